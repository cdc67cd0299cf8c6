"""The step axis: columns, ticks, and decimation that keeps the extremes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from medusa_ppo.reports.svg import MAX_COLUMNS, Grid, bin_values, nice_ticks, step_ticks


@pytest.mark.parametrize(
    "steps", [[], [0], [7], range(16), range(3, 363), range(361), range(10_000), [5, 100_000]]
)
def test_every_step_has_a_column_and_there_are_never_too_many(steps) -> None:
    grid = Grid.over(steps)
    assert 1 <= grid.count <= MAX_COLUMNS
    for step in steps:
        assert 0 <= grid.column(step) < grid.count
        assert 0 < grid.position(step) < 1
    assert all(0 < grid.position(tick) < 1 for tick in step_ticks(grid))


def test_short_runs_keep_one_column_per_step() -> None:
    grid = Grid.over(range(4, 20))
    assert (grid.first, grid.width, grid.count) == (4, 1, 16)
    binned = bin_values(grid, [4, 6], [1.0, 3.0])
    assert binned.mean[:3] == (1.0, None, 3.0) and binned.low == binned.high == binned.mean


def test_decimation_loses_no_extreme() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(10_000)]
    values[4321] = 50.0
    values[77] = -40.0
    grid = Grid.over(range(10_000))
    binned = bin_values(grid, range(10_000), values)
    assert binned.extremes == (-40.0, 50.0)
    assert binned.high[grid.column(4321)] == 50.0 and binned.low[grid.column(77)] == -40.0
    assert all(
        low <= mean <= high
        for low, mean, high in zip(binned.low, binned.mean, binned.high, strict=True)
    )


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (1.0, 3.2), (-5, 30), (0, 0), (3, 3), (0.0004, 0.0006), (-1e9, 1e9), (0, 1e-9)],
)
def test_ticks_are_round_cover_the_range_and_are_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high - 1e-12 * abs(high)
    assert 2 <= len(ticks) <= 7
    sizes = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in pairwise(ticks)}
    assert sizes == {1.0}
