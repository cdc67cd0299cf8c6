"""Training never takes more than its share of the loop's seconds, goes on while it gains, and wakes
when acceptance falls. Clocks are invented.
"""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest

from heads.heads_config import HeadsConfig
from medusa_ppo.companion.budget import (
    AHEAD,
    LEAST,
    LONGER,
    PATIENCE,
    PROBE_STEPS,
    Budget,
    StepSeen,
)
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.gate import replay
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.metrics import REASONS

MOST = 2.0
SHARE = 0.05
ENDLESS = 1e9


class World:
    """A loop of 10 seconds a step, of which a pass takes `pass_s`. Heads in training approach
    `reach` by a quarter of the rest with each pass (by 0.1 where that is far away); the gate
    publishes a lead of 0.03.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        reach: float = 2.4,
        pass_s: float = 0.8,
        noise: float = 0.003,
        seed: int = 0,
    ) -> None:
        self.budget = budget
        self.reach = reach
        self.pass_s = pass_s
        self.noise = noise
        self.serving = self.candidate = 1.0
        self.published = self.rejected = 0
        self.trained_s = self.loop_s = 0.0
        self.behind = False
        self._random = random.Random(seed)

    def step(self) -> tuple[float, str]:
        decision = self.budget.decide()
        trained_s = decision.passes * self.pass_s
        length = self.serving * (1 + self._random.gauss(0, self.noise))
        serving = self.published
        if decision.passes:
            ahead = self.reach - self.candidate
            self.candidate += min(0.1, ahead) if ahead > 100 else ahead * 0.25 * decision.passes
            if self.candidate - self.serving > 0.03:
                self.serving = self.candidate
                self.published += 1
            else:
                self.rejected += 1
        self.trained_s += trained_s
        self.loop_s += 10.0
        self.budget.step(
            StepSeen(10.0, trained_s, length, self.published, self.rejected, serving, self.behind)
        )
        return decision.passes, decision.reason

    def steps(self, count: int) -> list[tuple[float, str]]:
        return [self.step() for _ in range(count)]


def world(share: float = SHARE, *, shared: bool = True, **settings) -> World:
    return World(Budget(share, MOST, shared=shared), **settings)


def rested(**settings) -> World:
    """A world in which training has learned all there was, and rests."""
    made = world(0.2, **settings)
    for _ in range(100):
        made.step()
        if made.budget.last.reason == "resting":
            return made
    raise AssertionError("it never rests")


@pytest.mark.parametrize("pass_s", [0.01, 0.3, 0.8, 4.0, 30.0])
@pytest.mark.parametrize("reach", [1.0, 2.4, ENDLESS])
def test_training_never_takes_more_than_its_share_and_what_it_may_borrow(
    pass_s: float, reach: float
) -> None:
    """And a batch, whose cost is known only when it was made. Wherever heads stop improving."""
    here = world(pass_s=pass_s, reach=reach)
    for _ in range(300):
        passes, reason = here.step()
        assert reason in REASONS and 0 <= passes <= MOST
        bound_s = SHARE * here.loop_s + AHEAD * SHARE * 10.0 + MOST * pass_s
        assert here.trained_s <= bound_s + 1e-9
    assert here.budget.taken_frac == pytest.approx(here.trained_s / here.loop_s)
    if pass_s == 0.8 and reach == ENDLESS:
        assert here.budget.taken_frac == pytest.approx(SHARE, rel=0.1), "what it may take, it takes"


def test_what_is_always_gained_is_always_trained_for_where_it_costs_little() -> None:
    here = world(pass_s=0.1, reach=ENDLESS)
    assert set(here.steps(60)) == {(MOST, "training")}


def test_heads_that_begin_at_nothing_are_given_the_income_of_some_steps_once() -> None:
    here = world(reach=ENDLESS)
    seen = here.steps(4)
    assert seen[0] == (MOST, "training"), "nobody knows yet how long a pass takes"
    early_s = sum(passes for passes, _ in seen) * here.pass_s
    assert early_s > 2 * SHARE * 40.0, "more than these four steps bring in"
    here.steps(200)
    assert here.trained_s <= SHARE * (here.loop_s + AHEAD * 10.0) + MOST * here.pass_s


def test_heads_that_were_trained_before_get_no_advance() -> None:
    here = World(Budget(SHARE, MOST, shared=True, untrained=False), reach=ENDLESS)
    assert here.step() == (LEAST, "training")
    for _ in range(200):
        here.step()
        assert here.trained_s <= SHARE * here.loop_s + MOST * here.pass_s


def test_after_a_warm_up_a_small_part_of_a_pass_says_how_long_one_takes() -> None:
    here = world(reach=ENDLESS)
    here.budget.begin(published=1, rejected=0)
    here.published = 1
    assert here.step() == (LEAST, "training")
    here.steps(20)
    assert here.trained_s <= SHARE * here.loop_s + LEAST * here.pass_s


def test_a_part_of_every_batch_is_trained_on_where_a_whole_pass_is_too_much() -> None:
    """Each policy is learned from while it is new, in the place of one in ten at once."""
    here = world(reach=ENDLESS, pass_s=1.5)
    seen = here.steps(60)[30:]
    assert all(reason == "training" and LEAST <= passes < 1 for passes, reason in seen), seen


def test_it_waits_for_the_least_part_of_a_pass() -> None:
    here = world(reach=ENDLESS, pass_s=5.0)
    seen = here.steps(60)[20:]
    assert {reason for _, reason in seen} == {"training", "waiting"}
    assert all(passes >= LEAST for passes, reason in seen if reason == "training")
    assert all(passes == 0 for passes, reason in seen if reason == "waiting")


def test_no_batch_is_collected_while_another_one_waits() -> None:
    for shared, expected in ((True, (0.0, "waiting")), (False, (MOST, "alone"))):
        here = world(shared=shared, pass_s=0.01)
        here.behind = True
        here.step()
        assert here.step() == expected
        here.behind = False
        here.step()
        seen = here.step()
        assert seen[0] == (pytest.approx(LONGER) if shared else MOST), "what was skipped is no rest"
        assert here.steps(8)[-1][0] == MOST, "and grows again"


def test_it_rests_after_so_many_verdicts_without_a_new_version() -> None:
    here = world(0.5, reach=1.0)
    seen = here.steps(PATIENCE + 1)
    assert seen[:PATIENCE] == [(MOST, "training")] * PATIENCE and seen[-1] == (0.0, "resting")
    here = world(0.5)
    here.steps(40)
    assert here.serving > 2.3 and here.budget.last.reason == "resting", "all was gained before"


def test_a_fall_of_acceptance_wakes_it() -> None:
    here = rested()
    here.steps(12)  # The counters' noise is known by now.
    here.serving = here.candidate = 1.5  # The policy jumped.
    seen = here.steps(3)
    assert any(reason == "training" for _, reason in seen), seen
    here.steps(40)
    assert here.serving > 2.2 and here.budget.last.reason == "resting"


def test_noise_seldom_wakes_it() -> None:
    woken = 0
    for seed in range(20):
        here = rested(noise=0.05, seed=seed)
        seen = here.steps(40)
        woken += any(reason == "training" for _, reason in seen)
    assert woken <= 8, "some in 800 steps that each make a test"


def test_a_fall_that_no_training_makes_good_costs_a_few_batches() -> None:
    here = rested()
    here.steps(12)
    here.serving = here.candidate = here.reach = 1.5
    assert sum(passes > 0 for passes, _ in here.steps(40)) <= PATIENCE + 3


def test_probes_come_less_and_less_often_while_they_bring_nothing() -> None:
    here = rested(noise=0.0)
    seen = here.steps(200)
    probes = [index for index, (passes, _) in enumerate(seen) if passes]
    gaps = [b - a for a, b in pairwise(probes)]
    assert all(seen[index] == (1.0, "resting") for index in probes)
    assert gaps == sorted(gaps) and gaps[0] > PROBE_STEPS[0] and gaps[-1] <= PROBE_STEPS[1] + 1
    here.reach = 3.0
    while here.budget.last.reason == "resting":
        here.step()
    here.steps(30)
    assert here.serving > 2.8, "a probe that brings a new version ends the rest"


def test_alone_there_is_no_bound() -> None:
    assert set(world(shared=False, reach=1.0).steps(40)) == {(MOST, "alone")}


def test_real_heads_are_trained_until_they_stop_improving_and_again_when_the_policy_moves(
    chain,
) -> None:
    """The same rule over a companion's cycle; only the seconds are invented."""
    task = chain()
    config = CompanionConfig(batch_positions=64, learning_rate=2e-2)
    cycle = Cycle(
        HeadsConfig(task.hidden, task.vocab, num_heads=3), config, task.lm_head_VD, seed=0
    )
    budget = Budget(0.2, MOST, shared=True)

    def step() -> tuple[float, str]:
        decision = budget.decide()
        batch = task.batch()
        served = cycle.version
        if decision.passes:
            cycle.trainer.set_tables(task.lm_head_VD)
            cycle.run(dataclasses.replace(batch, passes=decision.passes))
        length = replay(cycle.serving, batch, task.lm_head_VD).mean_acceptance_length
        trained_s = decision.passes * 0.8
        budget.step(
            StepSeen(10.0, trained_s, length, cycle.version, cycle.candidates_rejected, served)
        )
        return decision.passes, decision.reason

    first = [step() for _ in range(4)]
    assert first[0] == (MOST, "training") and cycle.version > 0
    for _ in range(150):
        step()
        if budget.last.reason == "resting":
            break
    assert budget.last.reason == "resting"
    for _ in range(8):
        step()
    version = cycle.version
    task.drift()
    seen = [step() for _ in range(12)]
    assert any(reason == "training" for _, reason in seen), seen
    assert cycle.version > version
    assert budget.taken_frac < 0.2 + 0.1
