"""NoPlugin: the hooks of MedusaPlugin as no-ops, so that a loop is the same with and without a
plugin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_ppo.actors.hf import Actor
from medusa_ppo.companion.wire import TableRows, WantedRows
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.plugin import warm_up as warming
from medusa_ppo.plugin.medusa_plugin import DRAIN_TIMEOUT_S, MedusaPlugin, Tables
from medusa_ppo.plugin.warm_up import WarmUpReport


class NoPlugin:
    """Replaces a plugin, so that a loop never has to check whether it has one.

    Attributes:
        tap: None: the loop's own passes stay unchanged.
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

    def begin_pieces(self, step: int, responses: int, prompts: int) -> None:
        """No states are kept."""

    def rollout_ready(self, rollouts: Rollouts) -> None:
        """The rollouts are not needed."""

    @contextlib.contextmanager
    def actor_forward(
        self,
        model: Actor,
        response_mask_BT: torch.Tensor,
        sequences: Sequence[int | None] | torch.Tensor,
    ) -> Iterator[None]:
        """The pass is not tapped."""
        yield

    def wanted_rows(self) -> WantedRows | None:
        """No rows are needed."""
        return None

    def most_states(self) -> int:
        """No states are needed."""
        return 0

    def batch_ready(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        """The batch is not needed."""

    def policy_updated(self, model: Actor | None, policy_version: int) -> None:
        """The new lm_head is not needed."""

    def tables_updated(self, tables_VD: Tables | None, policy_version: int) -> None:
        """The new tables are not needed."""

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """Nothing is counted."""
        yield

    def metrics(self) -> dict[str, Any]:
        """No figures."""
        return {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """There is no companion to wait."""
        yield

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
        """Nothing is being trained. True."""
        return True

    def save(self, folder: str | Path) -> bool:
        """There is no state to write. False."""
        return False

    def save_heads(self, folder: str | Path) -> Path:
        """There are no heads, so nothing is written; returns the folder anyway."""
        return Path(folder)

    def close(self) -> None:
        """Nothing was started."""


AnyPlugin = MedusaPlugin | NoPlugin
"""What a loop holds."""
