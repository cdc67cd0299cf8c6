"""Pictures as separate SVG files, in light and dark: curves over running sequences or steps,
stacked bars, and the parts for a drawing of boxes and arrows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from medusa_ppo.reports.svg import nice_ticks

LIGHT = ("#b5651d", "#8a6fb0", "#2f86c4", "#1b5f9e", "#2f8f6b", "#a83a4c")
DARK = ("#e39a53", "#b9a2db", "#7cd0f0", "#5b8def", "#5cc79b", "#ee7f90")
"""Colours of curves and bars on a white and on a dark ground, in the order of their names."""
WIDTH, HEIGHT = 560, 300
LEFT, TOP, RIGHT, BOTTOM = 44, 34, 84, 46
BAR, BAR_GAP, BAR_LEFT = 34, 16, 120


def draw_curves(
    title: str, sizes: Sequence[int], curves: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Ratios against numbers on a logarithmic axis, around a line at 1.

    Args:
        sizes: where each curve has a value.
        curves: name -> one value per size.
        unit: what the sizes count.
    """
    return _draw(title, sizes, curves, unit, math.log2, 1.0)


def draw_steps(
    title: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Values against steps, both axes linear; arguments as for `draw_curves`."""
    return _draw(title, steps, curves, unit, float, None)


def draw_stacks(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One horizontal bar for each name, stacked from its parts.

    Args:
        bars: name -> part -> size; all bars have the same parts in the same order.
        unit: what the sizes count, shown behind each bar's sum.
    """
    height = TOP + len(bars) * (BAR + BAR_GAP) + BOTTOM
    scale = (WIDTH - BAR_LEFT - RIGHT) / max(sum(parts.values()) for parts in bars.values())
    shapes = [text(12, 20, title, 'font-weight="bold"')]
    for row, (name, parts) in enumerate(bars.items()):
        y, x = TOP + 8 + row * (BAR + BAR_GAP), float(BAR_LEFT)
        shapes.append(text(BAR_LEFT - 8, y + BAR / 2 + 4, name, 'text-anchor="end"'))
        for index, size in enumerate(parts.values()):
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}"'
                f' class="fill{index}"/>'
            )
            if size * scale > 28:
                shapes.append(
                    text(
                        x + size * scale / 2,
                        y + BAR / 2 + 4,
                        f"{size:.1f}",
                        'text-anchor="middle" class="on"',
                    )
                )
            x += size * scale
        shapes.append(text(x + 8, y + BAR / 2 + 4, f"{sum(parts.values()):.1f} {unit}"))
    x = float(BAR_LEFT)
    for index, part in enumerate(next(iter(bars.values()))):
        y = height - 22
        shapes.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" class="fill{index}"/>')
        shapes.append(text(x + 15, y, part))
        x += 32 + 6.2 * len(part)
    return frame(title, WIDTH, height, shapes)


def frame(title: str, width: float, height: float, shapes: Iterable[str]) -> str:
    """A whole file: its title, its colours in light and dark, and its shapes on a background. The
    background is drawn because a page may be dark where the reader's system is light.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' font-family="sans-serif" font-size="11" role="img"><title>{escape(title)}</title>'
        f'{STYLE}<rect width="{width:g}" height="{height:g}" class="ground"/>'
        f"{''.join(shapes)}</svg>\n"
    )


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    """Words that begin at x, on the line y."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A line of one of the kinds of STYLE."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _colours(ground: str, ink: str, grid: str, level: str, on: str, names: Sequence[str]) -> str:
    kinds = "".join(
        f".line{index}{{stroke:{colour}}}.fill{index}{{fill:{colour}}}"
        for index, colour in enumerate(names)
    )
    return (
        f".ground{{fill:{ground}}}text{{fill:{ink}}}.grid{{stroke:{grid}}}"
        f".level,.arrow{{stroke:{level}}}.head{{fill:{level}}}.on{{fill:{on}}}"
        f".quiet{{fill:{level}}}.box{{fill:{ground}}}{kinds}"
    )


STYLE = (
    "<style>polyline,.arrow{fill:none}[class^=line],.box{stroke-width:2}"
    ".level{stroke-dasharray:4 3}.arrow{stroke-width:1.5}"
    f"{_colours('#fff', '#24292f', '#d8dee4', '#57606a', '#fff', LIGHT)}"
    "@media (prefers-color-scheme:dark){"
    f"{_colours('#161b22', '#e6edf3', '#30363d', '#9198a1', '#161b22', DARK)}}}</style>"
)


def _draw(
    title: str,
    sizes: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    unit: str,
    place: Callable[[float], float],
    line_at: float | None,
) -> str:
    values = [value for curve in curves.values() for value in curve]
    if line_at is not None:
        values.append(line_at)
    ticks = nice_ticks(min(values), max(values))
    low, high = ticks[0], ticks[-1]
    first = place(min(sizes))
    across = max(place(max(sizes)) - first, 1e-9)

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place(size) - first) / across

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low))

    shapes = [text(LEFT, 20, title, 'font-weight="bold"')]
    for tick in ticks:
        shapes.append(line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid"))
        shapes.append(text(LEFT - 6, y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    if line_at is not None:
        shapes.append(line(LEFT, y(line_at), WIDTH - RIGHT, y(line_at), "level"))
    for size in sizes:
        shapes.append(text(x(size), HEIGHT - BOTTOM + 16, f"{size}", 'text-anchor="middle"'))
    shapes.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, unit, 'text-anchor="middle"'))
    drawn: list[str] = []
    for index, (name, curve) in enumerate(curves.items()):
        kind = f"line{index % len(LIGHT)}"
        points = " ".join(
            f"{x(size):.1f},{y(value):.1f}" for size, value in zip(sizes, curve, strict=True)
        )
        # A curve that lies on an earlier one is dashed, so that both are seen.
        dashes = ' stroke-dasharray="9 9"' if points in drawn else ""
        drawn.append(points)
        shapes.append(f'<polyline points="{points}" class="{kind}"{dashes}/>')
        # A legend in the order of the curves; names at their ends would overlap.
        row = TOP + 8 + 18 * index
        shapes.append(line(WIDTH - RIGHT + 10, row - 4, WIDTH - RIGHT + 26, row - 4, kind))
        shapes.append(text(WIDTH - RIGHT + 30, row, name))
    return frame(title, WIDTH, HEIGHT, shapes)
