"""Memory that a process frees stays with it, for the next step to use.

glibc gives large blocks back to the kernel as soon as they are freed. A training step frees and
takes the same hundreds of megabytes again and again, and the kernel fills every page with zeros
each time. So blocks below KEPT_BYTES come from the heap, and the heap shrinks only when more than
that is free at its end. A user's own settings of the allocator stay.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 1024**3
"""Most bytes at the end of the heap that stay, and size of the blocks that are given back at
once.
"""
AHEAD_BYTES = 64 * 1024**2  # What the heap takes more than it was asked for, when it grows.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TOP_PAD_": str(AHEAD_BYTES),
    # One heap for all threads: others can't hold large blocks.
    "MALLOC_ARENA_MAX": "1",
}
"""Read by glibc before anything runs in a process."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def environment() -> dict[str, str]:
    """What a process that we start is given; nothing where the user has set one of ENVIRONMENT."""
    return {} if _set_by_user() else ENVIRONMENT


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, as far as its main thread takes it.

    Returns:
        Whether the allocator did as it was asked: it does nothing where that is not glibc's, or
        where the user has set one of ENVIRONMENT.
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
    taken = [mallopt(name, value) for name, value in settings]  # All, whatever the first says.
    return all(taken)


def _set_by_user() -> bool:
    return any(name in os.environ for name in ENVIRONMENT)
