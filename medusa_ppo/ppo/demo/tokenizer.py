"""The demo actor's tokenizer: one token for each word of the task and for each number up to 99, bytes for everything else.

The vocabulary is a list, not the outcome of a training run: the end token, the 256 bytes, and the words of the task's
templates and the numbers, with the space in front of them. A word that is not on the list is spelled in bytes, so any text goes through and
comes back unchanged. The small vocabulary keeps the sampler cheap.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_ppo.ppo.demo.task import problem

END = "<|endoftext|>"
"""End of a document, and padding; id 0. Nothing stands at the beginning of a prompt."""

_WORDS_FROM = 4000
"""Problems whose words make the vocabulary; the templates have no word that is rarer."""


_SPACE = "\u0120"
"""How the byte-level form writes a space."""

_NUMBERS = 100
"""Numbers below are one token each; larger ones are spelled digit by digit."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, the same on every call."""
    vocabulary = {token: number for number, token in enumerate([END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_words()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Words and numbers with the space before them: then what to copy directly follows the word that it is found by."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _words() -> list[str]:
    """All pieces of the task's text longer than one byte, sorted."""
    splitter = _pre_tokenizer()
    seen: set[str] = set()
    for index in range(_WORDS_FROM):
        found = problem(index, seed=0)
        for text in (f"Question: {found.question}\nAnswer:", found.solution):
            seen.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    words = {piece for piece in seen if len(piece) > 1 and not re.search(r"\d", piece)}
    return sorted(words) + [f"{_SPACE}{number}" for number in range(_NUMBERS)]
