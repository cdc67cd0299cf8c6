"""A standalone companion: it starts from an actor's files and a configuration, gets its data from
taps, and publishes to a feed. It runs behind HTTP in a separate process (`medusa-ppo companion
serve`), or as a named actor in the loop's Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from heads.checkpoint import load_heads, load_state, refuse_foreign_folder, save_heads
from heads.errors import CheckpointError, CompanionError, ConfigError, DataError, FeedError
from heads.modules import MedusaHeads
from medusa_ppo.companion.companion_link import RAY, open_link
from medusa_ppo.companion.companion_server import CompanionServer, require_companion_token
from medusa_ppo.companion.desk import CompanionDesk
from medusa_ppo.companion.parts_wire import PartHeader, Tables, read_message
from medusa_ppo.companion.service import STATE_FILE, settle
from medusa_ppo.companion.team import actor_options
from medusa_ppo.companion.wire import ServiceArguments, pack
from medusa_ppo.companion.without_gpu import gpus_left
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.engines.launch import draft_vocabulary
from medusa_ppo.feeds.feed import verify
from medusa_ppo.feeds.feed_manifest import FeedActor, FeedManifest
from medusa_ppo.feeds.http_feed import absolute, open_feed, require_feed, warn_of_earlier
from medusa_ppo.loops.attachment import warn_of_untrained
from medusa_ppo.loops.remote import read_tables
from medusa_ppo.plugin.medusa_plugin import heads_for_table
from medusa_ppo.runtime.files import OwnedFolder, only_one_in
from medusa_ppo.runtime.guarded_server import require_free_address
from medusa_ppo.runtime.hardware import companion_gpus, find_hardware
from medusa_ppo.runtime.named_actors import NAMESPACE, join_ray

logger = logging.getLogger(__name__)

SAVED = "companion"
"""Folder of the state within the run folder; the service uses the same name."""
FROM_FEED = "of the feed"
"""How a folder of heads ends its note of what they started from, if that is a version of a feed."""
NEWS_S = 1.0


def _arguments(
    config: RunConfig, model: str, heads: Path, out: Path | None
) -> tuple[ServiceArguments, Tables]:
    """The arguments of this actor's companion. Writes initial heads for the engines if there are
    none.

    Raises:
        ConfigError: no feed is given, or several workers are: only a run's own Ray can place them.
        FeedError: the feed belongs to another actor, or can't be reached.
        ModelError, CheckpointError: as `read_tables` and `load_heads`, or the folder of the heads
            holds something else.
    """
    section = config.companion
    if not section.feed:
        raise ConfigError(
            "A standalone companion publishes to a feed.",
            given="no feed",
            expected="a folder, ray:NAME, or the address of `medusa-ppo feed serve`",
            do="Name it with --feed, and in the engines' MEDUSA_PPO_FEED.",
        )
    if section.workers > 1:
        raise ConfigError(
            "A standalone companion is one process.",
            given=f"companion.workers={section.workers}",
            expected="companion.workers=1",
            do="Leave companion.workers out.",
        )
    refuse_foreign_folder(heads)
    lm_head_VD, embedding_VD = read_tables(model)
    start = config.heads.path or "zero"
    made = not (heads / "config.json").is_file()
    copied = False
    if made:
        initial = heads_for_table(config, lm_head_VD)
    else:
        vocab_size, hidden_size = lm_head_VD.shape
        initial, read = load_heads(heads, hidden_size=hidden_size, vocab_size=vocab_size)
        # An earlier start has taken them from the feed, which may have better ones by now.
        copied = str(read.metadata.get("start")).endswith(FROM_FEED)
    address = absolute(section.feed)
    found = require_feed(address, FeedActor.of(initial.config, lm_head_VD))
    if out is None or not (out / SAVED / STATE_FILE).is_file():
        own = not initial.untrained and not copied
        if not own and found is not None and _take_newest(initial, found, address):
            start = f"version {found.newest} {FROM_FEED}"
        else:
            warn_of_earlier(found, address)
        if initial.untrained:
            warn_of_untrained(config.heads)
    if made:
        save_heads(heads, initial, lm_head_VD=lm_head_VD, metadata={"start": start})
    gpus = section.num_gpus
    if gpus is None:
        gpus = companion_gpus(find_hardware().gpus, 1)
    arguments = ServiceArguments(
        initial.config,
        section.model_copy(update={"feed": address, "num_gpus": gpus}),
        config.seed,
        pack(initial.trainable_state()),
        str(out.resolve()) if out is not None else "",
        # `_Desk` knows where it publishes to, and what it goes on from.
        "",
        draft_temperature=config.engine.draft_temperature,
        num_drafts=config.engine.most_drafts,
        draft_vocab=draft_vocabulary(config.engine, initial.config),
    )
    return arguments, (lm_head_VD, embedding_VD if initial.config.needs_embedding else None)


def _take_newest(initial: MedusaHeads, found: FeedManifest, address: str) -> bool:
    """Begin with a feed's newest version instead of untrained heads or an earlier version: the
    first one that beats those would take its place in all engines. False if there is none, or it
    can't be used.
    """
    if not found.versions:
        return False
    feed = open_feed(address)
    folder = OwnedFolder("medusa-ppo-start-", shared_memory=True)
    try:
        state = load_state(verify(feed, found.versions[-1], found.actor, folder.path))
        initial.load_trainable_state(
            {name: value.to(initial.dtype) for name, value in state.items()}
        )
    except (FeedError, CheckpointError, OSError) as error:
        logger.warning("The companion can't begin with the feed's newest version. %s", error)
        return False
    finally:
        folder.close()
        feed.close()
    logger.info("The companion goes on from version %d of its feed.", found.newest)
    return True


class _Desk:
    """A desk together with its folders, into which no other companion writes meanwhile. `close`
    saves its state in the run's folder, if it has one, and closes them together.

    Raises:
        RunError: another companion keeps its state there.
    """

    def __init__(self, arguments: ServiceArguments, tables: Tables) -> None:
        settle(arguments.companion)
        with contextlib.ExitStack() as stack:
            if arguments.run_dir:
                out = Path(arguments.run_dir)
                # Before the state is looked for, which another one may still write.
                stack.enter_context(only_one_in(out, "companion", "--out"))
                if (out / SAVED / STATE_FILE).is_file():
                    arguments = replace(arguments, resume_from=str(out / SAVED))
            published = OwnedFolder("medusa-ppo-heads-", shared_memory=True)
            stack.callback(published.close)
            arguments = replace(arguments, publish_dir=str(published.path))
            self.desk = CompanionDesk(arguments, tables)
            stack.callback(self.desk.close)
            if arguments.run_dir:
                stack.callback(self.desk.save, Path(arguments.run_dir) / SAVED)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


def serve_companion(
    config: RunConfig,
    model: str,
    heads: Path,
    *,
    out: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8461,
    say: Callable[[str], None] = logger.info,
) -> None:
    """Answer taps until a signal arrives. Then save the state in `out`, if given; the next start
    continues from it.

    Args:
        config: only `heads`, `companion`, `engine` (how it drafts) and `seed` are read.
        model: folder or hub name of the actor.
        heads: folder of the heads that engines start with; made if it is empty or missing.
        out: folder of the run; None: keep nothing.
        say: called with a line about each version.

    Raises:
        ConfigError: no token, no feed, several workers, or an address that can't be listened at.
        FeedError, ModelError, CheckpointError: what can't be read.
        RunError: another companion keeps its state in `out`.
    """
    require_companion_token(host)
    require_free_address(host, port)
    arguments, tables = _arguments(config, model, heads, out)
    holder = _Desk(arguments, tables)
    over = threading.Event()
    try:
        server = CompanionServer(holder.desk, host, port)
        say(f"Companion of {model} at http://{host}:{port}, feed {arguments.companion.feed}")
        news = threading.Thread(target=_tell, args=(holder.desk, say, over), daemon=True)
        news.start()
        server.run()
    finally:
        over.set()
        holder.close()


def _tell(desk: CompanionDesk, say: Callable[[str], None], over: threading.Event) -> None:
    """Report each version, and each problem once."""
    version, problem = 0, ""
    while not over.wait(NEWS_S):
        status = desk.status()
        if status.versions_published > version:
            version = status.versions_published
            row = status.candidate or status.serving
            length = f", {row.mean_acceptance_length:.2f} tokens a step by replay" if row else ""
            say(f"version {version} after {status.batches_trained} batches{length}")
        if status.error and status.error != problem:
            say(f"problem: {status.error}")
        problem = status.error


class _DeskActor:
    """A desk in a Ray actor. Its methods pass what HTTP would: JSON and bytes."""

    def __init__(self, config: CompanionConfig, first: list[Any]) -> None:
        arguments, tables = ray.get(first[0])
        self._holder = _Desk(replace(arguments, companion=config), tables)

    def wish(self) -> str:
        return self._holder.desk.wish().model_dump_json()

    def take(self, header: str, data: Any) -> str:
        desk = self._holder.desk
        told = read_message(PartHeader, header)
        content = memoryview(data)
        size = content.nbytes
        if size > desk.most_bytes:
            raise DataError(
                "A part is too large.",
                given=f"{size} bytes from process {told.rank}",
                expected=f"<= {desk.most_bytes} bytes",
                do="Raise companion.queue_bytes, or run the same release of medusa-ppo everywhere.",
            )
        if not desk.reserve(size):
            raise CompanionError(
                "There is no room until other parts have arrived.",
                given=f"{size} bytes from process {told.rank}",
                expected="room for them in companion.queue_bytes",
                do="Nothing: the loop goes on, and the next steps' rows have room again.",
            )
        room = size
        path = None
        try:
            handle, name = tempfile.mkstemp(dir=desk.folder)
            path = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # The desk gives it back itself, when it counts the part as one that it holds.
            room = 0
            return desk.take(path, told, size).model_dump_json()
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
            desk.give_back(room)

    def drain(self, timeout_s: float) -> bool:
        return self._holder.desk.drain(timeout_s)

    def close(self) -> None:
        """An orderly end: a handle that is dropped saves nothing."""
        self._holder.close()


def companion_in_ray(
    name: str, config: RunConfig, model: str, heads: Path, *, out: Path | None = None
) -> Any:
    """Start a companion as a named actor in the Ray that this process is in (or joins). Taps reach
    it at `ray:NAME`. It ends when the handle is dropped. `ray.get(handle.close.remote())` before
    that saves its state in `out`, from which the next start continues.

    Args:
        name: letters, digits, dots, dashes.
        config, model, heads, out: as in `serve_companion`. `companion.resource` decides the node,
            `companion.num_gpus` the device.

    Returns:
        The actor's handle.

    Raises:
        RunError: there is no Ray, or the name is taken.
        As `serve_companion`, except for the token.
    """
    open_link(f"{RAY}{name}").close()
    join_ray()
    arguments, tables = _arguments(config, model, heads, out)
    section = config.companion
    gpus = section.num_gpus
    if gpus is None:
        gpus = gpus_left(section, arguments.heads, arguments.draft_vocab)
    section = arguments.companion.model_copy(update={"num_gpus": gpus})
    actor = ray.remote(  # type: ignore[call-overload]  # Ray's stubs know no names.
        name=name,
        namespace=NAMESPACE,
        max_concurrency=4,
        **actor_options(section, None, 0),
    )(_DeskActor).remote(section, [ray.put((arguments, tables))])
    ray.get(actor.wish.remote())  # It is there, or says why not.
    return actor
