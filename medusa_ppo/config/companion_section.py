"""The section `companion`: how the heads are trained beside PPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from medusa_ppo.config.section import Count, Section, Text

HOLDOUT_SHARE = 0.2
"""Share of each batch's responses kept out of training, to judge candidates on."""
LOGITS_BYTES = 1024**3
"""Of a micro-batch of one head, in float32, at most."""


class CompanionConfig(Section):
    """How the heads are trained beside PPO."""

    enabled: bool = True
    """Train the heads while PPO runs. Set it to false when heads from a file are to stay as they
    are, or (with engine.num_drafts=0) to switch the plugin off.
    """
    on_error: Literal["raise", "disable"] = "disable"
    """What a failed companion does to PPO: `disable` goes on with the heads that serve, `raise`
    ends the run. Set it to raise in tests and measurements, where a run without training is worth
    nothing.
    """
    loss: Literal["ce", "tv", "ce_tv", "kl", "kl_tv"] = "kl_tv"
    """Loss of the heads: `ce` is cross entropy with the sampled tokens, `kl` the KL to the actor's
    own distribution, `tv` the share of drafts that are refused; `ce_tv` and `kl_tv` add two of
    them. Set it to ce_tv when the actor's distributions take too much memory: it reads tokens
    alone.
    """
    learning_rate: float = Field(2e-3, gt=0)
    """AdamW step size of the heads. The gate lowers it by itself when candidates get worse. Set it
    lower when the heads are large and candidates are worse from the start.
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of its matrix products; null: bfloat16 on a GPU or CPU that has it, else
    float32. Weights, sums and optimizer stay float32. Set it to float32 to find out whether
    rounding is what goes wrong.
    """
    batch_positions: Count = 2048
    """Positions (tokens of responses) in an optimizer step, of all workers together. Set it lower
    when batches are small: a batch should give ten steps or more.
    """
    epochs: Count = 2
    """Most passes over each rollout batch; fewer where `share` has no room for them (all with
    `wait` or ppo.staleness). Set it higher when the companion has a device of its own and waits
    for batches.
    """
    share: float = Field(0.05, gt=0, le=1)
    """The most that training may take of the loop's seconds, where it shares cores or a device with
    it; there is no bound where it shares none, with `wait`, or with ppo.staleness. Set it higher
    when `companion_reason` is mostly `waiting` and each version gains much, lower when generation
    is a small part of a step.
    """
    queue_bytes: Count = 2 * 1024**3
    """Bytes of memory for batches on their way, waiting and in training together (twice as much for
    those kept for replay). Of a batch that is larger than half of this a sample is taken; when
    it is full the oldest batch that waits is dropped and counted. Set it higher when
    `companion_positions_left_out` is above 0 and memory is free.
    """
    wait: bool = False
    """Wait for the companion before each generation: repeatable, also after --resume, where
    engine.num_drafts is a number; but its time is no longer hidden. Set it when two runs must give
    the same numbers.
    """
    replay_versions: int = Field(0, ge=0)
    """Policy versions for which a batch is trained on again beside newer ones, by half as much with
    each; 0: never. Set it when batches are small and the policy changes slowly.
    """
    gate_confidence: float = Field(0.95, gt=0.5, lt=1)
    """How sure it is, over all looks at the serving heads, that no candidate is published which is
    no better than they are on held-out responses. Set it higher when `versions_worse` is too large
    a part of `versions_followed`, lower when nothing is published.
    """
    cores: tuple[int, ...] | None = None
    """CPU cores that each worker is pinned to, a thread on each; null: any, with threads for a
    quarter of them (all with `resource`). Set it to cores that neither the loop nor engines use:
    the companion then need not stand still while the engine writes.
    """
    num_gpus: float | None = Field(None, ge=0)
    """GPUs of each worker; null: a tenth of one where so much is free, else none. A single worker
    with less than a whole GPU frees its memory there between batches. Set it to 1 when there is a
    GPU for the companion alone.
    """
    workers: Count = 1
    """Processes that share each batch and every optimizer step; the heads come out the same. Set it
    higher when one worker does not train a batch in the time of a step.
    """
    feed: Text | None = None
    """Where each version that is published goes as well, for engines that look there by themselves
    (docs/feeds.md): a folder, or the address of `medusa-ppo feed serve`; null: nowhere. Set it when
    engines can't be called between steps, or stand on other nodes.
    """
    resource: Text | None = None
    """Name of a Ray resource (`ray start --resources`): the companion runs on nodes that have it;
    null: on any node. Set it when a node is to be the companion's own.
    """

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
