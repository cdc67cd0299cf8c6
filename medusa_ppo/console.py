"""What all commands share: where they print, and how they end."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from heads.errors import MedusaError

__all__ = ["FAILED", "INTERRUPTED", "Debug", "command", "console", "errors", "escape"]

FAILED = 1
INTERRUPTED = 130

console = Console()
errors = Console(stderr=True)


class Debug:
    """Whether --debug was given anywhere on the command line."""

    on = False


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn exceptions into one clear sentence and an exit code: 1 failed, 2 usage, 130 interrupted."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            errors.print("Stopped. What was finished is on disk.", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except MedusaError as error:
            _show(error, str(error))
            raise typer.Exit(error.exit_code) from None
        except Exception as error:
            _show(error, f"{type(error).__name__}: {error}\n  do this:  run the same command with --debug and report what it prints.")
            raise typer.Exit(FAILED) from None

    return run


def _show(error: BaseException, text: str) -> None:
    if Debug.on:
        errors.print("".join(traceback.format_exception(error)), highlight=False, markup=False)
    errors.print(f"[red]Error:[/red] {escape(text)}", highlight=False, soft_wrap=True)
