"""Warnings: each appears when it should, and none in a healthy run."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.config.run_config import OFF
from medusa_ppo.reports.findings import find
from medusa_ppo.reports.run_files import Run, read_run
from medusa_ppo.reports.summary import build_summary
from medusa_ppo.reports.tables import choice_rows


def codes(run: Run) -> list[str]:
    return [finding.code for finding in find(run, build_summary(run))]


def make(*steps: dict[str, Any], status: str = "finished", unreadable: int = 0, **meta: Any) -> Run:
    numbered = tuple({"step": index, **step} for index, step in enumerate(steps))
    return Run(Path("runs/hand"), numbered, meta, unreadable, status)


def drafted(mal: float, version: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "mal_serving": mal,
        "drafts": 200,
        "accepted": round(200 * (mal - 1)),
        "heads_version": version,
        **more,
    }


def learning(steps: int, seed: int = 0) -> list[float]:
    """Mean rewards of a policy that learns: a rise, and the chance of small batches."""
    chance = random.Random(seed)
    return [0.2 + 0.3 * (1 - math.exp(-n / 6)) + chance.gauss(0, 0.03) for n in range(steps)]


def series(**columns: list[float]) -> Run:
    """A run of which these figures are known, step by step."""
    return make(
        *(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    )


@pytest.mark.parametrize("name", ["demo", "long", "one", "zero"])
def test_a_healthy_run_has_no_warning(runs: Path, name: str) -> None:
    assert codes(read_run(runs / name)) == []


def test_one_noisy_judgement_is_no_proof_however_often_it_stands_in_the_lines() -> None:
    """A companion that rests judges nothing new, and each step repeats its last estimates."""
    judged = {"replay_mal_serving": 2.40, "replay_mal_candidate": 2.40, "replay_mal_frozen": 2.41}
    run = make(*[{**judged, "heads_version": 3, "versions_published": 3}] * 80)
    lengths = build_summary(run)["mean_acceptance_length"]
    assert (lengths["replay_steps"], lengths["gain_standard_error"]) == (1, None)
    assert codes(run) == []
    # Estimates that happen to be equal, of two batches.
    batches = [{**judged, "replay_heads_version": 3, "replay_policy_version": n} for n in (7, 8)]
    run = make(*[{}] * 6, *batches)
    assert build_summary(run)["mean_acceptance_length"]["replay_steps"] == 2


def test_a_handful_of_drafts_does_not_break_a_swap() -> None:
    """An engine that chooses to draft nothing has only the drafts of its trials."""
    counted = [(2, 4, 1), (3, 0, 2), (2, 5, 3), (2, 0, 4)]
    trials = [
        {"drafts": n, "accepted": good, "heads_version": version, "mal_serving": 1 + good / n}
        for n, good, version in counted
    ]
    assert "broken_swap" not in codes(make(*trials))
    few = [{"drafts": 50, "accepted": accepted, "heads_version": 1} for accepted in (0, 60, 60)]
    few += [{"drafts": 50, "accepted": 60, "heads_version": 1}] * 2
    fallen = [{"drafts": 100, "accepted": 0, "heads_version": 2}] * 2
    assert codes(make(*few, *fallen)).count("broken_swap") == 1, "200 before and after, in all"
    assert "broken_swap" not in codes(make(*few, *fallen[:1]))


def test_of_many_broken_swaps_some_are_named_and_the_rest_counted() -> None:
    run = make(*(drafted(1.05 if n % 2 else 2.0, version=n) for n in range(1, 14)))
    texts = [f.text for f in find(run, build_summary(run)) if f.code == "broken_swap"]
    assert len(texts) == 4 and texts[-1] == "It fell like that after 3 more version(s)."


CASES: dict[str, Run] = {
    "failed": make(status="failed", extras={"error": "no memory"}),
    "interrupted": make({}, status="interrupted"),
    "killed": make({}, status="killed"),
    "unreadable_lines": make({}, unreadable=2),
    "not_finite": make({"value_loss": None, "nonfinite": ["value_loss"]}),
    "broken_swap": make(drafted(2.0), drafted(1.05, version=2)),
    "swap_alarm": make(
        drafted(1.5, swap_alarms=0), drafted(1.5, swap_alarms=1), drafted(1.5, swap_alarms=1)
    ),
    "restarts": make(
        {"engine_restarts": 0, "companion_restarts": 0},
        {"engine_restarts": 0, "companion_restarts": 2},
    ),
    "drafting_did_not_pay": make({"pair_speedup": 0.9}),
    "drafts_never_paid": make(
        {"draft_choices": [{"running": 64, "steps": [1900, 0, 60], "speedup": 1.0}]}
    ),
    "plugin_did_not_pay": make(
        {}, comparison={"steps": [{"with": {"step_s": 11.0}, "without": {"step_s": 10.0}}]}
    ),
    "worse_than_frozen": make(
        *[{}] * 6,
        {"replay_mal_serving": 1.4, "replay_mal_frozen": 1.6},
        {"replay_mal_serving": 1.39, "replay_mal_frozen": 1.6},
    ),
    "stale_heads": make(drafted(2.0), drafted(1.6, staleness=6)),
    "versions_worse": make({"versions_followed": 6, "versions_worse": 2}),
    "companion_stopped": make(
        *[{"companion_trained_tokens": min(step, 3) * 100} for step in range(12)]
    ),
    "batches_dropped": make({"companion_batches_dropped": 2}),
    "plugin_exposed": make({"plugin_exposed_s": 3.0, "wall_s": 20.0}),
    "logprob_gap": make({"logprob_gap": 0.2}),
    "off_policy": make({"importance_cut_frac": 0.1}),
    "steps_skipped": make({"optimizer_steps_skipped": 1}),
    "large_update": make({"kl_update": 0.2}),
    "truncated": make({"truncated_frac": 0.7}),
    "entropy_collapse": make({"entropy": 2.0}, {"entropy": 0.1}),
    "longer_responses": make({"response_length_tokens": 50}, {"response_length_tokens": 90}),
    "reward_jump": series(reward_mean=[*learning(12), *(0.95 + n / 500 for n in range(8))]),
    "value_loss_flat": series(
        value_loss=[0.2 + 0.01 * (n % 3) for n in range(20)],
        value_explained_frac=[0.02] * 20,
        reward_mean=learning(20),
    ),
    "kl_flat": series(kl_reference=[0.0, 2e-8, -3e-8, 1e-8] * 4),
    "kl_runaway": series(kl_reference=[0.0004 * 1.5**n for n in range(18)]),
}


def test_heads_are_stale_if_a_judged_candidate_is_better() -> None:
    judged = {"replay_mal_serving": 1.60, "replay_mal_candidate": 1.70}
    assert codes(make(drafted(2.0), drafted(1.6, staleness=6) | judged)) == ["stale_heads"]


@pytest.mark.parametrize("code", CASES)
def test_each_fault_is_named_once_and_alone(code: str) -> None:
    found = find(CASES[code], build_summary(CASES[code]))
    assert [finding.code for finding in found] == [code]
    assert found[0].text.endswith(".") and found[0].do.endswith((".", ")."))


@pytest.mark.parametrize(
    "run",
    [
        make(drafted(2.0), drafted(1.99, staleness=30)),  # old, but nothing is lost by it
        make(
            drafted(2.0),
            drafted(1.6, staleness=6) | {"replay_mal_serving": 1.60, "replay_mal_candidate": 1.61},
        ),  # old and worse than before, but training finds nothing better
        make(drafted(2.0), drafted(1.05, version=1)),  # acceptance fell, but no heads came in
        make(
            drafted(2.0), {"mal_serving": 1.0, "drafts": 0, "accepted": 0, "heads_version": 2}
        ),  # the step did not draft
        make(drafted(1.05, version=0), drafted(1.02, version=1)),  # there was nothing to lose
        make({"nonfinite": ["companion_loss"]}),  # no batch trained yet
        make(
            {
                "plugin_exposed_s": 3.0,
                "companion_train_s": 2.9,
                "companion_hidden_s": 0.0,
                "companion_taken_frac": 0.15,
                "wall_s": 20.0,
            }
        ),  # the companion's turns have a bound of their own
        make({"replay_mal_serving": 1.60, "replay_mal_frozen": 1.60}),
        # One of forty as good as their predecessors is counted as worse.
        make({"versions_followed": 2, "versions_worse": 1}),
        make({"versions_followed": 40, "versions_worse": 3}),
        # Rewards that vary more as more answers are right, and a critic that follows them.
        series(
            value_loss=[0.05 + 0.005 * n for n in range(20)],
            value_explained_frac=[0.3] * 20,
            reward_mean=learning(20),
        ),
        series(
            value_loss=[0.05 + 0.005 * n for n in range(20)],
            reward_mean=[0.1 + 0.02 * n for n in range(20)],
        ),  # the same of a loop that does not log it
        series(value_loss=[0.3 * 0.9**n for n in range(20)], value_explained_frac=[0.0] * 20),
        series(reward_mean=[1 - 0.5**n for n in range(20)]),  # quick, in several steps
        series(reward_mean=[0.0] * 20),
        series(kl_reference=[0.002 * n for n in range(20)]),
        series(kl_reference=[0.2 * (1 - 0.7**n) for n in range(20)]),  # a plateau that it went to
        series(kl_reference=[0.0, 0.0, *(3e-6 * n for n in range(18))]),  # a small step size
        # An older actor's tokens, as with ppo.staleness: their log-probs differ by design.
        make(*[{"logprob_gap": 0.2, "importance_cut_frac": 0.1, "policy_lag": 1}] * 12),
        series(reward_mean=[*learning(8)[:8], 0.9]),  # too few steps to know what is usual
    ],
)
def test_what_looks_similar_but_is_fine(run: Run) -> None:
    assert codes(run) == []


@pytest.mark.parametrize(("worse", "found"), [(0, []), (100, []), (400, ["versions_worse"])])
def test_thousands_of_versions_are_counted_too(worse: int, found: list[str]) -> None:
    assert codes(make({"versions_followed": 5000, "versions_worse": worse})) == found


def right_answers(steps: int, responses: int, chance: float, seed: int) -> list[float]:
    """Mean rewards where each response is right with the same chance, and nothing is learned."""
    drawn = random.Random(seed)
    return [
        sum(drawn.random() < chance for _ in range(responses)) / responses for _ in range(steps)
    ]


@pytest.mark.parametrize(
    ("steps", "responses", "chance"),
    [(40, 32, 0.01), (100, 64, 0.005), (200, 128, 0.002), (40, 32, 0.02), (40, 8, 0.5)],
)
def test_a_few_right_answers_are_no_jump(steps: int, responses: int, chance: float) -> None:
    """Most changes are 0 then, and a single right answer is more than eight times nothing."""
    runs = [series(reward_mean=right_answers(steps, responses, chance, seed)) for seed in range(50)]
    assert not any("reward_jump" in codes(run) for run in runs)


def test_a_reward_that_jumps_is_found_among_sparse_ones() -> None:
    rewards = right_answers(60, 64, 0.02, 1)
    rewards[40:] = [0.9 + 0.02 * reward for reward in rewards[40:]]
    assert "reward_jump" in codes(series(reward_mean=rewards))


@pytest.mark.parametrize("steps", [10, 16, 40, 400])
def test_chance_alone_makes_no_jump(steps: int) -> None:
    runs = [series(reward_mean=learning(steps, seed)) for seed in range(200)]
    assert not any("reward_jump" in codes(run) for run in runs)


def test_a_gap_counts_in_the_steps_that_learned_from_the_newest_actor() -> None:
    lagging = {"logprob_gap": 0.2, "importance_cut_frac": 0.1, "policy_lag": 0.25}
    assert codes(make(*[lagging, {"logprob_gap": 0.01, "policy_lag": 0}] * 6)) == []
    assert codes(make(*[lagging, {"logprob_gap": 0.2, "policy_lag": 0}] * 6)) == ["logprob_gap"]


def test_a_spike_is_a_jump_and_names_its_step() -> None:
    rewards = learning(20)
    rewards[9] += 1.0
    run = series(reward_mean=rewards)
    (finding,) = find(run, build_summary(run))
    assert finding.code == "reward_jump" and "in step 9, the first of 2" in finding.text


def test_the_documentation_lists_every_code() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"`{code}`" in text for code in CASES)


@pytest.mark.parametrize(
    "damaged",
    [
        7,
        "text",
        {"running": 64},
        [None],
        [{"running": 64}],
        [{"running": None, "steps": [5000], "speedup": 1.0}],
        [{"running": 64, "steps": 5000, "speedup": 1.0}],
        [{"running": 64, "steps": [5000, "many"], "speedup": 1.0}],
        [{"running": 64, "steps": [5000, None], "speedup": 1.0}],
    ],
)
def test_damaged_choices_are_left_out(damaged: object) -> None:
    run = make({"draft_choices": damaged})
    assert codes(run) == [] and choice_rows(run) == []
    sound = {"running": 4, "steps": [9, 1]}
    (row,) = choice_rows(make({"draft_choices": damaged}, {"draft_choices": [sound]}))
    assert (row.running, row.speedup) == ("4 to 7", None)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"runner": None, "stop_below": None}, ""),
        ({"runner": "v2", "stop_below": None}, ""),
        ({"runner": "v1", "stop_below": None}, "engine.runner=v1"),
        ({"runner": "v2", "stop_below": 8}, "engine.stop_below"),
    ],
)
def test_drafts_that_never_paid_name_scheduling_only_where_it_is_concerned(
    engine: dict[str, Any], reason: str
) -> None:
    (step,) = CASES["drafts_never_paid"].steps
    run = make(step, config={"engine": engine})
    (finding,) = find(run, build_summary(run))
    assert ("schedule" in finding.do) == bool(reason) and reason in finding.do
    assert " ".join(OFF) in finding.do, "with one of the keys alone the engine is still set up"
