"""`medusa-ppo train`, `eval`, `convert` and `push`: heads without PPO, on anyone's model and data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from medusa_ppo.console import command, line_breaks, offline_progress, say
from medusa_ppo.standalone.train_options import Dtype, Kind, Loss, TrainOptions

Model = Annotated[str, typer.Option(help="Folder or hub name of a transformers causal LM.")]
Data = Annotated[str, typer.Option(help="JSONL, Parquet, CSV or text file, a folder of them (RUN/rollouts), or a hub name.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")]
Respond = Annotated[bool, typer.Option("--respond", help="Messages are prompts: the model answers in place of their last answer.")]


@command
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder of heads, a medusa_lm_head file, or hf://owner/name.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New folder for the heads.")],
    to: Annotated[
        Literal["native", "vllm", "fasterdecoding", "medusa-1.0", "tgi-v1", "tgi-v2", "modelopt"],
        typer.Option(help="Format to write; the source's is found out."),
    ],
    model: Annotated[str, typer.Option(help="Folder of the base model, where its lm_head or its weights go into the target.")] = "",
) -> None:
    """Convert heads of kind medusa from any Medusa format to another. What can't be held is refused by name.

    Example:  [bold]medusa-ppo convert heads-gsm8k heads-vllm --to vllm --model models/actor[/bold]
    """
    from medusa_ppo.exchange.convert import convert as convert_heads
    from medusa_ppo.exchange.hub import local_heads

    done = convert_heads(local_heads(source), target, to, model, say)
    sizes = done.config
    say(f"{done.source} -> {done.target}: {sizes.num_heads} heads of {sizes.num_layers} layers, {sizes.lm_head} lm_head, in {target}")
    for note in done.notes:
        say(f"  note: {note}")


@command
def push(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="Native heads directory.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the hub; made when it isn't there.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private when it is made.")] = False,
    figures: Annotated[list[Path] | None, typer.Option("--eval", help="JSON file of `medusa-ppo eval --json`, for the model card.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the model card, push nothing.")] = False,
) -> None:
    """Push heads to the model hub, with a model card that says what was measured and how.

    The hub's token is the one of `hf auth login` or HF_TOKEN.

    Example:  [bold]medusa-ppo push heads-gsm8k me/gsm8k-4m-medusa --private --eval eval.json[/bold]
    """
    from medusa_ppo.exchange.hub import model_card, push_heads

    if dry_run:
        say(model_card(heads, repo, figures or ()))
        return
    say(f"Pushed: {push_heads(heads, repo, private=private, figures=figures or ())}")


DEFAULT = TrainOptions  # The class has the defaults.


@command
def train(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the heads (native checkpoint) and train.jsonl.")],
    kind: Annotated[Kind, typer.Option(help="Kind of the heads.")] = DEFAULT.kind,
    num_heads: Annotated[int, typer.Option(min=1, help="K, the number of heads.")] = DEFAULT.num_heads,
    loss: Annotated[Loss, typer.Option(help="Loss of the heads.")] = DEFAULT.loss,
    template: Annotated[
        str, typer.Option(help="Prompt template with the row's fields in braces; the model writes the responses.", callback=line_breaks)
    ] = "",
    column: Annotated[str, typer.Option(help="Column with full texts, or chat messages (only the assistant's turns are trained on).")] = "",
    respond: Respond = False,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data row by row, and only as much as is needed.")] = False,
    max_train_tokens: Annotated[int, typer.Option(min=1, help="Response tokens to train on.")] = DEFAULT.max_train_tokens,
    max_minutes: Annotated[float, typer.Option(min=0, help="Stop training after this many minutes; 0: no limit.")] = DEFAULT.max_minutes,
    target_mal: Annotated[float, typer.Option(min=0, help="Stop at this mean acceptance length by replay; 0: never.")] = DEFAULT.target_mal,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the tokens.")] = DEFAULT.epochs,
    learning_rate: Annotated[float, typer.Option(help="AdamW step size at its height; a cosine ends it.")] = DEFAULT.learning_rate,
    batch_positions: Annotated[int, typer.Option(min=1, help="Positions per micro-batch.")] = DEFAULT.batch_positions,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")] = DEFAULT.accumulate,
    workers: Annotated[
        int, typer.Option(min=1, help="Ray processes that train together, each on its own sequences; a GPU each.")
    ] = DEFAULT.workers,
    dtype: Annotated[Dtype, typer.Option(help="Of the model, its hidden states and all products.")] = DEFAULT.dtype,
    cache_bytes: Annotated[
        int, typer.Option(min=0, help="Most bytes of hidden states kept between epochs; 0: none.")
    ] = DEFAULT.cache_bytes,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the responses.")] = DEFAULT.temperature,
    max_new_tokens: NewTokens = DEFAULT.max_new_tokens,
    seed: Seed = DEFAULT.seed,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew where an interrupted training would go on.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes, memory and time, start nothing.")] = False,
) -> None:
    """Train heads for any causal LM on any dataset: the model's own responses, a PPO run's rollouts, full texts, or chats.
    Interrupted, it goes on.

    Example:  [bold]medusa-ppo train --model models/actor --data data/train.jsonl
    --template 'Question: {question}\\nAnswer:' --out heads-gsm8k[/bold]
    """
    given = dict(locals())  # The fields of TrainOptions have the names of these options.
    del given["dry_run"]
    options = TrainOptions(**given)
    if dry_run:
        from medusa_ppo.standalone.train import plan_training

        for name, value in plan_training(options):
            say(f"{name:<28}{value}")
        return
    from medusa_ppo.standalone.train import train_heads

    with offline_progress() as progress:
        result = train_heads(options, progress)
    length = result["replay_mean_acceptance_length"]
    say(f"Heads: {out}   replay mean acceptance length {length:.3f}")


@command
def evaluate(
    model: Model,
    heads: Annotated[str, typer.Option(help="Native heads directory, or hf://owner/name.")],
    data: Data,
    template: Annotated[str, typer.Option(help="Prompt template with the row's fields in braces.", callback=line_breaks)] = "",
    column: Annotated[str, typer.Option(help="Column with prompts, or with chat messages whose last answer the model writes.")] = "",
    engine: Annotated[
        Literal["replay", "vllm"], typer.Option(help="`replay`: from rollouts alone; `vllm`: the engine's own counters.")
    ] = "replay",
    draft: Annotated[Literal["one-hot", "sampled"], typer.Option(help="How drafts are drawn.")] = "one-hot",
    draft_temperature: Annotated[float, typer.Option(help="Temperature of sampled drafts.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    temperatures: Annotated[str, typer.Option(help="Several sampling temperatures, e.g. 0.3,0.7,1.0; the first is the headline.")] = "",
    top_p: Annotated[float, typer.Option(help="Nucleus mass; 1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: off.")] = 0,
    category: Annotated[str, typer.Option(help="Column whose values the figures are also given for.")] = "",
    compare: Annotated[Path | None, typer.Option(help="Other heads, measured on the same rollouts (vllm: on the same prompts).")] = None,
    max_new_tokens: NewTokens = 128,
    limit: Annotated[int, typer.Option(min=0, help="Prompts to use; 0: all.")] = 256,
    seed: Seed = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a report in Markdown to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of its own to this file.")] = None,
) -> None:
    """Measure what heads are worth: mean acceptance length, per position, with a confidence interval.

    Example:  [bold]medusa-ppo eval --model models/actor --heads heads-gsm8k
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:' --engine vllm[/bold]
    """
    given = dict(locals())  # The fields of EvalOptions have the names of these options.
    files = {name: given.pop(name) for name in ("json_file", "markdown", "html")}
    given["temperatures"] = numbers_of(temperatures, float, "temperatures", "like 0.3,0.7,1.0", "--temperatures")
    from medusa_ppo.exchange.hub import local_heads
    from medusa_ppo.standalone.evaluate import EvalOptions, evaluate_heads

    given["heads"] = local_heads(heads)
    with offline_progress() as progress:
        result = evaluate_heads(EvalOptions(**given), progress)
    _show(result, files)


def _show(result: dict[str, Any], files: dict[str, Path | None]) -> None:
    """Write the files that were asked for, and say the figures."""
    from medusa_ppo.files import write_atomic
    from medusa_ppo.reports.evaluation import lines, markdown_report, render_eval_page

    if files["json_file"]:
        write_atomic(files["json_file"], json.dumps(result, indent=1) + "\n")
    if files["markdown"]:
        write_atomic(files["markdown"], markdown_report(result))
    if files["html"]:
        write_atomic(files["html"], render_eval_page(result))
    for line in lines(result):
        say(line)


def words_of(text: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers_of(text: str, kind: Callable[[str], float], what: str, expected: str, option: str) -> tuple[float, ...]:
    """Positive numbers from a list with commas. ConfigError when one is none."""
    from heads.errors import ConfigError

    try:
        numbers = tuple(kind(word) for word in words_of(text))
    except ValueError:
        numbers = (0,)
    if any(number <= 0 for number in numbers):
        raise ConfigError(f"These are no {what}.", given=text, expected=expected, do=f"Correct {option}.")
    return numbers
