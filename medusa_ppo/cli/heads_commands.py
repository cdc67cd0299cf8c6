"""`medusa-ppo train`, `eval`, `convert`, `push` and `serve`: heads without PPO, on any model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_ppo.cli.command_options import check_folder, check_outputs, options_from
from medusa_ppo.cli.input_checks import check_data, check_heads, check_model
from medusa_ppo.offline.options import WRITTEN_BY_MODEL, EvalOptions, TrainOptions
from medusa_ppo.runtime import wording as w
from medusa_ppo.runtime.console import command, offline_progress, say
from medusa_ppo.runtime.files import write_atomic


@command
@options_from(TrainOptions)
def train(
    options: TrainOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, memory and time, without training.")
    ] = False,
) -> None:
    """Train heads for any causal LM on any dataset: the model's own responses, a PPO run's
    rollouts, full texts, or chats. An interrupted training continues when you run the command
    again.

    Example:  [bold]medusa-ppo train --model models/actor --data data/train.jsonl
    --template 'Question: {question}\\nAnswer:' --out heads-gsm8k[/bold]
    """
    check_model("--model", options.model)
    # Without them the data are not all that is wrong, and their own check says both.
    if options.template or options.column:
        check_data(options.data)
    check_folder("--out", options.out)
    if dry_run:
        from medusa_ppo.offline.data_parallel import gpus_for_workers
        from medusa_ppo.offline.scene import plan_training

        if options.workers > 1:
            gpus_for_workers(options.workers)
        for name, value in plan_training(options):
            say(f"{name:<28}{value}")
        return
    from medusa_ppo.offline.train import train_heads

    with offline_progress() as progress:
        result = train_heads(options, progress)
    length = result["replay_mean_acceptance_length"]
    trained = w.whole(result["tokens"])
    say(f"\nThe heads were trained on {trained} response tokens, counted again in each epoch.")
    say(
        "Next: medusa-ppo eval --engine vllm, with the same --model and --template, and --data that"
        " the heads were not trained on."
    )
    figure = f"The heads in {options.out} give {length:.3f} tokens per engine step on held-out"
    if result.get(WRITTEN_BY_MODEL, True):
        say(f"{figure} responses, by replay.")
    else:
        say(
            f"{figure} text that the model did not write, by replay; what it writes itself is"
            " accepted at another rate. `medusa-ppo eval` measures that, and with --respond heads"
            " are trained on the model's own answers."
        )


@command
@options_from(EvalOptions)
def evaluate(
    options: EvalOptions,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a report in Markdown to this file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.")] = None,
) -> None:
    """Measure what heads are worth: mean acceptance length, per position, with a confidence
    interval.

    Example:  [bold]medusa-ppo eval --model models/actor --heads heads-gsm8k
    --data data/test.jsonl --template 'Question: {question}\\nAnswer:' --engine vllm[/bold]
    """
    check_outputs(json=json_file, markdown=markdown, html=html)
    model = check_model("--model", options.model)
    check_heads(options.heads, model, hub=True)
    if options.compare is not None:
        check_heads(options.compare, model)
    if options.template or options.column:
        check_data(options.data)
    from medusa_ppo.offline.evaluate import evaluate_heads
    from medusa_ppo.offline.hub import local_heads
    from medusa_ppo.reports.evaluation import lines, markdown_report, render_eval_page

    with offline_progress() as progress:
        # Pulled from the hub first, if need be: evaluation itself only reads folders.
        pulled = dataclasses.replace(options, heads=str(local_heads(options.heads)))
        result = evaluate_heads(pulled, progress)
    # Print first: a file that can't be written must not lose the figures.
    for line in lines(result):
        say(line)
    if json_file:
        write_atomic(json_file, json.dumps(result, indent=1) + "\n")
    if markdown:
        write_atomic(markdown, markdown_report(result))
    if html:
        write_atomic(html, render_eval_page(result))


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
            help="Format to write; the source's is detected.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(help="Folder of the base model, if the target holds its lm_head or weights."),
    ] = "",
) -> None:
    """Convert heads of kind medusa from any Medusa format to another. What the target can't hold
    is refused by name, never dropped.

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
        str,
        typer.Argument(metavar="REPO", help="owner/name on the hub; created if it doesn't exist."),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private if it is created now.")
    ] = False,
    figures: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="JSON file of `medusa-ppo eval --json`, for the model card."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the model card without pushing anything.")
    ] = False,
) -> None:
    """Push heads to the model hub, with a model card that says what was measured and how.

    The hub's token comes from `hf auth login` or HF_TOKEN.

    Example:  [bold]medusa-ppo push heads-gsm8k me/gsm8k-4m-medusa --private --eval eval.json[/bold]
    """
    check_heads(heads, {})
    from medusa_ppo.offline.hub import model_card, push_heads

    if dry_run:
        say(model_card(heads, repo, figures or ()))
        return
    say(f"Pushed: {push_heads(heads, repo, private=private, figures=figures or ())}")


@command
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder or hub name of the actor.")],
    heads: Annotated[
        Path,
        typer.Option(help="Folder of the heads; created with untrained heads if it doesn't exist."),
    ],
    medusa: Annotated[
        Path | None, typer.Option(help="YAML file; only heads, engine and seed are read.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other needs MEDUSA_PPO_TOKEN.")
    ] = "127.0.0.1",
) -> None:
    """Run a vLLM server that drafts and accepts new heads, for a loop's server mode. All other
    options are passed on to vLLM.

    Example:  [bold]medusa-ppo serve --model models/actor --heads my-heads/ --port 8000[/bold]
    """
    from medusa_ppo.config.run_config import load_config

    check_heads(heads, check_model("--model", model), may_be_new=True)
    from medusa_ppo.loops.remote import serve as become_server

    # Options that typer does not know are vLLM's.
    become_server(model, str(heads), load_config(medusa), host, context.args)
