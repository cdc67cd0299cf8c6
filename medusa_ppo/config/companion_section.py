"""The section `companion`: how the heads are trained beside PPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from medusa_ppo.config.section import Count, Section, Text

HOLDOUT_SHARE = 0.2
"""Share of each batch's responses held out from training, to judge candidates on."""
REPLAY_DECAY = 0.5
"""Share of a replayed batch's positions that remains with each policy version."""
MOST_OF_PIECES = 2.0
"""States that are kept of a batch that is scored in pieces, before all of it is written, as a
multiple of its sample's rows.
"""
LOGITS_BYTES = 1024**3
"""Maximum bytes of float32 logits in a micro-batch of one head."""
RATE_AT_WIDTH = 2e-3 * 256
"""The default learning rate times the actor's hidden size. AdamW moves each weight by about the
rate, so the outputs of a layer move by that times its width: heads of width 1,024 learned from
bigrams at 5e-4 as those of width 256 did at 2e-3, and at 2e-3 their loss was above the start for
16 steps (`benchmarks/width_and_rate.py`).
"""
RATE_POSITIONS = 2048
"""Positions of a step with the default learning rate."""
LEAST_STEPS, LEAST_POSITIONS = 10, 128
"""A pass over a batch has so many optimizer steps or more, unless they had fewer positions."""


class CompanionConfig(Section):
    """How the heads are trained beside PPO."""

    enabled: bool = True
    """Train the heads while PPO runs. Set it to false to keep heads from a file as they are, or
    (with engine.num_drafts=0) to switch the plugin off.
    """
    on_error: Literal["raise", "disable"] = "disable"
    """What happens to PPO when the companion fails: `disable` continues with the serving heads,
    `raise` ends the run. Set it to raise in tests and measurements, where a run without training is
    useless.
    """
    loss: Literal["ce", "tv", "ce_tv", "kl", "kl_tv"] = "kl_tv"
    """Loss of the heads: `ce` is cross entropy with the sampled tokens, `kl` the KL to the actor's
    own distribution, `tv` the share of drafts that are refused; `ce_tv` and `kl_tv` combine two of
    them. Set it to ce_tv when the actor's distributions take too much memory: it needs only the
    tokens.
    """
    learning_rate: float | None = Field(None, gt=0)
    """AdamW learning rate of the heads in steps of `batch_positions`; smaller steps take the root
    of their share of it. null: 0.512 / the actor's hidden size in steps of 2,048 positions,
    whatever `batch_positions` is, so 2e-3 at 256 and 1.25e-4 at 4,096. The gate lowers it when
    candidates get worse. Set it lower when candidates are worse from the start.
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the companion's matrix products; null: bfloat16 on a GPU or CPU that has it,
    else float32. Weights, sums and optimizer stay float32. Set it to float32 to find out whether
    rounding is the problem.
    """
    batch_positions: Count = RATE_POSITIONS
    """Maximum positions (response tokens) in an optimizer step, over all workers. There are fewer
    if a pass over a batch would have fewer than ten steps, but not below 128. Set it lower when
    heads learn too slowly from large batches, and the companion has time.
    """
    epochs: Count = 2
    """Maximum passes over each rollout batch; there are fewer if `share` has no room for them, or
    while batches wait to be trained on (but always all of them with `wait` or ppo.staleness). Set
    it higher when the companion has its own device and waits for batches.
    """
    share: float = Field(0.05, gt=0, le=1)
    """Maximum share of the loop's seconds that training may take, if it shares cores or a device
    with the loop; there is no limit if it shares none, with `wait`, or with ppo.staleness. Set it
    higher when `companion_reason` is mostly `waiting` and each version gains much, lower when
    generation is a small part of a step.
    """
    queue_bytes: Count = 2 * 1024**3
    """Bytes of memory for all batches in transit, waiting and in training (twice as much for those
    kept for replay). A batch larger than half of this is sampled; when the memory is full, the
    oldest waiting batch is dropped and counted. Set it higher when `companion_positions_left_out`
    is above 0 and memory is free.
    """
    wait: bool = False
    """Wait for the companion before each generation. With a fixed engine.num_drafts the run is then
    reproducible, even after --resume, but training time is no longer hidden. Set it when two runs
    must give the same numbers.
    """
    replay_versions: int = Field(0, ge=0)
    """Number of policy versions for which a batch is trained on again beside newer ones, each time
    on half as many positions; 0: never. Set it when batches are small and the policy changes
    slowly.
    """
    gate_confidence: float = Field(0.95, gt=0.5, lt=1)
    """Confidence, over all looks at the same serving heads, that no candidate is published unless
    it is better on held-out responses. Set it higher when `versions_worse` is too large a share of
    `versions_followed`, lower when nothing is published.
    """
    cores: tuple[int, ...] | None = None
    """CPU cores that each worker is pinned to, with a thread on each; null: any, with threads for a
    quarter of them (all with `resource`). Set it to cores that neither the loop nor the engines
    use: the companion then does not have to pause during generation.
    """
    num_gpus: float | None = Field(None, ge=0)
    """GPUs of each worker; null: a tenth of one if that much is free, else none. A single worker
    with less than a whole GPU frees its GPU memory between batches. Set it to 1 when the companion
    has a GPU to itself.
    """
    workers: Count = 1
    """Processes that split each batch and every optimizer step; the resulting heads are the same.
    Set it higher when one worker can't train on a batch within a step.
    """
    feed: Text | None = None
    """Where each published version is also written, for engines that check it by themselves
    (docs/feeds.md): a folder, or the address of `medusa-ppo feed serve`; null: nowhere. Set it when
    engines can't be called between steps, or run on other nodes.
    """
    resource: Text | None = None
    """Name of a Ray resource (`ray start --resources`): the companion runs on nodes that have it;
    null: any node. Set it to give the companion a node of its own.
    """

    def learning_rate_of(self, hidden_size: int) -> float:
        """The learning rate of heads for an actor of this width, in steps of `rate_positions`."""
        if self.learning_rate is not None:
            return self.learning_rate
        return RATE_AT_WIDTH / hidden_size

    @property
    def rate_positions(self) -> int:
        """Positions of a step with the whole learning rate. For the default rate they don't depend
        on `batch_positions`: it would raise the rate of steps that it leaves as they are.
        """
        return RATE_POSITIONS if self.learning_rate is None else self.batch_positions

    def steps_of(self, positions: int) -> int:
        """Optimizer steps of a pass over so many positions."""
        least = min(LEAST_STEPS, positions // LEAST_POSITIONS)
        return max(1, least, -(-positions // self.batch_positions))

    @property
    def offload(self) -> bool:
        """Whether the companion frees its GPU between batches: with a share of a GPU it does;
        several workers don't.
        """
        return self.workers == 1 and 0 < (self.num_gpus or 0) < 1

    @property
    def replay_bytes(self) -> int:
        """Memory budget, in bytes, for batches kept for replay."""
        return 2 * self.queue_bytes

    @property
    def saves_replay(self) -> bool:
        """Whether batches kept for replay are part of the saved state. They are if the loop waits,
        because such a run must be reproducible to the bit.
        """
        return self.wait and self.workers == 1
