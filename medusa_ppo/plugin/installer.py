"""HeadsInstaller: which heads the engine drafts with, and what happens if they don't arrive, don't
work, or are lost.

install        send newer heads; if they don't arrive as sent, send the previous heads again
take_back      go back to the previous heads if the engine accepts next to nothing of the new ones
feed_again     send an engine that lost its heads (a deep sleep, a failed swap) the heads that it
               should have
begin_on_a_server   the same for a server that was running before, and has somebody else's
"""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from heads.checkpoint import checksum, load_state, save_state
from heads.errors import EngineError, SwapError
from heads.modules import MedusaHeads
from medusa_ppo.contract.rollouts import Counters, Rollouts
from medusa_ppo.contract.status import PublishedHeads
from medusa_ppo.engines.rollout_engine import RolloutEngine

logger = logging.getLogger(__name__)

MIN_DRAFTS = 200
"""Draft steps before acceptance is judged: an acceptance of one in ten is then known to about
0.02.
"""
KEPT_SHARE = 0.1
"""Raise an alarm if less than this share of the predicted extra tokens per step is accepted.
"""


class SwapWatch:
    """Judges the first rollouts after each swap by vLLM's counters.

    Attributes:
        alarms: swaps so far after which hardly anything was accepted.
        refused: newest version that raised an alarm; -1: none.
    """

    def __init__(self) -> None:
        self.alarms = 0
        self.refused = -1
        self._new: PublishedHeads | None = None
        self._counters = Counters()
        self._extra_before: float | None = None

    def swapped(self, new: PublishedHeads) -> None:
        """New heads were installed over others; their next rollouts are judged."""
        if self._counters.drafts >= MIN_DRAFTS:
            self._extra_before = self._counters.mean_acceptance_length - 1
        self._new = new
        self._counters = Counters()

    def put_back(self) -> None:
        """The previous heads are installed again: there is nothing to judge, and what is known
        about them stays.
        """
        self._new = None
        self._counters = Counters()

    def broken(self, rollouts: Rollouts) -> bool:
        """Whether these rollouts show that the newest heads don't work in the engine. Reported once
        per version.
        """
        if self._new is not None and rollouts.heads_version != self._new.version:
            return False
        if self._counters.drafts >= MIN_DRAFTS:  # The previous heads' acceptance is their last one.
            self._counters = Counters()
        self._counters = self._counters + rollouts.counters
        if self._new is None or self._counters.drafts < MIN_DRAFTS:
            return False
        new = self._new
        self._new = None
        extra = self._counters.mean_acceptance_length - 1
        promised = new.mean_acceptance_length - 1
        if (
            not 0 <= extra < KEPT_SHARE * promised
            or self._extra_before is None
            or self._extra_before <= extra
        ):
            return False
        self.alarms += 1
        self.refused = new.version
        logger.warning(
            "Heads version %d are hardly ever accepted: %.3f tokens per engine step beyond the "
            "first; replay predicted %.3f, and the previous heads had %.3f. The previous heads go "
            "back in.",
            new.version,
            extra,
            promised,
            self._extra_before,
        )
        return True


@contextlib.contextmanager
def first_heads(heads: MedusaHeads) -> Iterator[PublishedHeads]:
    """The heads that a run started with, as version 0, in a file that exists during the block,
    since they were never published.
    """
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-heads-") as folder:
        state = heads.trainable_state()
        path = Path(folder) / "first.safetensors"
        save_state(path, state)
        yield PublishedHeads(0, str(path), checksum(state), 0, 1.0)


class HeadsInstaller:
    """Swaps heads into one engine, which must be idle whenever a method is called.

    Attributes:
        installed: the published heads that the engine should have; None: those it started with.
        published_before: version that an earlier part of the run had published; the companion
            offers it before the first rollouts. 0: there was none.
        watch: judges the acceptance after each swap.
    """

    def __init__(self, engine: RolloutEngine, first: MedusaHeads | None, on_error: str) -> None:
        """
        Args:
            engine: where heads go.
            first: the heads that the engine started with; None: unknown.
            on_error: `raise` or `disable`: what happens to the loop if newer heads don't reach the
                engine.
        """
        self._engine = engine
        self._first = first
        self._on_error = on_error
        self._before: PublishedHeads | None = None
        self._broken = False
        self._seconds = 0.0
        self.installed: PublishedHeads | None = None
        self.published_before = 0
        self.watch = SwapWatch()

    @property
    def known_version(self) -> int:
        """Only versions newer than this are worth asking for."""
        return max(self.installed.version if self.installed else 0, self.watch.refused)

    def judge(self, rollouts: Rollouts) -> None:
        """Judge the acceptance of rollouts; heads that don't work are replaced by the previous ones
        before the next rollouts.
        """
        self._broken = self.watch.broken(rollouts) or self._broken

    def take_seconds(self) -> float:
        """Seconds of all swaps since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def install(self, published: PublishedHeads) -> None:
        """Swap newer heads in.

        Raises:
            SwapError: the engine did not take them, and `on_error` is `raise`.
        """
        try:
            self._swap(published)
        except SwapError as error:
            self._put_back()
            if self._on_error == "raise":
                raise
            logger.warning(
                "Heads version %d were not installed; the old ones stay. %s",
                published.version,
                error,
            )
        else:
            self._before = self.installed
            self.installed = published
            self.watch.swapped(published)

    def take_back(self) -> bool:
        """Put the previous heads back, under their own version, if the last rollouts showed that
        the current ones don't work. True if it did.
        """
        broken = self._broken
        self._broken = False
        if not broken or not self._go_back(
            self._before, "The previous heads could not be put back."
        ):
            return False
        self.installed = self._before
        self._before = None
        self.watch.put_back()
        return True

    def feed_again(self) -> None:
        """Give an engine that has lost its heads those that it should have; until then it drafts
        nothing.
        """
        if self._engine.heads_version >= 0:
            return
        wanted = (
            self.installed
            if self.installed is not None and Path(self.installed.path).is_file()
            else None
        )
        if self._go_back(wanted, "The engine lost its heads and did not accept them again."):
            self.installed = wanted
            logger.info(
                "The engine had lost its heads; it has version %d again.",
                wanted.version if wanted else 0,
            )

    def begin_on_a_server(self, *, named: bool) -> None:
        """Before the first step, with an engine that was running before the run: it drafts with the
        heads that whoever used it last left there. If the run has published heads before, these
        come anyway, and nothing is done.

        Args:
            named: the run names its first heads (`heads.path`), so the engine gets them. Otherwise
                they are new and draft nothing: the engine keeps its own until the first ones are
                published, and a warning tells both.
        """
        if self._first is None or self.published_before:
            return
        own = checksum(self._first.trainable_state())
        held, differ = self._held()
        if held == own and not (named and self._engine.heads_version):
            return
        if named:
            self._go_back(
                None, "The server did not take the heads of heads.path, and drafts with its own."
            )
            self._seconds = 0.0  # No step has begun.
        elif self._engine.num_drafts and self._engine.heads_version >= 0:
            logger.warning(
                "Until heads are published, the server drafts with those that it has (version %d,"
                " %s), and the report's figures are theirs; the run starts with %s. Name the heads"
                " to start with in heads.path.",
                self._engine.heads_version,
                differ or f"checksum {held[:16]}",
                f"checksum {own[:16]}",
            )

    def heads_to_save(self, newest: Callable[[], PublishedHeads | None]) -> tuple[MedusaHeads, int]:
        """The heads that the engine drafts with, and their version.

        Args:
            newest: returns a replacement if the file of the installed ones is gone because swaps
                kept failing.
        """
        assert self._first is not None, "only called if the plugin knows them"
        heads = copy.deepcopy(self._first)
        installed = self.installed
        if installed is not None and not Path(installed.path).is_file():
            installed = newest()
        if installed is not None:
            heads.load_trainable_state(load_state(installed.path))
        return heads, installed.version if installed else 0

    # ---- parts

    def _held(self) -> tuple[str, str]:
        """The checksum of the engine's heads; or an empty one, and why there is none."""
        try:
            return self._engine.checksums()["heads"], ""
        except EngineError as error:  # Several servers, each with its own.
            return "", error.problem

    def _go_back(self, heads: PublishedHeads | None, failure: str) -> bool:
        """Install these heads, or if there are none those that the run started with. False if that
        failed or those are unknown.
        """
        if heads is None and self._first is None:
            return False
        try:
            with (
                first_heads(self._first)
                if heads is None and self._first is not None
                else contextlib.nullcontext(heads)
            ) as wanted:
                assert wanted is not None, "one of the two is known"
                self._swap(wanted)
        except SwapError as error:
            logger.warning("%s %s", failure, error)
            return False
        return True

    def _swap(self, published: PublishedHeads) -> None:
        receipt = self._engine.swap_heads(published.path, published.version)
        self._seconds += receipt.seconds
        if receipt.checksum != published.checksum:
            raise SwapError(
                "The engine does not hold the heads that it was given.",
                given=f"checksum {receipt.checksum[:16]}",
                expected=published.checksum[:16],
                do=(
                    "Look for a second writer of the published files; the previous heads are put "
                    "back."
                ),
            )

    def _put_back(self) -> None:
        """Reinstall the heads from before a failed swap, since it is unknown what the engine holds
        now. Drafting is lossless either way.
        """
        if self.installed is None or not Path(self.installed.path).is_file():
            return
        try:
            self._swap(self.installed)
        except SwapError as error:
            logger.warning("The previous heads could not be put back either. %s", error)
