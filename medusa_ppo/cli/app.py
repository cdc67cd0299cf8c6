"""The `medusa-ppo` program: its commands, in the order in which --help lists them.

The files next to this one hold the commands, one file per group. A command only parses its options;
it imports heavy libraries (torch, Ray, vLLM) when it runs, so that --help and mistyped options
answer at once.
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
        "Medusa draft heads for the actor of a PPO loop: trained while it runs, served by vLLM, "
        "without changing what the policy learns. With --debug anywhere in its line, a command "
        "shows the traceback of an error."
    ),
    add_completion=False,
    rich_markup_mode="rich",
    # Our own errors say what to do; for others, --debug shows the traceback.
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
# `serve` passes options that it doesn't know on to vLLM.
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
        # Removed before typer parses the command line, so that --debug may stand anywhere in it.
        sys.argv.remove("--debug")
        Debug.on = True
    keep_freed_memory()
    # A cluster's SIGTERM ends a run as cleanly as Ctrl-C does.
    signal.signal(signal.SIGTERM, _raise_interrupt)
    app()


FIRST_STEPS = """\
medusa-ppo {version}: draft heads for the actor of a PPO loop.

Start with one of these:
  medusa-ppo doctor                        check this machine
  medusa-ppo demo                          see it work on an embedded example, 10 to 20 minutes
  medusa-ppo predict --model DIR --gpu h100 --acceptance 0.6,0.4,0.25,0.15
                                           what drafting would gain for your model
  medusa-ppo train --help                  train heads for your model
  medusa-ppo ppo --help                    run PPO with them

All commands: medusa-ppo --help. TRL, verl, OpenRLHF or your own loop: docs/hooks.md."""
"""What the program prints without a command: the first things to try, not all commands."""


@app.callback(invoke_without_command=True)
def _first(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        say(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(FIRST_STEPS.format(version=__version__))
