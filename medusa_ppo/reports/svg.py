"""Inline SVG charts, drawn in Python: lines, bars, a heat strip, pairs.

A chart is an <svg> as wide as its box and `height` pixels high. Grid lines and texts have percent
positions, so that texts keep their size; the data is in an inner <svg> of 1000 x height units that
stretches to the box (strokes keep their width). Axis texts are outside the box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, groupby
from statistics import fmean

from medusa_ppo.runtime.wording import FORMATS, ratio, seconds, short

MAX_COLUMNS = 360
"""About the width of a chart in pixels on a phone; more would only make the page larger."""


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
        """The grid for all these steps; with no steps, a single column for step 0."""
        found = list(steps)
        low, high = (min(found), max(found)) if found else (0, 0)
        span = high - low + 1
        width = math.ceil(span / MAX_COLUMNS)
        return cls(low, width, math.ceil(span / width))

    def column(self, step: int) -> int:
        return (step - self.first) // self.width

    def position(self, step: float) -> float:
        """A step's position on the axis, 0 (left edge) to 1 (right edge)."""
        # A step is drawn in the middle of its place, like a column's value.
        return ((step - self.first + 0.5) / self.width) / self.count

    def center(self, column: int) -> float:
        """Position of the middle of a column, 0 to 1."""
        return (column + 0.5) / self.count


@dataclass(frozen=True)
class Binned:
    """One metric per column: lowest, mean and highest value of its steps, None where there is
    none.
    """

    low: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    high: tuple[float | None, ...]

    @property
    def present(self) -> list[float]:
        return [value for value in self.mean if value is not None]

    @property
    def extremes(self) -> tuple[float, float] | None:
        """Lowest and highest value of all, decimated or not."""
        ends = [value for value in (*self.low, *self.high) if value is not None]
        return (min(ends), max(ends)) if ends else None


def bin_values(grid: Grid, steps: Sequence[int], values: Sequence[float | None]) -> Binned:
    """Values per column; extremes survive when a column holds many steps."""
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
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that cover low..high, at most about
    `most` of them.
    """
    # Give empty ranges and NaN some width, which the logarithm below needs.
    if not high > low:
        low = low - (abs(low) or 1.0) * 0.5
        high = high + (abs(high) or 1.0) * 0.5
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    # Subtracting a tiny share keeps an exactly round range from getting the next larger distance.
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    # A bound that equals a tick up to rounding must not get another tick beyond it.
    start = math.floor(low / size + 1e-9)
    stop = math.ceil(high / size - 1e-9)
    # 3 * 0.1 is 0.30000000000000004, and would be printed like that.
    return [round(index * size, 12) for index in range(start, stop + 1)]


def step_ticks(grid: Grid) -> list[int]:
    """Integer steps inside the grid, at round distances."""
    last = grid.first + grid.width * grid.count - 1
    # Distances of 2.5 or below 1 would give positions between two steps.
    ticks = (tick for tick in nice_ticks(grid.first, last, 6) if tick == int(tick))
    return [int(tick) for tick in ticks if grid.first <= tick <= last] or [grid.first]


UNITS = 1000
# Shades of a heat strip: more can't be told apart.
HEAT_LEVELS = 20
# Pixels.
HEAT_ROW, SPAN_ROW = 34, 22
DOTS_UP_TO = 48
"""Lines with at most this many points also show the points."""
# More lines would hide the curves; small strokes above the chart replace them.
MARK_LINES_UP_TO = 40
MARK_NAME_PERCENT = 8.0
"""Minimum distance between names of flags, so that they are readable on a phone."""


@dataclass(frozen=True)
class Series:
    """One line, bar or row of a chart.

    Attributes:
        name: as in legend and tooltip.
        tone: CSS class suffix for its colour.
        values: per column.
        style: solid | dash | dot | thin (lines only).
        format: key of wording.FORMATS.
        connect: draw through columns without a value (for metrics not measured in every step).
    """

    name: str
    tone: str
    values: Binned
    style: str = "solid"
    format: str = "plain"
    connect: bool = False


@dataclass(frozen=True)
class Scale:
    """Value -> vertical position in pixels, 0 at the top."""

    low: float
    high: float
    height: int

    def y(self, value: float) -> float:
        return self.height * (1 - (value - self.low) / (self.high - self.low))


def fit_scale(
    series: Sequence[Series], height: int, floor: float | None
) -> tuple[Scale, list[float]]:
    """Scale and ticks that hold all series; `floor` (0 for amounts, 1 for acceptance lengths) is
    always on the axis.
    """
    bounds = [bound for item in series if (bound := item.values.extremes)]
    low = min((bound[0] for bound in bounds), default=0.0)
    high = max((bound[1] for bound in bounds), default=1.0)
    if floor is not None:
        low = min(low, floor)
        # Never empty, even if all values equal the floor.
        high = max(high, floor + 1e-6)
    if low == high and low >= 0:
        # A metric that never moved: its axis starts at zero, and has some height even if the metric
        # is zero.
        low = 0.0
        high = high or 1.0
    ticks = nice_ticks(low, high)
    return Scale(ticks[0], ticks[-1], height), ticks


def draw_lines(
    key: str,
    title: str,
    series: Sequence[Series],
    grid: Grid,
    *,
    height: int,
    floor: float | None = None,
    format: str = "plain",
    marks: Sequence[tuple[int, str]] = (),
) -> str:
    """Lines over steps, with a band from lowest to highest where a column holds many steps."""
    scale, ticks = fit_scale(series, height, floor)
    shapes = [
        f'<path class="band t-{item.tone}" d="{_band(item.values, grid, scale)}"/>'
        for item in series
        if grid.width > 1
    ]
    for item in series:
        shapes.append(
            f'<path class="line t-{item.tone} l-{item.style}" d="{_line(item, grid, scale)}"/>'
        )
        points = len(item.values.present)
        # One or two values make no visible line, whatever its style.
        if points <= 2 or (points <= DOTS_UP_TO and item.style == "solid"):
            shapes.append(
                f'<path class="dots t-{item.tone}" d="{_dots(item.values, grid, scale)}"/>'
            )
    behind = _marks(marks, grid, height)
    return _frame(
        key,
        title,
        describe(series),
        grid,
        scale,
        ticks,
        FORMATS[format],
        "".join(shapes),
        behind=behind,
    )


def draw_bars(
    key: str, title: str, up: Sequence[Series], down: Sequence[Series], grid: Grid, *, height: int
) -> str:
    """Stacked bars of seconds above the line for `up` and below it for `down`; one path per
    series.
    """
    top, bottom = (
        max(sum(item.values.mean[x] or 0.0 for item in side) for x in range(grid.count))
        for side in (up, down)
    )
    ticks = nice_ticks(-bottom, top or 1.0)
    scale = Scale(ticks[0], ticks[-1], height)
    # With more bars the gaps would be thinner than a pixel and flicker.
    gap = 0.12 if grid.count <= 120 else 0.0
    shapes = [
        f'<path class="fill t-{item.tone}" d="{path}"/>'
        for side, sign in ((up, 1), (down, -1))
        for item, path in zip(side, _stack_paths(side, grid, scale, sign, gap), strict=True)
    ]
    shapes.append(f'<path class="base" d="M0 {_px(scale.y(0))}H{UNITS}"/>')
    return _frame(
        key,
        title,
        describe([*up, *down]),
        grid,
        scale,
        ticks,
        lambda value: seconds(abs(value or 0.0)),
        "".join(shapes),
    )


def draw_heat(key: str, title: str, rows: Sequence[Series], grid: Grid) -> str:
    """One row per series; the darker a cell, the larger its value (0 up to the largest of all
    rows).
    """
    height = HEAT_ROW * len(rows)
    top = max((value for row in rows for value in row.values.present), default=1.0) or 1.0
    # One path per shade instead of one element per cell: a long run has thousands of cells.
    levels: list[list[str]] = [[] for _ in range(HEAT_LEVELS + 1)]
    step = UNITS / grid.count
    # Slightly wider than the column, or the seams would show.
    wide = _px(step + 0.4)
    for index, row in enumerate(rows):
        for column, value in enumerate(row.values.mean):
            if value is not None:
                cell = (
                    f"M{_px(column * step)} {index * HEAT_ROW + 1}h{wide}v{HEAT_ROW - 3}h-{wide}z"
                )
                levels[round(HEAT_LEVELS * max(0.0, value) / top)].append(cell)
    shapes = [
        f'<path class="heat" fill-opacity="{0.04 + 0.96 * n / HEAT_LEVELS:.2f}"'
        f' d="{"".join(cells)}"/>'
        for n, cells in enumerate(levels)
        if cells
    ]
    labels = "".join(
        '<text class="tick y" x="-8"'
        f' y="{index * HEAT_ROW + HEAT_ROW / 2 + 4}">{escape(row.name.split()[-1])}</text>'
        for index, row in enumerate(rows)
    )
    return _svg(
        key,
        title,
        describe(rows),
        height,
        labels + _step_axis(grid, height) + _data(height, "".join(shapes)),
    )


def draw_pairs(
    key: str,
    title: str,
    upper: Series,
    lower: Series,
    extra: Sequence[Series],
    grid: Grid,
    *,
    height: int,
    labels: bool,
) -> str:
    """Two dots per pair joined by a stem with its ratio; `extra` series are thin lines behind."""
    scale, ticks = fit_scale([upper, lower, *extra], height, 0.0)
    shapes = [
        f'<path class="line t-{item.tone} l-{item.style}" d="{_line(item, grid, scale)}"/>'
        for item in extra
    ]
    stems = []
    texts = []
    for column, (high, low) in enumerate(zip(upper.values.mean, lower.values.mean, strict=True)):
        if high is None or low is None:
            continue
        x = grid.center(column)
        stems.append(f"M{_px(UNITS * x)} {_px(scale.y(low))}V{_px(scale.y(high))}")
        if labels and low > 0:
            above = _px(min(scale.y(high), scale.y(low)) - 9)
            texts.append(
                f'<text class="note" x="{100 * x:.2f}%" y="{above}">{ratio(high / low)}</text>'
            )
    shapes.append(f'<path class="stem" d="{"".join(stems)}"/>')
    shapes += [
        f'<path class="dots big t-{item.tone}" d="{_dots(item.values, grid, scale)}"/>'
        for item in (lower, upper)
    ]
    return _frame(
        key,
        title,
        describe([upper, lower, *extra]),
        grid,
        scale,
        ticks,
        FORMATS["plain"],
        "".join(shapes),
        front="".join(texts),
    )


def draw_spans(
    key: str,
    title: str,
    rows: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
) -> str:
    """When each (name, tone, spans of seconds) worked: one row each, from 0 to the last end."""
    height = SPAN_ROW * len(rows)
    last = max((end for _, _, spans in rows for _, end in spans), default=1.0) or 1.0
    shapes = []
    said = []
    for index, (name, tone, spans) in enumerate(rows):
        bars = (
            f"M{_px(UNITS * a / last)}"
            f" {index * SPAN_ROW + 2}H{_px(UNITS * b / last)}"
            f"v{SPAN_ROW - 4}H{_px(UNITS * a / last)}z"
            for a, b in spans
        )
        shapes.append(f'<path class="fill t-{tone}" d="{"".join(bars)}"/>')
        said.append(
            f"{name}: {seconds(sum(b - a for a, b in spans))} in {len(spans)}"
            f" part{'' if len(spans) == 1 else 's'}."
        )
    ticks = [tick for tick in nice_ticks(0.0, last, 6) if tick <= last]
    axis = "".join(
        f'<text class="tick x" x="{100 * tick / last:.2f}%"'
        f' y="{height + 18}">{seconds(tick)}</text>'
        for tick in ticks
    )
    return _svg(
        key, title, " ".join(said), height, axis + _data(height, "".join(shapes)), still=True
    )


def draw_spark(values: Sequence[float | None], tone: str) -> str:
    """A small line without axes for a headline tile; empty for fewer than two values."""
    grid = Grid(0, 1, max(1, len(values)))
    binned = Binned(tuple(values), tuple(values), tuple(values))
    bounds = binned.extremes
    if bounds is None or len(binned.present) < 2:
        return ""
    low, high = bounds
    scale = Scale(low - (high - low) * 0.1 - 1e-9, high + (high - low) * 0.1 + 1e-9, 36)
    line = _line(Series("", tone, binned, connect=True), grid, scale)
    frame = (
        f'<svg class="spark" viewBox="0 0 {UNITS} 36" preserveAspectRatio="none"'
        ' aria-hidden="true">'
    )
    return f'{frame}<path class="line t-{tone}" d="{line}"/></svg>'


def describe(series: Sequence[Series]) -> str:
    """A chart in words, for readers who can't see it."""
    parts = []
    for item in series:
        values = item.values.present
        bounds = item.values.extremes
        figures = (
            [FORMATS[item.format](value) for value in (values[0], values[-1], *bounds)]
            if bounds
            else []
        )
        said = (
            "first {}, last {}, lowest {}, highest {}".format(*figures)
            if figures
            else "not measured"
        )
        parts.append(f"{item.name}: {said}.")
    return " ".join(parts)


def _frame(
    key: str,
    title: str,
    description: str,
    grid: Grid,
    scale: Scale,
    ticks: Sequence[float],
    words: Callable[[float | None], str],
    shapes: str,
    *,
    behind: str = "",
    front: str = "",
) -> str:
    """Horizontal rules with their values, the step axis, and the data between."""
    rules = "".join(
        f'<line class="rule" x1="0" x2="100%" y1="{_px(scale.y(tick))}" y2="{_px(scale.y(tick))}"/>'
        for tick in ticks
    )
    labels = "".join(
        '<text class="tick y" x="-8"'
        f' y="{_px(scale.y(tick) + 4)}">{escape(short(words(tick), tick))}</text>'
        for tick in ticks
    )
    # SVG paints in this order: rules lie behind the data, notes before it.
    inner = (
        rules
        + labels
        + _step_axis(grid, scale.height)
        + behind
        + _data(scale.height, shapes)
        + front
    )
    return _svg(key, title, description, scale.height, inner)


def _svg(
    key: str, title: str, description: str, height: int, inner: str, *, still: bool = False
) -> str:
    """`still`: the chart's columns are not steps, so there is nothing to show under the pointer."""
    kind = "plot still" if still else "plot"
    return (
        f'<svg class="{kind}" height="{height}" role="img" tabindex="0" data-chart="{escape(key)}"'
        f' aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{escape(title)}</title><desc'
        f' id="{key}-d">{escape(description)}</desc>{inner}</svg>'
    )


def _data(height: int, shapes: str) -> str:
    return (
        f'<svg class="data" viewBox="0 0 {UNITS} {height}" preserveAspectRatio="none" width="100%"'
        f' height="{height}">{shapes}</svg>'
    )


def _step_axis(grid: Grid, height: int) -> str:
    texts = [
        f'<text class="tick x" x="{100 * grid.position(tick):.2f}%"'
        f' y="{height + 18}">{tick:,}</text>'
        for tick in step_ticks(grid)
    ]
    return f'<text class="tick y" x="-8" y="{height + 18}">step</text>' + "".join(texts)


def _marks(marks: Sequence[tuple[int, str]], grid: Grid, height: int) -> str:
    """Flags on top of the chart, e.g. new versions of the heads: full-height lines while they are
    few, names where they fit.
    """
    out = []
    named = -1.0
    few = len(marks) <= MARK_LINES_UP_TO
    for index, (step, name) in enumerate(marks):
        # Between two steps, because the swap came before this one.
        place = 100 * grid.position(step - 0.5 if grid.width == 1 else step)
        x = f"{place:.2f}%"
        if few:
            out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-3" y2="{height}"/>')
        if place - named >= MARK_NAME_PERCENT or index == 0:
            out.append(f'<text class="markname" x="{x}" y="-9">{escape(name)}</text>')
            named = place
    if not few:
        columns = sorted({grid.column(step) for step, _ in marks})
        rug = "".join(f"M{_px(UNITS * grid.center(column))} -6v6" for column in columns)
        out.append(_data(height, f'<path class="rug" d="{rug}"/>'))
    return "".join(out)


def _points(
    values: Sequence[float | None], grid: Grid, scale: Scale, *, through: bool = False
) -> list[list[str]]:
    """Runs of neighbouring columns that have a value, as "x y"; `through`: one run for all."""
    runs = groupby(enumerate(values), key=lambda pair: pair[1] is not None)
    found = [
        [f"{_px(UNITS * grid.center(x))} {_px(scale.y(y))}" for x, y in run if y is not None]
        for there, run in runs
        if there
    ]
    return [list(chain(*found))] if through and found else found


def _line(item: Series, grid: Grid, scale: Scale) -> str:
    return "".join(
        f"M{'L'.join(run)}" for run in _points(item.values.mean, grid, scale, through=item.connect)
    )


def _dots(values: Binned, grid: Grid, scale: Scale) -> str:
    """Dots as lines of length zero: round caps and a fixed stroke width keep them round however
    the chart stretches.
    """
    return "".join(f"M{point}h0" for point in chain(*_points(values.mean, grid, scale)))


def _band(values: Binned, grid: Grid, scale: Scale) -> str:
    upper = _points(values.high, grid, scale)
    lower = _points(values.low, grid, scale)
    return "".join(
        f"M{'L'.join([*high, *reversed(low)])}z" for high, low in zip(upper, lower, strict=True)
    )


def _stack_paths(
    series: Sequence[Series], grid: Grid, scale: Scale, sign: int, gap: float
) -> list[str]:
    """A path per series, with its bars on top of the previous ones."""
    paths = []
    levels = [0.0] * grid.count
    width = UNITS / grid.count
    # As in the heat strip, seams between bars without gaps would show.
    size = _px((1 - gap) * width + (0.4 if gap == 0 else 0))
    for item in series:
        bars = []
        for column, value in enumerate(item.values.mean):
            if value is not None and value > 0:
                start = scale.y(sign * levels[column])
                end = scale.y(sign * (levels[column] + value))
                bars.append(
                    f"M{_px((column + gap / 2) * width)} {_px(start)}h{size}V{_px(end)}h-{size}z"
                )
                levels[column] += value
        paths.append("".join(bars))
    return paths


def _px(value: float) -> str:
    """A coordinate with one decimal, as short as possible."""
    # A tenth of a pixel is finer than a screen, and pages of long runs have thousands of these.
    return f"{value:.1f}".removesuffix(".0")
