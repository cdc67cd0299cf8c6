"""Writes a benchmark's results as JSON, Markdown and an SVG picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from medusa_ppo.bench.bench_options import Table
from medusa_ppo.reports.store import hardware, package_versions
from medusa_ppo.runtime.files import write_atomic

# In the order of the arms; the first, in grey, is what the others are compared with. More arms than
# colours begin again.
COLOURS = (
    "#888888",
    "#b5651d",
    "#8a6fb0",
    "#4f9fd8",
    "#1b5f9e",
    "#3f9b6c",
    "#d4a017",
    "#c0504d",
    "#6b4f3a",
    "#d88fb8",
)
# Sizes of the picture, in pixels.
BAR = 18
GAP = 26
PLOT_HEIGHT = 220
MARGIN = 40


def write_bench(
    out: Path,
    settings: Any,
    result: Mapping[str, Any],
    table: Table,
    verdict: Sequence[str],
    plot: str = "",
) -> list[Path]:
    """Write `OUT` (JSON) and, beside it, the same name with .md and, with a plot, .svg.

    Args:
        settings: dataclass of the bench's options.
        table: header and rows.
        verdict: sentences above the table.
    """
    conditions = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(settings).items()
    }
    # What it turned out to be: a reader of the file is on another machine.
    if conditions.get("dtype") == "auto" and "dtype" in result:
        conditions["dtype"] = result["dtype"]
    record = {
        **result,
        "settings": conditions,
        "hardware": hardware(),
        "versions": package_versions(),
    }
    page = out.with_suffix(".md")
    write_atomic(out, json.dumps(record, indent=1) + "\n")
    write_atomic(page, _markdown(out.stem, record, table, verdict, plot))
    if not plot:
        return [out, page]
    picture = out.with_suffix(".svg")
    write_atomic(picture, plot)
    return [out, page, picture]


def _markdown(
    name: str, record: Mapping[str, Any], table: Table, verdict: Sequence[str], plot: str
) -> str:
    """The page: the verdict and the table, then the conditions under which they were measured."""
    header, *rows = table
    lines = [f"# {name}", "", *verdict, ""]
    lines.append(f"| {' | '.join(header)} |")
    lines.append(f"|{'---|' * len(header)}")
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if plot:
        lines += ["", f"![ratios]({name}.svg)"]
    machine = record["hardware"]
    gpus = ", ".join(machine["gpus"]) or "none"
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    settings = ", ".join(
        f"{key}={value}" for key, value in record["settings"].items() if value != ""
    )
    lines += [
        "",
        f"Machine: {machine['cpu']}, {machine['usable_cores']} cores,"
        f" {machine['memory_gib']} GiB, GPUs: {gpus}.",
        f"Versions: {versions}.",
        f"Settings: {settings}.",
        "",
    ]
    return "\n".join(lines)


def draw_ratios(
    title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Grouped bars of ratios around the line at 1, as a separate SVG file.

    Args:
        groups: names of the groups of bars, in order.
        series: name -> one ratio per group.
        unit: what the groups count.
    """
    # At least 1.2, so that the line at 1 stays below the upper edge; 8 % are room for the figures.
    top = 1.08 * max(1.2, *(max(values) for values in series.values()))
    group_width = len(series) * BAR + GAP
    # At least as wide as three names of the legend in a row.
    width = max(460, MARGIN * 2 + len(groups) * group_width)
    height = MARGIN + PLOT_HEIGHT + 32 + 16 * max(2, -(-len(series) // 3))

    def y(value: float) -> float:
        return MARGIN + PLOT_HEIGHT * (1 - value / top)

    parts = [_text(MARGIN, 20, title, ' font-weight="bold"')]
    for index, group in enumerate(groups):
        left = MARGIN + GAP / 2 + index * group_width
        for place, values in enumerate(series.values()):
            colour = COLOURS[place % len(COLOURS)]
            x = left + place * BAR
            above = y(values[index])
            parts.append(_box(x, above, BAR - 3, MARGIN + PLOT_HEIGHT - above, colour))
            parts.append(
                _text(
                    x + BAR / 2 - 2,
                    above - 4,
                    f"{values[index]:.2f}",
                    ' text-anchor="middle" font-size="8"',
                )
            )
        middle = left + len(series) * BAR / 2
        parts.append(
            _text(middle, MARGIN + PLOT_HEIGHT + 16, f"{group} {unit}", ' text-anchor="middle"')
        )
    parts.append(
        f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="#333"'
        ' stroke-dasharray="4 3"/>'
    )
    for place, name in enumerate(series):
        colour = COLOURS[place % len(COLOURS)]
        x = MARGIN + (place % 3) * 130
        row = MARGIN + PLOT_HEIGHT + 36 + (place // 3) * 16
        parts += [_box(x, row - 9, 10, 10, colour), _text(x + 15, row, name)]
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11" role="img">'
    )
    return f"{frame}{_box(0, 0, width, height, '#fff')}{''.join(parts)}</svg>\n"


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'
