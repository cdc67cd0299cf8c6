"""The command line: each command parses its options and hands over; heavy libraries load only
inside a command.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heads.errors import UsageError
from medusa_ppo import __version__
from medusa_ppo.cli.heads_commands import bench, convert, evaluate, push, serve, train
from medusa_ppo.runtime.console import (
    FAILED,
    Debug,
    command,
    console,
    escape,
    offline_progress,
    say,
)

if TYPE_CHECKING:
    from medusa_ppo.config.run_config import RunConfig


Config = Annotated[
    Path, typer.Option(help="YAML file of the run, or the name of a preset in configs/.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys on top of the file."),
]

app = typer.Typer(
    name="medusa-ppo",
    help=(
        "Medusa draft heads for the actor of a PPO loop: trained while it runs, served by vLLM,"
        " nothing that is learned changes."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `medusa-ppo` script."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        Debug.on = True
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


@app.command()
@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="PPO steps; default: as in configs/demo.yaml.")
    ] = None,
) -> None:
    """Run the whole job on an embedded example: about 7 minutes on two cores and 4 more on first
    use, nothing to prepare.

    Trains a tiny actor on first use, then PPO with drafting and the companion, then takes the same
    steps with and without the plugin.

    Example:  [bold]medusa-ppo demo --steps 16[/bold]
    """
    from medusa_ppo.config.config_file import preset
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.runtime.hardware import cpu_has_bfloat16, find_hardware

    overrides = [f"out={out.parent.as_posix()}", f"name={out.name}"]
    if steps:
        overrides.append(f"ppo.steps={steps}")
    name = "demo"
    if cpu_has_bfloat16() and not find_hardware().gpus:
        name = "demo-bf16"
        say(
            "This CPU multiplies bfloat16 itself: configs/demo-bf16.yaml. In float32: medusa-ppo"
            " ppo --config demo"
        )
    _ppo(load_config(preset(name), overrides), resume=False)


@app.command()
@command
def ppo(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the run's last checkpoint, with the same configuration."
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="With --resume: a key, or a section, that may differ."),
    ] = None,
) -> None:
    """Run the reference PPO loop on any model folder and any dataset.

    Example:  [bold]medusa-ppo ppo --config configs/gsm8k.yaml model.path=DIR ppo.steps=20
    companion.enabled=false[/bold]
    """
    from medusa_ppo.config.run_config import load_config

    if allow and not resume:
        raise UsageError(
            "--allow is for a run that goes on.",
            given=" ".join(allow),
            expected="--resume with it",
            do="Add --resume.",
        )
    _ppo(load_config(config, overrides or ()), resume, allow or ())


@app.command()
@command
def plan(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        bool | None,
        typer.Option("--gpus/--no-gpus", help="Plan for machines with GPUs; default: as this one."),
    ] = None,
) -> None:
    """Print who runs where, what moves in a step and what memory it takes. Starts nothing.

    Example:  [bold]medusa-ppo plan --config configs/one-node.yaml engine.replicas=4 --gpus[/bold]
    """
    from medusa_ppo.cli.plan import lines, make_plan
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.runtime.hardware import assumed_hardware

    settings = load_config(config, overrides or ())
    for line in lines(make_plan(settings, assumed_hardware(settings, gpus))):
        say(line)


def _ppo(config: RunConfig, resume: bool, allow: Sequence[str] = ()) -> None:
    from medusa_ppo.ppo.loop import run_ppo
    from medusa_ppo.ppo.run_progress import make_progress
    from medusa_ppo.runtime.processes import quiet_libraries

    quiet_libraries()
    with make_progress(console) as progress:
        summary = run_ppo(config, progress, resume=resume, allow=allow)
    _print_summary(summary, config.run_dir)


def _print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    from rich.table import Table

    from medusa_ppo.reports.tables import summary_rows

    table = Table(title=f"{run_dir.name}: what the heads were worth", show_header=False)
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    console.print(table)
    say(f"Report: {run_dir / 'report.html'}")
    say(f"Figures: {run_dir / 'summary.json'}")


app.command()(train)
app.command("eval")(evaluate)
app.command()(convert)
app.command()(push)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


@app.command()
@command
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, e.g. runs/demo.")],
    compare: Annotated[Path | None, typer.Option(help="Another run to lay over this one.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Refresh the page while the run goes on.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Where to write the page; default RUN/report.html.")
    ] = None,
) -> None:
    """Write the report of a run that has finished, was stopped, or still goes on.

    Example:  [bold]medusa-ppo report runs/demo --html report.html[/bold]
    """
    from medusa_ppo.reports import page as pages

    if follow:
        pages.follow(run, html, compare=compare, on_refresh=lambda path: say(f"Refreshed {path}"))
    else:
        say(f"Report: {pages.write_report(run, html, compare=compare)}")


@app.command()
@command
def doctor(
    overrides: Overrides = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Leave out the checks that start Ray, vLLM and an engine."),
    ] = False,
    distribution: Annotated[
        bool,
        typer.Option(
            "--distribution", help="Only this: are your engine's tokens samples of the model?"
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="With --distribution: a run's file, for its engine, sampling and prompts."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --distribution: folder or hub name of the actor.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="With --distribution: native heads directory; else random heads."),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=1000, help="With --distribution: tokens to sample with drafts, and without."
        ),
    ] = 20_000,
) -> None:
    """Check this machine: Python, packages, memory, Ray, and vLLM with our plug-in really loaded
    and sampling honestly.

    Example:  [bold]medusa-ppo doctor --distribution --model models/actor --heads heads-gsm8k
    sampling.top_p=0.9[/bold]
    """
    from medusa_ppo.cli.machine_checks import check_distribution, run_checks
    from medusa_ppo.config.run_config import load_config

    if distribution:
        given = [f"model.path={model}"] * bool(model) + [f"heads.path={heads}"] * bool(heads)
        settings = load_config(config, [*given, *(overrides or ())])
        with offline_progress() as progress:
            _tell(check_distribution(settings, tokens, progress, data=config is not None))
    else:
        _tell(run_checks(quick))


@app.command("check-loop")
@command
def check_loop(
    trainer: Annotated[str, typer.Argument(help="module:function, as in docs/hooks.md.")],
    medusa: Annotated[
        Path | None, typer.Option(help="YAML file; default: small heads that learn fast.")
    ] = None,
) -> None:
    """Ten checks of an adapter for a loop of your own: hooks, rows, states, versions, heads in the
    engine, gradients to the bit.

    Example:  [bold]medusa-ppo check-loop my_module:make_trainer[/bold]
    """
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.loops.check_loop import check_loop as findings

    _tell(findings(trainer, load_config(medusa).model_dump(mode="json") if medusa else None))


def _tell(checks: Iterable[Any]) -> None:
    """Print findings as they come; exit code 1 when one is not ok."""
    failed = 0
    for check in checks:
        warn = getattr(check, "warn", False)
        mark = (
            "[yellow]warn[/yellow]"
            if warn
            else "[green]ok  [/green]"
            if check.ok
            else "[red]FAIL[/red]"
        )
        console.print(
            f"{mark} {check.name:<22} {escape(check.found)}", highlight=False, soft_wrap=True
        )
        if not check.ok:
            failed += 1
            say(f"     do this: {check.do}")
    say("All checks passed." if not failed else f"{failed} checks failed.")
    if failed:
        raise typer.Exit(FAILED)


@app.command("check-setup")
@command
def check_setup(
    model: Annotated[
        str, typer.Option(help="Folder or hub name of the actor that the commands shall use.")
    ] = "Qwen/Qwen3-0.6B",
    data: Annotated[
        str, typer.Option(help="File with questions and answers, as GSM8K's.")
    ] = "data/train.jsonl",
) -> None:
    """Print the five commands that show that a setup with GPUs works: what each needs and must
    print. Starts nothing.

    Example:  [bold]medusa-ppo check-setup --model models/my-actor --data data/train.jsonl[/bold]
    """
    from medusa_ppo.cli.machine_checks import setup_steps
    from medusa_ppo.reports.store import gpu_names

    lines = [f"GPUs here: {'; '.join(gpu_names()) or 'none'}"]
    for number, step in enumerate(setup_steps(model, data), 1):
        words = ", ".join(repr(word) for word in step.prints)
        lines += [
            "",
            f"{number}. Shows that {step.shows}.",
            f"   needs:        {step.needs}",
            f"   run:          {step.command}",
        ]
        lines += [f"   must print:   {words}", f"                 {step.means}"]
    for line in lines:
        say(line)
