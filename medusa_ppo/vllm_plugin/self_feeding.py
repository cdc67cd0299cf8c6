"""An engine that feeds itself: the process of vLLM's core loop loads newer heads of a feed between
two steps, on all ranks in one call, even while requests run.

`MEDUSA_PPO_FEED` is the address (`medusa_ppo.feeds`), for engines that were started with our heads.
It is an environment variable because that reaches every engine: some loops pass no arguments of
their own to vLLM, and vLLM refuses unknown keys in its speculative configuration. Unless it is set,
vLLM's core is not changed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import vllm.v1.engine.core as engine_core
import vllm.v1.worker.gpu_worker as gpu_worker

from heads.errors import EngineError, MedusaError
from medusa_ppo.feeds.feed_manifest import FeedActor
from medusa_ppo.feeds.http_feed import open_feed
from medusa_ppo.vllm_plugin.feed_watch import FeedWatch, Fetched
from medusa_ppo.vllm_plugin.speculation import (
    FEED,
    feeds_itself,
    has_separate_ranks,
    heads_folder,
)
from medusa_ppo.vllm_plugin.worker_calls import WORKER_EXTENSION, first_of

logger = logging.getLogger(__name__)
told = logging.getLogger("vllm.medusa_ppo")
"""With vLLM's own handlers: people read about an engine in its log."""

ASK_S = 0.02
"""Seconds between two checks whether the ranks have read new heads."""
VERSION_S = 5.0
"""Seconds between two questions whether the fed heads still serve. A loop may let the workers sleep
without the core (`collective_rpc`), and a swap of its own may fail.
"""
MOST_FAULTS = 3
"""Failures in a row, after which feeding ends: to load a version, or to ask what serves."""
FEEDER = "medusa_feeder"
"""Attribute of vLLM's core that holds its `EngineFeeder`."""


class EngineFeeder:
    """Loads what a `FeedWatch` offers into one engine.

    Attributes:
        woken: the engine has slept since the last check, so its heads may be gone: asked at once.
    """

    def __init__(self, core: Any) -> None:
        """`core`: vLLM's core with its workers. No reference to it is kept."""
        self._watch: FeedWatch | None = None
        self._coming: Fetched | None = None
        self._asked = 0.0
        self._asks_at = 0.0
        self._patience_s = VERSION_S
        self.woken = False
        # In a row: with no version loaded between them, or no answer.
        self._faults = 0
        self._unanswered = 0
        if has_separate_ranks(core.vllm_config):
            # Each would load a version when it has seen it, while the others wait in another step.
            logger.warning(
                "This engine loads no heads from %s: its tensor-parallel ranks are engines of their"
                " own (external_launcher), which can't load between the same two steps. Use one"
                " rank, or let vLLM start the ranks.",
                FEED,
            )
            return
        try:
            answer = self._state(core)
            actor = FeedActor(heads=dict(answer["heads"]), sketch=str(answer["sketch"]))
            self._watch = FeedWatch(open_feed(os.environ[FEED]), actor)
        # Catches everything, here and below: whatever is wrong with a feed must never end an
        # engine, and nothing else catches what is raised between two steps.
        except Exception as error:
            logger.warning("This engine loads no heads from %s. %s", FEED, _in_words(error))
            return
        # For engines that are never shut down.
        weakref.finalize(core, self._watch.end)

    def between_steps(self, core: Any) -> None:
        """Called after every step of the engine: load newly fetched heads, if there are any. Raises
        nothing.
        """
        watch = self._watch
        if watch is None or not (watch.offers or self._coming or self._asks(watch)):
            return
        try:
            self._feed(core, watch)
        except Exception as error:
            self._failed(watch, error)

    def _feed(self, core: Any, watch: FeedWatch) -> None:
        if core.is_sleeping():
            return
        if (serving := watch.serving) is not None and self._asks(watch):
            self.woken = False
            try:
                lost = self._lost(core)
            except Exception as error:
                # It says nothing about a version that is being prepared, which stays.
                self._unanswered += 1
                self._ask_later(2 * self._patience_s)
                what = "The workers could not be asked which heads they have"
                self._had_fault(watch, self._unanswered, what, error)
                return
            self._unanswered = 0
            # A deep sleep may have thrown the heads away. What fails is tried ever more rarely.
            good = not lost or self._load(core, watch, serving)
            self._ask_later(VERSION_S if good else 2 * self._patience_s)
        if self._coming is None and (fetched := watch.take()) is not None:
            # Each rank reads it while the engine runs; it is loaded after a later step.
            self._coming = fetched
            self._tell_ranks(core, "medusa_feed_ahead", str(fetched.path), [fetched.checksum])
        if self._coming is not None and self._all_ready(core):
            fetched, self._coming = self._coming, None
            self._load(core, watch, fetched)

    def _asks(self, watch: FeedWatch) -> bool:
        """Whether it is time to ask if the fed heads still serve."""
        if watch.serving is None:
            return False
        return self.woken or time.perf_counter() >= self._asks_at

    def _ask_later(self, patience_s: float) -> None:
        """Seconds from now, since a call that fails may have taken longer than that."""
        self._patience_s = patience_s
        self._asks_at = time.perf_counter() + patience_s

    def _failed(self, watch: FeedWatch, error: Exception) -> None:
        """Take an error of loading that no version explains."""
        self._faults += 1
        what = "Newer heads could not be loaded"
        if self._coming is not None:
            # A newer version may be better; this one is not tried again, and the watch says so.
            watch.took(self._coming, error)
            self._coming = None
            what = ""
        self._had_fault(watch, self._faults, what, error)

    def _had_fault(self, watch: FeedWatch, faults: int, what: str, error: Exception) -> None:
        """Tell the first of some faults in a row. After a few the engine is left alone: each of
        them may have cost it a step's time, and its heads draft as before.

        Args:
            faults: in a row, with this one.
            what: what failed; empty: it was told already.
        """
        if what and faults == 1:
            logger.warning("%s: %s. The engine keeps drafting as before.", what, _in_words(error))
        if faults >= MOST_FAULTS:
            logger.warning(
                "This engine loads no more heads from %s, after %d failures in a row: %s. Restart"
                " the engine to feed it again.",
                FEED,
                faults,
                _in_words(error),
            )
            self._watch = None
            watch.end()

    def _all_ready(self, core: Any) -> bool:
        """Whether all ranks have read the new heads. Checked rarely, because it takes a call to the
        workers.
        """
        now = time.perf_counter()
        if now - self._asked < ASK_S:
            return False
        self._asked = now
        return all(answer["ready"] for answer in self._tell_ranks(core, "medusa_feed_ready"))

    def _tell_ranks(self, core: Any, method: str, *arguments: Any) -> list[dict[str, Any]]:
        answers = core.collective_rpc(method, args=arguments)
        first_of(answers)
        return answers

    def close(self) -> None:
        """End the watch. Safe to call again."""
        if self._watch is not None:
            self._watch.close()

    def _state(self, core: Any) -> dict[str, Any]:
        return first_of(core.collective_rpc("medusa_feed_state"))

    def _lost(self, core: Any) -> bool:
        """Whether the heads of a rank are gone, or are not those of the others."""
        answers = self._tell_ranks(core, "medusa_feed_version")
        versions = {answer["version"] for answer in answers}
        return len(versions) != 1 or min(versions) < 0

    def _load(self, core: Any, watch: FeedWatch, fetched: Fetched) -> bool:
        """Load heads into all ranks, or into none; whether they serve. If that fails after the old
        heads are gone, the last ones are loaded again.
        """
        before = watch.serving
        began = time.perf_counter()
        fault = self._given(core, fetched)
        watch.took(fetched, fault)
        if fault is None:
            self._faults = 0
            told.info(
                "Heads version %d is serving; loading took %.0f ms.",
                fetched.version,
                1e3 * (time.perf_counter() - began),
            )
        elif before is not None and before is not fetched and self._lost(core):
            watch.took(before, self._given(core, before))
        return fault is None

    def _given(self, core: Any, fetched: Fetched) -> Exception | None:
        """Load heads into all ranks. Returns the error if not all ranks have them, else None."""
        arguments = str(fetched.path), fetched.version, [fetched.checksum]
        try:
            answers = self._tell_ranks(core, "medusa_feed_heads", *arguments)
            versions = {answer["version"] for answer in answers}
        except Exception as error:
            return error
        if versions != {fetched.version}:
            return EngineError(
                "The engine's ranks draft with different heads.",
                given=f"versions {sorted(versions)}",
                expected=f"{fetched.version} on all of them",
                do="Report this.",
            )
        return None


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, MedusaError) else f"{type(error).__name__}: {error}"


def with_feed_looked_at(original: Callable[..., None]) -> Callable[..., None]:
    """`EngineCore.post_step`: called after every step, also if the core runs in its own process."""

    @functools.wraps(original)
    def post_step(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        feeder = vars(self).get(FEEDER)
        if feeder is None and feeds_itself() and heads_folder(self.vllm_config):
            feeder = EngineFeeder(self)
            setattr(self, FEEDER, feeder)
        if feeder is not None:
            feeder.between_steps(self)

    return post_step


def with_heads_fed_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.wake_up`: heads that a deep sleep threw away are loaded again after the next
    step.
    """

    @functools.wraps(original)
    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if (feeder := vars(self).get(FEEDER)) is not None:
            feeder.woken = True
        return result

    return wake_up


def with_feed_closed(original: Callable[..., None]) -> Callable[..., None]:
    """`EngineCore.shutdown`: the thread ends with the engine."""

    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        if (feeder := vars(self).get(FEEDER)) is not None:
            feeder.close()
        original(self)

    return shutdown


def with_feed_calls(original: Callable[..., None]) -> Callable[..., None]:
    """`Worker.__init__`: adds the feed's calls to a worker that a loop started without our
    extension. Only to this object: vLLM's class stays unchanged, for engines with other extensions.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not (feeds_itself() and heads_folder(self.vllm_config)):
            return
        # By its name, because it imports what activates the plugin, which imports this module.
        module, _, name = WORKER_EXTENSION.rpartition(".")
        extension = getattr(importlib.import_module(module), name)
        kind = type(self)
        if not issubclass(kind, extension):
            self.__class__ = type(kind.__name__, (kind, extension), {})

    return __init__


PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (engine_core.EngineCore, "post_step", with_feed_looked_at),
    (engine_core.EngineCore, "wake_up", with_heads_fed_again),
    (engine_core.EngineCore, "shutdown", with_feed_closed),
    (gpu_worker.Worker, "__init__", with_feed_calls),
)
