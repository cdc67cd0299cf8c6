"""The thread that watches a feed for an engine. It fetches and fully checks newer versions, so that
only loading is left to do between two steps. Imports no vLLM.

A fault of the feed ends here: it causes one warning, and the engine keeps drafting with its heads.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from heads.errors import BadVersionError, FeedError
from medusa_ppo.feeds.feed import Feed, verify
from medusa_ppo.feeds.feed_manifest import FeedActor, FeedManifest, FeedVersion
from medusa_ppo.runtime.files import OwnedFolder, sweep

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two reads of the manifest."""
CLOSE_S = 5.0


@dataclass(frozen=True)
class Fetched:
    """A version that was fetched completely and belongs to this actor.

    Attributes:
        path: file in shared memory, written by this process only.
        checksum: checksum of its tensors; loading confirms it.
    """

    version: int
    path: Path
    checksum: str


class FeedWatch:
    """Offers the newest good version of a feed to one engine.

    Attributes:
        known: the newest version that the engine has loaded; 0: none.
        serving: this version, with its file; None: none.
        looks: reads of the feed so far.
    """

    def __init__(self, feed: Feed, actor: FeedActor) -> None:
        """
        Args:
            feed: closed together with this object.
            actor: the actor that the engine serves; heads of others are refused.
        """
        self._feed = feed
        self._actor = actor
        # Engines that were killed leave theirs behind, with two versions each.
        sweep()
        self._folder = OwnedFolder("medusa-ppo-feed-", shared_memory=True)
        self._lock = threading.Lock()
        self._offered: Fetched | None = None
        self._loading: Fetched | None = None
        self.serving: Fetched | None = None
        self.known = 0
        self.looks = 0
        self._refused: set[str] = set()
        self._told = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="medusa-ppo-feed", daemon=True)
        self._thread.start()

    # ---- called by the engine's loop: nothing here waits

    @property
    def offers(self) -> bool:
        """Whether there is something to `take`."""
        return self._offered is not None

    @property
    def newest_here(self) -> int:
        """The newest version that was fetched, loaded or not; 0: none."""
        with self._lock:
            fetched = (self.serving, self._loading, self._offered)
            return max([self.known, *(found.version for found in fetched if found)])

    def take(self) -> Fetched | None:
        """The version to load now; its file stays until `took` reports the result."""
        with self._lock:
            self._loading, self._offered = self._offered, None
            return self._loading

    def took(self, fetched: Fetched, fault: Exception | None) -> None:
        """Report that the engine drafts with it, or refused it; then it is not offered again."""
        with self._lock:
            # What serves may be loaded again while a newer version is being prepared, which needs
            # its file then.
            if self._loading is fetched:
                self._loading = None
            if fault is None:
                self.serving = fetched
                self.known = max(self.known, fetched.version)
            else:
                self._refused.add(fetched.checksum)
        if fault is not None:
            self._tell(fault)

    def close(self) -> None:
        """End the thread and remove its files. Safe to call again."""
        self._over.set()
        self._thread.join(CLOSE_S)
        self._folder.close()

    def end(self) -> None:
        """Like `close`, without waiting: the thread removes the files."""
        self._over.set()

    # ---- the thread

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._look()
            except FeedError as error:
                self._tell(error)
            except OSError as error:
                # For example if shared memory is full.
                self._tell(
                    FeedError(
                        "New heads could not be stored on this machine.",
                        given=str(error),
                        expected="room in shared memory for two versions",
                        do="Free some of it.",
                    )
                )
            # Catches everything, because nobody would begin the thread again: from then on the
            # engine would get no version, and no word of it.
            except Exception as error:
                self._tell(
                    FeedError(
                        "The feed can't be read, for a reason that lies in this process.",
                        given=f"{type(error).__name__}: {error}",
                        expected="a version, or an error of a feed",
                        do="Report this; the feed is read again in a moment.",
                    )
                )
            self.looks += 1
            self._over.wait(LOOK_S)
        self._feed.close()
        self._folder.close()

    def _look(self) -> None:
        manifest = self._feed.manifest()
        if manifest is None or not manifest.versions:
            raise FeedError(
                "The feed is empty.",
                given=f"{self._feed.address}, nothing published",
                expected="versions of heads",
                do="Nothing, if its companion has not published yet; else correct the address.",
            )
        self._actor.require_same(manifest.actor, self._feed.address)
        if manifest.newest < self.known:
            raise FeedError(
                "The feed goes backwards.",
                given=f"{self._feed.address}: version {manifest.newest}",
                expected=f"{self.known}, which this engine drafts with, or a newer one",
                do="Give the new run a feed of its own, or restart the engine.",
            )
        if (wanted := self._wanted(manifest)) is not None:
            self._fetch(wanted)
        self._told = ""

    def _wanted(self, manifest: FeedManifest) -> FeedVersion | None:
        """The newest version that is neither known nor refused."""
        here = self.newest_here
        newer = [version for version in manifest.versions if version.version > here]
        good = [version for version in newer if not self._refused & _names(version)]
        return good[-1] if good else None

    def _fetch(self, version: FeedVersion) -> None:
        self._forget_files()
        try:
            path = verify(self._feed, version, self._actor, self._folder.path)
        except BadVersionError:
            self._refused.add(version.digest)
            raise
        except FeedError:
            newest = self._feed.manifest()
            # A slow reader of a fast feed: the version has been replaced meanwhile, which is no
            # fault.
            if newest is not None and version not in newest.versions:
                return
            raise
        with self._lock:
            self._offered = Fetched(version.version, path, version.checksum)

    def _forget_files(self) -> None:
        with self._lock:
            kept = {found.path for found in (self.serving, self._offered, self._loading) if found}
        for path in self._folder.path.glob("heads-*"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _tell(self, error: Exception) -> None:
        """Log a warning; repeat it only after another one."""
        problem = getattr(error, "problem", str(error))
        if problem != self._told:
            self._told = problem
            logger.warning("%s The engine keeps drafting as before.", error)


def _names(version: FeedVersion) -> set[str]:
    """The names under which a version may have been refused: its file, or its tensors."""
    return {version.digest, version.checksum}
