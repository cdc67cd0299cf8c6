"""`medusa-ppo convert` and `push`: heads in other formats, and on the model hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from medusa_ppo.console import command, console


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

    Example:  [bold]medusa-ppo convert heads-gsm8k heads-vllm --to vllm --model ../shared/actors/gsm8k-4m[/bold]
    """
    from medusa_ppo.offline.convert import convert as convert_heads
    from medusa_ppo.offline.hub import local_heads

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    done = convert_heads(local_heads(source), target, to, model, say)
    sizes = done.config
    console.print(
        f"{done.source} -> {done.target}: {sizes.num_heads} heads of {sizes.num_layers} layers, {sizes.lm_head} lm_head, in {target}",
        highlight=False,
        soft_wrap=True,
    )
    for note in done.notes:
        console.print(f"  note: {note}", highlight=False, markup=False, soft_wrap=True)


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
    from medusa_ppo.offline.hub import model_card, push_heads

    if dry_run:
        console.print(model_card(heads, repo, figures or ()), highlight=False, markup=False, soft_wrap=True)
        return
    console.print(f"Pushed: {push_heads(heads, repo, private=private, figures=figures or ())}", highlight=False, soft_wrap=True)
