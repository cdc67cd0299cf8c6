"""Placement groups of Ray: room for several processes is reserved at once, so that a run starts whole or says what is missing.

Ray finds another node for what a group has on a node that is lost; the group's other places stay.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from heads.errors import RunError

TIMEOUT_S = 180.0
TOKEN = 0.001  # Of a node's resource: it says where, not how many.


def bundle(gpus: float, resource: str) -> dict[str, float]:
    """What one process asks of its node. CPUs are shared, not reserved; Ray wants a token of something in each bundle."""
    asked = {name: amount for name, amount in (("GPU", gpus), (resource, TOKEN)) if name and amount}
    return asked or {"CPU": TOKEN}


def reserve(bundles: list[dict[str, float]], layout: str, what: str, timeout_s: float = TIMEOUT_S) -> PlacementGroup:
    """Reserve room for all bundles. `ray.init` is the caller's; so is `release`.

    Args:
        layout: `pack`, `spread`, `strict_pack` or `strict_spread`.
        what: whose room it is, for the error.

    Raises:
        RunError: there is no such room in the cluster.
    """
    group = placement_group(bundles, strategy=layout.upper())
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise RunError(
            f"The Ray cluster has no room for the {what}.",
            given=f"{_by_kind(bundles)}, {layout}; free: {_free()}",
            expected=f"room for all of them within {timeout_s:.0f} s",
            do="Add nodes, start Ray with the resources named, or ask for fewer processes or another placement.",
        )
    return group


def release(group: PlacementGroup | None) -> None:
    """Give the room back; whatever runs in it is ended."""
    if group is not None and ray.is_initialized():
        remove_placement_group(group)


def place(group: PlacementGroup | None, index: int) -> dict[str, Any]:
    """Options of the Ray actor that has a place of the group; none without a group."""
    return {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}


def _by_kind(bundles: list[dict[str, float]]) -> str:
    kinds = {str(bundle): bundles.count(bundle) for bundle in bundles}
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _free() -> str:
    free = {name: amount for name, amount in ray.available_resources().items() if not name.startswith(("node:", "memory", "object_store"))}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(free.items())) or "nothing"
