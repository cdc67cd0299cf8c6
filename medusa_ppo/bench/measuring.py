"""How everything is measured: arms in engines of their own, in turn, as ratios within one run, and the file that keeps them."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from string import Formatter
from typing import Any

from heads.errors import ConfigError
from medusa_ppo.config import EngineConfig
from medusa_ppo.engines.launch import LaunchPlan, plan_launch, read_heads_config
from medusa_ppo.engines.ray_engine import RayEngine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.files import write_atomic
from medusa_ppo.reports.store import hardware, package_versions

NONE, STOCK, NGRAM, FIXED, CHOSEN = "none", "stock medusa", "n-gram", "ours, K fixed", "ours, K chosen"
NGRAM_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
COLOURS = ("#888888", "#b5651d", "#8a6fb0", "#4f9fd8", "#1b5f9e")
BAR, GAP, PLOT_HEIGHT, MARGIN = 18, 26, 220, 40

Table = Sequence[Sequence[str]]


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
        return tuple(own / base for own, base in zip(self.rates[arm], self.rates[self.base], strict=True))

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


def run_rounds(arms: Mapping[str, Callable[[int], float]], base: str, rounds: int, warmup: int = 1) -> PairedRates:
    """Run every arm once per round; the order rotates, so that no arm always finds the machine as another left it.

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


@dataclass(frozen=True)
class Arm:
    """One way to serve: an engine (arms may share one), and how it drafts."""

    name: str
    engine: RolloutEngine
    choose: bool | None = None

    def prepare(self) -> None:
        """Set the engine to this arm's way of drafting."""
        if self.choose is not None:
            self.engine.configure(choose=self.choose)


@contextmanager
def running_arms(
    model: str, heads: str, stock_heads: str, config: EngineConfig, seed: int, scratch: Path, *, ngram: bool = True
) -> Iterator[list[Arm]]:
    """All arms, started one after the other; `ray.init` is the caller's. Every engine is closed at the end.

    Args:
        heads: folder of our heads, any kind.
        stock_heads: folder of heads of kind medusa for vLLM's own Medusa; empty: that arm is left out.
        config: settings that all engines share; `draft_temperature` and `num_drafts` are of our arms.
        scratch: folder for the stock arm's copy of its heads.
        ngram: with the n-gram arm.
    """
    ours = plan_launch(model, heads, config, seed)
    plain = plan_launch(model, None, config, seed)
    with ExitStack() as engines:

        def start(plan: LaunchPlan) -> RolloutEngine:
            return engines.enter_context(RayEngine(model, None, config, seed, plan=plan))

        arms = [Arm(NONE, start(plain))]
        if stock_heads:
            arms.append(Arm(STOCK, start(_stock_plan(plain, ours.max_drafts, stock_heads, scratch))))
        if ngram:
            settings = {"method": "ngram", "num_speculative_tokens": ours.max_drafts, **NGRAM_LOOKUP}
            arms.append(Arm(NGRAM, start(_with_speculation(plain, settings))))
        engine = start(ours)
        yield [*arms, Arm(FIXED, engine, choose=False), Arm(CHOSEN, engine, choose=True)]


def _with_speculation(plan: LaunchPlan, settings: dict[str, Any]) -> LaunchPlan:
    return replace(plan, engine_args={**plan.engine_args, "speculative_config": settings})


def _stock_plan(plain: LaunchPlan, drafts: int, stock_heads: str, scratch: Path) -> LaunchPlan:
    """vLLM's own Medusa module and lm_head products. The mends of the CPU build stay: without them its samples are wrong."""
    kind = read_heads_config(stock_heads, 0, 0).kind
    if kind != "medusa":
        raise ConfigError(
            "vLLM's own Medusa can't serve these heads.", given=f"kind {kind} in {stock_heads}", expected="medusa", do="Train some."
        )
    folder = scratch / "stock-heads"
    shutil.copytree(stock_heads, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["medusa_ppo"]  # Then our plug-in leaves the folder to vLLM's own proposer,
    config["num_heads"] = min(config["num_heads"], drafts)  # which drafts with all heads.
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return _with_speculation(plain, {"method": "medusa", "model": str(folder), "num_speculative_tokens": config["num_heads"]})


def table_of(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Header and rows for people. `columns`: title -> format of the row's figures; a cell whose figure is None stays empty."""

    def cell(form: str, row: Mapping[str, Any]) -> str:
        return "" if any(name and row[name] is None for _, name, _, _ in Formatter().parse(form)) else form.format(**row)

    return [list(columns), *([cell(form, row) for form in columns.values()] for row in rows)]


def write_bench(out: Path, settings: Any, result: Mapping[str, Any], table: Table, verdict: Sequence[str], plot: str = "") -> list[Path]:
    """Write `OUT` (JSON) and, beside it, the same name with .md and, with a plot, .svg.

    Args:
        settings: dataclass of the bench's options.
        table: header and rows.
        verdict: sentences that stand above the table.
    """
    conditions = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}
    record = {**result, "settings": conditions, "hardware": hardware(), "versions": package_versions()}
    files = [out, out.with_suffix(".md")]
    write_atomic(files[0], json.dumps(record, indent=1) + "\n")
    write_atomic(files[1], _markdown(out.stem, record, table, verdict, plot))
    if plot:
        files.append(out.with_suffix(".svg"))
        write_atomic(files[2], plot)
    return files


def _markdown(name: str, record: Mapping[str, Any], table: Table, verdict: Sequence[str], plot: str) -> str:
    header, *rows = table
    machine, versions = record["hardware"], record["versions"]
    lines = [f"# {name}", "", *verdict, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if plot:
        lines += ["", f"![ratios]({name}.svg)"]
    gpus = ", ".join(machine["gpus"]) or "none"
    settings = ", ".join(f"{key}={value}" for key, value in record["settings"].items() if value != "")
    lines += ["", f"Machine: {machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']} GiB, GPUs: {gpus}."]
    lines += [f"Versions: {', '.join(f'{key} {value}' for key, value in versions.items())}.", f"Settings: {settings}.", ""]
    return "\n".join(lines)


def draw_ratios(title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> str:
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
            parts.append(_text(x + BAR / 2 - 2, above - 4, f"{values[index]:.2f}", ' text-anchor="middle" font-size="8"'))
        middle = left + len(series) * BAR / 2
        parts.append(_text(middle, MARGIN + PLOT_HEIGHT + 16, f"{group} {unit}", ' text-anchor="middle"'))
    parts.append(f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="#333" stroke-dasharray="4 3"/>')
    for place, (colour, name) in enumerate(zip(COLOURS, series, strict=False)):
        x, row = MARGIN + (place % 3) * 130, MARGIN + PLOT_HEIGHT + 36 + (place // 3) * 16
        parts += [_box(x, row - 9, 10, 10, colour), _text(x + 15, row, name)]
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" role="img">'
    return f"{frame}{_box(0, 0, width, height, '#fff')}{''.join(parts)}</svg>\n"


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'
