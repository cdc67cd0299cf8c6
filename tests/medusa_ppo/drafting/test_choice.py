"""The chooser finds the best number of drafts on machines whose costs are known, and follows when
they change (docs/theory.md, proposition 8).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest

from medusa_ppo.drafting.choice import DraftChooser, StepTable

K = 4
FEW_STEPS = 4
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones in whatever order the tests run."""
    monkeypatch.setattr(sys.modules[__name__], "RNG", np.random.default_rng(0))


def cost_of(batch: int, drafts: int, costs: tuple[float, ...]) -> float:
    """Seconds of a step: of itself, of a row, of a draft, of drafting at all; what a machine is not
    said to cost is free.
    """
    features = (1.0, batch * (drafts + 1), batch * drafts, float(drafts > 0))
    return sum(cost * value for cost, value in zip(costs, features, strict=False))


def run(
    chooser: DraftChooser, batch: int, keep: float, costs: tuple[float, ...], steps: int
) -> tuple[list[int], float, float]:
    """Serve `steps` steps; (choices, tokens, seconds). Each draft is accepted with probability
    `keep` after accepted ones.
    """
    choices = []
    tokens = 0.0
    seconds = 0.0
    for _ in range(steps):
        k = chooser.choose(batch)
        took = cost_of(batch, k, costs) * RNG.uniform(0.95, 1.05)
        accepted = (
            np.minimum(RNG.geometric(1 - keep, size=batch) - 1, k)
            if keep < 1
            else np.full(batch, k)
        )
        chooser.observe_step(batch, k, took)
        chooser.observe_acceptance([k] * batch, accepted.tolist())
        choices.append(k)
        tokens += batch + float(accepted.sum())
        seconds += took
    return choices, tokens, seconds


def usual(choices: list[int]) -> int:
    tail = choices[FEW_STEPS + 20 :]
    return max(set(tail), key=tail.count)


@pytest.mark.parametrize(
    ("keep", "costs", "expected"),
    [
        (0.9, (10.0, 0.01, 0.01), {4}),  # a fixed cost and good heads: all drafts
        (0.02, (1.0, 1.0, 0.1), {0}),  # rows cost and heads are always wrong: none
        (0.5, (40.0, 1.0, 0.0), {1, 2}),  # in between
        (0.5, (2.0, 0.01, 0.01, 8.0), {0}),  # to draft at all costs more than it brings
    ],
)
def test_the_best_number_is_found(
    keep: float, costs: tuple[float, ...], expected: set[int]
) -> None:
    choices, _, _ = run(DraftChooser(K), 16, keep, costs, 400)
    assert usual(choices) in expected


def test_heads_that_are_always_wrong_cost_little() -> None:
    costs = (2.0, 0.5, 0.05)
    _, tokens, seconds = run(DraftChooser(K), 32, 0.0, costs, 2000)
    plain = 32 / cost_of(32, 0, costs)
    assert tokens / seconds > 0.96 * plain


def test_single_slow_steps_do_not_move_the_table() -> None:
    """They are the exception, so their mean lies above their median: pace and seconds that did not
    agree on one of both would drift apart for ever.
    """
    chooser = DraftChooser(K)
    table = chooser.table
    table.learn(
        {"running": 64, "drafts": k, "steps": 4, "seconds": 1.0 + 0.02 * k} for k in range(K + 1)
    )
    for step in range(4000):
        k = chooser.choose(64)
        log_noise = 0.7 * (RNG.random() < 0.1) + 0.05 * RNG.standard_normal()
        chooser.observe_step(64, k, (1.0 + 0.02 * k) * math.exp(log_noise))
        chooser.observe_acceptance([k] * 64, RNG.binomial(k, 0.9, size=64).tolist())
        if step % 1000 == 999:
            ratio = table.seconds(64, K) / table.seconds(64, 0)
            assert ratio == pytest.approx(1.0 + 0.02 * K, abs=0.07), step
            assert abs(table.pace(64)) < 0.2, step


def test_sizes_that_are_kept_by_one_power_have_one_pace() -> None:
    """48 and 60 sequences have one number of bits with 40, and one nearest power with 64."""
    chooser = DraftChooser(K)
    chooser.table.learn(
        {"running": size, "drafts": k, "steps": 4, "seconds": 0.01 + 0.001 * k}
        for size in (32, 64)
        for k in range(K + 1)
    )
    choices = []
    for step in range(400):
        # What is nearer to 32 takes twice as long as was calibrated, the others do not.
        batch, factor = ((40, 2.0), (60, 1.0))[step % 2]
        k = chooser.choose(batch)
        chooser.observe_step(batch, k, factor * (0.01 + 0.001 * k))
        chooser.observe_acceptance([k] * batch, RNG.binomial(k, 0.9, size=batch).tolist())
        choices.append(k)
    assert choices[40:].count(0) < 20


def test_it_follows_heads_that_improve() -> None:
    chooser = DraftChooser(K)
    costs = (4.0, 0.3, 0.02)
    assert usual(run(chooser, 16, 0.02, costs, 400)[0]) == 0
    chooser.heads_changed()
    assert usual(run(chooser, 16, 0.99, costs, 400)[0]) == 4


def test_heads_that_are_new_all_the_time_and_always_wrong_cost_little() -> None:
    """A loop that swaps and syncs before every short rollout."""
    chooser = DraftChooser(K)
    costs = (2.0, 0.5, 0.05)
    run(chooser, 8, 0.02, costs, 100)
    tokens = seconds = 0.0
    for _ in range(40):
        chooser.heads_changed()  # The new actor, and the new heads.
        chooser.heads_changed()
        _, some, took = run(chooser, 8, 0.02, costs, 50)
        tokens = tokens + some
        seconds = seconds + took
    assert tokens / seconds > 0.96 * 8 / cost_of(8, 0, costs)


def test_the_tail_of_a_rollout_drafts_again() -> None:
    """Costs learned at one batch size carry over to another: few sequences left, so drafts are
    nearly free.
    """
    chooser = DraftChooser(K)
    costs = (8.0, 1.0, 0.02)
    assert usual(run(chooser, 64, 0.5, costs, 300)[0]) == 0
    assert usual(run(chooser, 1, 0.5, costs, 300)[0]) >= 2


def test_pauses_are_not_taken_for_steps() -> None:
    chooser = DraftChooser(K)
    for _ in range(20):
        chooser.observe_step(8, 0, 0.01)
    before = chooser.table.seconds(8, 0)
    chooser.observe_step(8, 0, 5.0)
    assert chooser.table.seconds(8, 0) == pytest.approx(before)


def test_a_machine_that_became_slower_is_believed() -> None:
    chooser = DraftChooser(K)
    for _ in range(20):
        chooser.observe_step(8, 0, 0.01)
    for _ in range(200):
        chooser.observe_step(8, 0, 0.1)
    at_its_pace = chooser.table.seconds(8, 0) * math.exp(chooser.table.pace(8))
    assert at_its_pace == pytest.approx(0.1, rel=0.05)


def test_slow_first_steps_do_not_decide_for_good() -> None:
    """The first steps without drafts were slow (a process warms up): that drafting does not pay is
    found all the same.
    """
    chooser = DraftChooser(K)
    costs = (2.0, 0.5, 0.05, 4.0)
    for _ in range(FEW_STEPS):
        k = chooser.choose(4)
        chooser.observe_step(4, k, cost_of(4, k, costs) * (8.0 if k == 0 else 1.0))
        chooser.observe_acceptance([k] * 4, [min(k, 2)] * 4)
    assert usual(run(chooser, 4, 0.55, costs, 1500)[0][1000:]) == 0


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_jumps_that_no_formula_has_are_learned(batch: int) -> None:
    """Rows cost nothing up to 16 of them and then all at once; drafting pays for few sequences and
    not for many.
    """
    chooser = DraftChooser(K)

    def seconds(sequences: int, k: int) -> float:
        rows = sequences * (k + 1)
        return 0.004 + 0.0004 * k + (0.0 if rows <= 16 else 0.0006 * rows)

    choices: list[int] = []
    for turn in range(1200):
        sequences = (
            batch if turn % 2 else (1, 4, 16, 64)[turn // 2 % 4]
        )  # Other numbers of sequences pull the formula elsewhere.
        k = chooser.choose(sequences)
        accepted = np.minimum(RNG.geometric(0.5, size=sequences) - 1, k)
        chooser.observe_step(sequences, k, seconds(sequences, k) * RNG.uniform(0.9, 1.1))
        chooser.observe_acceptance([k] * sequences, accepted.tolist())
        if sequences == batch:
            choices.append(k)
    gains = [(1 + sum(0.5**j for j in range(1, k + 1))) / seconds(batch, k) for k in range(K + 1)]
    assert gains[usual(choices)] >= 0.94 * max(gains)


def test_the_report_says_what_was_chosen_for_how_many_sequences() -> None:
    chooser = DraftChooser(K)
    costs = (8.0, 1.0, 0.02)
    run(chooser, 64, 0.5, costs, 100)
    run(chooser, 5, 0.5, costs, 50)
    rows = chooser.take_report()
    assert [row["running"] for row in rows] == [4, 64]
    assert [sum(row["steps"]) for row in rows] == [50, 100]
    assert rows[0]["speedup"] > rows[1]["speedup"] == 1.0
    assert chooser.take_report() == []


def test_a_number_of_sequences_not_seen_before_is_learned_at_little_cost() -> None:
    """At 64 sequences each row costs, which steps of one sequence could not show; heads are nearly
    always wrong.
    """
    chooser = DraftChooser(K)

    def seconds(sequences: int, k: int) -> float:
        return 0.02 + 0.0002 * max(0, sequences * (k + 1) - 8)

    def serve(sequences: int, steps: int) -> tuple[float, float]:
        tokens = took = 0.0
        for _ in range(steps):
            k = chooser.choose(sequences)
            accepted = np.minimum(RNG.geometric(0.94, size=sequences) - 1, k)
            spent = seconds(sequences, k) * RNG.uniform(0.95, 1.05)
            chooser.observe_step(sequences, k, spent)
            chooser.observe_acceptance([k] * sequences, accepted.tolist())
            tokens = tokens + sequences + float(accepted.sum())
            took = took + spent
        return tokens, took

    serve(1, 200)
    tokens, took = serve(64, 100)
    assert tokens / took > 0.95 * 64 / seconds(64, 0)


def calibration(
    machine: Callable[[int, int], float], rng: np.random.Generator
) -> list[dict[str, float]]:
    """What an engine measured of a machine when it started: a few steps of each kind."""
    return [
        {
            "running": 2**power,
            "drafts": k,
            "steps": 8,
            "seconds": machine(2**power, k) * float(np.exp(0.05 * rng.standard_normal())),
        }
        for power in range(7)
        for k in range(K + 1)
    ]


def served_on_an_uneven_machine(seed: int) -> float:
    """Tokens per second of what is chosen over those of no drafts, by true costs; rollouts of 16
    sequences that end one by one.
    """
    rng = np.random.default_rng(seed)
    chooser = DraftChooser(K)
    chooser.table.learn(calibration(lambda batch, k: (0.004 + 0.0014 * batch) * (1 + 0.6 * k), rng))
    plain = took = pace = 0.0
    for turn in range(800):
        batch = 16 - turn // 12 % 16
        k = chooser.choose(batch)
        accepted = np.minimum(rng.geometric(0.5, size=batch) - 1, k)
        pace = 0.95 * pace + 0.1 * rng.standard_normal()
        alone = 0.004 + 0.0014 * batch
        seconds = alone * (1 + 0.6 * k)
        chooser.observe_step(batch, k, seconds * float(np.exp(pace + 0.2 * rng.standard_normal())))
        chooser.observe_acceptance([k] * batch, accepted.tolist())
        got = batch + float(accepted.sum())
        plain = plain + got * alone / batch
        took = took + seconds
    return plain / took


def test_a_machine_that_is_fast_and_slow_by_turns_is_not_taken_for_a_gain() -> None:
    """Drafting loses here, by 6 % with one draft; the machine's pace moves by a third all the
    time.
    """
    assert np.mean([served_on_an_uneven_machine(seed) for seed in range(8)]) > 0.97


MACHINES = {
    "memory": lambda b, k: 0.010 + 0.0004 * (k > 0) + 0.0003 * k + 0.00045 * b * (k + 1) ** 0.9,
    "cache": lambda b, k: 0.0035 + 0.0008 * (k > 0) + 0.0006 * k + 0.0003 * b * (k + 1),
    "graphs": lambda b, k: (
        0.008
        + 0.0008 * (k > 0)
        + 0.0002 * k
        + (0.00001 if b * (k + 1) <= 64 else 0.00008) * b * (k + 1)
    ),
}
"""Seconds of a step by sequences and drafts: weights read from memory, weights in the cache, and a
device with captured sizes.
"""


def served(
    machine: Callable[[int, int], float],
    keep: float,
    batch: int,
    chooser: DraftChooser,
    seed: int,
    steps: int = 800,
) -> float:
    """Tokens per second of `steps` steps over those of the best fixed number of drafts, by true
    costs; what is learned on the way counts.
    """
    rng = np.random.default_rng(seed)
    tokens = 0.0
    seconds = 0.0
    pace = 0.0
    for _ in range(steps):
        k = chooser.choose(batch)
        pace = 0.95 * pace + 0.02 * rng.standard_normal()
        accepted = np.minimum(rng.geometric(1 - keep, size=batch) - 1, k)
        chooser.observe_step(
            batch, k, machine(batch, k) * float(np.exp(pace + 0.08 * rng.standard_normal()))
        )
        chooser.observe_acceptance([k] * batch, accepted.tolist())
        tokens = tokens + batch + float(accepted.sum())
        seconds = seconds + machine(batch, k)
    best = max(sum(keep**j for j in range(k + 1)) * batch / machine(batch, k) for k in range(K + 1))
    return tokens / seconds / best


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("keep", [0.4, 0.7])
@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_chosen_is_nearly_as_good_as_the_best_fixed_number(
    machine: str, keep: float, calibrated: bool
) -> None:
    choosers = [DraftChooser(K) for _ in range(8)]
    if calibrated:
        for seed, chooser in enumerate(choosers):
            rng = np.random.default_rng(100 + seed)
            chooser.table.learn(calibration(MACHINES[machine], rng))
    for batch in (1, 4, 16, 64):
        assert (
            np.mean(
                [
                    served(MACHINES[machine], keep, batch, chooser, seed)
                    for seed, chooser in enumerate(choosers)
                ]
            )
            >= 0.96
        ), batch


def test_many_heads_are_chosen_from_sparsely() -> None:
    assert DraftChooser(4).allowed == [0, 1, 2, 3, 4]
    chooser = DraftChooser(15)
    assert chooser.allowed == [0, 1, 2, 3, 4, 6, 8, 12, 15]
    assert set(run(chooser, 4, 0.9, (8.0, 1.0, 0.02), 200)[0]) <= set(chooser.allowed)


def test_a_table_is_taken_over_and_todays_steps_correct_it() -> None:
    chooser = DraftChooser(K)
    run(chooser, 4, 0.5, (8.0, 1.0, 0.02), 200)
    rows = chooser.table.rows()
    other = DraftChooser(K)
    other.table.learn(rows)
    for row in rows:
        learned = other.table.seconds(int(row["running"]), int(row["drafts"]))
        assert learned == pytest.approx(row["seconds"], rel=0.05)
    # One draft costs half as much again as it did.
    for _ in range(60):
        other.observe_step(4, 1, 1.5 * rows[1]["seconds"])
        other.observe_step(4, 0, rows[0]["seconds"])
    ratio = other.table.seconds(4, 1) / other.table.seconds(4, 0)
    assert ratio == pytest.approx(1.5 * rows[1]["seconds"] / rows[0]["seconds"], rel=0.1)


def test_between_two_measured_sizes_seconds_are_a_line() -> None:
    table = StepTable()
    table.learn(
        [{"running": size, "drafts": 0, "seconds": size / 1000, "steps": 8} for size in (4, 8)]
    )
    assert table.seconds(6, 0) == pytest.approx(0.006)
    assert table.seconds(3, 0) == pytest.approx(0.004), "nothing is known below"
    assert table.seconds(6, 1) is None


@pytest.mark.parametrize("keep", [0.4, 0.7])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_whose_speed_changes_by_half_is_followed(
    machine: str, keep: float, factor: float
) -> None:
    """All steps take half or twice as long from the middle of a run on. What is best stays best:
    it is taken again soon, and meanwhile nothing is slower than no drafts.
    """
    found = []

    def changed(batch: int, k: int) -> float:
        return factor * MACHINES[machine](batch, k)

    best = max(
        sum(keep**j for j in range(k + 1)) * changed(8, 0) / changed(8, k) for k in range(K + 1)
    )
    for seed in range(8):
        chooser = DraftChooser(K)
        chooser.table.learn(calibration(MACHINES[machine], np.random.default_rng(100 + seed)))
        served(MACHINES[machine], keep, 8, chooser, seed)
        found.append([served(changed, keep, 8, chooser, turn + seed) for turn in (50, 150)])
    soon, later = np.mean(found, axis=0)
    assert soon * best >= 0.98 and later >= 0.97


def test_drafts_that_a_slower_machine_no_longer_pays_for_are_taken_back() -> None:
    """Steps with drafts take half as long again, from the middle of a run on; those without take
    what they took.
    """
    costs = (8.0, 0.1, 0.02, 0.0)
    slower = (8.0, 0.1, 0.02, 8.0)
    chooser = DraftChooser(K)
    assert usual(run(chooser, 16, 0.6, costs, 400)[0]) >= 2
    choices, tokens, seconds = run(chooser, 16, 0.6, slower, 1000)
    assert usual(choices[250:]) == 0
    assert tokens / seconds > 0.93 * 16 / cost_of(16, 0, slower), "what finding it out costs, too"


def test_thousands_of_steps_without_drafts_do_not_make_them_look_fast() -> None:
    """While heads know nothing (a warm-up) no step has drafts, and a busy machine has slow steps
    now and then. What the calibration said of drafts still holds afterwards.
    """
    chooser = DraftChooser(K)
    chooser.table.learn(calibration(MACHINES["cache"], RNG))
    for step in range(4000):
        slow = 3.0 if step % 4 == 0 else 1.0
        chooser.observe_step(4, 0, MACHINES["cache"](4, 0) * slow * RNG.uniform(0.95, 1.05))
    ratio = chooser.table.seconds(4, 4) / chooser.table.seconds(4, 0)
    true = MACHINES["cache"](4, 4) / MACHINES["cache"](4, 0)
    assert ratio == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("factor", [0.6, 1.7])
@pytest.mark.parametrize("batch", [1, 64])
def test_steps_that_all_take_longer_than_the_calibration_said_change_nothing(
    batch: int, factor: float
) -> None:
    """Long texts, a cold cache, another program: in service all kinds of steps of one size take
    longer, or less, than what was measured. What was best stays best, from the first steps on.
    """
    machine = MACHINES["cache"]

    def in_service(size: int, k: int) -> float:
        return machine(size, k) * (factor if size == batch else 1.0)

    found = []
    for seed in range(8):
        chooser = DraftChooser(K)
        chooser.table.learn(calibration(machine, np.random.default_rng(100 + seed)))
        served(machine, 0.9, 8, chooser, seed)
        found.append(served(in_service, 0.9, batch, chooser, seed, steps=60))
    assert np.mean(found) >= 0.97
