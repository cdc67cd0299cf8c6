"""Chats become sequences whose written tokens are the assistant's alone, whatever the template does
to a conversation.
"""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError, ModelError
from medusa_ppo.offline.collect import (
    Sample,
    chat_prompt,
    is_chat,
    samples_from_chats,
    split_samples,
)

CHAT = [
    {"role": "user", "content": "what is 1 + 2?"},
    {"role": "assistant", "content": "it is 3"},
    {"role": "user", "content": "and 4 + 4?"},
    {"role": "assistant", "content": "it is 8"},
]


def written(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(sample.ids[first:end]) for first, end in sample.spans]


def test_only_the_assistants_turns_and_their_end_tokens_are_written(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    (sample,) = samples_from_chats([CHAT], chat_tokenizer, 200, 0)
    end = chat_tokenizer.eos_token
    assert written(sample, chat_tokenizer) == [f"it is 3{end}", f"it is 8{end}"]
    assert chat_tokenizer.decode(sample.ids[: sample.spans[0][0]]) == "u: what is 1 + 2? a: "
    assert chat_tokenizer.decode(sample.ids[sample.spans[0][1] :]).startswith(" u: and 4")


def test_a_turn_that_the_template_shows_otherwise_later_stands_alone(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """As templates of reasoning models do: the thoughts of earlier turns are dropped."""
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}: {% if m['role'] == 'assistant' and loop.last"
        " %}{{ 'so ' }}{% endif %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token"
        " }}{% endif %} {% endfor %}{% if add_generation_prompt %}a: {% endif %}"
    )
    samples = samples_from_chats([CHAT], chat_tokenizer, 200, 0)
    end = chat_tokenizer.eos_token
    assert [written(sample, chat_tokenizer) for sample in samples] == [
        [f"so it is 8{end}"],
        [f"so it is 3{end}"],
    ]
    assert {sample.prompt for sample in samples} == {0}, "they are never parted by a hold-out"


def test_answers_to_one_question_are_on_one_side_of_a_hold_out(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """As data sets with several answers to each question have them, one a row."""
    chats = [
        [
            {"role": "user", "content": f"what is {question} + 2?"},
            {"role": "assistant", "content": f"it is {answer}"},
            *CHAT[2:],
        ]
        for answer in range(8)
        for question in range(10)
    ]
    samples = samples_from_chats(chats, chat_tokenizer, 200, 0)
    assert len(samples) == 80 and {sample.prompt for sample in samples} == set(range(10))
    training, held = (
        {sample.ids[: sample.spans[0][0]] for sample in part}
        for part in split_samples(samples, 0.3, 10_000, seed=0)
    )
    assert len(held) == 3 and len(training) == 7 and not held & training


def test_conversations_that_begin_with_the_assistant_are_told_apart(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """By the first question, or by everything if there is none."""
    greeting = [{"role": "system", "content": "1"}, {"role": "assistant", "content": "what?"}]
    chats = [
        [*greeting, *CHAT[:2]],
        [*greeting, *CHAT[2:]],
        [*greeting, *CHAT],
        greeting,
        [{"role": "assistant", "content": "it is 8"}],
    ]
    samples = samples_from_chats(chats, chat_tokenizer, 200, 0)
    assert [sample.prompt for sample in samples] == [0, 1, 0, 2, 3]


def test_what_the_generation_prompt_adds_and_the_turn_lacks_is_no_ones(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "a: {% endif %}", "a: (thinks){% endif %}"
    )
    (sample,) = samples_from_chats([CHAT[:2]], chat_tokenizer, 200, 0)
    assert written(sample, chat_tokenizer) == [f"it is 3{chat_tokenizer.eos_token}"]


def test_long_chats_are_cut_and_enough_is_enough(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    (whole,) = samples_from_chats([CHAT], chat_tokenizer, 200, 0)
    first_end = whole.spans[0][1]
    (cut,) = samples_from_chats([CHAT], chat_tokenizer, first_end, 0)
    assert cut.ids == whole.ids[:first_end] and cut.spans == whole.spans[:1]
    (cut,) = samples_from_chats([CHAT], chat_tokenizer, first_end - 1, 0)
    assert cut.spans == ((whole.spans[0][0], first_end - 1),), "the end of an answer is cut"

    def endless():
        yield CHAT
        raise AssertionError("the second conversation is not asked for")

    assert samples_from_chats(endless(), chat_tokenizer, 200, 1) == [whole]


def test_of_a_chat_whose_answers_come_late_the_last_one_is_kept(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Such chats, as with long documents in the question, were left out without a word."""
    (whole,) = samples_from_chats([CHAT], chat_tokenizer, 200, 0)
    first, end = whole.spans[-1]
    before_first_answer = whole.spans[0][0]
    for length in (before_first_answer, before_first_answer - 3):
        (cut,) = samples_from_chats([CHAT], chat_tokenizer, length, 0)
        assert cut.ids == whole.ids[end - length : end]
        assert cut.spans == ((first - (end - length), length),)
        assert written(cut, chat_tokenizer) == written(whole, chat_tokenizer)[-1:]
    (cut,) = samples_from_chats([CHAT], chat_tokenizer, 3, 0)
    assert cut.spans == ((1, 3),) and cut.ids == whole.ids[end - 3 : end], "no answer fits"


def test_a_prompt_ends_where_the_last_answer_begins(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    expected = f"u: what is 1 + 2? a: it is 3{chat_tokenizer.eos_token} u: and 4 + 4? a: "
    assert (
        chat_prompt(CHAT, chat_tokenizer, 0) == expected == chat_prompt(CHAT[:3], chat_tokenizer, 0)
    )


def test_errors_say_what_to_do(
    tokenizer: PreTrainedTokenizerBase, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match="--respond"):
        samples_from_chats([CHAT[:1]], chat_tokenizer, 200, 0)
    with pytest.raises(DataError, match="row 1"):
        samples_from_chats([CHAT, "no chat"], chat_tokenizer, 200, 0)  # type: ignore[list-item]
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        samples_from_chats([CHAT], chat_tokenizer, 200, 0)
    chat_tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        samples_from_chats([CHAT], chat_tokenizer, 200, 0)


def test_what_counts_as_a_chat() -> None:
    assert (
        is_chat(CHAT)
        and not is_chat([])
        and not is_chat("text")
        and not is_chat([{"role": "user"}])
    )
