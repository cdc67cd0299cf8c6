"""The time axis of a page: steps in columns, values per column, ticks; a run of any length becomes at most 360 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

MAX_COLUMNS = 360
"""About as many as a chart is pixels wide on a telephone; more would only make the page heavier."""


@dataclass(frozen=True)
class Grid:
    """Columns of equal width over a range of steps, shared by all charts of a page.

    Attributes:
        first: first step of the first column.
        width: steps per column; 1 unless the run has more than MAX_COLUMNS steps.
        count: columns.
    """

    first: int
    width: int
    count: int

    @classmethod
    def over(cls, steps: Iterable[int]) -> Grid:
        """The grid that holds all these steps; an empty one has a single column for step 0."""
        found = list(steps)
        low, high = (min(found), max(found)) if found else (0, 0)
        span = high - low + 1
        width = math.ceil(span / MAX_COLUMNS)
        return cls(low, width, math.ceil(span / width))

    def column(self, step: int) -> int:
        return (step - self.first) // self.width

    def position(self, step: float) -> float:
        """Where a step lies on the axis, 0 (left edge) to 1 (right edge)."""
        return ((step - self.first + 0.5) / self.width) / self.count

    def center(self, column: int) -> float:
        """Where the middle of a column lies, 0 to 1."""
        return (column + 0.5) / self.count


@dataclass(frozen=True)
class Binned:
    """One metric per column: lowest, mean and highest value of its steps, None where there is none."""

    low: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    high: tuple[float | None, ...]

    @property
    def present(self) -> list[float]:
        return [value for value in self.mean if value is not None]

    @property
    def extremes(self) -> tuple[float, float] | None:
        """Lowest and highest value of all, decimated or not."""
        lows = [value for value in self.low if value is not None]
        highs = [value for value in self.high if value is not None]
        return (min(lows), max(highs)) if lows else None


def bin_values(grid: Grid, steps: Sequence[int], values: Sequence[float | None]) -> Binned:
    """Values per column; nothing is lost of the extremes when a column holds many steps."""
    cells: list[list[float]] = [[] for _ in range(grid.count)]
    for step, value in zip(steps, values, strict=True):
        if value is not None:
            cells[grid.column(step)].append(value)
    return Binned(
        tuple(min(cell, default=None) for cell in cells),
        tuple(fmean(cell) if cell else None for cell in cells),
        tuple(max(cell, default=None) for cell in cells),
    )


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that cover low..high, at most about `most` of them."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    start, stop = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(index * size, 12) for index in range(start, stop + 1)]


def step_ticks(grid: Grid, most: int = 6) -> list[int]:
    """Whole step numbers inside the grid, at round distances."""
    last = grid.first + grid.width * grid.count - 1
    ticks = (tick for tick in nice_ticks(grid.first, last, most) if tick == int(tick))
    return [int(tick) for tick in ticks if grid.first <= tick <= last] or [grid.first]
