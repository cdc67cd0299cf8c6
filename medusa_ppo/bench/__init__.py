"""`medusa-ppo bench`: what each bench can be told, how all measure (in turn, as ratios within one
run), and the files they write.

No torch in this file: the command line reads the options from here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from typer import Option

from medusa_ppo.files import write_atomic
from medusa_ppo.reports.store import hardware, package_versions
from medusa_ppo.standalone import Data, Model, NewTokens, Seed, Template

COLOURS = ("#888888", "#b5651d", "#8a6fb0", "#4f9fd8", "#1b5f9e")
BAR, GAP, PLOT_HEIGHT, MARGIN = 18, 26, 220, 40

Table = Sequence[Sequence[str]]

Heads = Annotated[str, Option(help="Native heads directory.")]


@dataclass(frozen=True)
class RolloutBench:
    """What is served, and how often."""

    model: Model
    heads: Heads
    data: Data
    template: Template
    stock_heads: Annotated[
        str, Option(help="Heads of kind medusa for vLLM's own Medusa; empty: without that arm.")
    ] = ""
    batches: Annotated[tuple[int, ...], Option(help="Numbers of running sequences.")] = (
        1,
        4,
        16,
        64,
    )
    rounds: Annotated[int, Option(min=1, help="Rounds that every arm takes part in.")] = 6
    max_new_tokens: NewTokens = 96
    temperature: Annotated[float, Option(help="Sampling temperature.")] = 1.0
    draft_temperature: Annotated[
        float, Option(help="Draft temperature of our heads; 0: one-hot drafts.")
    ] = 1.0
    draft_vocab: Annotated[
        int,
        Option(
            min=-1,
            help="Draft from so many of the most frequent tokens; 0: from all; -1: as a run would.",
        ),
    ] = -1
    fixed: Annotated[
        tuple[int, ...],
        Option(
            min=0, help="Numbers of drafts that are arms of their own; 0: ours, drafting nothing."
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Option(help="Dtype of the engines.")
    ] = "float32"
    eager: Annotated[
        bool,
        Option("--eager", help="Without torch.compile: starts sooner, and is not vLLM's default."),
    ] = False
    others: Annotated[
        tuple[str, ...],
        Option(
            help=(
                "vLLM's own ways to draft that get arms: ngram, suffix (needs arctic-inference),"
                " none."
            )
        ),
    ] = ("ngram",)
    memory_bytes: Annotated[
        int, Option(min=0, help="Our memory of earlier responses; 0: heads alone.")
    ] = 0
    threads: Annotated[int, Option(min=1, help="CPU threads of each engine.")] = 2
    seed: Seed = 0


@dataclass(frozen=True)
class HeadsBench:
    """What heads to compare, on what."""

    model: Model
    data: Data
    template: Template
    train_tokens: Annotated[int, Option(min=1, help="Response tokens to train on.")] = 100_000
    epochs: Annotated[int, Option(min=1, help="Passes over the tokens.")] = 4
    num_heads: Annotated[int, Option(min=1, help="K, the number of heads.")] = 4
    kinds: Annotated[
        tuple[str, ...], Option(help="Kinds of heads to compare; hydra:N has a context of N pairs.")
    ] = (
        "medusa",
        "markov",
        "hydra:0",
        "hydra:16",
    )
    losses: Annotated[tuple[str, ...], Option(help="Losses to compare.")] = (
        "ce",
        "tv",
        "ce_tv",
        "kl",
        "kl_tv",
    )
    max_new_tokens: NewTokens = 96
    learning_rate: float = 2e-3
    batch_positions: int = 512
    seed: Seed = 0


@dataclass(frozen=True)
class SwapBench:
    """What is swapped, and how often."""

    model: Model
    heads: Heads
    repeats: Annotated[int, Option(min=1, help="Swaps to time.")] = 10
    seed: Seed = 0


@dataclass(frozen=True)
class CompanionBench:
    """The PPO step that is timed, and how often."""

    model: Model
    data: Data
    template: Template
    kind: Annotated[Literal["medusa", "markov", "hydra"], Option(help="Kind of the heads.")] = (
        "hydra"
    )
    rounds: Annotated[
        int, Option(min=1, help="Pairs of PPO steps with and without the companion.")
    ] = 8
    prompts_per_step: Annotated[
        int, Option(min=1, help="Prompts of a PPO step, 4 responses each.")
    ] = 16
    max_new_tokens: NewTokens = 64
    seed: Seed = 0


@dataclass(frozen=True)
class PairedRates:
    """Rates of several arms, one per round, and their ratios to the base arm within each round.

    Attributes:
        base: name of the arm that the others are compared with.
        rates: arm -> one rate (e.g. tokens/s) per round.
    """

    base: str
    rates: Mapping[str, tuple[float, ...]]

    def ratios(self, arm: str) -> tuple[float, ...]:
        return tuple(
            own / base for own, base in zip(self.rates[arm], self.rates[self.base], strict=True)
        )

    def median_ratio(self, arm: str) -> float:
        return statistics.median(self.ratios(arm))

    def spread(self, arm: str) -> tuple[float, float]:
        """Smallest and largest ratio of any round."""
        return min(self.ratios(arm)), max(self.ratios(arm))

    def ratio_figures(self, arm: str) -> dict[str, float]:
        """An arm's ratio with its range, as benches write it."""
        low, high = self.spread(arm)
        return {"ratio": self.median_ratio(arm), "ratio_low": low, "ratio_high": high}

    def median_rate(self, arm: str) -> float:
        return statistics.median(self.rates[arm])


def run_rounds(
    arms: Mapping[str, Callable[[int], float]], base: str, rounds: int, warmup: int = 1
) -> PairedRates:
    """Run every arm once per round; the order rotates, so that no arm always finds the machine as
    another left it.

    Args:
        arms: name -> function of the round's number that does the work and returns its rate.
        base: the arm to compare with.
        rounds: counted rounds.
        warmup: rounds before them that are not counted.
    """
    names: Sequence[str] = list(arms)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            rate = arms[name](number)
            if number >= 0:
                rates[name].append(rate)
    return PairedRates(base, {name: tuple(values) for name, values in rates.items()})


def table_of(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Header and rows for people. `columns`: title -> format of the row's figures; a cell whose
    figure is None stays empty.
    """

    def cell(form: str, row: Mapping[str, Any]) -> str:
        return (
            ""
            if any(name and row[name] is None for _, name, _, _ in Formatter().parse(form))
            else form.format(**row)
        )

    return [list(columns), *([cell(form, row) for form in columns.values()] for row in rows)]


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
        verdict: sentences that stand above the table.
    """
    conditions = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(settings).items()
    }
    record = {
        **result,
        "settings": conditions,
        "hardware": hardware(),
        "versions": package_versions(),
    }
    files = [out, out.with_suffix(".md")]
    write_atomic(files[0], json.dumps(record, indent=1) + "\n")
    write_atomic(files[1], _markdown(out.stem, record, table, verdict, plot))
    if plot:
        files.append(out.with_suffix(".svg"))
        write_atomic(files[2], plot)
    return files


def _markdown(
    name: str, record: Mapping[str, Any], table: Table, verdict: Sequence[str], plot: str
) -> str:
    header, *rows = table
    machine, versions = record["hardware"], record["versions"]
    lines = [f"# {name}", "", *verdict, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if plot:
        lines += ["", f"![ratios]({name}.svg)"]
    gpus = ", ".join(machine["gpus"]) or "none"
    settings = ", ".join(
        f"{key}={value}" for key, value in record["settings"].items() if value != ""
    )
    lines += [
        "",
        (
            f"Machine: {machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']}"
            f" GiB, GPUs: {gpus}."
        ),
    ]
    lines += [
        f"Versions: {', '.join(f'{key} {value}' for key, value in versions.items())}.",
        f"Settings: {settings}.",
        "",
    ]
    return "\n".join(lines)


def draw_ratios(
    title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Grouped bars of ratios around the line at 1, as an SVG file of its own.

    Args:
        groups: names of the groups of bars, in order.
        series: name -> one ratio per group.
        unit: what the groups count.
    """
    top = max(1.2, *(value for values in series.values() for value in values)) * 1.08
    group_width = len(series) * BAR + GAP
    width, height = max(460, MARGIN * 2 + len(groups) * group_width), MARGIN + PLOT_HEIGHT + 64

    def y(value: float) -> float:
        return MARGIN + PLOT_HEIGHT * (1 - value / top)

    parts = [_text(MARGIN, 20, title, ' font-weight="bold"')]
    for index, group in enumerate(groups):
        left = MARGIN + GAP / 2 + index * group_width
        for place, (colour, values) in enumerate(zip(COLOURS, series.values(), strict=False)):
            x, above = left + place * BAR, y(values[index])
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
    for place, (colour, name) in enumerate(zip(COLOURS, series, strict=False)):
        x, row = MARGIN + (place % 3) * 130, MARGIN + PLOT_HEIGHT + 36 + (place // 3) * 16
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
