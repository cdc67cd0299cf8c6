"""Keeps freed memory in the process for the next step.

glibc returns large blocks to the kernel as soon as they are freed. A training step frees and
allocates the same hundreds of megabytes again and again, and the kernel zeroes every page each
time. So blocks below KEPT_BYTES come from the heap, and the heap shrinks only when more than that
is free at its end. A user's own allocator settings are respected.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 1024**3
"""Maximum free bytes that are kept at the end of the heap, and the size from which a freed block is
returned at once.
"""
AHEAD_BYTES = 64 * 1024**2  # Extra bytes that the heap requests when it grows.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TOP_PAD_": str(AHEAD_BYTES),
    # One heap for all threads, since other arenas can't hold large blocks.
    "MALLOC_ARENA_MAX": "1",
}
"""Read by glibc before anything runs in a process."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def environment() -> dict[str, str]:
    """Environment for processes that we start; empty if the user has set one of ENVIRONMENT."""
    return {} if _set_by_user() else ENVIRONMENT


def keep_freed_memory() -> bool:
    """Let this process keep what its main thread frees.

    Returns:
        Whether the allocator accepted this: not if it isn't glibc's, or if the user has set one of
        ENVIRONMENT.
    """
    if not sys.platform.startswith("linux") or _set_by_user():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (M_MMAP_THRESHOLD, KEPT_BYTES),
        (M_TRIM_THRESHOLD, KEPT_BYTES),
        (M_TOP_PAD, AHEAD_BYTES),
    )
    taken = [
        mallopt(name, value) for name, value in settings
    ]  # Call all of them, whatever the first returns.
    return all(taken)


def _set_by_user() -> bool:
    return any(name in os.environ for name in ENVIRONMENT)
