"""The demo tokenizer: one token a word and a number of the task, and any other text unchanged
through bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from medusa_ppo.demo.task import END, SPLITS, build_tokenizer, demo_rows


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


def test_the_vocabulary_is_small_and_always_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    assert 257 < len(tokenizer) < 512
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.bos_token_id is None


def test_the_task_takes_one_token_a_word_and_a_number(tokenizer: PreTrainedTokenizerBase) -> None:
    for split in SPLITS:
        for row in demo_rows(split, seed=8, limit=100):
            prompt_ids = tokenizer(row["prompt"])["input_ids"]
            response_ids = tokenizer(row["solution"])["input_ids"]
            assert tokenizer.decode(prompt_ids + response_ids) == row["prompt"] + row["solution"]
            assert 30 <= len(prompt_ids) <= 60
            assert 40 <= len(response_ids) <= 95
            spelled = [
                token
                for token in tokenizer.convert_ids_to_tokens(prompt_ids + response_ids)
                if len(token) == 1 and token.isalpha()
            ]
            assert not set(spelled) - {"Ġ", "Ċ"}


@pytest.mark.parametrize(
    "text", ["", " ", "12,345", "Héllo wörld\n\n\t<x>", "日本語 🙂", "a  b   c", "x == y_1 # no"]
)
def test_any_text_comes_back_unchanged(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_end_token_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer(END)["input_ids"] == [0]


def test_transformers_reloads_it_as_it_is(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    for row in demo_rows("eval", seed=1, limit=20):
        assert reloaded(row["prompt"])["input_ids"] == tokenizer(row["prompt"])["input_ids"]
    assert (reloaded.eos_token_id, reloaded.pad_token_id, reloaded.bos_token_id) == (0, 0, None)
