"""Sequences from texts and rounds, and hold-outs that never part what belongs together."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.offline.collect import (
    Sample,
    samples_from_texts,
    samples_of,
    split_samples,
    take_prompts,
)


def test_prompts_begin_again_at_the_end() -> None:
    assert take_prompts("abc", 2, 5) == ["c", "a", "b", "c", "a"]


def test_answers_to_one_prompt_have_one_number() -> None:
    """In whatever round they were given; empty ones are left out."""
    answers = (
        Response(0, (7, 8, 9), (-1.0, -2.0, -3.0), "stop"),
        Response(1, (), (), "stop"),
        Response(1, (5,), (-1.0,), "length"),
    )
    rounds = [
        Rollouts(prompts, answers, Counters(), 1.0, Sampling())
        for prompts in (((1, 2), (3,)), ((3,), (4,)))
    ]
    samples = samples_of(rounds)
    assert [s.prompt for s in samples] == [0, 1, 1, 2]
    assert (
        samples[0] == Sample((1, 2, 7, 8, 9), ((2, 5),), 0, (-1.0, -2.0, -3.0))
        and samples[0].written == 3
    )


def test_long_texts_become_windows_that_lose_no_target(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "what is 12 + 34 + 56?"
    ids = tuple(tokenizer(text).input_ids)
    (whole,) = samples_from_texts([text], tokenizer, 1000, 0)
    assert whole.ids == ids and whole.spans == ((1, len(ids)),)
    windows = samples_from_texts([text, text], tokenizer, 5, len(ids) - 1)
    assert [t for w in windows for t in w.ids[1:]] == list(ids[1:]), "the second text is not needed"
    assert max(len(w.ids) for w in windows) == 5 and {w.prompt for w in windows} == {0}
    with pytest.raises(DataError, match="2 texts"):
        samples_from_texts(["1", "2"], tokenizer, 10, 0)


def test_a_hold_out_takes_whole_prompts_and_not_too_many_tokens() -> None:
    samples = [Sample((0,) * 11, ((1, 11),), n // 3) for n in range(60)]
    training, held = split_samples(samples, 0.1, 10_000, seed=0)
    assert len(held) == 6 and {s.prompt for s in held}.isdisjoint(s.prompt for s in training)
    assert len(split_samples(samples, 0.5, 65, seed=0)[1]) == 9, (
        "the prompt that reaches the bound is the last"
    )
    assert (
        split_samples(samples, 0.1, 10_000, seed=0)[1]
        == held
        != split_samples(samples, 0.1, 10_000, seed=1)[1]
    )
    with pytest.raises(DataError, match="too few prompts"):
        split_samples(samples[:3], 0.1, 100, seed=0)
