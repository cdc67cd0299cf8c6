"""The charts of the page: which metrics go into which chart, and a sentence that says what to look
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from medusa_ppo.contract import metrics as m
from medusa_ppo.reports import svg
from medusa_ppo.reports.run_files import Run, number, numbers
from medusa_ppo.reports.summary import PHASES
from medusa_ppo.reports.svg import Grid, Series, bin_values
from medusa_ppo.runtime.wording import FORMATS, overlapped, percent, seconds

Column = str | list[float | None]
"""A metric by name, or its values step by step."""

ROLE_TONES = {
    "engine": "generate",
    "actor": "score",
    "reference": "kl",
    "critic": "value",
    "reward": "good",
    "update": "update",
    "sync": "sync",
}
"""Roles of a step, as `medusa_ppo.ppo.run_progress` has them."""
# With more pairs than this, lines are drawn without ratios, which would overlap.
PAIR_DOTS_UP_TO = 60
PAIR_LABELS_UP_TO = 8
SPARK_COLUMNS = 60
# Pixels.
MAL_HEIGHT, WIDE_HEIGHT, SMALL_HEIGHT, ENTROPY_HEIGHT = 280, 240, 150, 90


class Small(NamedTuple):
    """One small chart of a single metric: its place on the page, what to look for, and how its
    values are written.
    """

    key: str
    title: str
    metric: str
    tone: str
    hint: str
    format: str = "plain"
    floor: float | None = 0.0


RISES_SLOWLY = "Should rise slowly; a sudden jump is more often a loophole than a skill."
LENGTH_GROWS = "If it grows together with the reward, the reward may pay for length."
CUT_ARE_GUESSES = "Near zero is good: the reward of a cut response is a guess."
GAP_GROWS = "Flat and small; growth means that syncs or dtypes don't match."
SMALL = (
    Small(
        "right",
        "Right answers",
        m.CORRECT_FRAC,
        "good",
        "Should rise; it is what PPO is for.",
        "percent",
    ),
    # No floor: rewards may be negative.
    Small("reward", "Reward", m.REWARD_MEAN, "good", RISES_SLOWLY, floor=None),
    Small(
        "kl",
        "KL to the reference",
        m.KL_REFERENCE,
        "kl",
        "Grows while the policy learns; it should not grow while the reward is flat.",
    ),
    Small(
        "klupdate",
        "KL of one update",
        m.KL_UPDATE,
        "kl",
        "Should stay below about 0.05 nats; spikes mean too large a step.",
    ),
    Small(
        "value",
        "Value loss",
        m.VALUE_LOSS,
        "value",
        "Should fall, as long as rewards vary as before; the next chart does not depend on that.",
    ),
    Small(
        "explained",
        "Variance of the returns that the critic explains",
        m.VALUE_EXPLAINED,
        "value",
        "Should rise above 0 and stay there; below 0 a constant would do better.",
        "percent",
        floor=None,
    ),
    Small("length", "Response length", m.RESPONSE_LENGTH, "length", LENGTH_GROWS, "whole"),
    Small(
        "truncated",
        "Responses cut at the limit",
        m.TRUNCATED_FRAC,
        "length",
        CUT_ARE_GUESSES,
        "percent",
    ),
    Small(
        "clip",
        "Clipped ratios",
        m.CLIP_FRAC,
        "kl",
        "A few percent are normal; above 30 % most of an update is lost.",
        "percent",
    ),
    Small("gap", "Engine against actor, log-prob", m.LOGPROB_GAP, "value", GAP_GROWS),
)


@dataclass(frozen=True)
class Figure:
    """One chart with its words.

    Attributes:
        key: id on the page.
        title: heading.
        hint: the sentence that says what to look for.
        svg: the drawing; empty when nothing was measured.
        legend: (name, tone, style, last value as text) per series.
        series: what the tooltip reads: name, tone, format, mean (and lowest, highest) per column.
    """

    key: str
    title: str
    hint: str
    svg: str
    legend: tuple[tuple[str, str, str, str], ...] = ()
    series: tuple[dict[str, Any], ...] = field(default=())


class Panels:
    """Draws the charts of one run, or of two overlaid runs, on a common step axis."""

    def __init__(self, run: Run, other: Run | None = None) -> None:
        self.run = run
        self.other = other
        self.steps = run.step_numbers()
        self.other_steps = other.step_numbers() if other else []
        self.grid = Grid.over([*self.steps, *self.other_steps])

    def acceptance(self) -> Figure:
        """MAL over steps: the engine's count and the three replay estimates, versions marked."""
        replays = [
            ("serving", m.REPLAY_SERVING, "dash"),
            ("candidate", m.REPLAY_CANDIDATE, "dot"),
            ("frozen", m.REPLAY_FROZEN, "dash"),
        ]
        series = [
            self._series(
                "serving, counted by the engine",
                "serving",
                self._drafted(self.run),
                format="length",
            )
        ]
        for tone, metric, style in replays:
            series.append(
                self._series(
                    f"{tone}, by replay", tone, metric, style=style, format="length", connect=True
                )
            )
        if self.other:
            series = [
                series[0],
                # This run's engine and frozen heads, and the other run's engine: with more lines
                # one could not tell them apart.
                series[3],
                self._overlay(self._drafted(self.other), format="length"),
            ]
        hint = (
            "Blue above grey is what continued training is worth: grey shows the first published "
            "heads, never trained again. Each flag is a new version of the heads."
        )
        marks = version_marks(self.run)
        return self._lines(
            "mal",
            "Tokens per engine step",
            hint,
            series,
            height=MAL_HEIGHT,
            floor=1.0,
            format="length",
            marks=marks,
        )

    def entropy(self) -> Figure:
        hint = (
            "A more certain policy (lower entropy) is easier to draft for: acceptance that only "
            "mirrors this line is not due to the heads."
        )
        series = self._single("entropy, nats", "entropy", m.ENTROPY)
        return self._lines(
            "entropy", "Entropy of the policy", hint, series, height=ENTROPY_HEIGHT, floor=0.0
        )

    def positions(self) -> Figure:
        """Acceptance per position over steps as a heat strip."""
        rates = [
            (
                numbers(step.get(m.ACCEPTANCE_PER_POSITION))
                # A step without drafts has zeros here, which are not rates.
                if number(step.get(m.DRAFTS)) != 0
                else None
            )
            for step in self.run.steps
        ]
        heads = max((len(found) for found in rates if found), default=0)
        columns = [
            [found[position] if found and position < len(found) else None for found in rates]
            for position in range(heads)
        ]
        rows = [
            self._series(f"position {index}", "serving", column, format="percent")
            for index, column in enumerate(columns, 1)
        ]
        title = "Acceptance per position"
        hint = (
            "Darker is more. Each row is one draft position; a row that stays pale is a draft token"
            " that costs more than it gives."
        )
        drawing = svg.draw_heat("positions", title, rows, self.grid) if rows else ""
        return self._figure("positions", title, hint, drawing, rows)

    def passes(self) -> Figure:
        """How much the companion trained on each batch."""
        hint = (
            "As much as companion.share allows while new versions come, none while they don't. A "
            "line that stays high while acceptance stays flat is wasted work."
        )
        series = self._single("passes over the batch", "hidden", m.COMPANION_PASSES, connect=True)
        return self._lines(
            "passes", "How much the heads train", hint, series, height=SMALL_HEIGHT, floor=0.0
        )

    def speed(self) -> Figure:
        """Tokens/s with and without drafting: dots for a few pairs, lines for many."""
        title = "Tokens per second in the run"
        hint = (
            "The same prompts on the same engine, timed in turn: blue above grey is what drafting"
            " is worth."
        )
        drafting = self._series(
            "with drafting", "serving", m.PAIR_DRAFTING_TOKENS_PER_S, format="whole", connect=True
        )
        plain = self._series(
            "without",
            "plain",
            m.PAIR_PLAIN_TOKENS_PER_S,
            format="whole",
            connect=True,
            style="dash",
        )
        rollouts = self._series(
            "this run's rollouts", "rollouts", m.TOKENS_PER_S, format="whole", style="thin"
        )
        series = [drafting, plain, rollouts, *self._overlays(m.TOKENS_PER_S, format="whole")]
        pairs = len(drafting.values.present)
        # Stems and dots of many pairs would overlap.
        if pairs == 0 or pairs > PAIR_DOTS_UP_TO:
            if pairs == 0:
                hint = (
                    "The run's own rollouts. A run generates nothing twice unless asked to "
                    "(report.speed_every)."
                )
            return self._lines(
                "speed",
                title,
                hint,
                [s for s in series if s.values.present],
                height=WIDE_HEIGHT,
                floor=0.0,
                format="whole",
            )
        labels = pairs <= PAIR_LABELS_UP_TO
        drawing = svg.draw_pairs(
            "speed",
            title,
            drafting,
            plain,
            series[2:],
            self.grid,
            height=WIDE_HEIGHT,
            labels=labels,
        )
        return self._figure("speed", title, hint, drawing, series)

    def phases(self) -> Figure:
        """Seconds of each phase per step; below the line the companion."""
        above: list[tuple[str, str, Column]] = [
            *((name, name, metric) for metric, name in PHASES.items()),
            ("rest", "rest", rest_seconds(self.run)),
        ]
        below: list[tuple[str, str, Column]] = [
            ("companion, hidden", "hidden", m.COMPANION_HIDDEN_S),
            ("plugin, the loop waited", "exposed", m.PLUGIN_EXPOSED_S),
        ]
        sides = [
            [self._series(*what, format="seconds") for what in side] for side in (above, below)
        ]
        up, down = ([item for item in side if item.values.present] for side in sides)
        title = "Seconds of each step"
        hint = (
            "Above the line are the loop's own phases, below it the companion: green ran in "
            "parallel with PPO, orange is what the loop waited for."
        )
        drawing = (
            svg.draw_bars("phases", title, up, down, self.grid, height=WIDE_HEIGHT)
            if up or down
            else ""
        )
        return self._figure("phases", title, hint, drawing, [*up, *down])

    def timelines(self) -> list[Figure]:
        """Who worked when in the last step that recorded it; a second run has its own chart."""
        found = []
        for index, run in enumerate(run for run in (self.run, self.other) if run is not None):
            # A run that was stopped may have a last line without spans.
            step = next((step for step in reversed(run.steps) if role_spans(step)), None)
            if step is None:
                continue
            spans = role_spans(step)
            title = f"Who worked when, in step {step[m.STEP]}" + (
                f" of {run.name}" if self.other else ""
            )
            idle = number(step.get(m.GENERATE_SCORE_IDLE))
            hint = "Gaps are idle time."
            if overlapped(idle):
                hint = (
                    "Gaps are idle time: while responses were generated and scored, engine and"
                    f" scoring were idle for {percent(idle)} on average."
                )
            rows = [(role, tone, spans[role]) for role, tone in ROLE_TONES.items() if role in spans]
            legend = tuple(
                (role, tone, "solid", seconds(sum(b - a for a, b in parts)))
                for role, tone, parts in rows
            )
            found.append(
                Figure(
                    f"spans-{index}",
                    title,
                    hint,
                    svg.draw_spans(f"spans-{index}", title, rows),
                    legend,
                )
            )
        return found

    def learning(self) -> list[Figure]:
        """The small charts about PPO; those without any value are left out."""
        figures = []
        for small in SMALL:
            series = self._single(small.title, small.tone, small.metric, format=small.format)
            if any(item.values.present for item in series):
                look = {"height": SMALL_HEIGHT, "floor": small.floor, "format": small.format}
                figures.append(self._lines(small.key, small.title, small.hint, series, **look))
        return figures

    def others(self) -> list[Figure]:
        """Every other logged number, drawn as it is, so that nothing is hidden."""
        described = m.describe()
        unknown = "Logged by this run; the report has no explanation for it."
        drawn = [
            (name, described.get(name, unknown), self._single(name, "rollouts", name, connect=True))
            for name in other_metrics(self.run)
        ]
        return [
            # Numbered, because a metric's name may contain what an id may not.
            self._lines(f"x-{index}", *what, height=SMALL_HEIGHT)
            for index, what in enumerate(drawn)
        ]

    def _series(
        self, name: str, tone: str, metric: Column, run: Run | None = None, **options: Any
    ) -> Series:
        run = run or self.run
        column = run.column(metric) if isinstance(metric, str) else metric
        return Series(name, tone, bin_values(self.grid, run.step_numbers(), column), **options)

    def _single(self, name: str, tone: str, metric: str, **options: Any) -> list[Series]:
        """The line of a single-metric chart; when two runs are overlaid, each line is named after
        its run.
        """
        return [
            self._series(self.run.name if self.other else name, tone, metric, **options),
            *self._overlays(metric, **options),
        ]

    def _overlay(self, metric: Column, **options: Any) -> Series:
        assert self.other is not None, "an overlay needs a second run"
        return self._series(self.other.name, "other", metric, self.other, style="dash", **options)

    def _overlays(self, metric: str, **options: Any) -> list[Series]:
        return [self._overlay(metric, **options)] if self.other else []

    def _drafted(self, run: Run) -> list[float | None]:
        """MAL of the steps that drafted at all: a step without drafting has no acceptance rather
        than 1.
        """
        return [
            number(step.get(m.MAL_SERVING)) if number(step.get(m.DRAFTS)) != 0 else None
            for step in run.steps
        ]

    def _lines(
        self, key: str, title: str, hint: str, series: Sequence[Series], **options: Any
    ) -> Figure:
        shown = [item for item in series if item.values.present]
        return self._figure(
            key,
            title,
            hint,
            svg.draw_lines(key, title, shown, self.grid, **options) if shown else "",
            shown,
        )

    def _figure(
        self, key: str, title: str, hint: str, drawing: str, series: Sequence[Series]
    ) -> Figure:
        legend = tuple(
            (item.name, item.tone, item.style, FORMATS[item.format](item.values.present[-1]))
            for item in series
            if item.values.present
        )
        return Figure(
            key, title, hint, drawing, legend, tuple(_hover(item, self.grid) for item in series)
        )


def role_spans(step: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """When each role worked in a step; invalid spans are left out."""
    given: Any = step.get(m.SPANS)
    found: dict[str, list[tuple[float, float]]] = {}
    for role in ROLE_TONES if isinstance(given, dict) else ():
        parts = given.get(role)
        pairs = [numbers(part) for part in parts] if isinstance(parts, list) else []
        spans = [
            (pair[0], pair[1])
            for pair in pairs
            if pair is not None and len(pair) == 2 and 0 <= pair[0] <= pair[1]
        ]
        found |= {role: spans} if spans else {}
    return found


def version_marks(run: Run) -> list[tuple[int, str]]:
    """(step, name) for each step that drafted with a different version than the step before,
    without version 0 at the start.
    """
    marks = []
    before = 0.0
    for step in run.steps:
        version = number(step.get(m.HEADS_VERSION))
        if version is not None and version != before:
            marks.append((int(step[m.STEP]), f"v{version:.0f}"))
            before = version
    return marks


def rest_seconds(run: Run) -> list[float | None]:
    """Unaccounted seconds of each step (timed pairs, reports); None for steps without a neighbour
    to subtract.
    """
    rest: list[float | None] = []
    before: tuple[int, float] | None = None
    for step in run.steps:
        wall = number(step.get(m.WALL_S))
        known = [number(step.get(metric)) or 0.0 for metric in PHASES]
        index = int(step[m.STEP])
        # Otherwise a missing line's seconds would count for the next step.
        follows = before is not None and before[0] == index - 1
        rest.append(
            max(0.0, wall - before[1] - sum(known))
            if wall is not None and before is not None and follows
            else None
        )
        before = (index, wall) if wall is not None else None
    return rest


def other_metrics(run: Run) -> list[str]:
    """Names of numeric metrics that no other chart or column of the page shows."""
    shown = {
        m.STEP,
        m.WALL_S,
        m.HEADS_VERSION,
        m.MAL_SERVING,
        m.REPLAY_SERVING,
        m.REPLAY_CANDIDATE,
        m.REPLAY_FROZEN,
        m.ENTROPY,
    }
    shown |= {
        m.COMPANION_PASSES,
        m.PAIR_DRAFTING_TOKENS_PER_S,
        m.PAIR_PLAIN_TOKENS_PER_S,
        m.TOKENS_PER_S,
        m.COMPANION_HIDDEN_S,
    }
    shown |= {m.PLUGIN_EXPOSED_S, *PHASES, *(small.metric for small in SMALL)}
    # In the order of the lines, which a set would not keep.
    logged = dict.fromkeys(
        name for step in run.steps for name, value in step.items() if number(value) is not None
    )
    return [name for name in logged if name not in shown]


def _hover(item: Series, grid: Grid) -> dict[str, Any]:
    """What the page's script needs to show values under the pointer; five digits are enough for a
    screen.
    """
    data: dict[str, Any] = {
        "name": item.name,
        "tone": item.tone,
        "format": item.format,
        "mean": _short(item.values.mean),
    }
    if grid.width > 1:
        data |= {"low": _short(item.values.low), "high": _short(item.values.high)}
    return data


def _short(values: Sequence[float | None]) -> list[float | int | None]:
    rounded = (None if value is None else float(f"{value:.5g}") for value in values)
    return [
        int(value) if value is not None and value.is_integer() and abs(value) < 1e15 else value
        for value in rounded
    ]


def spark_values(run: Run, metric: str) -> list[float | None]:
    """One metric as at most about SPARK_COLUMNS means, for a headline tile."""
    steps = run.step_numbers()
    if not steps:
        return []
    full = Grid.over(steps)
    width = -(-full.width * full.count // SPARK_COLUMNS)
    grid = Grid(full.first, width, -(-full.width * full.count // width))
    return list(bin_values(grid, steps, run.column(metric)).mean)
