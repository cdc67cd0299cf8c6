"""Files and folders that survive a crash: atomic writes, locks, and temporary folders that are
removed with the process that made them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from heads.errors import RunError

logger = logging.getLogger(__name__)

UNFINISHED = ".*.new-*"
"""Name pattern of files and folders that are written under a temporary name and then renamed."""
LOCK_FILE = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks, as some shared ones of clusters."""


def write_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text through a temporary file in the same folder and a rename.

    Raises:
        OSError: the folder can't be written to; the old file is then intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            # Synced, because a rename can reach the disk before the text: after a power cut the new
            # name would refer to an empty file.
            os.fsync(stream.fileno())
        # mkstemp makes the file private; a report should be as readable as any other new file.
        # A process can't read its umask, only replace it.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    # Also catches Ctrl-C, after which the temporary file would otherwise stay.
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file; the system releases it when the process ends, however it ends. The empty
    file stays.

    Raises:
        BlockingIOError: `wait` is False, and somebody else holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def only_one_in(folder: Path, what: str, named: str) -> Iterator[None]:
    """Hold a folder, which is created: two programs would write the same files, and each remove
    what the other has half written.

    Args:
        what: what writes there, for the error.
        named: how the user named the folder.

    Raises:
        RunError: another one holds it.
        OSError: nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK_FILE, wait=False))
        except BlockingIOError:
            raise RunError(
                f"Another {what} writes into the output folder.",
                given=folder,
                expected=f"one {what} per folder",
                do=f"Wait for it, stop it, or choose another {named}.",
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(
                "%s can't be locked (%s): start no second %s there.", folder, error.strerror, what
            )
        yield


def remove_unfinished(folder: Path, pattern: str = UNFINISHED) -> None:
    """Remove what killed processes left half-written under a folder: it may be as large as what
    they wrote.

    The caller must be the only writer there.
    """
    for path in sorted(folder.rglob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)  # Gone with its folder, or a link.


def cache_folder(name: str) -> Path:
    """This user's `<cache>/medusa-ppo/NAME`; it is created only when something is written."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "medusa-ppo" / name


SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("medusa-ppo-", "mppo-")
LOCK = ".owner"
"""Locked by the owner for as long as it lives. The kernel frees a lock with its process, even
across containers, where process ids mean nothing.
"""


class OwnedFolder:
    """A new folder of this process, removed by `close` (safe to call again), when this object is
    collected, or when the process ends.
    """

    def __init__(self, prefix: str, *, shared_memory: bool = False) -> None:
        """
        Args:
            prefix: begins with one of PREFIXES.
            shared_memory: in shared memory if there is any; else among the temporary files.
        """
        base = SHARED_MEMORY if shared_memory and os.access(SHARED_MEMORY, os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._own(folder, _new_lock(folder))

    @classmethod
    def taken(cls, path: Path) -> Self | None:
        """A folder with a name from another node, which is created here if it does not exist, or
        was a dead process's. None: its owner lives, on this node, or it is no folder of PREFIXES.
        """
        if not path.name.startswith(PREFIXES):
            return None
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            lock = _new_lock(path)
        except OSError:  # Another user's, or a link.
            return None
        else:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return None
        folder = cls.__new__(cls)
        folder._own(path, lock)
        return folder

    def _own(self, path: Path, lock: int) -> None:
        self.path = path
        self._end = weakref.finalize(self, _remove, path, lock, os.getpid())

    def close(self) -> None:
        self._end()

    def keep(self) -> Path:
        """Leave the folder for a reader; `sweep` ignores it."""
        if (ending := self._end.detach()) is not None:
            _object, _function, (_folder, lock, _owner), _keywords = ending
            # A folder without a lock file belongs to the reader: `sweep` only removes folders with
            # lock files.
            (self.path / LOCK).unlink(missing_ok=True)
            os.close(lock)
        return self.path


def _new_lock(folder: Path) -> int:
    """Another process's `sweep` looks for LOCK, and assumes that the owner of a folder with a free
    lock is dead.
    """
    made = folder / f"{LOCK}.new"
    lock = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(folder / LOCK)  # Locked before anyone can find it.
    return lock


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # Not in a forked child.
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def sweep(*, shared_memory_alone: bool = False) -> list[Path]:
    """Remove the folders of dead owners. Returns what was removed.

    Args:
        shared_memory_alone: leave the temporary files, for processes that may be on another node
            than the loop: if nodes share that folder but not its locks, a living loop's are free.
    """
    removed = []
    places = (
        {SHARED_MEMORY} if shared_memory_alone else {SHARED_MEMORY, Path(tempfile.gettempdir())}
    )
    for base in places:
        for lock in [path for prefix in PREFIXES for path in base.glob(f"{prefix}*/{LOCK}")]:
            if _is_free(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
    if removed:
        logger.info(
            "Removed leftovers of %d killed processes: %s",
            len(removed),
            ", ".join(map(str, removed)),
        )
    return removed


def _is_free(lock: Path) -> bool:
    try:
        # Others may write into these folders too: their files stay, and links are never followed.
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # It is gone, another user's, or a link.
        return False
    try:
        if os.fstat(handle).st_uid != os.geteuid() or lock.parent.is_symlink():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def forget_registration() -> None:
    """Remove this process's shared-memory entry of Intel's OpenMP (needed by vLLM's CPU build),
    with which the library detects a second copy of itself, now that it has checked.

    The library removes it only if the process ends by returning, but Ray kills actors, and faults
    kill engines.
    """
    (SHARED_MEMORY / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)
