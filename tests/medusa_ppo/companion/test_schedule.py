"""The rule that decides how much is trained, case by case and in a simulated world."""

from __future__ import annotations

import math
import random

import pytest

from medusa_ppo.companion.schedule import REASONS, START, Decision, Schedule

MOST, LEAST, LAG = 2.0, 0.25, 0.03


def drift() -> Schedule:
    return Schedule("drift", MOST, LEAST, LAG)


def served() -> Schedule:
    """After the first version, which reaches 2.0 tokens a step."""
    schedule = drift()
    assert step(schedule, 1.5, 0.5) == (MOST, "start") and step(schedule, 2.0) == (MOST, "behind")
    return schedule


def settled() -> Schedule:
    schedule = served()
    for _ in range(3):
        step(schedule, 2.0)
    return schedule


def step(schedule: Schedule, serving: float, gain: float = 0.0, *, noise: float = 0.01, upper: float | None = None) -> tuple[float, str]:
    """One batch: decide, then a training that gained so much. The gate publishes what is surely better."""
    decision = schedule.decide(serving, serving + noise)
    low = gain - noise
    schedule.judged(serving, serving + gain, low, published=low > 0, upper=upper)
    return decision.passes, decision.reason


def test_fixed_never_changes() -> None:
    schedule = Schedule("fixed", 3, LEAST, LAG)
    assert {step(schedule, length, gain) for length, gain in [(2.0, 0.0), (1.1, 0.5), (2.0, -0.3)]} == {(3, "fixed")}
    assert schedule.decide(None).passes == 3


def test_begins_with_the_most_and_stays_there_while_training_gains() -> None:
    schedule, serving, seen = drift(), 1.2, []
    for _ in range(5):
        seen.append(step(schedule, serving, 0.2))
        serving += 0.2
    assert seen == [(MOST, "start")] + [(MOST, "behind")] * 4


def test_halves_to_the_floor_when_nothing_is_gained() -> None:
    schedule = served()
    seen = [step(schedule, 2.0) for _ in range(5)]
    assert [passes for passes, _ in seen] == [1, 0.5, 0.25, 0.25, 0.25]
    assert [reason for _, reason in seen] == ["settling", "settling", "floor", "floor", "floor"]


def test_heads_that_show_no_gain_at_first_are_not_given_up_at_once() -> None:
    """Nothing is accepted before a draft is the likeliest token; but heads that were brought along may just not become better."""
    schedule = drift()
    seen = [step(schedule, 1.0) for _ in range(START + 4)]
    assert seen[:START] == [(MOST, "start")] * START
    assert [passes for passes, _ in seen[START:]] == [1, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(("gain", "passes"), [(0.02, 0.25), (0.05, MOST)])
def test_a_sure_gain_counts_from_the_lag_on(gain: float, passes: float) -> None:
    """A share of 0.03 of one extra token."""
    schedule = settled()
    step(schedule, 2.0, gain)
    assert step(schedule, 2.0 + gain)[0] == passes


def test_an_unsure_gain_neither_raises_nor_lowers() -> None:
    schedule = served()
    assert step(schedule, 2.0, 0.2, noise=0.3) == (1, "settling")
    assert step(schedule, 2.0, 0.2, noise=0.3) == (1, "unsure")
    assert step(schedule, 2.0, 0.2, noise=0.1) == (1, "unsure")
    assert step(schedule, 2.2) == (MOST, "behind"), "once the gain is sure"


def test_lost_acceptance_calls_for_the_most_on_that_very_batch() -> None:
    schedule = settled()
    assert step(schedule, 1.7) == (MOST, "fell")


def test_noise_is_no_fall() -> None:
    schedule = settled()
    assert step(schedule, 1.9, noise=0.08) == (LEAST, "floor"), "the level was measured as badly"


def test_settles_again_when_no_training_brings_the_acceptance_back() -> None:
    """The policy has grown less sure: less can be reached, and the expectation follows."""
    schedule = settled()
    seen = [step(schedule, 1.6) for _ in range(9)]
    assert seen[0] == (MOST, "fell") and seen[-1] == (LEAST, "floor")
    assert sum(passes for passes, _ in seen) < 7 * MOST


def test_at_the_upper_mark_nothing_is_left() -> None:
    schedule = drift()
    step(schedule, 1.5, 0.5, upper=2.01)
    assert step(schedule, 2.0, 0.0, upper=2.4) == (LEAST, "at_upper")
    assert step(schedule, 2.0)[1] == "floor", "a mark far away is no reason for anything: it has seen the holdout"


def test_a_batch_without_holdout_is_trained_on_like_the_one_before() -> None:
    schedule = served()
    step(schedule, 2.0)
    decision = schedule.decide(None)
    assert (decision.passes, decision.reason) == (1, "unjudged")
    assert drift().decide(None).reason == "start"


def test_goes_on_from_its_state() -> None:
    rng = random.Random(3)
    straight, first = drift(), drift()
    assert first.last == Decision()
    events = [(1.5 + rng.random(), rng.uniform(-0.1, 0.1)) for _ in range(30)]
    expected = [step(straight, *event) for event in events]
    got = [step(first, *event) for event in events[:13]]
    second = drift()
    second.load([float(value) for value in first.state()])
    assert second.last == first.last
    got += [step(second, *event) for event in events[13:]]
    assert got == expected and {reason for _, reason in got} <= set(REASONS)
    fresh = drift()
    fresh.load([float(value) for value in drift().state()])
    assert fresh.last.reason == "" and fresh.decide(1.5, 1.6).reason == "start"


class World:
    """Heads that come nearer to what can be reached with every pass, a policy that moves, and a gate that measures with noise."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule, self.rng = schedule, random.Random(seed)
        self.reach, self.candidate, self.serving = 2.4, 1.1, 1.1
        self.spent: list[float] = []
        self.lags: list[float] = []

    def move(self, lost: float) -> None:
        self.candidate = 1 + (self.candidate - 1) * (1 - lost)
        self.serving = 1 + (self.serving - 1) * (1 - lost)

    def batch(self) -> None:
        common = self.rng.gauss(0, 0.02)  # Of the holdout: both sets of heads are measured on it.
        decision = self.schedule.decide(self.serving + common, self.serving + common + 0.03)
        self.spent.append(decision.passes)
        self.candidate += (self.reach - self.candidate) * (1 - math.exp(-0.2 * decision.passes))
        measured = self.candidate + common + self.rng.gauss(0, 0.005)
        low = measured - (self.serving + common) - 0.008
        published = low > 0
        self.schedule.judged(self.serving + common, measured, low, published=published)
        if published:
            self.serving = self.candidate
        self.lags.append((self.reach - self.serving) / (self.reach - 1))


@pytest.mark.parametrize("seed", range(4))
def test_in_a_world_that_stands_still_it_spends_a_fraction_and_loses_next_to_nothing(seed: int) -> None:
    drifting, fixed = World(drift(), seed), World(Schedule("fixed", MOST, LEAST, LAG), seed)
    for world in (drifting, fixed):
        for _ in range(60):
            world.batch()
    assert sum(drifting.spent[20:]) < 0.35 * sum(fixed.spent[20:])
    assert sum(drifting.lags[20:]) / 40 < 0.03


@pytest.mark.parametrize("seed", range(4))
def test_after_a_jump_of_the_policy_it_spends_all_it_may_at_once(seed: int) -> None:
    world = World(drift(), seed)
    for _ in range(30):
        world.batch()
    world.move(0.4)
    for _ in range(30):
        world.batch()
    assert world.spent[30] == MOST and sum(world.spent[30:36]) > 2 * sum(world.spent[24:30])
    assert world.lags[40] < 0.05 and sum(world.spent[50:]) < 0.5 * 10 * MOST


@pytest.mark.parametrize("seed", range(4))
def test_under_steady_drift_it_keeps_up(seed: int) -> None:
    world = World(drift(), seed)
    for _ in range(60):
        world.move(0.02)
        world.batch()
    assert sum(world.lags[30:]) / 30 < 0.12
