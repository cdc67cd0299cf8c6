"""The figures of benchmarks/holding.py from steps that are known; its runs are `medusa-ppo ppo`,
tested elsewhere.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("holding")


def steps(versions: list[int], candidates: list[float]) -> list[dict[str, Any]]:
    lines = []
    for number, (version, candidate) in enumerate(zip(versions, candidates, strict=True)):
        line = {
            "step": number,
            "reward_mean": 1.0 + number,
            "kl_reference": 0.1 * number,
            "entropy": 1.5,
            "mal_serving": 2.5,
        }
        line |= {
            "replay_mal_serving": 2.4,
            "replay_mal_frozen": 2.0,
            "replay_mal_candidate": candidate,
            "versions_published": version,
        }
        lines.append(line)
    return lines


def test_ratios_are_of_extra_tokens(bench: ModuleType) -> None:
    figures = bench.summary(steps([0] * 12, [2.5] * 12))
    assert figures["of_frozen"] == pytest.approx(1.4 / 1.0)
    assert figures["counters"] == pytest.approx(1.5)
    rows = bench.table({4: steps([0] * 12, [2.5] * 12)})
    assert rows[2].startswith("| 4 | 1.00 -> 11.00 | 0.00 -> 1.00 |")
    assert len(rows) == 3 + 2 + 3 + 12 and rows[-1].startswith("| 11-11 | 12.000 |")
    assert rows[4] == "No version was compared on later batches."


def test_versions_are_counted_on_batches_that_came_later(bench: ModuleType) -> None:
    """By the companion's own count: on the holdout that passed a version it can hardly fail."""
    lines = steps([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3], [2.5] * 12)
    for line in lines[6:]:
        line |= {"versions_followed": 2, "versions_worse": 1}
    figures = bench.summary(lines)
    assert (figures["versions"], figures["followed"], figures["worse"]) == (3, 2, 1)
    rows = bench.table({0: lines, 1: lines})
    assert rows[2].endswith("| 3 | 2 | 1 |")
    # Clopper and Pearson's interval of 2 of 4, from their table.
    assert "Worse: 2 of 4 versions, 50.0% (6.8% to 93.2%)" in rows


def test_a_memory_is_compared_epoch_by_epoch(bench: ModuleType) -> None:
    without = [{**line, "rollout_tokens_per_s": 100.0} for line in steps([0] * 12, [2.5] * 12)]
    with_one = [
        {**line, "mal_serving": 2.5 + line["step"], "rollout_tokens_per_s": 150.0}
        for line in without
    ]
    rows = bench.epochs({0: (without, with_one), 1: (without, without)})
    assert (
        len(rows) == 2 + 3
        and rows[2].startswith("| 1 | 2.500 / 3.250 |")
        and rows[4].startswith("| 3 | 2.500 / 7.250 |")
    )
    assert rows[2].endswith("| 100.000 / 125.000 |")
