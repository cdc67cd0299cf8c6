"""The thread that puts a companion's versions into its feed. An upload takes as long as network and
feed do, minutes with large heads: training does not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from heads.errors import FeedError
from medusa_ppo.feeds.feed import Feed
from medusa_ppo.feeds.feed_manifest import Release
from medusa_ppo.runtime.files import write_atomic

logger = logging.getLogger(__name__)

LONG_S = 10.0
BYTES_PER_S = 10 << 20
"""An upload may take `LONG_S` and its bytes at this speed, 239 s for 2.4 GB of heads. Then the
status names it, and the end of the process waits no longer.
"""


@dataclass(frozen=True)
class Offer:
    """A version for the feed.

    Attributes:
        path: file of its tensors; it may be gone once there are newer ones.
        checksum: checksum of its tensors.
        first: only for a feed in which nothing has been published yet.
    """

    path: Path
    checksum: str
    release: Release
    first: bool = False


class Feeder:
    """Puts the newest version that it is offered into a feed. Of those that are offered during an
    upload only the last is put there.
    """

    def __init__(self, feed: Feed, kept: Path | None = None) -> None:
        """
        Args:
            feed: closed together with this object.
            kept: file for the highest number, which outlives this process; None: none.
        """
        self._feed = feed
        self._kept = kept
        self._changed = threading.Condition()
        # What the feed lacks, and whether to put it there now: not again at once after an error.
        self._offered: Offer | None = None
        self._wanted = self._over = False
        self._busy_since: float | None = None
        self._problem = ""
        self._highest = _number_in(kept)
        # Bytes of what is being put there.
        self._busy_bytes = 0
        # Begun with the first offer: a companion that does not come up leaves nothing.
        self._thread: threading.Thread | None = None

    @property
    def problem(self) -> str:
        """Why the feed lacks the newest version; empty if it has it, or will have it soon."""
        since = self._busy_since
        within_s = _within_s(self._busy_bytes)
        if since is None or time.monotonic() - since <= within_s:
            return self._problem
        return f"New heads are still on their way into the feed, after {within_s:.0f} s or more"

    def offer(self, offered: Offer | None) -> None:
        """Put a version there, instead of one that has not been begun; None: nothing. Returns at
        once.
        """
        with self._changed:
            self._offered, self._problem = offered, ""
            self._wanted = offered is not None
            self._changed.notify_all()
            if offered is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="companion-feed", daemon=True
                )
                self._thread.start()

    def again(self) -> None:
        """Try again what could not be put there, if there is such a version. Returns at once."""
        with self._changed:
            self._wanted = self._offered is not None
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is to be put there now; False if the time is up first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._wanted and self._busy_since is None, timeout_s
            )

    def close(self, timeout_s: float | None) -> None:
        """End the thread after what it was told to put there; wait for that, but not longer than
        `timeout_s`. None: as long as it should take, by its bytes; what could not be put there
        before is tried once more.
        """
        with self._changed:
            self._over = True
            if timeout_s is None and self._busy_since is None:
                # Nobody is left who would tell it to.
                self._wanted = self._offered is not None
            coming = self._wanted or self._busy_since is not None
            nbytes = self._busy_bytes + (_size(self._offered) if self._wanted else 0)
            self._changed.notify_all()
        if self._thread is None:
            self._feed.close()
            return
        if timeout_s is None:
            timeout_s = _within_s(nbytes)
            if coming:
                logger.warning(
                    "New heads are on their way into the feed: the companion ends when they are"
                    " there, after %.0f s at most.",
                    timeout_s,
                )
        self._thread.join(timeout_s)
        if coming and self._thread.is_alive():
            logger.warning(
                "New heads were not in the feed after %.0f s: the companion ends without.",
                timeout_s,
            )
        elif self._problem:
            logger.warning("The companion ends, and its newest heads are not in the feed.")

    def _run(self) -> None:
        while (offered := self._next()) is not None:
            problem = ""
            try:
                self._put(offered)
            # Everything is caught, because nobody would begin the thread again.
            except Exception as error:
                kind = "" if isinstance(error, FeedError | OSError) else f"{type(error).__name__}: "
                problem = f"The new heads could not be put into the feed: {kind}{error}"
                logger.warning("%s; training continues.", problem)
            with self._changed:
                if self._offered is offered:
                    self._problem = problem
                    self._offered = offered if problem else None
                    self._wanted &= bool(problem)
        self._feed.close()

    def _next(self) -> Offer | None:
        """What to put there now, once there is something; None: it is over."""
        with self._changed:
            self._busy_since, self._busy_bytes = None, 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._wanted or self._over)
            if not self._wanted:
                return None
            self._wanted = False
            self._busy_since, self._busy_bytes = time.monotonic(), _size(self._offered)
            return self._offered

    def _put(self, offered: Offer) -> None:
        found = self._feed.manifest()
        if found is not None:
            self._highest = max(self._highest, found.newest)
            if offered.first:
                return
        newest = found.versions[-1:] if found is not None else []
        # After a crash it may already be there.
        if [version.checksum for version in newest] == [offered.checksum]:
            return
        # Numbers go on also where the feed has lost what it held: engines load only what is newer
        # than what they have, and that may have come from an earlier run with higher numbers.
        number = max(offered.release.version, self._highest + 1)
        release = offered.release.model_copy(update={"version": number})
        self._highest = self._feed.publish(offered.path, release).version
        if self._kept is not None:
            try:
                write_atomic(self._kept, f"{self._highest}\n")
            except OSError as error:
                # The version is there. The number is missed only if feed and companion are lost.
                logger.warning("The feed's number could not be kept in %s: %s", self._kept, error)


def _number_in(kept: Path | None) -> int:
    """The number that an earlier process has kept; 0 if there is none."""
    if kept is None or not kept.is_file():
        return 0
    try:
        return int(kept.read_text())
    except (OSError, ValueError) as error:
        logger.warning("The feed's number could not be read from %s: %s", kept, error)
        return 0


def _within_s(nbytes: int) -> float:
    return LONG_S + nbytes / BYTES_PER_S


def _size(offered: Offer | None) -> int:
    # That the file is gone is told by the upload.
    with contextlib.suppress(OSError):
        return offered.path.stat().st_size if offered is not None else 0
    return 0
