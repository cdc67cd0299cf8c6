"""The thread that watches a feed for an engine: it fetches and fully checks newer versions, so that
they only have to be loaded between two steps. Imports no vLLM.

Whatever is wrong with a feed ends here: one warning, and the engine drafts with what it has.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from heads.errors import BadVersionError, FeedError
from medusa_ppo.feeds.feed import Feed, verify
from medusa_ppo.feeds.feed_manifest import FeedActor, FeedManifest, FeedVersion
from medusa_ppo.runtime.files import OwnedFolder

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks into the manifest."""
CLOSE_S = 5.0


@dataclass(frozen=True)
class Fetched:
    """A version that is here, whole, and this actor's.

    Attributes:
        path: file in shared memory, which only this process writes.
        checksum: of its tensors, which whoever loads it confirms.
    """

    version: int
    path: Path
    checksum: str


class FeedWatch:
    """Offers the newest good version of a feed to one engine.

    Attributes:
        known: the newest version that the engine has taken; 0: none.
        serving: what it was, with its file; None: none.
        looks: into the feed so far.
    """

    def __init__(self, feed: Feed, actor: FeedActor) -> None:
        """
        Args:
            feed: is closed with this.
            actor: what the engine serves; heads of others are refused.
        """
        self._feed = feed
        self._actor = actor
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

    # ---- what the engine's loop calls: nothing here waits

    @property
    def offers(self) -> bool:
        """There is something to `take`."""
        return self._offered is not None

    @property
    def newest_here(self) -> int:
        """The newest version that was fetched, loaded or not; 0: none."""
        with self._lock:
            fetched = (self.serving, self._loading, self._offered)
            return max([self.known, *(found.version for found in fetched if found)])

    def take(self) -> Fetched | None:
        """What to load now; its file stays until `took` says how that went."""
        with self._lock:
            self._loading, self._offered = self._offered, None
            return self._loading

    def took(self, fetched: Fetched, fault: Exception | None) -> None:
        """The engine drafts with it; or it has refused it, and gets it no second time."""
        with self._lock:
            self._loading = None
            if fault is None:
                self.serving = fetched
                self.known = max(self.known, fetched.version)
            else:
                self._refused.add(fetched.checksum)
        if fault is not None:
            self._tell(fault)

    def close(self) -> None:
        """End the thread and remove its files; harmless when called again."""
        self._over.set()
        self._thread.join(CLOSE_S)
        self._folder.close()

    def end(self) -> None:
        """As `close`, without waiting: the thread removes the files."""
        self._over.set()

    # ---- the thread

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._look()
            except FeedError as error:
                self._tell(error)
            except OSError as error:
                # Shared memory is full, or the like.
                self._tell(
                    FeedError(
                        "New heads could not be kept here.",
                        given=str(error),
                        expected="room in shared memory for two versions",
                        do="Make room there.",
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
                do="Nothing, where its companion has published none yet; else correct the address.",
            )
        self._actor.require_same(manifest.actor, self._feed.address)
        if manifest.newest < self.known:
            raise FeedError(
                "The feed goes backwards.",
                given=f"{self._feed.address}: version {manifest.newest}",
                expected=f"{self.known}, which this engine drafts with, or a newer one",
                do="Let the new run publish into a feed of its own, or start the engine again.",
            )
        if (wanted := self._wanted(manifest)) is not None:
            self._fetch(wanted, manifest)
        self._told = ""

    def _wanted(self, manifest: FeedManifest) -> FeedVersion | None:
        """The newest one that is neither here nor refused."""
        here = self.newest_here
        newer = [version for version in manifest.versions if version.version > here]
        good = [version for version in newer if not self._refused & _names(version)]
        return good[-1] if good else None

    def _fetch(self, version: FeedVersion, manifest: FeedManifest) -> None:
        self._forget_files()
        try:
            path = verify(self._feed, version, self._actor, self._folder.path)
        except BadVersionError:
            self._refused.add(version.digest)
            raise
        except FeedError:
            newest = self._feed.manifest()
            # A slow reader of a quick feed: by now there are others, and no fault.
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
        """A warning, once for as long as nothing else comes between."""
        problem = getattr(error, "problem", str(error))
        if problem != self._told:
            self._told = problem
            logger.warning("%s The engine goes on drafting as it does.", error)


def _names(version: FeedVersion) -> set[str]:
    """By what it may have been refused: its file, or its tensors."""
    return {version.digest, version.checksum}
