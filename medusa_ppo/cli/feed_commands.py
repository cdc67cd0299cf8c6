"""`medusa-ppo feed serve`, `list`, `verify` and `forget`: stores of head versions."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from heads.errors import ConfigError, FeedError
from medusa_ppo.cli.command_options import check_folder
from medusa_ppo.runtime.console import command, say

feed = typer.Typer(
    name="feed",
    help="Stores of head versions, which companions write and engines read.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Address = Annotated[
    str,
    typer.Argument(metavar="FEED", help="Folder, address of `medusa-ppo feed serve`, or ray:NAME."),
]


@feed.command()
@command
def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the feed; it need not exist yet.")
    ],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; others need MEDUSA_PPO_FEED_TOKEN."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8460,
) -> None:
    """Serve a feed's folder to engines on other nodes, and accept new versions from a companion
    that has the same MEDUSA_PPO_FEED_TOKEN.

    Example:  [bold]medusa-ppo feed serve feed/ --host 0.0.0.0[/bold]
    """
    # One that is there may be readable only: somebody else writes to it.
    if not folder.is_dir():
        check_folder("FOLDER", folder)
    from medusa_ppo.feeds.feed_server import FeedServer

    server = FeedServer(folder, host, port)
    say(f"Feed {folder} at http://{host}:{port}")
    server.run()


@feed.command("list")
@command
def list_versions(address: Address) -> None:
    """Show the versions in a feed, and how they were judged.

    Example:  [bold]medusa-ppo feed list feed/[/bold]
    """
    from medusa_ppo.feeds.folder_feed import FolderFeed
    from medusa_ppo.feeds.http_feed import open_feed

    place = open_feed(address)
    manifest = place.manifest()
    if manifest is None:
        if isinstance(place, FolderFeed) and not place.folder.is_dir():
            raise FeedError(
                "There is no such feed.",
                given=address,
                expected="a folder; the first published heads create it",
                do="Give the folder or address that companion.feed names, or wait for these heads.",
            )
        say(f"{place.address}: nothing has been published yet.")
        return
    config = manifest.actor.config
    say(
        f"{place.address}: {config.num_heads} heads of kind {config.kind}, width"
        f" {config.hidden_size}, vocabulary {config.vocab_size}"
    )
    say(f"{'version':>8}  {'actor':>8}  {'tokens a step':>13}  {'MB':>8}  written")
    for version in manifest.versions:
        length = version.judged.mean_acceptance_length
        judged = "-" if length is None else f"{length:.3f}"
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.written_s))
        say(
            f"{version.version:>8}  {version.policy_version:>8}  {judged:>13}"
            f"  {version.bytes / 1e6:>8.1f}  {written}"
        )


@feed.command("verify")
@command
def verify_versions(address: Address) -> None:
    """Fetch every version in a feed and check all its bytes and tensors, as an engine does. Exit
    code 1 if one is damaged.

    Example:  [bold]medusa-ppo feed verify http://10.0.0.5:8460[/bold]
    """
    from medusa_ppo.feeds.feed import verify
    from medusa_ppo.feeds.http_feed import open_feed

    place = open_feed(address)
    manifest = place.manifest()
    if manifest is None or not manifest.versions:
        raise FeedError(
            "There is nothing to verify.",
            given=f"{place.address}, nothing published",
            expected="a feed with a version",
            do="Give the folder or address that companion.feed names.",
        )
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-verify-") as folder:
        for version in manifest.versions:
            verify(place, version, manifest.actor, Path(folder)).unlink()
            say(f"version {version.version}: {version.bytes} bytes, SHA-256 {version.digest[:16]}")
    say(f"{len(manifest.versions)} versions are whole.")


@feed.command()
@command
def forget(
    address: Annotated[str, typer.Argument(metavar="ray:NAME", help="A feed in Ray.")],
) -> None:
    """End a feed in Ray and delete its versions; otherwise it outlives the loop that created it.
    Engines keep the heads that they have.

    Example:  [bold]medusa-ppo feed forget ray:heads[/bold]
    """
    from medusa_ppo.feeds.http_feed import RAY, open_feed

    if not address.startswith(RAY):
        raise ConfigError(
            "Only a feed in Ray can be forgotten.",
            given=address,
            expected="ray:NAME",
            do="Remove the folder when it is no longer needed.",
        )
    # Load Ray only if the feed is in it.
    from medusa_ppo.feeds.ray_feed import RayFeed

    place = open_feed(address)
    assert isinstance(place, RayFeed), "its address says so"
    say(f"{address}: {'ended' if place.forget() else 'there is no such feed'}.")
