"""The figures of `medusa-ppo eval` for people: lines for the terminal, and a report in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_ppo.reports import wording as w

Figures = Mapping[str, Any]
HEADINGS = ("tokens a step", "95 % interval", "accepted at position 1, 2, ...", "draft steps")
COMPARED = ("the others", "difference", "its interval")


def lines(result: Figures) -> list[str]:
    """What the terminal shows."""
    low, high = result["confidence_interval"]
    shown = [
        f"mean acceptance length   {result['mean_acceptance_length']:.3f}  "
        f"(95 % interval {low:.3f} to {high:.3f}, {result['settings']['engine']})",
        f"acceptance per position  {'  '.join(f'{value:.3f}' for value in result['acceptance_per_position'])}",
        f"tokens generated         {result['generated_tokens']} at {result['tokens_per_s']:.0f} tokens/s",
    ]
    if "compare" in result:
        shown.append(f"against {result['settings']['compare']}: {verdict(result)}")
    for part in sections(result)[1:]:
        shown += ["", *aligned([part.header, *part.rows])]
    return shown


def verdict(result: Figures) -> str:
    """The comparison in one sentence."""
    other = result["compare"]
    low, high = other["difference_interval"]
    sure = "better" if low > 0 else "worse" if high < 0 else "not surely different"
    return f"{other['difference']:+.3f} tokens a step (95 % interval {low:+.3f} to {high:+.3f}, paired): {sure}"


class Section:
    """A table of the report: a title, a header, rows, and the figures that each row stands for."""

    def __init__(self, title: str, first: str, rows: Sequence[tuple[str, Figures]]) -> None:
        self.title = title
        compared = bool(rows) and "compare" in rows[0][1]
        self.header = [first, *HEADINGS, *(COMPARED if compared else ())]
        self.names = [name for name, _ in rows]
        self.figures = [figures for _, figures in rows]
        self.rows = [[name, *_cells(figures)] for name, figures in rows]


def sections(result: Figures) -> list[Section]:
    """All tables: the headline, by temperature, by category."""
    temperature = result["settings"]["temperature"]
    found = [Section("All prompts", "temperature", [(f"{temperature:g}", result)])]
    if "temperatures" in result:
        found.append(Section("By temperature", "temperature", [(f"{row['temperature']:g}", row) for row in result["temperatures"]]))
    column = result["settings"]["category"]
    for row in result.get("temperatures", [{**result, "temperature": temperature}]):
        if "categories" in row:
            title = f"By {column}, temperature {row['temperature']:g}"
            found.append(Section(title, column, [(part["category"], part) for part in row["categories"]]))
    return found


def markdown_report(result: Figures) -> str:
    """The whole report."""
    settings = result["settings"]
    parts = [f"# {settings['heads']}", "", headline(result), ""]
    if "compare" in result:
        parts += [f"Against {settings['compare']}: {verdict(result)}.", ""]
    for part in sections(result):
        parts += [f"## {part.title}", "", _row(part.header), f"|{'---|' * len(part.header)}", *map(_row, part.rows), ""]
    parts += ["## Settings", "", "| option | value |", "|---|---|"]
    parts += [_row([key, str(value)]) for key, value in settings.items() if value not in ("", None, [], ())]
    parts += ["", method(result), ""]
    return "\n".join(parts)


def headline(result: Figures) -> str:
    low, high = result["confidence_interval"]
    written = f"{w.whole(result['generated_tokens'])} tokens generated at {w.whole(result['tokens_per_s'])} tokens/s"
    length = f"{result['mean_acceptance_length']:.3f} tokens a step (95 % interval {low:.3f} to {high:.3f})"
    return f"{length}, {result['prompts']} prompts, {written}."


def method(result: Figures) -> str:
    """How the figures came about."""
    if result["settings"]["engine"] == "vllm":
        return "Acceptance is vLLM's own count; intervals are a bootstrap over groups of prompts, each answered in a call of its own."
    return "Acceptance is the replay estimate on the model's own responses; intervals are a bootstrap over prompts."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns one under the other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(figures: Figures) -> list[str]:
    low, high = figures["confidence_interval"]
    positions = ", ".join(f"{value:.3f}" for value in figures["acceptance_per_position"])
    cells = [f"{figures['mean_acceptance_length']:.3f}", f"{low:.3f} to {high:.3f}", positions, w.whole(figures["drafts"])]
    if "compare" in figures:
        other = figures["compare"]
        low, high = other["difference_interval"]
        cells += [f"{other['mean_acceptance_length']:.3f}", f"{other['difference']:+.3f}", f"{low:+.3f} to {high:+.3f}"]
    return cells


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
