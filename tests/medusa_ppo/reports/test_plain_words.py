"""The three sentences at a run's end: their figures, and what is left out where nothing was
measured.
"""

from __future__ import annotations

from typing import Any

from medusa_ppo.reports.plain_words import in_plain_words


def summary(**given: Any) -> dict[str, Any]:
    return {
        "rollout_speedup": None,
        "rollout_speedup_pairs": {"count": 0, "min": None, "max": None, "against": None},
        "step_ratio": None,
        "mean_acceptance_length": {"serving": None, "frozen": None, "serving_replay": None},
        "acceptance_per_position": None,
        "companion": {"versions_published": None},
        "reward": {"first": None, "last": None},
        "correct_frac": {"first": None, "last": None},
        **given,
    }


def test_all_three_sentences() -> None:
    said = in_plain_words(
        summary(
            rollout_speedup=1.414,
            rollout_speedup_pairs={"count": 5, "min": 1.3, "max": 1.5, "against": "vllm"},
            step_ratio=0.88,
            mean_acceptance_length={"serving": 4.1, "frozen": 3.7, "serving_replay": 4.2},
            acceptance_per_position=[0.9, 0.8, 0.7, 0.6],
            reward={"first": 0.2, "last": 1.1},
            correct_frac={"first": 0.1, "last": 0.4},
        )
    )
    assert len(said) == 3
    speed, heads, policy = said
    assert "1.41 times as fast as vLLM without speculation (1.30 to 1.50 in 5 pairs)" in speed
    assert speed.endswith("a whole PPO step took 12 % less time.")
    assert "4.10 of at most 5 tokens" in heads
    assert "beside the loop reach 4.20" in heads and "first version 3.70" in heads
    assert "0.20 to 1.10" in policy and "10 % to 40 %" in policy


def test_what_was_not_measured_is_left_out() -> None:
    assert in_plain_words(summary()) == []
    (heads,) = in_plain_words(
        summary(
            mean_acceptance_length={"serving": 1.5, "frozen": None, "serving_replay": None},
            acceptance_per_position=[0.5],
        )
    )
    assert heads == "In the last steps an engine step wrote 1.50 of at most 2 tokens."


def test_a_length_of_the_steps_with_drafts_is_called_that() -> None:
    """Of an engine that drafted in 6 % of its steps, an average step wrote hardly more than 1."""
    (heads,) = in_plain_words(
        summary(
            mean_acceptance_length={"serving": 2.99, "frozen": None, "serving_replay": None},
            acceptance_per_position=[0.7, 0.5, 0.4, 0.3],
            drafted_frac=0.06,
        )
    )
    assert heads == (
        "In the last steps an engine step with drafts wrote 2.99 of at most 5 tokens"
        " (6.0 % of the steps had drafts)."
    )


def test_one_version_is_not_compared_with_itself() -> None:
    (heads,) = in_plain_words(
        summary(
            mean_acceptance_length={"serving": 2.1, "frozen": 2.0, "serving_replay": 2.0},
            acceptance_per_position=[0.7, 0.5],
            companion={"versions_published": 1},
        )
    )
    assert "one version was published" in heads and "2.00" not in heads
