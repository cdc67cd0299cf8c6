"""Shows the figures of `medusa-ppo eval`: as text in the terminal, as a Markdown report, and as an
HTML page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from medusa_ppo.reports.page import page_template
from medusa_ppo.reports.svg import nice_ticks
from medusa_ppo.runtime import wording as w

Figures = Mapping[str, Any]
HEADINGS = ("tokens a step", "95 % interval", "accepted at position 1, 2, ...", "draft steps")
STEP_HEADINGS = ("tokens a step", "draft steps")
COMPARED = ("the others", "difference", "its interval")
# Pixels: the height of a row, the margin above the first row, and the room for the axis below the
# last one.
ROW, TOP, BOTTOM = 34, 8, 26
POSITIONS_HEIGHT = 180
TONES = ("serving", "candidate")


def lines(result: Figures) -> list[str]:
    """Lines for the terminal."""
    low, high = result["confidence_interval"]
    shown = [
        (
            f"mean acceptance length   {result['mean_acceptance_length']:.3f}  "
            f"(95 % interval {low:.3f} to {high:.3f}, {result['settings']['engine']})"
        ),
        (
            "acceptance per position "
            f" {'  '.join(f'{value:.3f}' for value in result['acceptance_per_position'])}"
        ),
        (
            f"tokens generated         {result['generated_tokens']} at {result['tokens_per_s']:.0f}"
            " tokens/s"
        ),
    ]
    if "compare" in result:
        shown.append(f"against {result['settings']['compare']}: {verdict(result)}")
    # The first section is the headline, which is already above.
    for part in sections(result)[1:]:
        shown += ["", *aligned([part.header, *part.rows])]
    for title, rows in breakdowns(result):
        shown += ["", title, *aligned(rows)]
    if "warning" in result:
        shown += ["", result["warning"]]
    return shown


def breakdowns(result: Figures) -> list[tuple[str, list[list[str]]]]:
    """Tables that show where drafts are accepted: each one's title and rows, header first."""
    found = []
    for title, parts in result.get("parts", {}).items():
        # Drafts from a memory are counted one by one, everything else per step.
        by_draft = bool(parts) and "accepted_share" in parts[0]
        header = ["", "accepted", "drafts verified"] if by_draft else ["", *STEP_HEADINGS]
        rows = [header]
        for part in parts:
            figure = (
                w.percent(part["accepted_share"])
                if by_draft
                else f"{part['mean_acceptance_length']:.3f}"
            )
            rows.append([part["part"], figure, w.whole(part["drafts"])])
        found.append((title, rows))
    return found


def verdict(result: Figures) -> str:
    """The comparison in one sentence."""
    other = result["compare"]
    low, high = other["difference_interval"]
    sure = "better" if low > 0 else "worse" if high < 0 else "not significantly different"
    return (
        f"{other['difference']:+.3f} tokens a step (95 % interval {low:+.3f} to {high:+.3f},"
        f" paired): {sure}"
    )


class ReportTable:
    """A table of the report: a title, a header, rows, and the figures behind each row."""

    def __init__(self, title: str, first: str, rows: Sequence[tuple[str, Figures]]) -> None:
        self.title = title
        compared = bool(rows) and "compare" in rows[0][1]
        self.header = [first, *HEADINGS, *(COMPARED if compared else ())]
        self.names = [name for name, _ in rows]
        self.figures = [figures for _, figures in rows]
        self.rows = [[name, *_cells(figures)] for name, figures in rows]


def sections(result: Figures) -> list[ReportTable]:
    """All tables: the headline, by temperature, by category."""
    temperature = result["settings"]["temperature"]
    found = [ReportTable("All prompts", "temperature", [(f"{temperature:g}", result)])]
    if "temperatures" in result:
        found.append(
            ReportTable(
                "By temperature",
                "temperature",
                [(f"{row['temperature']:g}", row) for row in result["temperatures"]],
            )
        )
    column = result["settings"]["category"]
    # With a single temperature there are no rows: the headline covers it.
    for row in result.get("temperatures", [{**result, "temperature": temperature}]):
        if "categories" in row:
            title = f"By {column}, temperature {row['temperature']:g}"
            found.append(
                ReportTable(title, column, [(part["category"], part) for part in row["categories"]])
            )
    return found


def markdown_report(result: Figures) -> str:
    """The whole report."""
    settings = result["settings"]
    parts = [f"# {settings['heads']}", "", headline(result), ""]
    if "compare" in result:
        parts += [f"Against {settings['compare']}: {verdict(result)}.", ""]
    for part in sections(result):
        parts += [
            f"## {part.title}",
            "",
            _row(part.header),
            f"|{'---|' * len(part.header)}",
            *map(_row, part.rows),
            "",
        ]
    for title, rows in breakdowns(result):
        parts += [
            f"## {title}",
            "",
            _row(rows[0]),
            f"|{'---|' * len(rows[0])}",
            *map(_row, rows[1:]),
            "",
        ]
    parts += ["## Settings", "", "| option | value |", "|---|---|"]
    parts += [_row([key, str(value)]) for key, value in _given(result)]
    parts += ["", method(result), ""]
    return "\n".join(parts)


def headline(result: Figures) -> str:
    low, high = result["confidence_interval"]
    written = (
        f"{w.whole(result['generated_tokens'])} tokens generated at"
        f" {w.whole(result['tokens_per_s'])} tokens/s"
    )
    length = (
        f"{result['mean_acceptance_length']:.3f} tokens a step (95 % interval {low:.3f} to"
        f" {high:.3f})"
    )
    # Figures from before 0.4 don't say it.
    left_out = result.get("prompts_left_out", 0)
    prompts = f"{result['prompts']} prompts"
    if left_out:
        prompts += f" ({left_out} more were too long)"
    warning = f" {result['warning']}" if "warning" in result else ""
    return f"{length}, {prompts}, {written}.{warning}"


def method(result: Figures) -> str:
    """How the figures were measured."""
    if result["settings"]["engine"] == "vllm":
        return (
            "Acceptance is vLLM's own count. Intervals are Student's t over groups of prompts, "
            "each answered in its own call."
        )
    return (
        "Acceptance is the replay estimate on the model's own responses. Intervals are Student's t"
        " over prompts."
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cells(figures: Figures) -> list[str]:
    low, high = figures["confidence_interval"]
    positions = ", ".join(f"{value:.3f}" for value in figures["acceptance_per_position"])
    cells = [
        f"{figures['mean_acceptance_length']:.3f}",
        f"{low:.3f} to {high:.3f}",
        positions,
        w.whole(figures["drafts"]),
    ]
    if "compare" in figures:
        other = figures["compare"]
        low, high = other["difference_interval"]
        cells += [
            f"{other['mean_acceptance_length']:.3f}",
            f"{other['difference']:+.3f}",
            f"{low:+.3f} to {high:+.3f}",
        ]
    return cells


def _given(result: Figures) -> list[tuple[str, Any]]:
    return [
        (key, value) for key, value in result["settings"].items() if value not in ("", None, [], ())
    ]


def _row(cells: Sequence[str]) -> str:
    # A vertical bar would end the cell.
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def render_eval_page(result: Figures) -> str:
    """The page as one HTML text that loads nothing from elsewhere."""
    parts = sections(result)
    return page_template("evaluation.html.jinja").render(
        heads=result["settings"]["heads"],
        headline=headline(result),
        verdict=(
            f"Against {result['settings']['compare']}: {verdict(result)}."
            if "compare" in result
            else ""
        ),
        tiles=_tiles(result),
        positions=Markup(
            draw_positions(
                [one["acceptance_per_position"] for one in (result, result.get("compare")) if one]
            )
        ),
        sections=[
            (part, Markup(draw_intervals(part.title, part.names, part.figures))) for part in parts
        ],
        legend=list(
            zip(
                TONES,
                filter(None, (result["settings"]["heads"], result["settings"]["compare"])),
                # One entry for each set of heads.
                strict=False,
            )
        ),
        settings=_given(result),
        method=method(result),
    )


def draw_intervals(title: str, names: Sequence[str], figures: Sequence[Figures]) -> str:
    """A dot with its interval for each row; a second set of heads goes below the first."""
    rows = [[row, *([row["compare"]] if "compare" in row else [])] for row in figures]
    ends = [end for row in rows for one in row for end in one["confidence_interval"]]
    # The axis always includes 1, the length without drafts.
    ticks = nice_ticks(min(1.0, *ends), max(*ends, 1.0 + 1e-6))
    height = TOP + ROW * len(rows)
    shapes = []
    for tick in ticks:
        x = _percent(tick, ticks)
        shapes.append(f'<line class="rule" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        shapes.append(f'<text class="tick x" x="{x}" y="{height + 18}">{tick:g}</text>')
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        middle = TOP + ROW * (index + 0.5)
        shapes.append(
            f'<text class="tick y" x="-8" y="{middle + 4:.0f}">{escape(_short(name))}</text>'
        )
        for place, one in enumerate(row):
            # Two sets are drawn one above the other, so that their intervals don't overlap.
            y = middle + (12 * place - 6 if len(row) > 1 else 0)
            low, high = (_percent(end, ticks) for end in one["confidence_interval"])
            x = _percent(one["mean_acceptance_length"], ticks)
            # The page has no script: a browser shows a shape's <title> by itself.
            said = "{}: {:.3f}, {:.3f} to {:.3f}".format(
                name, one["mean_acceptance_length"], *one["confidence_interval"]
            )
            shapes.append(
                f'<g class="t-{TONES[place]}"><title>{escape(said)}</title><line class="line"'
                f' x1="{low}" x2="{high}" y1="{y}" y2="{y}"/><circle class="fill" cx="{x}" cy="{y}"'
                ' r="5"/></g>'
            )
    return _svg(f"{title}: mean acceptance length with its 95 % interval", height, "".join(shapes))


def draw_positions(sets: Sequence[Sequence[float]]) -> str:
    """Bars of the acceptance at each position, one for each set of heads."""
    count = max(len(values) for values in sets)
    width = 100 / max(1, count)
    shapes = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = POSITIONS_HEIGHT * (1 - tick)
        shapes.append(f'<line class="rule" x1="0" x2="100%" y1="{y:.0f}" y2="{y:.0f}"/>')
        shapes.append(f'<text class="tick y" x="-8" y="{y + 4:.0f}">{w.percent(tick)}</text>')
    for place, values in enumerate(sets):
        bar = width * 0.7 / len(sets)
        for k, value in enumerate(values):
            x = k * width + 0.15 * width + place * bar
            top = POSITIONS_HEIGHT * (1 - value)
            box = (
                f'x="{x:.2f}%" width="{bar:.2f}%" y="{top:.1f}"'
                f' height="{POSITIONS_HEIGHT - top:.1f}"'
            )
            shapes.append(
                f'<rect class="fill t-{TONES[place]}" {box}><title>position {k + 1}:'
                f" {value:.3f}</title></rect>"
            )
    for k in range(count):
        shapes.append(
            f'<text class="tick x" x="{(k + 0.5) * width:.2f}%"'
            f' y="{POSITIONS_HEIGHT + 18}">{k + 1}</text>'
        )
    return _svg(
        "Share of the draft steps that accepted the draft at position 1, 2, ...",
        POSITIONS_HEIGHT,
        "".join(shapes),
    )


def _tiles(result: Figures) -> list[tuple[str, str, str]]:
    low, high = result["confidence_interval"]
    # There are no positions if the engine drafted nothing.
    first = w.percent(next(iter(result["acceptance_per_position"]), None))
    speed = f"{w.whole(result['tokens_per_s'])} tokens/s, {result['prompts']} prompts"
    tiles = [
        (
            "Tokens a step",
            f"{result['mean_acceptance_length']:.3f}",
            f"95 % interval {low:.3f} to {high:.3f}",
        ),
        ("First draft accepted", first, f"of {w.whole(result['drafts'])} draft steps"),
        ("Tokens generated", w.whole(result["generated_tokens"]), speed),
    ]
    if "compare" in result:
        other = result["compare"]
        low, high = other["difference_interval"]
        tiles.append(
            (
                "Against the other heads",
                f"{other['difference']:+.3f}",
                f"95 % interval {low:+.3f} to {high:+.3f}, paired",
            )
        )
    return tiles


def _percent(value: float, ticks: Sequence[float]) -> str:
    return f"{100 * (value - ticks[0]) / (ticks[-1] - ticks[0]):.2f}%"


def _short(name: str) -> str:
    """A name that fits beside a chart; the table has it in full."""
    return name if len(name) <= 7 else name[:6] + "\N{HORIZONTAL ELLIPSIS}"


def _svg(title: str, height: int, inner: str) -> str:
    return (
        f'<svg class="plot" height="{height + BOTTOM}" role="img" tabindex="0"'
        f' aria-label="{escape(title)}">{inner}</svg>'
    )
