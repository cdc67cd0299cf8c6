"""What all commands share: where they print, how they show progress, and how they end."""

from __future__ import annotations

import errno
import functools
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from heads.errors import MedusaError
from medusa_ppo.runtime.wording import seconds

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "LINE_WIDTH",
    "Debug",
    "command",
    "console",
    "errors",
    "escape",
    "offline_progress",
    "say",
]

LINE_WIDTH = 100
"""Columns of a line in a log or a terminal."""
FAILED = 1
INTERRUPTED = 130
# Errors of files can come from any access, as bare OSErrors without our advice. The user has to
# solve them, and need not report them to us.
REPORT = "run the same command with --debug and report what it prints."
NO_SPACE = "make room on the disk; a run continues with --resume."
NO_ACCESS = "give {path} to this user, or choose another place (for a run: out=FOLDER)."
WRONG_PATH = f"correct the path {{path}}; if no option or setting of yours has it, {REPORT}"
DISK: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), NO_SPACE),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), NO_ACCESS),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), WRONG_PATH),
}
"""What to do about a path that can't be read or written."""

# By default rich replaces words between colons by pictures: `hydra:x:` in what a user gave.
console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)


class Debug:
    """Whether --debug was given anywhere on the command line."""

    # Not an option of typer's: the script removes it from the command line before typer reads it,
    # so that it may come before or after any command.
    on = False


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn exceptions into one clear sentence and an exit code: 1 failed, 2 usage, 130
    interrupted.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            errors.print("Stopped. Everything finished is on disk.", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
        # Both are RuntimeErrors in Python, so that `except Exception` below would report an
        # intended exit as a fault.
        except (typer.Exit, typer.Abort):
            raise
        except MedusaError as error:
            _show(error, str(error))
            raise typer.Exit(error.exit_code) from None
        except Exception as error:
            _show(error, f"{type(error).__name__}: {error}\n  do this:  {_advice(error)}")
            raise typer.Exit(FAILED) from None

    return run


def _advice(error: Exception) -> str:
    """What to do about an error that is none of ours."""
    if not isinstance(error, OSError):
        return REPORT
    # A rename names the temporary file first, which nobody has given.
    path = error.filename2 or error.filename
    advice = DISK.get(error.errno, REPORT)
    # Without a path, as of a pipe, there is nothing to correct.
    return REPORT if advice == WRONG_PATH and not path else advice.format(path=path or "the folder")


def say(text: object) -> None:
    """Print a line as it is, without markup or coloured numbers; the terminal wraps it."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _show(error: BaseException, text: str) -> None:
    if Debug.on:
        errors.print("".join(traceback.format_exception(error)), highlight=False, markup=False)
    errors.print(f"[red]Error:[/red] {escape(text)}", highlight=False, soft_wrap=True)


LINE_EVERY_S = 15.0
"""Seconds between two lines of a phase if there is no terminal for a bar."""
RECENT_CALLS = 64
"""Reports of work by which the remaining time is estimated."""


class Advance(Protocol):
    """Called with the work done since the last call and a short text (loss, acceptance)."""

    def __call__(self, amount: float = 1, note: str = "") -> None: ...


class OfflineProgress:
    """Bars on a terminal, plain lines elsewhere. Use as a context manager."""

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
        self._bars = Progress(
            *columns,
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._live,
        )

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
        worked = said = time.monotonic()
        paces: deque[float] = deque(maxlen=RECENT_CALLS)
        last = ""

        def advance(amount: float = 1, note: str = "") -> None:
            nonlocal done, last, said, worked
            done += amount
            # Most calls have no news; the last figures stay visible until there are newer ones.
            last = note or last
            self._bars.update(task, completed=done, note=last)
            now = time.monotonic()
            if amount > 0:
                paces.append((now - worked) / amount)
            worked = now
            if not self._live and now - said > LINE_EVERY_S:
                said = now
                # Before the first unit of work there is no speed to go by. The middle one, not the
                # mean: while a process is stopped or the machine asleep, the clock goes on.
                left = seconds(median(paces) * max(0.0, total - done)) if paces else "?"
                share = f"{min(1.0, done / total):.0%}" if total else ""
                news = [part for part in (last, f"{left} left" if total else "") if part]
                self.say("  ".join([f"{name}: {share}".rstrip(), ", ".join(news)]).rstrip())

        # No `finally`: a phase that breaks off must not end as a full bar.
        yield advance
        self._bars.update(task, completed=total or done)
        if not self._live and last:
            self.say(f"{name}: {last}")

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True)


def offline_progress() -> OfflineProgress:
    """Progress of a command without PPO; other libraries' bars and warnings are silenced."""
    # That module loads Ray, which other commands that print should not wait for.
    from medusa_ppo.runtime.processes import quiet_libraries

    quiet_libraries()
    return OfflineProgress(console)
