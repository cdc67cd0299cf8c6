"""The arithmetic of the growth table, by hand. The measurement itself is run by a person."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_growth_is_work_per_core_second_times_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module("companion_growth")
    alone = [bench.Round(100, [2.0], 3.0), bench.Round(100, [4.0], 4.0)]
    two = [bench.Round(100, [1.0, 1.5], 1.5), bench.Round(100, [2.0, 2.0], 2.5)]
    row = bench.summary(2, two, alone)
    assert row["core_seconds"] == 3.25 and row["tokens_per_core_second"] == pytest.approx(
        (40 + 25) / 2
    )
    assert (row["growth_low"], row["growth_high"]) == (pytest.approx(2 * 2.0 / 2.5), 2.0) and row[
        "growth"
    ] == pytest.approx(1.8)
    assert row["at_the_busiest"] == pytest.approx((2 / 1.5 + 2) / 2)
    assert row["by_the_clock"] == pytest.approx((3 / 1.5 + 4 / 2.5) / 2)
    assert bench.summary(1, alone, alone)["growth"] == 1.0
    assert "| 2 workers | 100 | 3.2 |" in bench.table(
        "hydra", [bench.summary(1, alone, alone), row]
    )
    with pytest.raises(AssertionError, match="same work"):
        bench.summary(2, [bench.Round(90, [1.0, 1.0], 1.0)], alone[:1])
