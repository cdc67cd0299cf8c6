"""What `train` and `eval` show while they work: one bar per phase, with rate and time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medusa_ppo.reports.wording import seconds

LINE_EVERY_S = 15.0
"""Seconds between two lines of a phase where there is no terminal to draw a bar on."""


class Advance(Protocol):
    """Called with the work done since the last call and a short text (loss, acceptance)."""

    def __call__(self, amount: float = 1, note: str = "") -> None: ...


class OfflineProgress:
    """Bars on a terminal; plain lines when the output is not one. Use as a context manager."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = console or Console()
        self._live = not quiet and self._console.is_terminal
        self._quiet = quiet
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console, disable=not self._live)

    def __enter__(self) -> OfflineProgress:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[Advance]:
        """A phase of known length; `total` 0 shows a spinner."""
        task = self._bars.add_task(name, total=total or None, note="")
        done = 0.0
        if not self._live:
            self.say(f"{name} ...")
        began = said = time.monotonic()
        last = ""

        def advance(amount: float = 1, note: str = "") -> None:
            nonlocal done, last, said
            done += amount
            last = note or last
            self._bars.update(task, completed=done, note=last)
            now = time.monotonic()
            if not self._live and now - said > LINE_EVERY_S:
                said = now
                left = seconds((now - began) * max(0.0, total - done) / done) if done else "?"
                self.say(f"{name}: {min(1.0, done / total):.0%}  {last}, {left} left" if total else f"{name}: {last}")

        yield advance
        self._bars.update(task, completed=total or done)
        if not self._live and last:
            self.say(f"{name}: {last}")

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True)
