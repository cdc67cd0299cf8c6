"""Pictures as separate SVG files: speed-up against running sequences, acceptance against steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from medusa_ppo.reports.svg import nice_ticks

COLOURS = ("#b5651d", "#8a6fb0", "#4f9fd8", "#1b5f9e", "#2f8f6b", "#a83a4c")
WIDTH, HEIGHT = 560, 300
LEFT, TOP, RIGHT, BOTTOM = 44, 34, 84, 46


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

    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 20, title, 'font-weight="bold"'),
    ]
    for tick in ticks:
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#ddd"))
        parts.append(_text(LEFT - 6, y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    if line_at is not None:
        level = y(line_at)
        parts.append(_line(LEFT, level, WIDTH - RIGHT, level, "#333", ' stroke-dasharray="4 3"'))
    for size in sizes:
        parts.append(_text(x(size), HEIGHT - BOTTOM + 16, f"{size}", 'text-anchor="middle"'))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, unit, 'text-anchor="middle"'))
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(
            f"{x(size):.1f},{y(value):.1f}" for size, value in zip(sizes, curve, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        # A legend in the order of the curves; names at their ends would overlap.
        row = TOP + 8 + 18 * index
        parts.append(_line(WIDTH - RIGHT + 10, row - 4, WIDTH - RIGHT + 26, row - 4, colour))
        parts.append(_text(WIDTH - RIGHT + 30, row, name))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="11" role="img"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{2 if colour.startswith("#") and colour not in ("#ddd", "#333") else 1}"'
        f"{more}/>"
    )
