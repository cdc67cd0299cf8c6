"""A feed in a folder of one node, or of a shared file system."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from heads.errors import CheckpointError, FeedError
from heads.tensorfile import file_inside, read_regular, regular_size
from medusa_ppo.feeds.feed import CHUNK_BYTES, Feed, check_heads_file
from medusa_ppo.feeds.feed_manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    FeedManifest,
    FeedVersion,
    Release,
    described,
    next_number,
    with_version,
)
from medusa_ppo.runtime.files import write_atomic

FILES = "heads-*.safetensors"
COPIED = ".heads.new-"
ABANDONED_S = 3600.0
"""A copy that nobody has written to for this long belongs to a publisher that was killed."""


class FolderFeed(Feed):
    """Files and a manifest; each appears by a rename. Publishers must take turns: if two publish at
    once, a version of one of them may be lost, but nothing else.
    """

    def __init__(self, folder: str | Path) -> None:
        """`folder`: created when something is published."""
        self.folder = Path(folder)
        self.address = str(folder)

    def read(self) -> bytes | None:
        try:
            # Not `exists`, for which a file that may not be read is missing.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(self.folder / MANIFEST)
                return read_regular(file_inside(self.folder, MANIFEST), MOST_MANIFEST_BYTES)
            return None
        except (CheckpointError, OSError) as error:
            raise self._unreadable(MANIFEST, error) from error

    def stream(self, file: str, size: int) -> Iterator[bytes]:
        try:
            path = file_inside(self.folder, file)
            regular_size(path)  # Not a pipe, which might never end.
            with path.open("rb") as source:
                while part := source.read(CHUNK_BYTES):
                    yield part
        except (CheckpointError, OSError) as error:
            raise self._unreadable(file, error) from error

    def publish(self, path: Path, release: Release) -> FeedVersion:
        tensors = check_heads_file(path, release.actor, release.dtype)
        found = self.manifest()
        number = next_number(found, release, self.address)
        try:
            version = self._take_in(path, number, tensors, release)
            manifest = with_version(found, version, release)
            write_atomic(self.folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise FeedError(
                "The feed's folder can't be written to.",
                given=f"{self.address}: {error}",
                expected="a folder with room",
                do="Free some space, or use another folder.",
            ) from error
        self._forget_all_but(manifest)
        return version

    def close(self) -> None:
        """Nothing to release."""

    def begin_file(self) -> tuple[int, Path]:
        """An open new file in the feed's folder, and its path. No reader sees it; one that is left
        there is removed in time.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=COPIED, dir=self.folder)
        return handle, Path(path)

    def _take_in(self, path: Path, number: int, tensors: str, release: Release) -> FeedVersion:
        """Copy a file into the feed, named by its digest."""
        handle, temporary = self.begin_file()
        try:
            self._forget_unfinished(os.fstat(handle).st_mtime)
            with path.open("rb") as source, os.fdopen(handle, "wb") as copy:
                shutil.copyfileobj(source, copy, CHUNK_BYTES)
                copy.flush()
                # Synced before the rename, which might otherwise reach the disk before the bytes.
                os.fsync(copy.fileno())
            with temporary.open("rb") as copied:
                digest = hashlib.file_digest(copied, "sha256").hexdigest()
            size = os.path.getsize(temporary)
            version = described(number, size, digest, tensors, release)
            os.chmod(temporary, 0o644)  # mkstemp makes a private file, but other users read heads.
            os.replace(temporary, self.folder / version.file)
        finally:
            temporary.unlink(missing_ok=True)
        return version

    def _forget_all_but(self, manifest: FeedManifest) -> None:
        named = {version.file for version in manifest.versions}
        for path in self.folder.glob(FILES):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _forget_unfinished(self, now: float) -> None:
        """`now`: by the clock of the file system, which may be another machine's."""
        for path in self.folder.glob(f"{COPIED}*"):
            # Another publisher's may be gone by now.
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_mtime < now - ABANDONED_S:
                    path.unlink()

    def _unreadable(self, file: str, error: Exception) -> FeedError:
        reason = error.given if isinstance(error, CheckpointError) else error
        return FeedError(
            "The feed's folder can't be read.",
            given=f"{self.address}: {file}: {reason}",
            expected="a plain file that this process may read",
            do="Inspect the folder, and publish again.",
        )
