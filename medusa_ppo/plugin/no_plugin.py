"""NoPlugin: the hooks of MedusaPlugin, with nothing done. A loop calls the same lines with a plugin
and without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_ppo.actors.hf import Actor
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.plugin import warm_up as warming
from medusa_ppo.plugin.medusa_plugin import DRAIN_TIMEOUT_S, MedusaPlugin, Tables
from medusa_ppo.plugin.warm_up import WarmUpReport


class NoPlugin:
    """Stands where there is no plugin, so that a loop asks nowhere whether it has one.

    Attributes:
        tap: None: the loop's own passes stay as they are.
    """

    tap: None = None

    def warm_up(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        score: Callable[[Rollouts], None],
        *,
        tokens: int = warming.TOKENS,
        seconds: float = warming.SECONDS,
        folder: str | Path | None = None,
        advance: warming.Advance = warming.silent,
    ) -> WarmUpReport:
        """There are no heads to train."""
        return WarmUpReport(problem="nothing is trained here")

    def before_generation(self) -> None:
        """No heads to install."""

    def rollout_ready(self, rollouts: Rollouts) -> None:
        """Nobody wants the rollouts."""

    @contextlib.contextmanager
    def actor_forward(
        self,
        model: Actor,
        response_mask_BT: torch.Tensor,
        sequences: Sequence[int | None] | torch.Tensor,
    ) -> Iterator[None]:
        """The pass is not tapped."""
        yield

    def batch_ready(self, batch: RolloutBatch) -> None:
        """Nobody trains on the batch."""

    def policy_updated(self, model: Actor | None, policy_version: int) -> None:
        """Nobody needs the new lm_head."""

    def tables_updated(self, tables_VD: Tables | None, policy_version: int) -> None:
        """Nobody needs the new tables."""

    def metrics(self) -> dict[str, Any]:
        """No figures."""
        return {}

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
        """Nothing is being trained. True."""
        return True

    def save(self, folder: str | Path) -> bool:
        """There is no state to write. False."""
        return False

    def save_heads(self, folder: str | Path) -> Path:
        """There are no heads, and nothing is written; gives the folder all the same."""
        return Path(folder)

    def close(self) -> None:
        """Nothing was started."""


AnyPlugin = MedusaPlugin | NoPlugin
"""What a loop holds."""
