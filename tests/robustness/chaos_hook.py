"""What chaos.py lets go wrong inside of Ray's workers: they look for an order in a file.
Imports nothing heavy by itself.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

ORDERS = "CHAOS_ORDERS"
"""Environment variable with the file's name."""


def take_order(file: Path, *wanted: str) -> str:
    """The order in a file, which is then gone; empty when there is none, or none of those that are
    wanted.
    """
    try:
        order = file.read_text() if file.is_file() else ""
        if not order or (wanted and order not in wanted):
            return ""
        file.unlink()
    except OSError:
        return ""
    return order


def install() -> None:
    """Ray's `worker_process_setup_hook`: the companion fails where its order says so."""
    import torch

    from heads.tensorfile import StateWriter
    from medusa_ppo.companion.service import CompanionService

    orders = Path(os.environ[ORDERS])
    learn = CompanionService._learn
    put = StateWriter.put

    def learn_or_fail(self: CompanionService, batch: Any) -> Any:
        order = take_order(orders, "cuda", "memory", "clock")
        if order == "cuda":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if order == "memory":
            torch.empty(1 << 60)  # A real refusal of the allocator.
        if order == "clock":
            now = time.time
            time.time = lambda: now() - 2 * 86_400
        return learn(self, batch)

    def put_or_die(self: StateWriter, name: str, tensor: torch.Tensor) -> None:
        if self.path.name.startswith("heads-") and take_order(orders, "half"):
            self._file.write(b"half of a file")
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, name, tensor)

    CompanionService._learn = learn_or_fail  # type: ignore[method-assign]
    StateWriter.put = put_or_die  # type: ignore[method-assign]
