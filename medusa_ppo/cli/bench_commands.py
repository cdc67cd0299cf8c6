"""`medusa-ppo bench rollout`, `heads`, `swap` and `companion`: measure on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from heads.errors import UsageError
from medusa_ppo.bench.bench_options import CompanionBench, HeadsBench, RolloutBench, SwapBench
from medusa_ppo.bench.bench_page import write_bench
from medusa_ppo.cli.command_options import check_outputs, options_from
from medusa_ppo.cli.input_checks import ModelFile, check_data, check_heads, check_model
from medusa_ppo.runtime.console import OfflineProgress, command, console, offline_progress, say

bench = typer.Typer(
    name="bench",
    help=(
        "Measure on this machine: the variants take turns, and only ratios within a round are "
        "compared."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Out = Annotated[
    Path,
    typer.Option(
        "--json", help="File for the figures; a table (.md) and a plot (.svg) go next to it."
    ),
]


@bench.command()
@command
@options_from(RolloutBench)
def rollout(options: RolloutBench, out: Out = Path("bench/rollout.json")) -> None:
    """Compare tokens/s of no speculation, stock vLLM Medusa, n-gram drafts and ours, with K fixed
    and with K chosen at every step.

    Example:  [bold]medusa-ppo bench rollout --model models/actor --heads heads-gsm8k
    --data data/test.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    model = _check(options, out)
    check_heads(options.heads, model)
    if options.stock_heads:
        check_heads(options.stock_heads, model)
    check_data(options.data)
    # Imported when the command runs: torch and vLLM take seconds to load, and --help must not.
    from medusa_ppo.bench import rollout_speed as part

    _measure(options, part.run_rollout, part.table, part.verdict, part.plot, out=out)


@bench.command()
@command
@options_from(HeadsBench)
def heads(options: HeadsBench, out: Out = Path("bench/heads.json")) -> None:
    """Compare kinds and losses of heads by replay, on the same on-policy tokens, and race our
    training against the original recipe.

    Example:  [bold]medusa-ppo bench heads --model models/actor
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    _check(options, out)
    check_data(options.data)
    from medusa_ppo.bench import heads_table as part

    _measure(options, part.run_heads, part.table, part.verdict, out=out)


@bench.command()
@command
@options_from(SwapBench)
def swap(options: SwapBench, out: Out = Path("bench/swap.json")) -> None:
    """Time how long new heads take into a running engine, and how long reading their file takes.

    Example:  [bold]medusa-ppo bench swap --model models/actor --heads heads-gsm8k[/bold]
    """
    check_heads(options.heads, _check(options, out))
    from medusa_ppo.bench import plugin_costs as part

    _measure(options, part.run_swap, part.swap_table, part.swap_verdict, out=out)


@bench.command()
@command
@options_from(CompanionBench)
def companion(options: CompanionBench, out: Out = Path("bench/companion.json")) -> None:
    """Measure what the companion costs PPO on a CPU, even if there is a GPU: the same scoring and
    update, in turn with and without it, each process on its own core.

    Example:  [bold]medusa-ppo bench companion --model models/actor
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    _check(options, out)
    check_data(options.data)
    from medusa_ppo.bench import plugin_costs as part

    _measure(options, part.run_companion, part.companion_table, part.companion_verdict, out=out)


def _check(options: Any, out: Path) -> ModelFile:
    """What all benchmarks check first: where the figures go, and the model, whose config.json is
    returned.
    """
    # These names are for the page and the picture, which would replace the figures.
    if out.suffix in (".md", ".svg"):
        raise UsageError(
            "The figures can't have this name: a table (.md) and a plot (.svg) go next to them.",
            given=f"--json {out}",
            expected=f"{out.with_suffix('.json')}",
            do="Correct --json.",
        )
    check_outputs(json=out)
    return check_model("--model", options.model)


def _measure(
    options: Any,
    run: Callable[[Any, OfflineProgress], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], Any],
    verdict: Callable[[Mapping[str, Any]], list[str]],
    plot: Callable[[Mapping[str, Any]], str] = lambda result: "",
    *,
    out: Path,
) -> None:
    """Run a benchmark, print its table and write the files."""
    from rich.table import Table

    with offline_progress() as progress:
        result = run(options, progress)
    header, *rows = table(result)
    sentences = verdict(result)
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for line in sentences:
        say(line)
    # Print first: an unwritable folder must not lose an hour's figures.
    for path in write_bench(out, options, result, [header, *rows], sentences, plot(result)):
        say(f"Written: {path}")
