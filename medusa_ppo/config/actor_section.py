"""The section `actor`: what trains the actor, and on how many processes."""

from __future__ import annotations

from typing import Literal

from medusa_ppo.config.section import Count, Section, Text


class ActorConfig(Section):
    """What trains the actor, and on how many processes."""

    backend: Literal["transformers", "megatron"] = "transformers"
    """`transformers`: in the loop's own process; `megatron`: megatron-core, on processes that Ray
    starts.
    """
    tensor_parallel: Count = 1
    """Ranks that share each layer (backend `megatron`)."""
    pipeline_parallel: Count = 1
    """Ranks that the layers are spread over (backend `megatron`)."""
    context_parallel: Count = 1
    """Ranks that share the tokens of each sequence (backend `megatron`)."""
    data_parallel: Count = 1
    """Copies of the whole, each with its share of the sequences (backend `megatron`)."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens, too, where they would all compute the same (backend
    `megatron`).
    """
    distributed_optimizer: bool = False
    """Each copy keeps moments and float32 weights of its share of the parameters only (backend
    `megatron`).
    """
    resource: Text | None = None
    """Ray resource of the nodes for the actor's ranks (`ray start --resources`); null: any node."""
    imports: Text | None = None
    """Python module that each rank imports before it builds its part, e.g. to replace layers of
    Megatron's; null: none.
    """

    @property
    def ranks(self) -> int:
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )
