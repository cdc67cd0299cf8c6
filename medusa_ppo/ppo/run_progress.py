"""How a PPO run reports its progress: a small protocol of events, and three listeners (silent,
live, plain lines).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from medusa_ppo.contract import metrics as names
from medusa_ppo.runtime.console import LINE_WIDTH

RAY, ACTOR, CRITIC, RANKS, ENGINE = (
    "start Ray",
    "prepare the actor",
    "prepare the critic",
    "start the actor's ranks",
    "start vLLM",
)
WARM_UP = "warm up the heads"
GENERATE, SCORE, UPDATE, SYNC, EVALUATE = "generate", "score", "update", "sync", "evaluate"
SAVE, COMPARE, FINISH = "save", "compare", "write the report"
"""Names of the phases: of the preparation, of a step, and of the end."""


ROLES = ("engine", "actor", "reference", "critic", "reward", "update", "sync")
"""Who works in a step; the first writes responses, the next four score them."""
FORGET_PEAK, PROCESS_STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
SIDES = (ROLES[:1], ROLES[1:5])

STEP_FORMS = {
    names.REWARD_MEAN: ("reward {:.3f}", "reward {:.2f}"),
    names.CORRECT_FRAC: ("right {:.0%}", "right {:.0%}"),
    names.KL_REFERENCE: ("kl {:.3f}", "kl {:.3f}"),
    names.ENTROPY: ("entropy {:.2f}", "entropy {:.2f}"),
    names.MAL_SERVING: ("{:.2f} tokens a step", "{:.2f} tok/step"),
    names.HEADS_VERSION: ("heads v{}", "v{}"),
    names.TOKENS_PER_S: ("{:.0f} tokens/s", "{:.0f} tok/s"),
    names.PAIR_PLAIN_TOKENS_PER_S: ("({:.0f} without drafts)", "({:.0f} without drafts)"),
    names.EVAL_REWARD: ("evaluation {:.3f}", "evaluation {:.3f}"),
    names.IMAGES: ("{} images", "{} images"),
}
"""Metrics in a step's line, in their order: in full, and how they are written where the line would
be too long.
"""
INDENT = " " * len("step   0  ")


class Timeline:
    """Who works when: spans of seconds since the timeline began. Any thread may add to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.spans: dict[str, list[tuple[float, float]]] = {}

    @contextlib.contextmanager
    def at_work(self, role: str) -> Iterator[None]:
        """The role works in this block."""
        began = self._clock()
        try:
            yield
        finally:
            self.add(role, began)

    def add(self, role: str, began: float) -> None:
        """Record that the role worked from then until now; anything before the timeline is left
        out.
        """
        self.spans.setdefault(role, []).append(
            (max(0.0, began - self._began), self._clock() - self._began)
        )

    def figures(self) -> dict[str, Any]:
        """The spans, the seconds from the start of generation to the end of scoring, and the share
        of these in which one of the two was idle.
        """
        sides = [
            sorted(span for role in side for span in self.spans.get(role, [])) for side in SIDES
        ]
        found: dict[str, Any] = {
            names.SPANS: {role: _rounded(self.spans[role]) for role in ROLES if role in self.spans}
        }
        if not all(sides):
            return found
        seconds = max(end for side in sides for _, end in side) - min(side[0][0] for side in sides)
        busy = sum(map(_covered, sides))
        idle = 1 - busy / (len(SIDES) * seconds) if seconds > 0 else 0.0
        return {names.GENERATE_SCORE_S: seconds, names.GENERATE_SCORE_IDLE: idle, **found}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the spans, which are in order."""
    total = 0.0
    reached = 0.0
    for began, ended in spans:
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def _rounded(spans: list[tuple[float, float]]) -> list[list[float]]:
    return [[round(began, 4), round(ended, 4)] for began, ended in sorted(spans)]


class PeakMemory:
    """Peak memory of each phase of a step: torch's on this process's GPU, or else the process's own
    (Linux).
    """

    def __init__(self) -> None:
        self.gib: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record the peak under this metric's name, if the system counts it."""
        counted = _forget_peak()
        yield
        if counted:
            self.gib[name] = _peak_bytes() / 2**30

    def take(self) -> dict[str, float]:
        """The peaks of the step's phases; counting restarts."""
        taken = self.gib
        self.gib = {}
        return taken


def _forget_peak() -> bool:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        FORGET_PEAK.write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    line = next(
        line for line in PROCESS_STATUS.read_text().splitlines() if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


class ProgressSink:
    """Listener of a run; this one ignores events. All methods return at once and never raise."""

    def run_started(self, name: str, first_step: int, steps: int) -> None:
        """The loop begins: steps first_step .. steps - 1 will be run."""

    def phase_started(self, phase: str, step: int | None = None) -> None:
        """A phase of a step (or of the preparation, step None) begins."""

    def phase_advanced(self, done: float, total: float, note: str = "") -> None:
        """The running phase has done this much of its total."""

    def phase_finished(self, phase: str, seconds: float) -> None:
        """The phase ended after this many seconds."""

    def step_finished(self, values: Mapping[str, Any]) -> None:
        """A step ended; its metrics, keys as in medusa_ppo/contract/metrics.py."""

    def note(self, text: str) -> None:
        """One sentence worth reading."""

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[Callable[[], float]]:
        """A phase as a block; yields a function that returns afterwards how many seconds it
        took.
        """
        began = time.monotonic()
        taken = 0.0
        self.phase_started(name, step)
        yield lambda: taken
        taken = time.monotonic() - began
        self.phase_finished(name, taken)

    def __enter__(self) -> ProgressSink:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class PrintedProgress(ProgressSink):
    """What the other two share: lines on a console, and the time left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._clock = StepClock()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


class LineProgress(PrintedProgress):
    """One line for each step and each long phase of the preparation: for logs, pipes and CI."""

    ANNOUNCE_S = 5.0
    """Minimum seconds between two lines about a phase."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._phase = ""
        self._said_at = 0.0

    def run_started(self, name: str, first_step: int, steps: int) -> None:
        self._clock.start(first_step, steps)
        self.note(f"{name}: steps {first_step} to {steps - 1}")

    def phase_started(self, phase: str, step: int | None = None) -> None:
        self._phase = phase
        self._said_at = time.monotonic()
        if step is None:
            self.note(f"{phase} ...")

    def phase_advanced(self, done: float, total: float, note: str = "") -> None:
        if time.monotonic() - self._said_at >= self.ANNOUNCE_S:
            self._said_at = time.monotonic()
            self.note(f"  {self._phase}: {done / total if total else 0:.0%}  {note}".rstrip())

    def step_finished(self, values: Mapping[str, Any]) -> None:
        self._clock.finished()
        self.note("\n".join(step_lines(values, f"left {self._clock.left_text()}")))


class LiveProgress(PrintedProgress):
    """A live bar on a terminal: what happens now and for how long, steps, tokens/s, acceptance,
    time left; one line per finished step.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console)
        self._live = Live(self._bars, console=self._console, refresh_per_second=8, transient=True)
        self._phase = self._bars.add_task("", total=1, note="", visible=False)
        self._steps = self._bars.add_task("steps", total=None, note="", visible=False)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def run_started(self, name: str, first_step: int, steps: int) -> None:
        self._clock.start(first_step, steps)
        self._bars.update(
            self._steps, description=name, total=steps, completed=first_step, visible=True
        )

    def phase_started(self, phase: str, step: int | None = None) -> None:
        self._bars.reset(self._phase, total=None, description=phase, note="", visible=True)

    def phase_advanced(self, done: float, total: float, note: str = "") -> None:
        self._bars.update(self._phase, completed=round(done), total=round(total), note=note)

    def phase_finished(self, phase: str, seconds: float) -> None:
        self._bars.update(self._phase, visible=False)

    def step_finished(self, values: Mapping[str, Any]) -> None:
        self._clock.finished()
        self.note("\n".join(step_lines(values)))
        rate = values.get(names.TOKENS_PER_S)
        acceptance = values.get(names.MAL_SERVING)
        parts = [f"{rate:.0f} tokens/s"] * bool(rate) + [f"{acceptance:.2f} tokens a step"] * bool(
            acceptance
        )
        self._bars.update(
            self._steps, advance=1, note="  ".join([*parts, f"left {self._clock.left_text()}"])
        )


class StepClock:
    """Time left, from the mean length of the steps so far."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._done = self._total = 0

    def start(self, first_step: int, steps: int) -> None:
        self._began = time.monotonic()
        self._done = 0
        self._total = steps - first_step

    def finished(self) -> None:
        self._done += 1

    def left_text(self) -> str:
        if not self._done:
            return "?"
        minutes, seconds = divmod(
            round((time.monotonic() - self._began) / self._done * (self._total - self._done)), 60
        )
        return f"{minutes}:{seconds:02d}"


def step_lines(values: Mapping[str, Any], end: str = "") -> list[str]:
    """A finished step in one line of at most LINE_WIDTH columns. If that is too little for all its
    figures, they are shortened; if it still is, they continue on an indented line.

    Args:
        values: the step's metrics; those that it does not have are left out.
        end: what comes last.
    """
    for short in (0, 1):
        parts = [
            forms[short].format(values[key])
            for key, forms in STEP_FORMS.items()
            if values.get(key) is not None
        ]
        lines = [f"step {values[names.STEP]:>3}"]
        for part in [*parts, *([end] if end else [])]:
            if len(lines[-1]) + 2 + len(part) <= LINE_WIDTH:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"{INDENT}{part}")
        if len(lines) == 1:
            break
    return lines


def make_progress(console: Console | None = None) -> LineProgress | LiveProgress:
    """The live bar on a terminal, plain lines anywhere else."""
    console = console or Console()
    return LiveProgress(console) if console.is_terminal else LineProgress(console)
