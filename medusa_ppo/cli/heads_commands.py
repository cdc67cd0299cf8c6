"""`medusa-ppo train`, `eval`, `serve`, `convert`, `push` and `bench`: heads without PPO, on
anyone's model and data.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from heads.errors import ConfigError
from medusa_ppo.bench.bench_options import CompanionBench, HeadsBench, RolloutBench, SwapBench
from medusa_ppo.bench.bench_page import write_bench
from medusa_ppo.offline.options import EvalOptions, TrainOptions
from medusa_ppo.runtime.console import OfflineProgress, command, console, offline_progress, say
from medusa_ppo.runtime.files import write_atomic


def takes(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command that is given one `kind`, a dataclass, first: its fields become options, where
    `Annotated` says how they are typed.

    A tuple is typed with commas. What else the command is given comes from options of its own.
    """
    hints = get_type_hints(kind, include_extras=True)
    typed = [
        field for field in dataclasses.fields(kind) if hasattr(hints[field.name], "__metadata__")
    ]

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            values = {field.name: given.pop(field.name) for field in typed}
            for field in typed:
                if isinstance(field.default, tuple):
                    values[field.name] = _parts(field, values[field.name], hints[field.name])
            function(kind(**values), **given)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        parameters = [
            *(_parameter(field, hints[field.name]) for field in typed),
            *(p.replace(kind=p.KEYWORD_ONLY) for p in own),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    if isinstance(default, tuple):
        hint = Annotated[(str, *hint.__metadata__)]
        default = ",".join(map(str, default))
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )


def _parts(field: dataclasses.Field[Any], text: str, hint: Any) -> tuple[Any, ...]:
    """Words, or numbers above 0 (from 0 on, where the option has min=0), with commas between them.
    ConfigError when one is none.
    """
    default: tuple[Any, ...] = field.default  # type: ignore[assignment]
    kind = get_args(get_args(hint)[0])[0]
    zero = hint.__metadata__[0].min == 0
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        parts = tuple(kind(word) for word in words)
    except ValueError:
        parts = (-1,)
    fits = all(isinstance(part, str) or part > 0 or (zero and part == 0) for part in parts)
    if not fits or (default and not parts):
        option = f"--{field.name.replace('_', '-')}"
        from_where = "from 0 on" if zero else "above 0"
        like = ",".join(map(str, default)) or ("0,1,4" if zero else "0.3,0.7,1.0")
        raise ConfigError(
            f"{option} takes numbers {from_where}.",
            given=text,
            expected=f"like {like}",
            do=f"Correct {option}.",
        )
    return parts


@command
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Folder of heads, a medusa_lm_head file, or hf://owner/name."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New folder for the heads.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="native|vllm|fasterdecoding|medusa-1.0|modelopt",
            help="Format to write; the source's is found out.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Folder of the base model, where its lm_head or its weights go into the target."
        ),
    ] = "",
) -> None:
    """Convert heads of kind medusa from any Medusa format to another. What can't be held is refused
    by name.

    Example:  [bold]medusa-ppo convert heads-gsm8k heads-vllm --to vllm --model models/actor[/bold]
    """
    from medusa_ppo.offline.convert import convert as convert_heads
    from medusa_ppo.offline.hub import local_heads

    done = convert_heads(local_heads(source), target, to, model, say)
    sizes = done.config
    say(
        f"{done.source} -> {done.target}: {sizes.num_heads} heads of {sizes.num_layers} layers,"
        f" {sizes.lm_head} lm_head, in {target}"
    )
    for note in done.notes:
        say(f"  note: {note}")


@command
def push(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="Native heads directory.")],
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="owner/name on the hub; made when it isn't there.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private when it is made.")
    ] = False,
    figures: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="JSON file of `medusa-ppo eval --json`, for the model card."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the model card, push nothing.")
    ] = False,
) -> None:
    """Push heads to the model hub, with a model card that says what was measured and how.

    The hub's token is the one of `hf auth login` or HF_TOKEN.

    Example:  [bold]medusa-ppo push heads-gsm8k me/gsm8k-4m-medusa --private --eval eval.json[/bold]
    """
    from medusa_ppo.offline.hub import model_card, push_heads

    if dry_run:
        say(model_card(heads, repo, figures or ()))
        return
    say(f"Pushed: {push_heads(heads, repo, private=private, figures=figures or ())}")


@command
@takes(TrainOptions)
def train(
    options: TrainOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, memory and time, start nothing.")
    ] = False,
) -> None:
    """Train heads for any causal LM on any dataset: the model's own responses, a PPO run's
    rollouts, full texts, or chats. Interrupted, it goes on.

    Example:  [bold]medusa-ppo train --model models/actor --data data/train.jsonl
    --template 'Question: {question}\\nAnswer:' --out heads-gsm8k[/bold]
    """
    if dry_run:
        from medusa_ppo.offline.scene import plan_training

        for name, value in plan_training(options):
            say(f"{name:<28}{value}")
        return
    from medusa_ppo.offline.train import train_heads

    with offline_progress() as progress:
        result = train_heads(options, progress)
    length = result["replay_mean_acceptance_length"]
    say(f"Heads: {options.out}   replay mean acceptance length {length:.3f}")


@command
@takes(EvalOptions)
def evaluate(
    options: EvalOptions,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a report in Markdown to this file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of its own to this file.")] = None,
) -> None:
    """Measure what heads are worth: mean acceptance length, per position, with a confidence
    interval.

    Example:  [bold]medusa-ppo eval --model models/actor --heads heads-gsm8k
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:' --engine vllm[/bold]
    """
    from medusa_ppo.offline.evaluate import evaluate_heads
    from medusa_ppo.offline.hub import local_heads
    from medusa_ppo.reports.evaluation import lines, markdown_report, render_eval_page

    with offline_progress() as progress:
        result = evaluate_heads(
            dataclasses.replace(options, heads=str(local_heads(options.heads))), progress
        )
    if json_file:
        write_atomic(json_file, json.dumps(result, indent=1) + "\n")
    if markdown:
        write_atomic(markdown, markdown_report(result))
    if html:
        write_atomic(html, render_eval_page(result))
    for line in lines(result):
        say(line)


@command
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder or hub name of the actor.")],
    heads: Annotated[
        Path, typer.Option(help="Folder of the heads; made (zero start) when it does not exist.")
    ],
    medusa: Annotated[
        Path | None, typer.Option(help="YAML file; read are heads, engine and seed.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this one need MEDUSA_PPO_TOKEN.")
    ] = "127.0.0.1",
) -> None:
    """Become a vLLM server that drafts and takes new heads, for a loop's server mode. More options
    are vLLM's own.

    Example:  [bold]medusa-ppo serve --model models/actor --heads heads/ --port 8000[/bold]
    """
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.loops.remote import serve as become_server

    become_server(model, str(heads), load_config(medusa), host, context.args)


bench = typer.Typer(
    name="bench",
    help=(
        "Measure on this machine: arms take turns within one run, and only ratios within a round"
        " are compared."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Out = Annotated[
    Path,
    typer.Option(
        "--json", help="File for the figures; the table goes beside it as .md, a plot as .svg."
    ),
]


@bench.command()
@command
@takes(RolloutBench)
def rollout(options: RolloutBench, out: Out = Path("bench/rollout.json")) -> None:
    """Tokens/s of no speculation, stock vLLM Medusa, n-gram drafts and ours, with K fixed and K
    chosen at every step.

    Example:  [bold]medusa-ppo bench rollout --model models/actor --heads heads-gsm8k
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import rollout_speed as part

    _measure(options, part.run_rollout, part.table, part.verdict, part.plot, out=out)


@bench.command()
@command
@takes(HeadsBench)
def heads(options: HeadsBench, out: Out = Path("bench/heads.json")) -> None:
    """Kinds x losses of heads on the same on-policy tokens, judged by replay; and the speed of
    training against the original recipe's.

    Example:  [bold]medusa-ppo bench heads --model models/actor
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import heads_table as part

    _measure(options, part.run_heads, part.table, part.verdict, out=out)


@bench.command()
@command
@takes(SwapBench)
def swap(options: SwapBench, out: Out = Path("bench/swap.json")) -> None:
    """Seconds to put new heads into a running engine, beside the seconds that reading their file
    takes.

    Example:  [bold]medusa-ppo bench swap --model models/actor --heads heads-gsm8k[/bold]
    """
    from medusa_ppo.bench import plugin_costs as part

    _measure(options, part.run_swap, part.swap_table, part.swap_verdict, out=out)


@bench.command()
@command
@takes(CompanionBench)
def companion(options: CompanionBench, out: Out = Path("bench/companion.json")) -> None:
    """What the companion costs PPO: the same score and update with and without it, in turn, each
    process on its own core.

    Example:  [bold]medusa-ppo bench companion --model models/actor
    --data data/train.jsonl --template 'Question: {question}\\nAnswer:'[/bold]
    """
    from medusa_ppo.bench import plugin_costs as part

    _measure(options, part.run_companion, part.companion_table, part.companion_verdict, out=out)


def _measure(
    options: Any,
    run: Callable[[Any, OfflineProgress], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], Any],
    verdict: Callable[[Mapping[str, Any]], list[str]],
    plot: Callable[[Mapping[str, Any]], str] = lambda result: "",
    *,
    out: Path,
) -> None:
    """Run a bench, show its table and write the files."""
    from rich.table import Table

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
