"""The interface of a feed, for readers and publishers, whatever its kind."""

from __future__ import annotations

import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from heads.checkpoint import check_names_and_shapes
from heads.errors import BadVersionError, CheckpointError
from heads.tensorfile import MAX_HEADS_HEADER_BYTES, checksum, load_state, read_header
from medusa_ppo.feeds.feed_manifest import (
    FeedActor,
    FeedManifest,
    FeedVersion,
    Release,
    read_manifest,
)

CHUNK_BYTES = 1 << 20


class Feed(ABC):
    """A store of head versions. Many may read while one publishes.

    Attributes:
        address: where it is, in a readable form.
    """

    address: str

    @abstractmethod
    def read(self) -> bytes | None:
        """The manifest's bytes; None: nothing has been published yet. Raises FeedError if it can't
        be reached.
        """

    @abstractmethod
    def stream(self, file: str, size: int) -> Iterator[bytes]:
        """A file's bytes, in parts; there may be more or fewer than `size`. Raises FeedError if the
        file is gone or can't be reached.
        """

    @abstractmethod
    def publish(self, path: Path, release: Release) -> FeedVersion:
        """Add a version, whose tensors are in a file written by `heads.checkpoint.save_state`.
        Readers see it once it is complete.

        Raises:
            FeedError: the feed can't be reached, belongs to another actor, or refuses.
            CheckpointError: the file's tensors are not those of the release.
        """

    @abstractmethod
    def close(self) -> None:
        """Release its resources. Safe to call again."""

    def manifest(self) -> FeedManifest | None:
        """The manifest; None: nothing has been published yet. Raises FeedError if it can't be
        reached or read.
        """
        data = self.read()
        return None if data is None else read_manifest(data, self.address)

    def fetch(self, version: FeedVersion, target: Path, most_bytes: int) -> None:
        """Fetch a version's file. It appears at `target` once all its bytes have arrived and match
        the manifest.

        Args:
            most_bytes: limit on what is read and written, whatever the manifest says.

        Raises:
            BadVersionError: the file is too large, too short, or has other bytes.
            FeedError: it is gone, or the feed can't be reached.
        """
        if version.bytes > most_bytes:
            raise BadVersionError(
                "The feed names a file that is larger than any heads of these sizes.",
                given=f"{self.address}: {version.file}, {version.bytes} bytes",
                expected=f"<= {most_bytes} bytes",
                do="Don't trust this feed; find out who writes to it.",
            )
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.new-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256()
                count = 0
                for part in self.stream(version.file, version.bytes):
                    count += len(part)
                    if count > version.bytes:
                        break
                    digest.update(part)
                    file.write(part)
            if (count, digest.hexdigest()) != (version.bytes, version.digest):
                raise BadVersionError(
                    "A file in the feed is not the one that its manifest describes.",
                    given=f"{self.address}: {version.file}, {count} bytes or more, SHA-256"
                    f" {digest.hexdigest()[:16]}",
                    expected=f"{version.bytes} bytes, SHA-256 {version.digest[:16]}",
                    do="It is incomplete, damaged in transit, or forged: publish it again.",
                )
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def check_heads_file(path: Path, actor: FeedActor, dtype: str) -> str:
    """The checksum of a file's tensors. Raises CheckpointError if their names, shapes or dtype are
    not those of the actor's heads, or if there is NaN or infinity among them.
    """
    config = actor.config
    names = read_header(path, MAX_HEADS_HEADER_BYTES)
    check_names_and_shapes(path, config.shapes_among(names), dtype)
    return checksum(load_state(path))


def verify(feed: Feed, version: FeedVersion, actor: FeedActor, folder: Path) -> Path:
    """Fetch a version into a folder and check it completely. Returns its file.

    Raises:
        BadVersionError: as `fetch`, or if the tensors are not those that the manifest describes.
        FeedError: as `fetch`.
    """
    path = folder / version.file
    feed.fetch(version, path, actor.most_bytes())
    try:
        found = check_heads_file(path, actor, version.dtype)
        if found != version.checksum:
            raise CheckpointError(
                "The tensors do not match their checksum.",
                given=found[:16],
                expected=version.checksum[:16],
            )
    except CheckpointError as error:
        path.unlink()
        raise BadVersionError(
            "A version of the feed does not hold heads of its actor.",
            given=f"{feed.address}, version {version.version}: {error.problem} {error.given}",
            expected=str(error.expected),
            do="Find out who writes to the feed, and publish it again.",
        ) from error
    return path
