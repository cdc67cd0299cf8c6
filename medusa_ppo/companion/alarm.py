"""SwapWatch: did acceptance fall to nothing right after new heads came in? Then the heads before should go back.

The gate has seen the new heads do well in a replay, so an engine that accepts next to nothing of their drafts does not compute what the
companion computed: another lm_head, a damaged copy, a wrong order of heads. Drafts stay lossless, but every step pays for them.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from heads.checkpoint import checksum, save_state
from heads.modules import MedusaHeads
from medusa_ppo.types import Counters, PublishedHeads, Rollouts

logger = logging.getLogger(__name__)

MIN_DRAFTS = 200
"""Draft steps until acceptance is judged: one in ten accepted is then known to about 0.02."""
KEPT_SHARE = 0.1
"""An alarm is raised when less than this share of the promised extra tokens per step is accepted."""


class SwapWatch:
    """Judges the first rollouts after each swap by vLLM's counters.

    Attributes:
        alarms: swaps so far that were followed by next to no acceptance.
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
        self._remember()
        self._new, self._counters = new, Counters()

    def put_back(self) -> None:
        """The heads before are installed again: nothing is to be judged, and what is known of them stays."""
        self._new, self._counters = None, Counters()

    def broken(self, rollouts: Rollouts) -> bool:
        """Whether these rollouts show that the newest heads don't work in the engine. Says so once for each version."""
        if self._new is not None and rollouts.heads_version != self._new.version:
            return False
        if self._counters.drafts >= MIN_DRAFTS:  # What the heads before accepted is what they accepted last.
            self._counters = Counters()
        self._counters = self._counters + rollouts.counters
        if self._new is None or self._counters.drafts < MIN_DRAFTS:
            return False
        new, self._new = self._new, None
        extra, promised = self._counters.mean_acceptance_length - 1, new.mean_acceptance_length - 1
        if not 0 <= extra < KEPT_SHARE * promised or self._extra_before is None or self._extra_before <= extra:
            return False
        self.alarms += 1
        self.refused = new.version
        logger.warning(
            "Heads version %d are accepted next to never: %.3f tokens per engine step beyond the first, %.3f promised by replay, "
            "%.3f with the heads before. Those go back in.",
            new.version,
            extra,
            promised,
            self._extra_before,
        )
        return True

    def _remember(self) -> None:
        if self._counters.drafts >= MIN_DRAFTS:
            self._extra_before = self._counters.mean_acceptance_length - 1


@contextlib.contextmanager
def first_heads(heads: MedusaHeads) -> Iterator[PublishedHeads]:
    """The heads that a run started with as version 0, in a file for the time of the block: nothing was published of them."""
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-heads-") as folder:
        state, path = heads.trainable_state(), Path(folder) / "first.safetensors"
        save_state(path, state)
        yield PublishedHeads(0, str(path), checksum(state), 0, 1.0)
