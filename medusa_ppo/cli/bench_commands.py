"""`medusa-ppo bench`: what heads are worth on this machine, as ratios within one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from medusa_ppo.cli.heads_commands import Data, Model, Seed, numbers_of, words_of
from medusa_ppo.console import OfflineProgress, command, console, line_breaks, offline_progress, say

bench = typer.Typer(
    name="bench",
    help="Measure on this machine: arms take turns within one run, and only ratios within a round are compared.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Heads = Annotated[Path, typer.Option(help="Native heads directory.")]
Template = Annotated[str, typer.Option(help="Prompt template with the row's fields in braces.", callback=line_breaks)]
Out = Annotated[Path, typer.Option("--json", help="File for the figures; the table goes beside it as .md, a plot as .svg.")]


@bench.command()
@command
def rollout(
    model: Model,
    heads: Heads,
    data: Data,
    template: Template,
    stock_heads: Annotated[str, typer.Option(help="Heads of kind medusa for vLLM's own Medusa; empty: without that arm.")] = "",
    batches: Annotated[str, typer.Option(help="Numbers of running sequences.")] = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that every arm takes part in.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 96,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    draft_temperature: Annotated[float, typer.Option(help="Draft temperature of our heads; 0: one-hot drafts.")] = 1.0,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Draft from so many of the most frequent tokens; 0: from all.")] = 0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Dtype of the engines.")] = "float32",
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile: starts sooner, and is not vLLM's default.")] = False,
    ngram: Annotated[bool, typer.Option(help="With an arm of n-gram drafts.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each engine.")] = 2,
    seed: Seed = 0,
    out: Out = Path("bench/rollout.json"),
) -> None:
    """Tokens/s of no speculation, stock vLLM Medusa, n-gram drafts and ours, with K fixed and K chosen at every step.

    Example:  [bold]medusa-ppo bench rollout --model models/actor --heads heads-gsm8k
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    given = dict(locals())  # The fields of RolloutBench have the names of these options.
    from medusa_ppo.bench import rollout_speed as part

    del given["out"]
    given["heads"] = str(heads)
    given["batches"] = numbers_of(batches or "none", int, "numbers of sequences", "like 1,4,16,64", "--batches")
    _measure(part.RolloutBench(**given), part.run_rollout, part.table, part.verdict, out, part.plot)


@bench.command()
@command
def heads(
    model: Model,
    data: Data,
    template: Template,
    train_tokens: Annotated[int, typer.Option(min=1, help="Response tokens to train on.")] = 100_000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the tokens.")] = 4,
    num_heads: Annotated[int, typer.Option(min=1, help="K, the number of heads.")] = 4,
    kinds: Annotated[str, typer.Option(help="Kinds of heads to compare.")] = "medusa,markov,hydra",
    losses: Annotated[str, typer.Option(help="Losses to compare.")] = "ce,tv,ce_tv,kl,kl_tv",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 96,
    seed: Seed = 0,
    out: Out = Path("bench/heads.json"),
) -> None:
    """Kinds x losses of heads on the same on-policy tokens, judged by replay; and the speed of training against the original recipe's.

    Example:  [bold]medusa-ppo bench heads --model models/actor
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    given = dict(locals())  # As above.
    from medusa_ppo.bench import heads_table as part

    del given["out"]
    given |= {"kinds": words_of(kinds), "losses": words_of(losses)}
    _measure(part.HeadsBench(**given), part.run_heads, part.table, part.verdict, out)


@bench.command()
@command
def swap(
    model: Model,
    heads: Heads,
    repeats: Annotated[int, typer.Option(min=1, help="Swaps to time.")] = 10,
    seed: Seed = 0,
    out: Out = Path("bench/swap.json"),
) -> None:
    """Seconds to put new heads into a running engine, beside the seconds that reading their file takes.

    Example:  [bold]medusa-ppo bench swap --model models/actor --heads heads-gsm8k[/bold]
    """
    from medusa_ppo.bench import plugin_costs as part

    options = part.SwapBench(model, str(heads), repeats, seed)
    _measure(options, part.run_swap, part.swap_table, part.swap_verdict, out)


@bench.command()
@command
def companion(
    model: Model,
    data: Data,
    template: Template,
    kind: Annotated[Literal["medusa", "markov", "hydra"], typer.Option(help="Kind of the heads.")] = "hydra",
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of PPO steps with and without the companion.")] = 8,
    prompts_per_step: Annotated[int, typer.Option(min=1, help="Prompts of a PPO step, 4 responses each.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 64,
    seed: Seed = 0,
    out: Out = Path("bench/companion.json"),
) -> None:
    """What the companion costs PPO: the same score and update with and without it, in turn, each process on its own core.

    Example:  [bold]medusa-ppo bench companion --model models/actor
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import plugin_costs as part

    options = part.CompanionBench(model, data, template, kind, rounds, prompts_per_step, max_new_tokens, seed)
    _measure(options, part.run_companion, part.companion_table, part.companion_verdict, out)


def _measure(
    options: Any,
    run: Callable[[Any, OfflineProgress], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], Any],
    verdict: Callable[[Mapping[str, Any]], list[str]],
    out: Path,
    plot: Callable[[Mapping[str, Any]], str] = lambda result: "",
) -> None:
    """Run a bench, show its table and write the files."""
    from rich.table import Table

    from medusa_ppo.bench.measuring import write_bench

    with offline_progress() as progress:
        result = run(options, progress)
    (header, *rows), sentences = table(result), verdict(result)
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for line in sentences:
        say(line)
    for path in write_bench(out, options, result, [header, *rows], sentences, plot(result)):
        say(f"Written: {path}")
