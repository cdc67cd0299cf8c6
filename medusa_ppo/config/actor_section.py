"""The section `actor`: what trains the actor, and on how many processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from medusa_ppo.config.section import Contradiction, Count, Section, Text

POLICY_ROLES, CRITIC_ROLES, ALL_ROLES = "policy", "critic", "all"


class ActorConfig(Section):
    """What trains the actor, and on how many processes."""

    backend: Literal["transformers", "megatron"] = "transformers"
    """`transformers` trains the actor in the loop's own process, on one device. `megatron` trains
    it with megatron-core, on processes that Ray starts. Set it to megatron when weights, gradients
    and optimizer of the actor do not fit on one GPU.
    """
    tensor_parallel: Count = 1
    """Ranks that split each layer (backend `megatron`). Set it first when the actor is too large
    for one GPU, up to the GPUs of a node: these ranks communicate in every layer.
    """
    pipeline_parallel: Count = 1
    """Ranks that the layers are spread over (backend `megatron`). Set it when the actor does not
    fit on the GPUs of one node: these ranks communicate only at the boundaries between parts.
    """
    context_parallel: Count = 1
    """Ranks that split the tokens of each sequence (backend `megatron`). Set it when the weights
    fit but the activations of long sequences do not.
    """
    data_parallel: Count = 1
    """Copies of the whole actor, each with its share of the sequences (backend `megatron`). Set
    it when the actor fits and you have GPUs left, to make the update faster.
    """
    sequence_parallel: bool = False
    """Tensor-parallel ranks also split the tokens wherever all of them would compute the same
    (backend `megatron`). Set it with `tensor_parallel` when activations take too much memory.
    """
    distributed_optimizer: bool = False
    """Each copy keeps moments and float32 weights only for its share of the parameters (backend
    `megatron`). Set it with `data_parallel` when the optimizer takes too much memory.
    """
    roles: Literal["policy", "critic", "all"] = "policy"
    """What the ranks hold (backend `megatron`). `policy`: actor and reference; critic and reward
    model stay whole, in the loop's process. `critic`: the critic too, sharded like the actor.
    `all`: a reward model of whole responses as well. Set it to critic or all when one of them is
    too large for one GPU.
    """
    resource: Text | None = None
    """Name of a Ray resource (`ray start --resources`): the actor's ranks run on nodes that have
    it; null: any node. Set it on a cluster to keep the actor away from the engines.
    """
    imports: Text | None = None
    """Python module that each rank imports before it builds its part of the actor; null: none. Set
    it when your own code must run there first, e.g. to replace Megatron's layers.
    """

    @property
    def ranks(self) -> int:
        """Number of the actor's processes."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )

    def contradictions(self) -> Iterator[Contradiction]:
        megatron = self.backend == "megatron"
        if not megatron and self.ranks > 1:
            yield Contradiction(
                "The transformers backend trains in one process.",
                (
                    "actor.backend",
                    "actor.tensor_parallel",
                    "actor.pipeline_parallel",
                    "actor.context_parallel",
                    "actor.data_parallel",
                ),
                "actor.backend=megatron",
                "Set actor.backend=megatron, or all four parallel sizes to 1.",
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            yield Contradiction(
                "Sequence parallelism needs tensor parallelism.",
                ("actor.sequence_parallel", "actor.tensor_parallel"),
                "actor.tensor_parallel above 1",
                "Raise actor.tensor_parallel, or leave actor.sequence_parallel out.",
            )
        if self.distributed_optimizer and not megatron:
            yield Contradiction(
                "A single process can't distribute its optimizer.",
                ("actor.distributed_optimizer", "actor.backend"),
                "actor.backend=megatron",
                "Set actor.backend=megatron, or leave the first out.",
            )
        if self.roles != POLICY_ROLES and not megatron:
            yield Contradiction(
                "A single process already holds all roles.",
                ("actor.roles", "actor.backend"),
                "actor.backend=megatron",
                "Set actor.backend=megatron, or leave the first out.",
            )
