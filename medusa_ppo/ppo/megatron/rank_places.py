"""Where the ranks of a Megatron actor are: which of them are on one node, what they ask Ray for,
and whose devices an engine uses if engines share them (ppo.placement=shared). No torch, no Ray.

For example, 4 ranks with tensor_parallel=2 and 4 engines of one rank, on 4 GPUs:

    bundle 0 (2 GPUs)   rank 0, engine 0   rank 1, engine 1
    bundle 1 (2 GPUs)   rank 2, engine 2   rank 3, engine 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from medusa_ppo.config.ppo_section import SHARED
from medusa_ppo.config.run_config import RunConfig


def ranks_together(config: RunConfig) -> int:
    """How many consecutive ranks are on one node: those of a tensor-parallel group, which
    communicate in every layer, and those whose devices one engine uses.
    """
    section = config.actor
    if config.ppo.placement != SHARED:
        return section.tensor_parallel
    return math.lcm(section.tensor_parallel, config.engine.ranks)


def rank_bundles(config: RunConfig, each: Mapping[str, float]) -> list[dict[str, float]]:
    """The bundles of the placement group; Ray keeps each on one node.

    Args:
        each: what a rank asks Ray for. Engines that share the ranks' devices ask for nothing.
    """
    together = ranks_together(config)
    bundle = {name: amount * together for name, amount in each.items()}
    return [bundle] * (config.actor.ranks // together)


def bundle_of(config: RunConfig, rank: int) -> int:
    """The bundle that a rank is in."""
    return rank // ranks_together(config)


def ranks_of_engines(config: RunConfig) -> list[range]:
    """For each engine, the ranks whose devices it uses; none if engines have their own."""
    section = config.actor
    if config.ppo.placement != SHARED or section.backend != "megatron":
        return []
    each = config.engine.ranks
    return [range(index * each, (index + 1) * each) for index in range(config.engine.replicas)]
