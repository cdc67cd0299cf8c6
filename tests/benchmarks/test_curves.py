"""The figures and the picture of benchmarks/curves.py from curves that are known; its runs are
`medusa-ppo ppo`, tested elsewhere.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("curves")


def one(arm: str, seed: int, end: float, seconds: float, algorithm: str = "gae") -> dict[str, Any]:
    """Ten steps: reward 0 at first and `end` in the last two."""
    return {
        "algorithm": algorithm,
        "arm": arm,
        "seed": seed,
        "commit": "abc",
        "cpu": "a CPU",
        "reward": [0.0] * 8 + [end] * 2,
        "correct": None,
        "length": [70.0] * 10,
        "wall_s": [seconds * (step + 1) / 10 for step in range(10)],
        "generate_s": seconds / 2,
        "warm_up_s": 20.0 if arm == "with" else 0.0,
        "tokens_a_step": 4.0 if arm == "with" else None,
    }


def six(ours: list[float], theirs: list[float]) -> list[dict[str, Any]]:
    return [one("with", seed, end, 80.0) for seed, end in enumerate(ours)] + [
        one("without", seed, end, 100.0 + 20 * seed) for seed, end in enumerate(theirs)
    ]


def test_what_is_kept_grows_over_sessions(bench: ModuleType) -> None:
    earlier = [one("with", 0, 1.0, 80.0), one("without", 0, 1.0, 100.0)]
    later = [one("with", 0, 2.0, 90.0), one("with", 0, 3.0, 90.0, "grpo")]
    found = {
        (run["algorithm"], run["arm"]): run["reward"][-1] for run in bench.together(earlier, later)
    }
    assert found == {("gae", "with"): 2.0, ("gae", "without"): 1.0, ("grpo", "with"): 3.0}


def test_an_interval_by_hand(bench: ModuleType) -> None:
    """Both variances are 1, so the error is the square root of 2 / 3; four degrees of freedom."""
    apart, half = bench.difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert apart == pytest.approx(-1.0) and half == pytest.approx(2.776 * (2 / 3) ** 0.5)
    assert bench.difference([1.0], [2.0]) == (-1.0, float("inf"))


@pytest.mark.parametrize(("theirs", "same"), [([1.0, 1.1, 1.3], "yes"), ([1.9, 2.0, 2.1], "no")])
def test_arms_are_the_same_within_what_seeds_differ_by(
    bench: ModuleType, theirs: list[float], same: str
) -> None:
    found = six([1.0, 1.2, 1.2], theirs)
    (row,) = [line for line in bench.tables(found) if line.startswith("| PPO with a critic | 3")]
    assert row.endswith(f"| {same} |") and "| 1.133 (1.000 to 1.200) |" in row


def test_seconds_are_compared_seed_by_seed(bench: ModuleType) -> None:
    """80 of 100, 120 and 140 seconds; 60 of them without the warm-up."""
    lines = bench.tables(six([1.0] * 3, [1.0] * 3))
    row = lines[-3]
    assert row.startswith("| PPO with a critic | 80 | 120 | 0.667 (0.571 to 0.800) | 0.500 |")
    assert row.endswith("| 4.00 |") and lines[-1] == "6 runs: abc, a CPU"


def test_a_seed_with_one_arm_is_left_out(bench: ModuleType) -> None:
    arms = bench.by_arm([*six([1.0], [1.0]), one("with", 7, 1.0, 80.0)], "gae")
    assert {arm: list(runs) for arm, runs in arms.items()} == {"with": [0], "without": [0]}
    lines = bench.tables(six([1.0], [1.0]))
    assert not any("GRPO" in line for line in lines)
    assert lines[2].endswith("| one seed says nothing |")


def test_settings_follow_options(bench: ModuleType) -> None:
    args = bench.arguments(
        ["run", "--out", "runs", "--seeds", "3", "4", "--steps", "9", "a.b=1", "c.d=2"]
    )
    assert (args.what, args.seeds, args.steps) == ("run", [3, 4], 9)
    assert args.overrides == ["a.b=1", "c.d=2"] and args.algorithms == ["gae", "grpo", "rloo"]
    with pytest.raises(SystemExit):
        bench.arguments(["keep"])


def test_arms_of_a_seed_follow_each_other_in_changing_order(bench: ModuleType) -> None:
    runs = list(bench.planned([0, 1, 2], ["gae", "grpo", "rloo"]))
    assert len(set(runs)) == len(runs) == 18
    pairs = [runs[at : at + 2] for at in range(0, 18, 2)]
    assert all(first[:2] == second[:2] for first, second in pairs)
    assert sum(first[2] == "with" for first, _ in pairs) in (4, 5)


def save_run(folder: Path, status: str, steps: int, plugin: bool) -> None:
    folder.mkdir(parents=True)
    config = {"ppo": {"advantages": "grpo"}, "companion": {"enabled": plugin}, "seed": 5}
    meta = {"status": status, "config": config, "commit": "abc", "hardware": {"cpu": "a CPU"}}
    (folder / "run.json").write_text(json.dumps(meta))
    rows = [
        {
            "step": step,
            "reward_mean": step / 3,
            "correct_frac": 0.5,
            "response_length_tokens": 70.04,
            "wall_s": 30.0 + step,
            "generate_s": 0.5,
            "mal_serving": 2.0 + step,
        }
        for step in range(steps)
    ]
    rows[0]["warm_up_s"] = 29.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_is_kept_of_a_run(bench: ModuleType, tmp_path: Path) -> None:
    save_run(tmp_path / "a", "finished", 10, plugin=True)
    save_run(tmp_path / "b", "interrupted", 10, plugin=False)
    (found,) = bench.records(tmp_path)
    assert (found["algorithm"], found["arm"], found["seed"]) == ("grpo", "with", 5)
    assert found["reward"][:3] == [0.0, 0.3333, 0.6667] and found["correct"] == [0.5] * 10
    assert found["generate_s"] == 5.0 and found["warm_up_s"] == 29.0
    # 10 and 11 in the last two steps.
    assert found["tokens_a_step"] == 10.5
    assert bench.is_complete(tmp_path / "a", 10) and not bench.is_complete(tmp_path / "a", 20)
    assert not bench.is_complete(tmp_path / "b", 10) and not bench.is_complete(tmp_path / "c", 10)


def test_the_picture_has_a_line_and_a_range_for_each_arm(bench: ModuleType) -> None:
    found = six([1.0, 1.2, 1.4], [1.1, 1.1, 1.1])
    root = ElementTree.fromstring(bench.picture(found))
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("polyline") == kinds.count("polygon") == 4, "by step and by second"
    assert bench.means([1.0, 2.0, 3.0, 4.0, 5.0, 9.0]) == [3.0]
    with_plugin = bench.by_arm(found, "gae")["with"]
    # Groups of five steps: 0, and two of five steps with the end's reward.
    assert bench.points_of(with_plugin, bench.STEPS)[1] == pytest.approx((7.0, 0.4, 0.48, 0.56))
    assert bench.points_of(with_plugin, bench.SECONDS)[1][0] == pytest.approx(8.0 * 8)


def test_the_kept_picture_is_as_it_would_be_drawn(bench: ModuleType) -> None:
    """Both come with the first whole set of runs."""
    assert bench.KEPT.is_file() == bench.PICTURE.is_file()
    if bench.KEPT.is_file():
        assert bench.PICTURE.read_text(encoding="utf-8") == bench.picture(bench.kept())
