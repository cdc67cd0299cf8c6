"""The section `companion`: how the heads are trained beside PPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from medusa_ppo.config.section import Count, Section, Text

HOLDOUT_SHARE = 0.2
"""Share of each batch's responses kept out of training, to judge candidates on."""


class CompanionConfig(Section):
    """How the heads are trained beside PPO."""

    enabled: bool = True
    """Train the heads while PPO runs."""
    on_error: Literal["raise", "disable"] = "disable"
    """What a failed companion does to PPO: `disable` goes on with the serving heads."""
    loss: Literal["ce", "tv", "ce_tv", "kl", "kl_tv"] = "kl_tv"
    """Loss of the heads."""
    learning_rate: float = Field(2e-3, gt=0)
    """AdamW step size."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of its products; null: bfloat16 on a GPU or CPU that has it, else float32. Weights,
    sums and optimizer stay float32.
    """
    batch_positions: Count = 2048
    """Positions per optimizer step, of all workers together."""
    epochs: Count = 2
    """Most passes over each rollout batch; as many are made as gain more seconds than they lose
    (all with `wait` or ppo.staleness).
    """
    queue_bytes: Count = 2 * 1024**3
    """Byte budget of batches on their way, waiting and in training together (and twice as much of
    those kept for replay). Of a batch that is more than half of it a sample is taken; when it is
    full the oldest that waits goes and is counted.
    """
    wait: bool = False
    """Wait for the companion before each generation: repeatable, also after --resume, but its time
    is no longer hidden.
    """
    replay_versions: int = Field(0, ge=0)
    """Policy versions for which a batch is trained on again beside newer ones, by half as much with
    each.
    """
    gate_confidence: float = Field(0.9, gt=0.5, lt=1)
    """How sure (one-sided) a candidate must be better on the holdout than the serving heads before
    it is published.
    """
    cores: tuple[int, ...] | None = None
    """CPU cores that each worker is pinned to, a thread on each; null: any, with threads for a
    quarter of them (all with `resource`).
    """
    num_gpus: float | None = Field(None, ge=0)
    """GPUs of each worker; null: a tenth, where so much is free. A single worker with a share of
    one leaves it between batches.
    """
    workers: Count = 1
    """Processes that share each batch and every optimizer step; the heads come out the same."""
    resource: Text | None = None
    """Ray resource of the nodes for the companion (`ray start --resources`); null: any node."""

    @property
    def offload(self) -> bool:
        """A companion that has a share of a GPU leaves it to others between batches; several
        workers keep their place.
        """
        return self.workers == 1 and 0 < (self.num_gpus or 0) < 1

    @property
    def replay_bytes(self) -> int:
        """Byte budget of the batches kept for replay."""
        return 2 * self.queue_bytes

    @property
    def saves_replay(self) -> bool:
        """Batches kept for replay are part of the saved state: a run that waits is one that must
        repeat to the bit.
        """
        return self.wait and self.workers == 1
