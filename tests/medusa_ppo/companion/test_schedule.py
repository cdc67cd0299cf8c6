"""How much is trained follows from seconds: case by case, and in a simulated loop."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from medusa_ppo.companion.schedule import (
    LEAST,
    PROBE_STEPS,
    START,
    Account,
    SharedSeconds,
    StepSeen,
)
from medusa_ppo.contract.metrics import REASONS

MOST = 2.0


class World:
    """A loop of 8 + 2 seconds a step without drafts. A pass costs `pass_s` of training and b times
    as much of the loop.

    Heads in training approach `reach` by a share of the rest with each pass; the gate publishes a
    lead of 0.03.
    """

    def __init__(
        self,
        account: Account,
        *,
        reach: float = 2.4,
        b: float = 1.2,
        pass_s: float = 0.8,
        seed: int = 0,
    ) -> None:
        self.account = account
        self.reach = reach
        self.b = b
        self.pass_s = pass_s
        self.serving = self.candidate = 1.0
        self.judged = self.published = 0
        self._noise = random.Random(seed)
        self.steps_s: list[float] = []

    def step(self) -> tuple[float, str]:
        decision = self.account.decide()
        trained_s = decision.passes * self.pass_s
        length = self.serving * (1 + self._noise.gauss(0, 0.003))
        generate_s = 2.0 / length**0.6
        other_s = 8.0 * (1 + self._noise.gauss(0, 0.01)) + self.b * trained_s
        gain = 0.0
        serving = self.published
        if decision.passes:
            self.candidate += (self.reach - self.candidate) * min(0.9, 0.25 * decision.passes)
            gain = self.candidate - self.serving
            self.judged = self.judged + 1
            if gain > 0.03:
                self.serving = self.candidate
                self.published = self.published + 1
        self.account.step(
            StepSeen(
                generate_s,
                other_s,
                0.01,
                1000,
                length,
                trained_s,
                self.judged,
                gain,
                self.published,
                serving,
            )
        )
        self.steps_s.append(generate_s + other_s)
        return decision.passes, decision.reason

    def steps(self, count: int) -> list[tuple[float, str]]:
        return [self.step() for _ in range(count)]


def test_begins_with_the_most_and_ends_with_nothing_when_nothing_is_gained() -> None:
    world = World(Account(MOST, shared=True))
    seen = world.steps(16)
    assert seen[0] == (MOST, "start") and seen[1][0] == MOST
    assert seen[-1] == (0.0, "rest"), seen
    assert world.serving > 2.2, "what was to be gained was gained before"
    assert {reason for _, reason in seen} <= set(REASONS)


def test_the_last_pass_must_pay_and_not_only_their_mean() -> None:
    """A pass more brings about half of the mean: what is worth its cost once, but not twice, is
    made less of; and nothing pays forever.
    """
    for gain, expected in ((0.5, (4.0, "pays")), (0.3, (3.0, "waning")), (0.0, (1.0, "waning"))):
        account = Account(4.0, shared=True)
        account.step(StepSeen(2.0, 9.0, 0.0, 1000, 2.0, 1.0, 0, 0.0, 0, 0))
        account.decide()
        account.step(
            StepSeen(2.0, 9.0, 0.0, 1000, 2.0, 1.0, 1, gain, 1, 0)
        )  # Worth 5, 3 and 0 seconds; 2 were spent.
        decision = account.decide()
        assert (pytest.approx(decision.passes), decision.reason) == expected
    world = World(Account(MOST, shared=True), b=4.0)
    assert sum(passes for passes, _ in world.steps(12)) < 4 * MOST, (
        "where it costs much it ends soon"
    )


def test_no_batch_is_collected_while_another_one_waits() -> None:
    """Training that takes longer than a step would only fall behind; and what is skipped is no
    rest.
    """
    for shared, expected in (
        (True, [(MOST, "start"), (0.0, "behind"), (MOST, "start")]),
        (False, [(MOST, "alone")] * 3),
    ):
        account = Account(MOST, shared=shared)
        seen = []
        for waiting in (False, True, False):
            account.step(StepSeen(2.0, 9.0, 0.0, 1000, 1.0, 9.0, 0, 0.0, 0, 0, waiting))
            decision = account.decide()
            seen.append((decision.passes, decision.reason))
        assert seen == expected


def test_a_fall_of_acceptance_wakes_it() -> None:
    world = World(Account(MOST, shared=True))
    world.steps(18)
    assert world.account.last.reason == "rest"
    # The policy jumped.
    world.serving = 1.5
    world.candidate = 1.5
    seen = world.steps(3)
    assert (MOST, "fell") in seen, seen
    world.steps(12)
    assert world.serving > 2.2 and world.account.last.passes <= LEAST


def test_a_fall_that_no_training_mends_costs_a_few_batches() -> None:
    world = World(Account(MOST, shared=True))
    world.steps(18)
    world.serving = world.candidate = world.reach = 1.5
    assert sum(passes > 0 for passes, _ in world.steps(20)) <= 6


def test_probes_come_less_and_less_often_while_they_bring_nothing() -> None:
    world = World(Account(MOST, shared=True))
    world.steps(16)
    seen = world.steps(80)
    probes = [index for index, (_, reason) in enumerate(seen) if reason == "probe"]
    gaps = [b - a for a, b in pairwise(probes)]
    assert 2 <= len(probes) <= 4 and gaps == sorted(gaps) and gaps[-1] > PROBE_STEPS[0]
    assert all(passes == LEAST for passes, reason in seen if reason == "probe")


def test_heads_from_nothing_get_their_time() -> None:
    """No draft is accepted before it is likely: the first batches show no gain."""
    account = Account(MOST, shared=True)
    for judged in range(START):
        assert account.decide().passes == MOST
        account.step(StepSeen(2.0, 9.0, 0.0, 1000, 1.0, 1.0, judged + 1, 0.0, 0, 0))
    assert account.decide().passes < MOST


def test_a_companion_that_takes_nothing_from_the_loop_always_trains() -> None:
    world = World(Account(MOST, shared=False), b=0.0)
    assert set(world.steps(20)) == {(MOST, "alone")}
    assert world.account.lost_s == pytest.approx(0.01), "hooks cost all the same"


@pytest.mark.parametrize("price", [0.0, 0.5, 1.5])
def test_the_price_of_training_is_found_from_the_steps(price: float) -> None:
    seconds = SharedSeconds()
    noise = random.Random(0)
    assert seconds.price == 1.0
    for _ in range(60):
        tokens = noise.randint(800, 1200)
        trained_s = noise.choice([0.0, 0.5, 1.0, 2.0])
        seconds.add(
            tokens, trained_s, 0.008 * tokens * (1 + noise.gauss(0, 0.01)) + price * trained_s
        )
    assert seconds.price == pytest.approx(price, abs=0.15)


def test_a_price_that_no_step_shows_stays_at_one() -> None:
    """The first step warms up, and while all steps train alike nothing tells training from the
    rest.
    """
    account = Account(MOST, shared=True)
    noise = random.Random(0)
    account.step(StepSeen(9.0, 60.0, 0.0, 1000, 1.0, 6.0, 0, 0.0, 0, 0))
    for _ in range(5):
        account.step(
            StepSeen(2.0, 9.0 * (1 + noise.gauss(0, 0.03)), 0.0, 1000, 1.0, 1.0, 0, 0.0, 0, 0)
        )
    assert account.lost_s == pytest.approx(1.0, abs=0.6)


def test_what_is_saved_is_seconds_and_not_tokens_a_step() -> None:
    """Twice as many tokens a step are not half of the seconds: a step with drafts takes longer."""
    account = Account(MOST, shared=True)
    account.step(
        StepSeen(2.6, 8.0, 0.0, 1000, 1.0, 0.0, 0, 0.0, 0, 0)
    )  # Something else ran beside it.
    account.step(StepSeen(2.0, 8.0, 0.0, 1000, 1.0, 0.0, 0, 0.0, 0, 0))
    assert account.saved_s == 0
    account.step(StepSeen(1.8, 8.0, 0.5, 1200, 2.2, 0.0, 1, 0.3, 1, 1))
    assert account.saved_s == pytest.approx(1.2 * 2.0 - 1.8) and account.lost_s == pytest.approx(
        0.5
    )
    account.step(StepSeen(2.5, 8.0, 0.5, 1000, 2.2, 0.0, 1, 0.3, 1, 1))
    assert account.saved_s == pytest.approx(-0.5), "drafts can cost more than they bring"


def test_in_a_simulated_run_the_loop_gains() -> None:
    """Against the same world in which as much is trained in every step, and against none."""
    paying = World(Account(MOST, shared=True))
    fixed = World(Account(MOST, shared=False), b=1.2)
    paying.steps(40)
    fixed.steps(40)
    assert sum(paying.steps_s[20:]) < 0.96 * 20 * 10.0
    assert sum(paying.steps_s) < 0.93 * sum(fixed.steps_s)
