"""Paired steps: which ones, in which order, and what becomes of the extra rollouts."""

from __future__ import annotations

import pytest

from medusa_ppo import metrics as names
from medusa_ppo.config import RunConfig, build_config
from medusa_ppo.ppo.generation import SpeedPairs, num_drafts, sampling_of


def config(every: int | None = 2, prompts: int | None = None, drafts: int | None = None) -> RunConfig:
    sampling = {"max_new_tokens": 3, "responses_per_prompt": 1}
    values = {"report": {"speed_every": every, "speed_prompts": prompts}, "engine": {"num_drafts": drafts}, "sampling": sampling}
    return build_config(values)


@pytest.fixture
def engine(tiny_actor, sampling_engine):
    engine = sampling_engine(tiny_actor())
    engine.num_drafts = 4
    return engine


PROMPTS = [(1, 2), (3,), (4, 5)]


def test_order_alternates_and_the_run_keeps_the_drafting_rollouts(engine):
    settings = config(every=2)
    pairs = SpeedPairs(engine, settings)
    kept = [pairs.generate(PROMPTS, sampling_of(settings, step), step) for step in range(4)]
    assert engine.drafts == [4, 0, 4, 4, 4, 0], "steps 0 and 2 alone, step 1 plain first, step 3 plain last"
    assert [rollouts.num_drafts for rollouts, _ in kept] == [4] * 4
    assert [bool(figures) for _, figures in kept] == [False, True, False, True]
    assert engine.num_drafts == 4
    figures = kept[1][1]
    assert figures[names.PAIR_SPEEDUP] == pytest.approx(figures[names.PAIR_DRAFTING_TOKENS_PER_S] / figures[names.PAIR_PLAIN_TOKENS_PER_S])


def test_fewer_prompts_in_a_pair(engine):
    settings = config(every=1, prompts=2)
    rollouts, _ = SpeedPairs(engine, settings).generate(PROMPTS, sampling_of(settings, 0), 0)
    assert len(rollouts.prompts) == 3 and engine.drafts == [0, 4, 4]


@pytest.mark.parametrize("settings", [config(every=None), config(drafts=0)])
def test_no_pairs_when_there_is_nothing_to_compare(engine, settings: RunConfig):
    pairs = SpeedPairs(engine, settings)
    assert not any(pairs.due(step) for step in range(20))


def test_drafting_comes_back_even_when_the_plain_run_fails(engine, monkeypatch: pytest.MonkeyPatch):
    pairs = SpeedPairs(engine, config(every=1))

    def fail(prompts, sampling):
        raise RuntimeError("engine died")

    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(RuntimeError):
        pairs.generate(PROMPTS, sampling_of(config(), 0), 0)
    assert engine.num_drafts == 4


def test_sampling_seed_is_the_runs_and_the_steps():
    assert sampling_of(config(), 3) == sampling_of(config(), 3)
    assert len({sampling_of(config(), step).seed for step in range(50)}) == 50


def test_number_of_drafts():
    assert (num_drafts(config()), num_drafts(config(drafts=0)), num_drafts(config(drafts=2))) == (4, 0, 2)
