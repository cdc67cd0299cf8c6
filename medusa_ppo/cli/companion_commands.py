"""`medusa-ppo companion serve`: trains heads in a separate process, for any loop with taps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from medusa_ppo.cli.command_options import Overrides, check_folder
from medusa_ppo.cli.input_checks import check_heads, check_model
from medusa_ppo.runtime.console import command, say

companion = typer.Typer(
    name="companion",
    help="Train heads in a separate process, beside a loop with taps.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@companion.command()
@command
def serve(
    model: Annotated[str, typer.Option(help="Folder or hub name of the actor.")],
    heads: Annotated[
        Path,
        typer.Option(help="Folder of the heads that engines start with; created if missing."),
    ],
    feed: Annotated[
        str, typer.Option(help="Feed to publish to; default: companion.feed of the configuration.")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file; only heads, companion, engine and seed are read."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for state and versions; a restart continues from it."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8461,
    overrides: Overrides = None,
) -> None:
    """Train heads on the data that a loop's taps send, and publish the better ones to a feed. The
    loop needs the same MEDUSA_PPO_COMPANION_TOKEN.

    Example:  [bold]medusa-ppo companion serve --model models/actor --heads my-heads/ --feed feed/
    heads.num_heads=3[/bold]
    """
    from medusa_ppo.config.run_config import load_config

    given = [*(overrides or ()), *([f"companion.feed={feed}"] if feed else [])]
    settings = load_config(config, given)
    actor = check_model("--model", model)
    check_heads(heads, actor, may_be_new=True)
    if settings.heads.path:
        check_heads(settings.heads.path, actor)
    if out is not None:
        check_folder("--out", out)
    from medusa_ppo.loops.served_companion import serve_companion

    serve_companion(settings, model, heads, out=out, host=host, port=port, say=say)
