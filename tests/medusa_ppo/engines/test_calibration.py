"""What is timed when an engine starts, without an engine: which kinds of steps, for how long, and
what a table makes of them.
"""

from __future__ import annotations

import pytest

from medusa_ppo.drafting.choice import LEAST_STEPS, DraftChooser
from medusa_ppo.engines.calibration import (
    ROUNDS,
    TIMED_STEPS,
    StepBench,
    Timed,
    batch_sizes,
    in_words,
    measure,
    rows_of,
)


class ClockedBench(StepBench):
    """Steps by a formula, on a clock of its own. As in an engine a step verifies the drafts that
    the one before made.
    """

    def __init__(self, first_steps_s: float = 0.0) -> None:
        self.now = 0.0
        self.first_steps_s = first_steps_s
        self.seen: set[tuple[int, int]] = set()
        self.made = 0

    def clock(self) -> float:
        return self.now

    def begin(self, running: int) -> None:
        self.running = running
        self.drafts = self.made = 0
        self.timed: list[Timed] = []

    def draft(self, drafts: int) -> list[Timed]:
        timed = self.timed
        self.timed = []
        self.drafts = drafts
        return timed

    def seconds(self, running: int, drafts: int) -> float:
        return 0.004 + 0.001 * running * (1 + drafts)

    def step(self) -> None:
        kind = (self.running, self.made)
        took = self.seconds(*kind) + (0.0 if kind in self.seen else self.first_steps_s)
        self.seen.add(kind)
        self.now += took
        self.timed.append(Timed(*kind, took))
        self.made = self.drafts


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (32, [1, 32, 16, 8, 4, 2]),
        (48, [1, 48, 32, 16, 8, 4, 2]),
        (33, [1, 32, 16, 8, 4, 2]),
    ],
)
def test_one_sequence_first_and_then_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_every_number_of_drafts_is_timed_at_every_size_without_its_first_steps() -> None:
    bench = ClockedBench(first_steps_s=1.0)
    steps = measure(bench, batch_sizes(8), range(5), longest_s=1e9, clock=bench.clock)
    kinds = {(running, drafts) for running in (1, 2, 4, 8) for drafts in range(5)}
    assert {step[:2] for step in steps} == kinds
    assert len(steps) == len(kinds) * ROUNDS * TIMED_STEPS
    assert max(step.seconds for step in steps) < 1.0, "first steps take long, and don't count"


def test_a_slow_engine_is_timed_for_a_while_only_and_what_was_timed_counts() -> None:
    bench = ClockedBench()
    whole = ClockedBench()
    measure(whole, batch_sizes(64), range(5), longest_s=1e9, clock=whole.clock)
    steps = measure(bench, batch_sizes(64), range(5), longest_s=whole.now / 3, clock=bench.clock)
    assert bench.now < whole.now / 2
    assert {step.running for step in steps} >= {1, 64} and 2 not in {s.running for s in steps}
    assert min(row["steps"] for row in rows_of(steps)) >= LEAST_STEPS


def test_a_chooser_begins_with_what_was_timed() -> None:
    bench = ClockedBench()
    steps = measure(bench, batch_sizes(16), range(5), longest_s=1e9, clock=bench.clock)
    chooser = DraftChooser(4)
    chooser.table.learn(rows_of(steps))
    for running in (1, 3, 12, 16):
        for drafts in range(5):
            seconds = chooser.table.seconds(running, drafts)
            assert seconds == pytest.approx(bench.seconds(running, drafts))
    for _ in range(200):
        chooser.observe_acceptance([4], [4])
    assert chooser.choose(1) == 4


def test_a_largest_batch_between_two_powers_stands_at_the_one_above() -> None:
    bench = ClockedBench()
    steps = [
        Timed(running, drafts, bench.seconds(running, drafts))
        for running in (32, 48)
        for drafts in (0, 2)
    ]
    table = DraftChooser(2).table
    table.learn(rows_of(steps))
    for running in (32, 40, 48):
        assert table.seconds(running, 2) == pytest.approx(bench.seconds(running, 2))
    assert rows_of([Timed(48, 0, 0.1)]) == [], "a line needs two ends"


def test_it_is_said_what_drafts_cost() -> None:
    rows = rows_of(
        Timed(running, drafts, 0.01 * (1 + drafts * running / 10))
        for running in (1, 4, 8)
        for drafts in (0, 2)
    )
    words = in_words(rows)
    assert "2 drafts" in words and "x1.20 at 1" in words and "x2.60 at 8" in words
    assert in_words([]) == in_words(rows[:1]) == "too few to compare"
