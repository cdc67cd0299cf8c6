"""The figures of a run, checked against numbers worked out by hand; null where nothing was
measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.reports.run_files import Run, read_run
from medusa_ppo.reports.summary import (
    SUMMARY_KEYS,
    acceptance_per_position,
    build_summary,
    mal_per_engine,
    mean_acceptance_length,
    window_steps,
)
from medusa_ppo.reports.tables import flatten, summary_rows

OPEN_ENDED = ("versions", "extras")


def make(*steps: dict[str, Any], **meta: Any) -> Run:
    return Run(
        Path("runs/hand"), tuple({"step": index, **step} for index, step in enumerate(steps)), meta
    )


# Eight steps: a window of two.
HAND = make(
    {
        "heads_version": 0,
        "drafts": 100,
        "accepted": 10,
        "reward_mean": 1.0,
        "correct_frac": 0.2,
        "wall_s": 10.0,
        "generate_s": 4.0,
        "staleness": 0,
    },
    {
        "heads_version": 0,
        "drafts": 100,
        "accepted": 20,
        "reward_mean": 2.0,
        "correct_frac": 0.4,
        "pair_speedup": 1.0,
        "staleness": 1,
    },
    {
        "heads_version": 1,
        "drafts": 0,
        "accepted": 0,
        "companion_passes": 2.0,
        "companion_reason": "behind",
    },
    {
        "heads_version": 1,
        "drafts": 50,
        "accepted": 25,
        "pair_speedup": 1.5,
        "replay_mal_serving": 9.0,
        "replay_mal_frozen": 9.0,
    },
    {
        "heads_version": 2,
        "drafts": 100,
        "accepted": 60,
        "companion_hidden_s": 3.0,
        "plugin_exposed_s": 0.5,
        "companion_train_s": 3.5,
    },
    {
        "heads_version": 2,
        "drafts": 100,
        "accepted": 70,
        "pair_speedup": 2.0,
        "pair_drafting_tokens_per_s": 200.0,
        "pair_plain_tokens_per_s": 100.0,
        "companion_passes": 0.5,
        "companion_reason": "floor",
        "companion_taken_frac": 0.04,
        "companion_optimizer_steps": 30,
    },
    {
        "heads_version": 3,
        "drafts": 100,
        "accepted": 80,
        "acceptance_per_position": [0.5, 0.3],
        "reward_mean": 4.0,
        "replay_mal_serving": 1.9,
        "replay_mal_frozen": 1.5,
        "companion_hidden_s": 1.0,
        "companion_trained_tokens": 1000,
    },
    {
        "heads_version": 3,
        "drafts": 300,
        "accepted": 360,
        "acceptance_per_position": [0.7, 0.5],
        "reward_mean": 6.0,
        "correct_frac": 0.9,
        "replay_mal_serving": 2.1,
        "replay_mal_frozen": 1.6,
        "wall_s": 80.0,
        "generate_s": 3.0,
        "versions_published": 3,
        "versions_followed": 2,
        "versions_worse": 1,
        "staleness": 2,
    },
    name="hand",
    versions={"torch": "2.13.0"},
)


def test_every_figure_of_a_run_worked_out_by_hand() -> None:
    summary = build_summary(HAND)
    assert summary["steps"] == 8 and summary["window_steps"] == 2 and summary["wall_s"] == 80.0
    mal = summary["mean_acceptance_length"]
    assert mal["serving"] == pytest.approx(
        1 + 440 / 400
    )  # weighted by draft steps: not the mean of 1.8 and 2.2
    assert mal["first"] == pytest.approx(
        1.5
    )  # step 3: step 2 has published heads but did not draft
    assert mal["frozen"] == pytest.approx(1.55) and mal["serving_replay"] == pytest.approx(2.0)
    assert (
        mal["gain"] == pytest.approx(0.45)
        and mal["gain_standard_error"] == pytest.approx(0.05)
        and mal["replay_steps"] == 2
    )
    assert summary["acceptance_per_position"] == pytest.approx([0.65, 0.45])
    assert summary["rollout_speedup"] == 1.5
    assert (
        summary["rollout_speedup_pairs"]["count"] == 3
        and summary["rollout_speedup_pairs"]["last"] == 2.0
    )
    assert summary["rollout_speedup_pairs"]["lower_quartile"] is None
    assert summary["tokens_per_s"] == {"drafting": 200.0, "plain": 100.0, "rollouts": None}
    assert summary["reward"] == {"first": 1.5, "last": 5.0}
    assert summary["correct_frac"] == {"first": pytest.approx(0.3), "last": 0.9}
    assert summary["companion"] == {
        "trained_tokens": 1000, "versions_published": 3, "batches_dropped": None, "train_s": 3.5,
        "versions_followed": 2, "versions_worse": 1,
        "hidden_s": 4.0, "exposed_s": 0.5,
        "optimizer_steps": 30, "passes": 1.25, "reasons": [["behind", 1], ["floor", 1]],
        "saved_s": None, "lost_s": None, "net_s": None, "taken_frac": 0.04,
    }  # fmt: skip
    assert summary["staleness"] == {"last": 2.0, "max": 2.0}
    assert summary["phases_s"]["generate"] == 7.0 and summary["phases_s"]["sync"] is None
    assert summary["versions"] == {"torch": "2.13.0"}


def test_the_warm_up_has_a_line_with_its_cost_beside_what_it_brought() -> None:
    step = {
        "step": 0,
        "warm_up_s": 41.5,
        "warm_up_tokens": 12300,
        "warm_up_mal_before": 1.02,
        "warm_up_mal_after": 1.85,
    }
    summary = build_summary(make(step, {"step": 1}))
    assert summary["warm_up"] == {"seconds": 41.5, "tokens": 12300, "before": 1.02, "after": 1.85}
    (row,) = [row for row in summary_rows(summary) if row[0].startswith("Warm-up")]
    assert "12,300 tokens" in row[1] and "1.02 -> 1.85" in row[1], row
    without = summary_rows(build_summary(make({"step": 0})))
    assert not [row for row in without if row[0].startswith("Warm-up")]


COMPARISON = {
    "rollouts": [
        {
            "pair_speedup": 1.2,
            "pair_drafting_tokens_per_s": 120.0,
            "pair_plain_tokens_per_s": 100.0,
        },
        {"pair_speedup": None},
    ],
    "steps": [
        {
            "with": {"step_s": 11.0, "generate_s": 3.0},
            "without": {"step_s": 10.0, "generate_s": 4.0},
        },
        {
            "with": {"step_s": 12.0, "generate_s": 3.0},
            "without": {"step_s": 10.0, "generate_s": 4.0},
        },
        {"with": {"step_s": 12.0}, "without": "torn"},
    ],
}


def test_a_comparison_after_the_last_step_goes_before_pairs_within_the_run() -> None:
    assert (
        build_summary(HAND)["rollout_speedup_pairs"]["against"] == "own"
        and build_summary(HAND)["step_ratio"] is None
    )
    summary = build_summary(
        Run(HAND.path, HAND.steps, {"comparison": COMPARISON, "actor_note": "an actor of paper"})
    )
    assert (
        summary["rollout_speedup"] == 1.2 and summary["rollout_speedup_pairs"]["against"] == "vllm"
    )
    assert summary["tokens_per_s"] == {"drafting": 120.0, "plain": 100.0, "rollouts": None}
    assert summary["step_ratio"] == pytest.approx(1.2)
    assert summary["step_pairs"] == {
        "count": 2, "min": pytest.approx(1.1), "max": pytest.approx(1.2),
        "with_s": 12.0, "without_s": 10.0, "generate_with_s": 3.0, "generate_without_s": 4.0,
    }  # fmt: skip
    assert summary["actor_note"] == "an actor of paper"
    uneven = [
        (1.2, 600.0, 500.0),
        (2.7, 1350.0, 500.0),
        (1.1, 1430.0, 1300.0),
    ]  # Medians of each side: 1,350 and 500.
    names_of = ("pair_speedup", "pair_drafting_tokens_per_s", "pair_plain_tokens_per_s")
    three = Run(
        HAND.path,
        HAND.steps,
        {"comparison": {"rollouts": [dict(zip(names_of, pair, strict=True)) for pair in uneven]}},
    )
    assert (
        build_summary(three)["rollout_speedup"] == 1.2
        and build_summary(three)["rollout_speedup_pairs"]["last"] == 1.1
    )
    assert build_summary(three)["tokens_per_s"] == {
        "drafting": 600.0,
        "plain": 500.0,
        "rollouts": None,
    }
    broken = Run(HAND.path, HAND.steps, {"comparison": {"rollouts": 7, "steps": {"with": 1}}})
    assert (
        build_summary(broken)["rollout_speedup"] == 1.5
        and build_summary(broken)["step_pairs"]["count"] == 0
    )


def test_frozen_and_serving_are_taken_over_the_same_steps() -> None:
    lonely = make(
        *[{"replay_mal_serving": 5.0}] * 4,
        {"replay_mal_serving": 2.0, "replay_mal_frozen": 1.5},
        *[{"replay_mal_frozen": 9.0}] * 3,
    )
    assert build_summary(lonely)["mean_acceptance_length"]["replay_steps"] == 0
    both = make(*lonely.steps[:7], {"replay_mal_serving": 2.5, "replay_mal_frozen": 1.5})
    mal = build_summary(both)["mean_acceptance_length"]
    assert (mal["serving_replay"], mal["frozen"], mal["gain_standard_error"]) == (2.5, 1.5, None)


@pytest.mark.parametrize("name", ["demo", "one", "zero"])
def test_the_keys_are_those_that_are_documented(runs: Path, name: str) -> None:
    summary = build_summary(read_run(runs / name))
    nested = {
        key
        for key in flatten(summary)
        if not key.startswith(tuple(f"{name}." for name in OPEN_ENDED))
    }
    nested |= set(OPEN_ENDED)
    assert nested == set(SUMMARY_KEYS)


def test_the_keys_of_the_contract_are_there(runs: Path) -> None:
    summary = build_summary(read_run(runs / "demo"))
    for name in ("serving", "frozen", "first"):
        assert summary["mean_acceptance_length"][name] > 1
    assert (
        summary["steps"] == 16
        and summary["rollout_speedup"] > 1
        and len(summary["acceptance_per_position"]) == 4
    )
    assert {"first", "last"} <= set(summary["reward"]) and {"drafting", "plain"} <= set(
        summary["tokens_per_s"]
    )
    assert {"trained_tokens", "versions_published", "hidden_s", "exposed_s"} <= set(
        summary["companion"]
    )
    assert summary["versions"]["torch"] == "2.13.0"


def test_nothing_measured_is_null_everywhere() -> None:
    for run in (make(), make({}), make({"drafts": 0, "accepted": 0, "mal_serving": 1.0})):
        flat = flatten(build_summary(run))
        made_up = {key: value for key, value in flat.items() if value is not None}
        counts = {
            "steps",
            "window_steps",
            "mean_acceptance_length.replay_steps",
            "rollout_speedup_pairs.count",
            "step_pairs.count",
        }
        assert set(made_up) <= {"name", "status", "versions", "extras", *counts}


def test_windows_and_weights() -> None:
    assert [window_steps(n) for n in (0, 1, 3, 4, 12, 16, 79, 80, 10_000)] == [
        0,
        1,
        1,
        1,
        3,
        4,
        19,
        20,
        20,
    ]
    assert mean_acceptance_length(
        [{"drafts": 10, "accepted": 5}, {"drafts": 30, "accepted": 45}, {"drafts": 5}]
    ) == pytest.approx(2.25)
    # A step that drafted only one token accepted nothing at position 2.
    steps = [
        {"drafts": 10, "acceptance_per_position": [0.5]},
        {"drafts": 30, "acceptance_per_position": [0.5, 0.4]},
    ]
    assert acceptance_per_position(steps) == pytest.approx([0.5, 0.3])
    assert acceptance_per_position([]) is None and mean_acceptance_length([]) is None


def test_each_engine_of_a_pool_has_its_acceptance():
    steps = [
        {"mal_per_engine": [2.0, 1.0], "generated_tokens_per_engine": [10, 0]},
        {"mal_per_engine": [3.0, 1.5], "generated_tokens_per_engine": [10, 5]},
    ]
    assert mal_per_engine(steps) == [2.5, 1.5]
    assert mal_per_engine(steps[:1]) == [2.0, None]
    assert mal_per_engine([{"drafts": 3}]) is None
    rows = dict(summary_rows(build_summary(make(*steps))))
    assert rows["Tokens per engine step of each engine"] == "3.00, 1.50"
    assert "Tokens per engine step of each engine" not in dict(summary_rows(build_summary(HAND)))


def test_an_engine_is_as_good_as_all_its_draft_steps() -> None:
    """In its second step the first engine chose to draft nothing: that is no acceptance of 1."""
    steps = [
        {
            "mal_per_engine": [3.0, 3.0],
            "drafts_per_engine": [100, 100],
            "accepted_per_engine": [200, 200],
            "generated_tokens_per_engine": [1000, 1000],
        },
        {
            "mal_per_engine": [1.0, 3.0, 1.0],
            "drafts_per_engine": [0, 300, 0],
            "accepted_per_engine": [0, 600, 0],
            "generated_tokens_per_engine": [90_000, 1000, 0],
        },
    ]
    assert mal_per_engine(steps) == [3.0, 3.0, None]
