"""The comparison on a CPU: acceptance comes from what was measured, ratios from steps alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("predict_cpu")


class Priced:
    """A drafting step costs a tenth of a plain one more for each draft."""

    source = "written out"

    def plain(self, sequences: float, context: float) -> float:
        return 1.0

    def drafted(self, sequences: float, drafts: int, context: float) -> float:
        return 1 + 0.1 * drafts * sequences

    def prefill(self, tokens: float) -> float:
        return 0.0


def row(batch: int, arm: str, ratio: float, length: float | None) -> dict[str, Any]:
    return {"batch": batch, "arm": arm, "ratio": ratio, "mean_acceptance_length": length}


def rows(batch: int) -> list[dict[str, Any]]:
    return [
        row(batch, "none", 1.0, None),
        row(batch, "ours, K = 1", 1.4, 1.6),
        row(batch, "ours, K = 2", 1.5, 2.0),
        row(batch, "ours, K = 4", 1.2, 2.4),
        row(batch, "ours, K chosen", 1.45, 1.9),
    ]


def test_shares_are_differences_of_lengths(comparison: ModuleType) -> None:
    assert comparison.accepted_shares(rows(1), 4) == pytest.approx((0.6, 0.4, 0.2, 0.2))
    noisy = [row(1, "ours, K = 1", 1, 1.3), row(1, "ours, K = 2", 1, 1.8)]
    assert comparison.accepted_shares(noisy, 4) == pytest.approx((0.3, 0.3))


def test_ratios_are_tokens_over_price(comparison: ModuleType) -> None:
    ratios = comparison.predicted_ratios(Priced(), 2, (0.6, 0.4, 0.2, 0.2), 100)
    assert ratios[1] == pytest.approx(1.6 / 1.2)
    assert ratios[4] == pytest.approx(2.4 / 1.8)


def test_a_cell_holds_both_and_judges_the_best_number(comparison: ModuleType) -> None:
    idle = row(16, "ours, K = 0", 0.9, None)
    measured = {
        "batches": [1, 16],
        "rows": [*rows(1), *rows(16), idle],
        "settings": {"max_new_tokens": 64},
    }
    few, many = comparison.cells_of(measured, Priced(), 4)
    assert few["best"] == 4, "2.4 / 1.4 is the largest"
    assert few["at_best"] == pytest.approx(1.2 / 1.5)
    assert few["predicted_best"] == pytest.approx(2.4 / 1.4)
    assert few["measured"] == {1: 1.4, 2: 1.5, 4: 1.2}
    # At 16 no draft pays on paper: vLLM at its defaults, and not our engine without drafts.
    assert many["best"] == 0
    assert many["at_best"] == pytest.approx(1 / 1.5)
    line = comparison.markdown("actor", [few])[0]
    assert "1.45 / 1.71, +18 %" in line


def test_an_engines_own_step_times_beside_a_prediction(comparison: ModuleType) -> None:
    kept = {
        "rows": [
            {"running": running, "drafts": drafts, "seconds": seconds}
            for running, drafts, seconds in [
                (1, 0, 1.0),
                (1, 1, 1.1),
                (1, 2, 1.5),
                (4, 0, 2.0),
                (4, 1, 2.8),
            ]
        ]
    }
    first, second, errors = comparison.step_rows(kept, Priced())
    assert first == "| 1 | 1000.00 / 1000.00 | K = 1: 0.91 / 0.91, K = 2: 0.67 / 0.83 |"
    assert second == "| 4 | 2000.00 / 1000.00 | K = 1: 0.71 / 0.71 |"
    # Of three ratios one is 25 % off.
    assert errors == "\n2 of 3 ratios within 10 %, mean 8.3 %"
