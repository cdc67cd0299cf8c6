"""The figures of `medusa-ppo eval` as one self-contained page: tables, and charts of intervals and of positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from medusa_ppo import __version__
from medusa_ppo.reports import evaluation as e
from medusa_ppo.reports import wording as w
from medusa_ppo.reports.grid import nice_ticks

HERE = Path(__file__).parent
ROW, TOP, BOTTOM = 34, 8, 26
POSITIONS_HEIGHT = 180
TONES = ("serving", "candidate")


def render_eval_page(result: Mapping[str, Any]) -> str:
    """The page as one HTML text; nothing in it is loaded from anywhere."""
    sections = e.sections(result)
    return _template().render(
        heads=result["settings"]["heads"],
        headline=e.headline(result),
        verdict=f"Against {result['settings']['compare']}: {e.verdict(result)}." if "compare" in result else "",
        tiles=_tiles(result),
        positions=Markup(draw_positions(_sets(result))),
        sections=[(part, Markup(draw_intervals(part.title, part.names, part.figures))) for part in sections],
        legend=[(tone, name) for tone, name in zip(TONES, _names(result), strict=False)],
        settings=[(key, value) for key, value in result["settings"].items() if value not in ("", None, [], ())],
        method=e.method(result),
        product_version=__version__,
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
    )


def draw_intervals(title: str, names: Sequence[str], figures: Sequence[Mapping[str, Any]]) -> str:
    """A dot with its interval for each row; where two sets of heads are compared, the second one's below."""
    rows = [[row, *([row["compare"]] if "compare" in row else [])] for row in figures]
    ends = [end for row in rows for one in row for end in one["confidence_interval"]]
    ticks = nice_ticks(min(1.0, *ends), max(*ends, 1.0 + 1e-6))
    height = TOP + ROW * len(rows)
    shapes = []
    for tick in ticks:
        x = _percent(tick, ticks)
        shapes.append(f'<line class="rule" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        shapes.append(f'<text class="tick x" x="{x}" y="{height + 18}">{tick:g}</text>')
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        middle = TOP + ROW * (index + 0.5)
        shapes.append(f'<text class="tick y" x="-8" y="{middle + 4:.0f}">{escape(_short(name))}</text>')
        for place, one in enumerate(row):
            y = middle + (12 * place - 6 if len(row) > 1 else 0)
            low, high = (_percent(end, ticks) for end in one["confidence_interval"])
            x = _percent(one["mean_acceptance_length"], ticks)
            said = (
                f"{name}: {one['mean_acceptance_length']:.3f}, {one['confidence_interval'][0]:.3f} to {one['confidence_interval'][1]:.3f}"
            )
            shapes.append(
                f'<g class="t-{TONES[place]}"><title>{escape(said)}</title><line class="line" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>'
                f'<circle class="fill" cx="{x}" cy="{y}" r="5"/></g>'
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
            x, top = k * width + 0.15 * width + place * bar, POSITIONS_HEIGHT * (1 - value)
            box = f'x="{x:.2f}%" width="{bar:.2f}%" y="{top:.1f}" height="{POSITIONS_HEIGHT - top:.1f}"'
            shapes.append(f'<rect class="fill t-{TONES[place]}" {box}><title>position {k + 1}: {value:.3f}</title></rect>')
    for k in range(count):
        shapes.append(f'<text class="tick x" x="{(k + 0.5) * width:.2f}%" y="{POSITIONS_HEIGHT + 18}">{k + 1}</text>')
    return _svg("Share of the draft steps that accepted the draft at position 1, 2, ...", POSITIONS_HEIGHT, "".join(shapes))


def _tiles(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    low, high = result["confidence_interval"]
    first = w.percent(next(iter(result["acceptance_per_position"]), None))
    speed = f"{w.whole(result['tokens_per_s'])} tokens/s, {result['prompts']} prompts"
    tiles = [
        ("Tokens a step", f"{result['mean_acceptance_length']:.3f}", f"95 % interval {low:.3f} to {high:.3f}"),
        ("First draft accepted", first, f"of {w.whole(result['drafts'])} draft steps"),
        ("Tokens generated", w.whole(result["generated_tokens"]), speed),
    ]
    if "compare" in result:
        other = result["compare"]
        low, high = other["difference_interval"]
        tiles.append(("Against the others", f"{other['difference']:+.3f}", f"95 % interval {low:+.3f} to {high:+.3f}, paired"))
    return tiles


def _sets(result: Mapping[str, Any]) -> list[Sequence[float]]:
    return [one["acceptance_per_position"] for one in (result, result.get("compare")) if one]


def _names(result: Mapping[str, Any]) -> list[str]:
    return [name for name in (result["settings"]["heads"], result["settings"]["compare"]) if name]


def _percent(value: float, ticks: Sequence[float]) -> str:
    return f"{100 * (value - ticks[0]) / (ticks[-1] - ticks[0]):.2f}%"


def _short(name: str) -> str:
    """A name that fits beside a chart; the table has it in full."""
    return name if len(name) <= 7 else name[:6] + "\N{HORIZONTAL ELLIPSIS}"


def _svg(title: str, height: int, inner: str) -> str:
    return f'<svg class="plot" height="{height + BOTTOM}" role="img" tabindex="0" aria-label="{escape(title)}">{inner}</svg>'


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("evaluation.html.jinja")
