"""`medusa-ppo bench`: what heads are worth on this machine, as ratios within one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from medusa_ppo.console import command, console

bench = typer.Typer(
    name="bench",
    help="Measure on this machine: arms take turns within one run, and only ratios within a round are compared.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Model = Annotated[str, typer.Option(help="Folder or hub name of a transformers causal LM.")]
Heads = Annotated[Path, typer.Option(help="Native heads directory.")]
Data = Annotated[str, typer.Option(help="JSONL, Parquet, CSV or text file, or a hub name.")]
Template = Annotated[str, typer.Option(help="Prompt template with the row's fields in braces.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
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

    Example:  [bold]medusa-ppo bench rollout --model ../shared/actors/gsm8k-4m --heads heads-gsm8k
    --data ../shared/data/gsm8k/train.jsonl --template '<|endoftext|>Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import rollout_speed as part

    sizes = _numbers(batches)
    options = part.RolloutBench(
        model,
        str(heads),
        data,
        template,
        stock_heads,
        sizes,
        rounds,
        max_new_tokens,
        temperature,
        draft_temperature,
        draft_vocab,
        dtype,
        eager,
        ngram,
        threads,
        seed,
    )
    with _progress() as progress:
        result = part.run_rollout(options, progress)
    _finish(out, options, result, part.table(result), part.verdict(result), part.plot(result))


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

    Example:  [bold]medusa-ppo bench heads --model ../shared/actors/gsm8k-4m
    --data ../shared/data/gsm8k/train.jsonl --template '<|endoftext|>Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import heads_table as part

    options = part.HeadsBench(
        model, data, template, train_tokens, epochs, num_heads, _words(kinds), _words(losses), max_new_tokens, seed=seed
    )
    with _progress() as progress:
        result = part.run_heads(options, progress)
    _finish(out, options, result, part.table(result), part.verdict(result))


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

    Example:  [bold]medusa-ppo bench swap --model ../shared/actors/gsm8k-4m --heads heads-gsm8k[/bold]
    """
    from medusa_ppo.bench import swap_time as part

    options = part.SwapBench(model, str(heads), repeats, seed)
    with _progress() as progress:
        result = part.run_swap(options, progress)
    _finish(out, options, result, part.table(result), part.verdict(result))


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

    Example:  [bold]medusa-ppo bench companion --model ../shared/actors/gsm8k-4m
    --data ../shared/data/gsm8k/train.jsonl --template '<|endoftext|>Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import companion_cost as part

    options = part.CompanionBench(model, data, template, kind, rounds, prompts_per_step, max_new_tokens, seed)
    with _progress() as progress:
        result = part.run_companion(options, progress)
    _finish(out, options, result, part.table(result), part.verdict(result))


def _progress() -> Any:
    from medusa_ppo.console import OfflineProgress
    from medusa_ppo.processes import quiet_libraries

    quiet_libraries()
    return OfflineProgress(console)


def _finish(out: Path, options: Any, result: Mapping[str, Any], table: list[list[str]], verdict: list[str], plot: str = "") -> None:
    """Show the table and write the files."""
    from rich.table import Table

    from medusa_ppo.bench.measuring import write_bench

    shown = Table(*table[0])
    for row in table[1:]:
        shown.add_row(*row)
    console.print(shown)
    for sentence in verdict:
        console.print(sentence, highlight=False)
    for path in write_bench(out, options, result, table, verdict, plot):
        console.print(f"Written: {path}", highlight=False, soft_wrap=True)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    from heads.errors import ConfigError

    try:
        numbers = tuple(int(word) for word in _words(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError("These are not numbers of sequences.", given=text, expected="like 1,4,16,64", do="Correct --batches.")
    return numbers
