"""Intel's OpenMP, which vLLM's CPU build asks for, and the file that it leaves in shared memory when its process is killed."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def forget_registration() -> None:
    """Remove this process's entry, by which the library would find a second copy of itself, now that it has looked.

    It removes the entry itself only where a process ends by returning; Ray ends actors, and faults end engines, otherwise.
    """
    (SHARED_MEMORY / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)
