"""`medusa-ppo demo`, `ppo`, `plan` and `report`: a PPO run, before, during and after it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heads.errors import UsageError
from medusa_ppo.cli.command_options import Config, Overrides, check_folder
from medusa_ppo.cli.input_checks import check_run
from medusa_ppo.runtime.console import LINE_WIDTH, command, console, say

if TYPE_CHECKING:
    from medusa_ppo.config.run_config import RunConfig


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="PPO steps; default: the configuration's.")
    ] = None,
) -> None:
    """Run everything on an embedded example, with nothing to prepare: 10 to 20 minutes on two cores
    the first time.

    Trains a tiny actor on first use, runs PPO with drafting and the companion, then times steps
    with and without the plugin.

    Example:  [bold]medusa-ppo demo --steps 16[/bold]
    """
    check_folder("--out", out)
    from medusa_ppo.config.config_file import preset
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.demo.dtype_choice import time_bfloat16
    from medusa_ppo.runtime.hardware import find_hardware
    from medusa_ppo.runtime.processes import quiet_libraries

    # The configuration gives a run's folder as OUT/NAME.
    overrides = [f"out={out.parent.as_posix()}", f"name={out.name}"]
    if steps:
        overrides.append(f"ppo.steps={steps}")
    hardware = find_hardware()
    bfloat16 = hardware.bfloat16
    if not hardware.gpus:
        quiet_libraries()
        timed = time_bfloat16()
        bfloat16 = timed.taken
        say(str(timed))
    name = "demo-bf16" if bfloat16 else "demo"
    say(f"The configuration is configs/{name}.yaml.")
    _run(load_config(preset(name), overrides), resume=False)


@command
def ppo(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the run's last checkpoint, with the same configuration."
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="With --resume: a key or section that may have changed."),
    ] = None,
) -> None:
    """Run the reference PPO loop on any model folder and any dataset.

    Example:  [bold]medusa-ppo ppo --config configs/gsm8k.yaml model.path=DIR ppo.steps=20
    companion.share=0.1[/bold]
    """
    from medusa_ppo.config.run_config import load_config

    if allow and not resume:
        raise UsageError(
            "--allow only works with --resume.",
            given=" ".join(allow),
            expected="--resume with it",
            do="Add --resume.",
        )
    _run(load_config(config, overrides or ()), resume, allow or ())


@command
def plan(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        bool | None,
        typer.Option(
            "--gpus/--no-gpus", help="Plan for machines with or without GPUs; default: this one's."
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="h100|h200|a100",
            help="Plan for the memory of such GPUs, and predict what drafting would gain there;"
            " implies --gpus.",
        ),
    ] = "",
) -> None:
    """Print who runs where, what moves in a step and how much memory it takes. Starts nothing.

    Example:  [bold]medusa-ppo plan --config configs/one-node.yaml engine.replicas=4 --gpus[/bold]
    """
    from medusa_ppo.cli.plan import lines, make_plan
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.predict.gpus import find_gpu
    from medusa_ppo.runtime.hardware import assumed_hardware

    settings = load_config(config, overrides or ())
    hardware = assumed_hardware(settings, bool(gpu) or gpus)
    if gpu:
        memory = int(find_gpu(gpu).memory_bytes)
        found = f"{hardware.found}, each with the memory of one {gpu}"
        hardware = replace(hardware, gpu_bytes=memory, bfloat16=True, found=found)
    for line in lines(make_plan(settings, hardware)):
        say(line)
    if gpu:
        say(f"\n{_worth(settings, gpu)}")


@command
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, e.g. runs/demo.")],
    compare: Annotated[
        Path | None, typer.Option(help="Another run to compare with this one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep updating the page while the run goes on.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write the report of a run that has finished, was stopped, or is still going.

    Example:  [bold]medusa-ppo report runs/demo --html report.html[/bold]
    """
    from medusa_ppo.reports import page as pages

    if follow:
        pages.follow(run, html, compare=compare, on_refresh=lambda path: say(f"Refreshed {path}"))
    else:
        say(f"Report: {pages.write_report(run, html, compare=compare)}")


def _worth(config: RunConfig, gpu: str) -> str:
    """What drafting would gain for the run on such GPUs, before there are heads."""
    from medusa_ppo.ppo.role_memory import model_config
    from medusa_ppo.predict.asking import assumed, question_of, unpredicted
    from medusa_ppo.predict.gpus import find_gpu
    from medusa_ppo.predict.predict_options import PredictOptions
    from medusa_ppo.predict.prediction import predict_on_gpu

    figures = find_gpu(gpu)
    accepted = assumed(config.heads.num_heads)
    options, raw = PredictOptions(), model_config(config.model.path)
    if setting := unpredicted(options, config, raw):
        return f"With {setting} rollouts on vLLM's V2 runner are not predicted."
    question = question_of(options, raw, accepted, config)
    return f"{predict_on_gpu(question, figures).sentence}\nAccepted: {accepted.said}."


def _run(config: RunConfig, resume: bool, allow: Sequence[str] = ()) -> None:
    """Run PPO with its progress on the terminal, then print what the heads were worth."""
    check_folder("out/name", config.run_dir)
    check_run(config)
    from medusa_ppo.ppo.loop import run_ppo
    from medusa_ppo.ppo.run_progress import make_progress
    from medusa_ppo.runtime.processes import quiet_libraries

    quiet_libraries()
    with make_progress(console) as progress:
        summary = run_ppo(config, progress, resume=resume, allow=allow)
    _print_summary(summary, config.run_dir)


def _print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    from rich.table import Table

    from medusa_ppo.reports.plain_words import in_plain_words
    from medusa_ppo.reports.tables import summary_rows

    # The sentences are what most readers want; the table has the figures.
    if sentences := in_plain_words(summary):
        say("\n" + "\n".join(textwrap.fill(sentence, LINE_WIDTH) for sentence in sentences) + "\n")
    table = Table(title=f"{run_dir.name}: what the heads were worth", show_header=False)
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    console.print(table)
    say(f"Report: {run_dir / 'report.html'}")
    say(f"Figures: {run_dir / 'summary.json'}")
