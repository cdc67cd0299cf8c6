"""TRL's trainers with draft heads: GRPO and RLOO in `grpo`, PPO in `trl_ppo`; they need different versions of TRL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another object under a module's name for the time of the block: some loops have no seam where their engine is built."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
