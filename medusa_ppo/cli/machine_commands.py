"""`medusa-ppo doctor`, `check-loop` and `check-setup`: does it work on this machine and in this
loop?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from heads.errors import UsageError
from medusa_ppo.cli.command_options import Overrides
from medusa_ppo.cli.input_checks import check_run
from medusa_ppo.runtime.console import FAILED, command, console, escape, offline_progress, say

TOKENS = 20_000


@command
def doctor(
    overrides: Overrides = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Skip the checks that start Ray, vLLM and an engine."),
    ] = False,
    distribution: Annotated[
        bool,
        typer.Option(
            "--distribution",
            help="Only test whether your engine samples from the model's own distribution.",
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="With --distribution: YAML file of a run or name of a preset, for its engine,"
            " sampling and prompts."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --distribution: folder or hub name of the actor.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="With --distribution: native heads directory; default: random heads."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1000,
            help="With --distribution: tokens to sample with drafts, and again without; default:"
            f" {TOKENS:,}.",
        ),
    ] = None,
) -> None:
    """Check this machine: Python, packages, memory, Ray, and whether vLLM loads our plugin and
    samples from the model's own distribution.

    Example:  [bold]medusa-ppo doctor --distribution --model models/actor --heads heads-gsm8k
    sampling.top_p=0.9[/bold]
    """
    from medusa_ppo.cli.machine_checks import check_distribution, run_checks
    from medusa_ppo.config.run_config import load_config

    asked = {"--config": config, "--model": model, "--heads": heads, "--tokens": tokens}
    _refuse_what_would_be_ignored(
        distribution,
        quick,
        [f"{name} {value}" for name, value in asked.items() if value],
        overrides or (),
    )
    if distribution:
        # Options come first, so that a KEY=VALUE on the command line overrides them.
        given = []
        if model:
            given.append(f"model.path={model}")
        if heads:
            given.append(f"heads.path={heads}")
        settings = load_config(config, [*given, *(overrides or ())])
        check_run(settings, data=config is not None)
        with offline_progress() as progress:
            _print_checks(
                check_distribution(settings, tokens or TOKENS, progress, data=config is not None)
            )
    else:
        _print_checks(run_checks(quick))


def _refuse_what_would_be_ignored(
    distribution: bool, quick: bool, options: Sequence[str], overrides: Sequence[str]
) -> None:
    """Raise UsageError: otherwise `All checks passed` would be read as said of what was given."""
    if distribution and quick:
        raise UsageError(
            "--distribution is a test of its own and has no quick form.",
            given="--distribution --quick",
            expected="one of the two",
            do="Leave one out; --tokens makes the test shorter.",
        )
    given = [*options, *overrides]
    if given and not distribution:
        raise UsageError(
            "These belong to --distribution; the other checks are of this machine alone.",
            given=" ".join(given),
            expected="--distribution with them",
            do="Add --distribution, or leave them out.",
        )


@command
def check_loop(
    trainer: Annotated[str, typer.Argument(help="module:function, as in docs/other-loops.md.")],
    medusa: Annotated[
        Path | None, typer.Option(help="YAML file; default: small heads that learn fast.")
    ] = None,
) -> None:
    """Run ten checks of an adapter for your own loop: hooks, rows, states, versions, heads in the
    engine, bit-identical gradients.

    Example:  [bold]medusa-ppo check-loop my_module:make_trainer[/bold]
    """
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.loops.check_loop import check_loop as findings

    settings = load_config(medusa).model_dump(mode="json") if medusa else None
    _print_checks(findings(trainer, settings))


@command
def check_setup(
    model: Annotated[
        str, typer.Option(help="Folder or hub name of the actor for the commands.")
    ] = "Qwen/Qwen3-0.6B",
    data: Annotated[
        str, typer.Option(help="File with questions and answers, as in GSM8K.")
    ] = "data/train.jsonl",
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="List the tests for this many GPUs; default: those of this machine."
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write the page to this file, for a bug report.")
    ] = None,
) -> None:
    """Print a page about this GPU setup: five commands that show whether it works, with what each
    must print, and the tests for its GPUs, with what their last run found. Starts nothing.

    Example:  [bold]medusa-ppo check-setup --model models/my-actor --data data/train.jsonl[/bold]
    """
    from medusa_ppo.cli.machine_checks import setup_page
    from medusa_ppo.runtime.files import write_atomic

    lines = []
    for line in setup_page(model, data, gpus):
        say(line)
        lines.append(line)
    if page is not None:
        write_atomic(page, "\n".join(lines) + "\n")


def _print_checks(checks: Iterable[Any]) -> None:
    """Print checks as they finish; exit code 1 if one is not ok."""
    failed = 0
    for check in checks:
        # Only checks of the machine can warn; checks of a loop pass or fail.
        if getattr(check, "warn", False):
            mark = "[yellow]warn[/yellow]"
        elif check.ok:
            mark = "[green]ok  [/green]"
        else:
            mark = "[red]FAIL[/red]"
        console.print(
            # Findings may contain brackets, which rich would read as markup.
            f"{mark} {check.name:<22} {escape(check.found)}",
            highlight=False,
            soft_wrap=True,
        )
        if not check.ok:
            failed += 1
            say(f"     do this: {check.do}")
    say("All checks passed." if not failed else f"{failed} checks failed.")
    if failed:
        raise typer.Exit(FAILED)
