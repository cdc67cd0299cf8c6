"""The command line: each command parses its options and hands over; heavy libraries load only inside a command."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_ppo import __version__
from medusa_ppo.cli_bench import bench
from medusa_ppo.cli_formats import convert, push
from medusa_ppo.console import FAILED, Debug, command, console, escape

if TYPE_CHECKING:
    from medusa_ppo.config import RunConfig

app = typer.Typer(
    name="medusa-ppo",
    help="Medusa draft heads for the actor of a PPO loop: trained while it runs, served by vLLM, nothing that is learned changes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command()(convert)
app.command()(push)


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
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.command()
@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="PPO steps; default: as in configs/demo.yaml.")] = None,
) -> None:
    """Run the whole job on an embedded example: about 10 minutes on two cores, nothing to prepare.

    Trains a tiny actor on first use, then PPO with drafting and the companion, then writes a report.

    Example:  [bold]medusa-ppo demo --steps 16[/bold]
    """
    from medusa_ppo.config import load_config, preset

    overrides = [f"out={out.parent.as_posix()}", f"name={out.name}"]
    if steps:
        overrides.append(f"ppo.steps={steps}")
    _ppo(load_config(preset("demo"), overrides), resume=False)


@app.command()
@command
def ppo(
    config: Annotated[Path, typer.Option(help="YAML file of the run; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys on top of the file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Run the reference PPO loop on any model folder and any dataset.

    Example:  [bold]medusa-ppo ppo --config configs/gsm8k-4m.yaml ppo.steps=20 companion.enabled=false[/bold]
    """
    from medusa_ppo.config import load_config

    _ppo(load_config(config, overrides or ()), resume)


def _ppo(config: RunConfig, resume: bool) -> None:
    from medusa_ppo.ppo.loop import run_ppo
    from medusa_ppo.ppo.progress import make_progress
    from medusa_ppo.runtime import quiet_libraries

    quiet_libraries()
    with make_progress(console) as progress:
        summary = run_ppo(config, progress, resume=resume)
    _print_summary(summary, config.run_dir)


def _print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    from rich.table import Table

    from medusa_ppo.reports.markdown import summary_rows

    table = Table(title=f"{run_dir.name}: what the heads were worth", show_header=False)
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    console.print(table)
    console.print(f"Report: {run_dir / 'report.html'}", highlight=False, soft_wrap=True)
    console.print(f"Figures: {run_dir / 'summary.json'}", highlight=False, soft_wrap=True)


@app.command()
@command
def train(
    model: Annotated[str, typer.Option(help="Folder or hub name of a transformers causal LM.")],
    data: Annotated[str, typer.Option(help="JSONL, Parquet, CSV or text file, or a hub name.")],
    out: Annotated[Path, typer.Option(help="Folder for the heads (native checkpoint) and train.jsonl.")],
    kind: Annotated[Literal["medusa", "markov", "hydra"], typer.Option(help="Kind of the heads.")] = "hydra",
    num_heads: Annotated[int, typer.Option(min=1, help="K, the number of heads.")] = 4,
    loss: Annotated[Literal["ce", "tv", "ce_tv", "kl", "kl_tv"], typer.Option(help="Loss of the heads.")] = "ce_tv",
    template: Annotated[str, typer.Option(help="Prompt template with the row's fields in braces; the model writes the responses.")] = "",
    column: Annotated[str, typer.Option(help="Column with full texts to train on as they are.")] = "",
    max_train_tokens: Annotated[int, typer.Option(min=1, help="Response tokens to train on.")] = 100_000,
    max_minutes: Annotated[float, typer.Option(min=0, help="Stop after this many minutes; 0: no limit.")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the tokens.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="AdamW step size at its height; a cosine ends it.")] = 2e-3,
    batch_positions: Annotated[int, typer.Option(min=1, help="Positions per optimizer step.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the responses.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and memory, start nothing.")] = False,
) -> None:
    """Train heads for any causal LM on any dataset, on the model's own responses or on full texts.

    Example:  [bold]medusa-ppo train --model ../shared/actors/gsm8k-4m --data ../shared/data/gsm8k/train.jsonl
    --template '<|endoftext|>Question: {question}\\nAnswer:' --out heads-gsm8k[/bold]
    """
    from medusa_ppo.offline.train import TrainOptions, plan_training, train_heads

    options = TrainOptions(
        model,
        data,
        out,
        kind,
        num_heads,
        loss,
        template,
        column,
        max_train_tokens,
        max_minutes,
        epochs,
        learning_rate,
        batch_positions,
        temperature,
        max_new_tokens,
        seed,
    )
    if dry_run:
        for name, value in plan_training(options):
            console.print(f"{name:<28}{value}", highlight=False, soft_wrap=True)
        return
    from medusa_ppo.offline.progress import OfflineProgress
    from medusa_ppo.runtime import quiet_libraries

    quiet_libraries()
    with OfflineProgress(console) as progress:
        result = train_heads(options, progress)
    console.print(
        f"Heads: {out}   replay mean acceptance length {result['replay_mean_acceptance_length']:.3f}", highlight=False, soft_wrap=True
    )


@app.command("eval")
@command
def evaluate(
    model: Annotated[str, typer.Option(help="Folder or hub name of a transformers causal LM.")],
    heads: Annotated[str, typer.Option(help="Native heads directory, or hf://owner/name.")],
    data: Annotated[str, typer.Option(help="JSONL, Parquet, CSV or text file, or a hub name.")],
    template: Annotated[str, typer.Option(help="Prompt template with the row's fields in braces.")] = "",
    engine: Annotated[
        Literal["replay", "vllm"], typer.Option(help="`replay`: from rollouts alone; `vllm`: the engine's own counters.")
    ] = "replay",
    draft: Annotated[Literal["one-hot", "sampled"], typer.Option(help="How drafts are drawn.")] = "one-hot",
    draft_temperature: Annotated[float, typer.Option(help="Temperature of sampled drafts.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass; 1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: off.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 128,
    limit: Annotated[int, typer.Option(min=0, help="Prompts to use; 0: all.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure what heads are worth: mean acceptance length, per position, with a confidence interval.

    Example:  [bold]medusa-ppo eval --model ../shared/actors/gsm8k-4m --heads heads-gsm8k
    --data ../shared/data/gsm8k/train.jsonl --template '<|endoftext|>Question: {question}\\nAnswer:' --engine vllm[/bold]
    """
    from medusa_ppo.offline.evaluate import EvalOptions, evaluate_heads
    from medusa_ppo.offline.hub import local_heads
    from medusa_ppo.offline.progress import OfflineProgress
    from medusa_ppo.runtime import quiet_libraries

    quiet_libraries()
    options = EvalOptions(
        model, local_heads(heads), data, template, engine, draft, draft_temperature, temperature, top_p, top_k, max_new_tokens, limit, seed
    )
    with OfflineProgress(console) as progress:
        result = evaluate_heads(options, progress)
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    low, high = result["confidence_interval"]
    positions = "  ".join(f"{value:.3f}" for value in result["acceptance_per_position"])
    console.print(
        f"mean acceptance length   {result['mean_acceptance_length']:.3f}  (95 % interval {low:.3f} to {high:.3f}, {engine})",
        highlight=False,
    )
    console.print(f"acceptance per position  {positions}", highlight=False)
    console.print(f"tokens generated         {result['generated_tokens']} at {result['tokens_per_s']:.0f} tokens/s", highlight=False)


@app.command()
@command
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, e.g. runs/demo.")],
    compare: Annotated[Path | None, typer.Option(help="Another run to lay over this one.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Refresh the page while the run goes on.")] = False,
    html: Annotated[Path | None, typer.Option(help="Where to write the page; default RUN/report.html.")] = None,
) -> None:
    """Write the report of a run that has finished, was stopped, or still goes on.

    Example:  [bold]medusa-ppo report runs/demo --html report.html[/bold]
    """
    from medusa_ppo.reports import html as pages

    if follow:
        pages.follow(
            run, html, compare=compare, on_refresh=lambda path: console.print(f"Refreshed {path}", highlight=False, soft_wrap=True)
        )
        return
    path = pages.write_report(run, html, compare=compare)
    console.print(f"Report: {path}", highlight=False, soft_wrap=True)


@app.command()
@command
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the checks that start Ray and an engine.")] = False,
) -> None:
    """Check this machine: Python, packages, memory, Ray, and vLLM with our plug-in really loaded and sampling honestly.

    Example:  [bold]medusa-ppo doctor[/bold]
    """
    from medusa_ppo.doctor import run_checks

    failed = 0
    for check in run_checks(quick):
        mark = "[green]ok  [/green]" if check.ok else "[red]FAIL[/red]"
        console.print(f"{mark} {check.name:<22} {escape(check.found)}", highlight=False, soft_wrap=True)
        if not check.ok:
            failed += 1
            console.print(f"     do this: {escape(check.do)}", highlight=False, soft_wrap=True)
    console.print("All checks passed." if not failed else f"{failed} checks failed.", highlight=False)
    if failed:
        raise typer.Exit(FAILED)
