"""The `medusa-ppo` program: its commands, in the order in which --help lists them.

The files beside this one hold the commands, one file a group. A command parses its options and
hands over; it imports heavy libraries (torch, Ray, vLLM) only when it runs, so that --help and
mistyped options answer at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from medusa_ppo import __version__
from medusa_ppo.cli.bench_commands import bench
from medusa_ppo.cli.companion_commands import companion
from medusa_ppo.cli.feed_commands import feed
from medusa_ppo.cli.heads_commands import convert, evaluate, push, serve, train
from medusa_ppo.cli.machine_commands import check_loop, check_setup, doctor
from medusa_ppo.cli.predict_commands import predict
from medusa_ppo.cli.run_commands import demo, plan, ppo, report
from medusa_ppo.runtime.console import Debug, say
from medusa_ppo.runtime.kept_memory import keep_freed_memory

app = typer.Typer(
    name="medusa-ppo",
    help=(
        "Medusa draft heads for the actor of a PPO loop: trained while it runs, served by vLLM,"
        " nothing that is learned changes."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # Our own errors say what to do; what is none of ours is shown with --debug.
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(ppo)
app.command()(plan)
app.command()(predict)
app.command()(train)
app.command("eval")(evaluate)
app.command()(convert)
app.command()(push)
# vLLM's own options pass through `serve` unread.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.add_typer(companion, name="companion")
app.add_typer(feed, name="feed")
app.command()(report)
app.command()(doctor)
app.command("check-loop")(check_loop)
app.command("check-setup")(check_setup)
app.add_typer(bench, name="bench")


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `medusa-ppo` script."""
    if "--debug" in sys.argv:
        # Taken out before typer reads the line, so that it may stand anywhere, behind a command
        # too.
        sys.argv.remove("--debug")
        Debug.on = True
    keep_freed_memory()
    # A cluster's SIGTERM ends a run as cleanly as Ctrl-C does.
    signal.signal(signal.SIGTERM, _raise_interrupt)
    app()


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        say(__version__)
        raise typer.Exit
