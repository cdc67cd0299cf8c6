"""Agreement of all ranks of an engine.

Each rank draws drafts and verifies them by itself, from the same random numbers. So q must be the
same on all of them to the bit, although what each computes alone may be rounded differently (by
kernels that were tuned on each rank). Whatever q is made of is therefore gathered from all ranks,
as vLLM gathers lm_head's logits: `shared_product`.

A rank that raises while the others continue to a product leaves them waiting for ever. So anything
that may fail on a single rank (a file that exists on only one node, a lack of memory) is done
`together`: it finishes on all ranks before anything is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp
from vllm.distributed.parallel_state import get_tp_group

from heads.errors import MedusaError, SwapError
from medusa_ppo.drafting.products import LINEAR, PACK

T = TypeVar("T")
MOST_TEXT = 1000
"""Bytes of an error's text that the other ranks receive."""


def only_rank() -> bool:
    """Whether there is no other tensor-parallel rank, so that nothing is a collective."""
    return bool(get_tp_group().world_size == 1)


def agreed(number: int) -> int:
    """The number of the first tensor-parallel rank, returned on all ranks."""
    return _over_ranks(
        number,
        lambda shared, group: torch.distributed.broadcast(
            shared, src=group.ranks[0], group=group.cpu_group
        ),
    )


def agreed_by_all(good: bool) -> bool:
    """Whether `good` is true on all tensor-parallel ranks; each of them calls this."""
    return bool(
        _over_ranks(
            int(good),
            lambda shared, group: torch.distributed.all_reduce(
                shared, ReduceOp.MIN, group=group.cpu_group
            ),
        )
    )


def together(what: str, work: Callable[[], T]) -> T:
    """The result of `work`, once it has succeeded on all tensor-parallel ranks.

    Raises:
        SwapError: it failed on another rank. The rank where it failed raises the original error.
    """
    error: Exception | None = None
    try:
        result = work()
    # Catches everything, because the other ranks must hear of any error before it is raised.
    except Exception as caught:
        error = caught
    texts = _texts_of_ranks("" if error is None else _in_short(error))
    if error is not None:
        raise error
    failed = next((rank for rank, text in enumerate(texts) if text), None)
    if failed is not None:
        raise SwapError(
            f"Another rank of the engine failed at {what}.",
            given=f"rank {failed}: {texts[failed]}",
            expected="success on every rank",
            do="Read what that rank says; each node needs the same files, and room for them.",
        )
    return result


def shared_product(pack: PACK) -> PACK:
    """`pack` for products that logits come from: each tensor-parallel rank multiplies by its part
    of a weight's rows, and all of them get the same logits, to the bit. Calls are collectives.
    """

    def packed(weight: torch.Tensor) -> LINEAR:
        group = get_tp_group()
        if group.world_size == 1:
            return pack(weight)
        width = len(weight)
        each = -(-width // group.world_size)
        first = group.rank_in_group * each
        own = weight[first : first + each]
        if len(own) < each:  # Parts of one size are gathered.
            own = torch.nn.functional.pad(own, (0, 0, 0, each - len(own)))
        product = pack(own)
        return lambda rows: group.all_gather(product(rows), dim=-1)[:, :width]

    return packed


def _in_short(error: Exception) -> str:
    if isinstance(error, MedusaError):
        return f"{error.problem} {error.given or ''}"
    return f"{type(error).__name__}: {error}"


def _texts_of_ranks(text: str) -> list[str]:
    group = get_tp_group()
    if group.world_size == 1:
        return [text]
    own = torch.zeros(MOST_TEXT, dtype=torch.uint8)
    data = text.encode()[:MOST_TEXT]
    own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, own, group=group.cpu_group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in found]


def _over_ranks(number: int, share: Callable[[torch.Tensor, Any], Any]) -> int:
    group = get_tp_group()
    if group.world_size == 1:
        return number
    shared = torch.tensor([number], dtype=torch.int64)
    share(shared, group)
    return int(shared.item())
