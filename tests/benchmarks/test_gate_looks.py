"""The gate over many looks: what is no better stays out, what is better comes soon."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("gate_looks")


@pytest.mark.parametrize("gain", [0.0, -0.01])
def test_of_fifty_batches_that_bring_nothing_none_is_published(
    bench: ModuleType, gain: float
) -> None:
    """With each look at the full error a run of fifty batches published such a version more often
    than not. `benchmarks/gate_looks.py` has the figures of a thousand runs.
    """
    runs = [bench.run(seed, 50, gain, bench.DEMO) for seed in range(120)]
    assert sum(run is not None for run in runs) <= 0.05 * 120


def test_what_is_better_is_published_within_six_batches(bench: ModuleType) -> None:
    runs = [bench.run(seed, 6, 0.05, bench.LARGE) for seed in range(120)]
    assert sum(run is not None for run in runs) >= 0.9 * 120


def test_a_gain_that_begins_late_is_noticed_within_four_batches(bench: ModuleType) -> None:
    """Pooled with all that came before it, this took 4 batches in a third of the runs."""
    runs = [bench.run(seed, bench.LATE + 4, 0.1, bench.DEMO, late=bench.LATE) for seed in range(60)]
    assert sum(run is not None for run in runs) >= 0.9 * 60


def test_few_prompts_show_a_version_that_is_much_worse_and_seldom_a_slightly_worse_one(
    bench: ModuleType,
) -> None:
    """docs/companion.md states the shares: a count of 0 says little about small losses."""
    alike, slightly, much = (
        sum(bench.counted_as_worse(seed, gain, bench.DEMO) for seed in range(300)) / 300
        for gain in (0.0, -0.02, -0.2)
    )
    assert alike <= 0.05 and slightly < 0.4 and much > 0.9
