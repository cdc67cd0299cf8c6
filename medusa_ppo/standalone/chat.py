"""Chat messages as sequences: the tokenizer's own template, and which tokens are the assistant's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError, ModelError
from medusa_ppo.standalone.collect import Sample

ASSISTANT = "assistant"

Messages = Sequence[dict[str, Any]]


def is_chat(value: object) -> bool:
    """Whether a field of a row holds messages: a list of {role, content}."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)


def samples_from_chats(chats: Iterable[Messages], tokenizer: PreTrainedTokenizerBase, max_length: int, max_tokens: int) -> list[Sample]:
    """Conversations: only the assistant's turns (the token that ends each included) count as written.

    Args:
        max_length: longer conversations are cut at their end.
        max_tokens: stop when so many written tokens are there; 0: all.

    Raises:
        ModelError: the tokenizer has no chat template, or can't say where its tokens begin.
        DataError: a row is no list of messages, the template refuses it, or nowhere does an assistant say anything.
    """
    check_template(tokenizer)
    samples: list[Sample] = []
    tokens = seen = 0
    for number, messages in enumerate(chats):
        seen += 1
        for text, turns in _written_turns(messages, tokenizer, number):
            sample = _sample(text, turns, tokenizer, max_length, number)
            if sample is not None:
                samples.append(sample)
                tokens += sample.written
        if max_tokens and tokens >= max_tokens:
            break
    if not samples:
        raise DataError(
            "No conversation has an assistant's turn to train on.",
            given=f"{seen} conversations",
            expected="messages of the role assistant",
            do="Add --respond, so that the model writes the answers itself.",
        )
    return samples


def chat_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    """The conversation, without its last answer if it ends with one, ready for the model to answer."""
    asked = messages[:-1] if messages and messages[-1]["role"] == ASSISTANT else messages
    return _render(asked, tokenizer, number, answer=True)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError when the tokenizer can't render messages."""
    if not tokenizer.chat_template:
        raise ModelError(
            "The tokenizer has no chat template.",
            given=tokenizer.name_or_path or type(tokenizer).__name__,
            expected="chat_template in tokenizer_config.json, or chat_template.jinja beside it",
            do="Use the folder of a chat model, or train on plain texts (--column) or prompts (--template).",
        )
    if not tokenizer.is_fast:
        raise ModelError(
            "The tokenizer can't say where its tokens begin in the text.",
            given=type(tokenizer).__name__,
            expected="a fast tokenizer (tokenizer.json)",
            do="Convert it, or train on plain texts (--column) or prompts (--template).",
        )


def _written_turns(messages: Messages, tokenizer: PreTrainedTokenizerBase, number: int) -> list[tuple[str, list[tuple[int, int]]]]:
    """Texts with the places (in characters) of what the assistant wrote.

    One text holds all turns, unless the template shows a turn otherwise once more messages follow (some drop earlier reasoning): then the
    turn stands in a text of its own, as the model wrote it.
    """
    if not is_chat(messages):
        raise DataError(
            "A row is no conversation.",
            given=f"row {number}: {messages!r:.120}",
            expected="a list of messages with role and content",
            do="Name another --column.",
        )
    whole = _render(messages, tokenizer, number)
    together: list[tuple[int, int]] = []
    alone = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = _render(messages[:index], tokenizer, number, answer=True), _render(messages[: index + 1], tokenizer, number)
        # A generation prompt can say more than the turn does in the end (an opening tag for reasoning): the common part was given.
        turn = (_common_prefix(before, after), len(after))
        if whole.startswith(after):
            together.append(turn)
        else:
            alone.append((after, [turn]))
    return [(whole, together), *alone] if together else alone


def _common_prefix(left: str, right: str) -> int:
    """Number of characters that both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _render(messages: Messages, tokenizer: PreTrainedTokenizerBase, number: int, *, answer: bool = False) -> str:
    if not messages:
        return ""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer))
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            "The chat template refuses a conversation.",
            given=f"row {number}: {type(error).__name__}: {error}",
            expected="messages as this model's template wants them",
            do="Correct the row, or leave it out.",
        ) from error


def _sample(text: str, turns: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, max_length: int, number: int) -> Sample | None:
    """Tokens of a text, and the stretches of them that lie in the turns."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)
    ids, starts = tuple(encoded["input_ids"][:max_length]), [start for start, _ in encoded["offset_mapping"][:max_length]]
    spans = []
    for begin, end in turns:
        inside = [i for i, start in enumerate(starts) if begin <= start < end and i > 0]
        if not inside:
            continue
        first, last = inside[0], inside[-1]
        # What the template puts behind the end token is never written by the model.
        ends = [i for i in inside if ids[i] == tokenizer.eos_token_id]
        spans.append((first, (ends[-1] if ends else last) + 1))
    return Sample(ids, tuple(spans), number) if spans else None
