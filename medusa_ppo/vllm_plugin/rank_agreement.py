"""Whether all ranks of an engine say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp
from vllm.distributed.parallel_state import get_tp_group


def agreed(number: int) -> int:
    """The number of the first tensor-parallel rank, on all of them."""
    return _over_ranks(
        number,
        lambda shared, group: torch.distributed.broadcast(
            shared, src=group.ranks[0], group=group.cpu_group
        ),
    )


def agreed_by_all(good: bool) -> bool:
    """Whether it is so on all tensor-parallel ranks; each of them asks."""
    return bool(
        _over_ranks(
            int(good),
            lambda shared, group: torch.distributed.all_reduce(
                shared, ReduceOp.MIN, group=group.cpu_group
            ),
        )
    )


def _over_ranks(number: int, share: Callable[[torch.Tensor, Any], Any]) -> int:
    group = get_tp_group()
    if group.world_size == 1:
        return number
    shared = torch.tensor([number], dtype=torch.int64)
    share(shared, group)
    return int(shared.item())
