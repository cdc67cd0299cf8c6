"""Sequences from texts and rounds, and hold-outs that never part what belongs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.offline.collect import (
    Sample,
    response_rounds,
    samples_from_texts,
    samples_of,
    split_samples,
    take_prompts,
    take_samples,
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


class FixedLengths:
    """Answers each prompt with as many tokens as the prompt's first one says."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        given = tuple(tuple(prompt) for prompt in prompts)
        answers = tuple(
            Response(n, (5,) * prompt[0], (-1.0,) * prompt[0], "stop")
            for n, prompt in enumerate(given)
        )
        return Rollouts(given, answers, Counters(), 1.0, sampling)


def rounds_of(prompts: Sequence[Sequence[int]], most: int, **options: Any) -> list[Rollouts]:
    engine = cast(RolloutEngine, FixedLengths())
    sampling = Sampling(max_new_tokens=100, seed=3)
    return list(
        response_rounds(engine, prompts, sampling, most, lambda amount, note="": None, **options)
    )


@pytest.mark.parametrize(
    ("length", "most", "sizes"),
    [
        (100, 1_000, [16]),  # ten would do, but a round has at least sixteen
        (100, 6_000, [60]),
        (100, 20_000, [128, 72]),
        (10, 2_000, [20, 128, 52]),  # the first round expects responses as long as is allowed
        (1, 200, [16, 128, 56]),
    ],
)
def test_rounds_shrink_so_that_long_responses_do_not_pass_what_is_wanted(
    length: int, most: int, sizes: list[int]
) -> None:
    prompts = [(length, n) for n in range(150)]
    rounds = rounds_of(prompts, most)
    assert [len(part.prompts) for part in rounds] == sizes
    assert [prompt for part in rounds for prompt in part.prompts] == take_prompts(
        prompts, 0, sum(sizes)
    )


def test_rounds_continue_as_if_they_had_not_stopped() -> None:
    prompts = [(3 + n % 40, n) for n in range(100)]
    whole = rounds_of(prompts, 9_000)
    assert len(whole) > 3
    for count in range(1, len(whole)):
        done = [part.generated_tokens for part in whole[:count]]
        rest = rounds_of(prompts, 9_000, done=done)
        assert [(part.prompts, part.sampling) for part in rest] == [
            (part.prompts, part.sampling) for part in whole[count:]
        ]


def test_without_a_number_of_tokens_each_prompt_is_asked_once() -> None:
    prompts = [(2, n) for n in range(150)]
    rounds = rounds_of(prompts, 0)
    assert [len(part.prompts) for part in rounds] == [128, 22]
    assert len(rounds_of(prompts, 0, done=[256])) == 1


def test_long_texts_become_windows_that_lose_no_target(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "what is 12 + 34 + 56?"
    ids = tuple(tokenizer(text).input_ids)
    (whole,) = samples_from_texts([text], tokenizer, 1000, 0)
    assert whole.ids == ids and whole.spans == ((1, len(ids)),)
    windows = samples_from_texts([text], tokenizer, 5, len(ids) - 1)
    assert [t for w in windows for t in w.ids[1:]] == list(ids[1:])
    assert max(len(w.ids) for w in windows) == 5 and {w.prompt for w in windows} == {0}
    with pytest.raises(DataError, match="2 texts"):
        samples_from_texts(["1", "2"], tokenizer, 10, 0)


def test_what_is_no_text_is_not_learned_as_python_shows_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = ["what is 1 + 2?", [{"role": "user", "content": "1 + 2"}]]
    with pytest.raises(DataError, match="row 1"):
        samples_from_texts(rows, tokenizer, 1000, 0)  # type: ignore[arg-type]


def test_one_long_text_is_not_all_that_heads_learn(tokenizer: PreTrainedTokenizerBase) -> None:
    """As long as there are others; and nobody reads on once there is enough."""
    long = "what is 12 + 34 + 56? " * 500
    texts = [long, *(f"what is {n} + {n} + {n + 1}?" for n in range(200))]
    most = 1_000
    samples = samples_from_texts(texts, tokenizer, 51, most)
    assert most <= sum(sample.written for sample in samples) < most + 50
    assert 100 <= sum(sample.written for sample in samples if sample.prompt == 0) < 150
    few = samples_from_texts([long, "what is 1 + 2?"], tokenizer, 51, most)
    assert most <= sum(sample.written for sample in few) < most + 50
    assert {sample.prompt for sample in few} == {0, 1}, "both are needed"


def test_few_long_rows_give_as_much_each() -> None:
    rows = [[Sample((0,) * 11, ((1, 11),), row) for _ in range(400)] for row in range(5)]
    samples = take_samples(rows, 5000, "", "", expected="", do="")
    counts = Counter(sample.prompt for sample in samples)
    assert sum(counts.values()) == 500 and max(counts.values()) <= 101, counts


def test_a_long_text_is_not_all_that_heads_are_judged_on() -> None:
    """Windows of it that are not judged on are not trained on, either."""
    long = [Sample((0,) * 101, ((1, 101),), 0)] * 500
    short = [Sample((0,) * 11, ((1, 11),), n) for n in range(1, 100)]
    for seed in range(20):
        training, held = split_samples([*long, *short], 0.5, 1_000, seed)
        assert sum(sample.written for sample in held if sample.prompt == 0) in (0, 100)
        assert 400 < sum(sample.written for sample in held) < 1_100 and len(held) > 10
        assert {s.prompt for s in held}.isdisjoint(s.prompt for s in training)
        (one,) = split_samples([*long, *short], 0.01, 1_000, seed)[1:]
        assert sum(sample.written for sample in one) in (10, 1_000), "the only one"


def test_a_text_that_is_there_twice_has_one_number(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["what is 1 + 2?", "it is 3", "what is 1 + 2?"]
    samples = samples_from_texts(texts, tokenizer, 1000, 0)
    assert [sample.prompt for sample in samples] == [0, 1, 0]


def test_a_hold_out_takes_whole_prompts_and_not_too_many_tokens() -> None:
    samples = [Sample((0,) * 11, ((1, 11),), n // 3) for n in range(60)]
    training, held = split_samples(samples, 0.1, 10_000, seed=0)
    assert len(held) == 6 and {s.prompt for s in held}.isdisjoint(s.prompt for s in training)
    held_out = split_samples(samples, 0.5, 65, seed=0)[1]
    assert len(held_out) == 7, "the sample that reaches the bound is the last"
    assert len({sample.prompt for sample in held_out}) == 7
    assert (
        split_samples(samples, 0.1, 10_000, seed=0)[1]
        == held
        != split_samples(samples, 0.1, 10_000, seed=1)[1]
    )
    with pytest.raises(DataError, match="too few prompts"):
        split_samples(samples[:3], 0.1, 100, seed=0)
