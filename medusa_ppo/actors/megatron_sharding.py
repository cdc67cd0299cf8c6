"""Where the rows of a micro-batch and of a table are when Megatron spreads them over ranks, and how they come together on one rank.

Shape letters: T tokens of the whole micro-batch (S of them on one rank), B batch rows, D hidden, V vocabulary, P positions of one rank.

    tensor parallel     hidden states are whole on every rank; tables are cut along V, padded at the end
    sequence parallel   rank i has the i-th S tokens
    context parallel    every sequence is cut into 2 x ranks pieces; rank i has pieces i and 2 x ranks - 1 - i, in that order
    packed              sequences stand one after the other in T, each padded to what the cuts need; B is 1

No megatron import: groups are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from heads.errors import DataError


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank; None stands for a group of one."""

    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """First of its tensor and context groups: whatever is put together comes together here."""
        return rank_of(self.tensor) == 0 and rank_of(self.context) == 0


@dataclass(frozen=True)
class Packing:
    """Which rows of a packed micro-batch belong to which sequence.

    Attributes:
        bounds: where the sequences begin, their padding counted; context parallelism cuts between these.
        starts: first row of each sequence that has a token.
        lengths: its tokens, padding left out.
    """

    bounds: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def read(cls, parameters: Any) -> Packing | None:
        """From Megatron's `PackedSeqParams`; None when the micro-batch isn't packed."""
        if parameters is None or parameters.cu_seqlens_q is None:
            return None
        ends = [int(n) for n in parameters.cu_seqlens_q.tolist()]
        padded = parameters.cu_seqlens_q_padded
        bounds = ends if padded is None else [int(n) for n in padded.tolist()]
        lengths = [b - a for a, b in pairwise(ends)]
        # A last pseudo-sequence of padding has no token of its own.
        kept = [i for i, length in enumerate(lengths) if length]
        return cls(tuple(bounds[:-1]), tuple(bounds[i] for i in kept), tuple(lengths[i] for i in kept))

    def unpack(self, hidden_T1D: torch.Tensor) -> torch.Tensor:
        """One row for each sequence, zeros behind its end: `BTD`."""
        out_BTD = hidden_T1D.new_zeros(len(self.starts), max(self.lengths), hidden_T1D.shape[-1])
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            out_BTD[row, :length] = hidden_T1D[start : start + length, 0]
        return out_BTD


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def context_positions(rank: int, ranks: int, total: int, bounds: tuple[int, ...] = ()) -> torch.Tensor:
    """Positions `P` (of T) of the rows that a context-parallel rank holds, in the order in which it holds them.

    Args:
        rank, ranks: within the context-parallel group.
        total: T.
        bounds: where packed sequences begin (padded), the first at 0; empty: one sequence.

    Raises:
        DataError: a sequence that can't be cut into 2 x ranks equal pieces.
    """
    if ranks == 1:
        return torch.arange(total)
    edges = [*(bounds or (0,)), total]
    pieces = []
    for start, end in pairwise(edges):
        piece, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise DataError(
                "A sequence can't be cut for context parallelism.",
                given=f"{end - start} tokens",
                expected=f"a multiple of {2 * ranks} (twice the context-parallel ranks)",
                do="Pad each sequence to it.",
            )
        for index in (rank, 2 * ranks - 1 - rank):
            pieces.append(torch.arange(start + index * piece, start + (index + 1) * piece))
    return torch.cat(pieces)


class Gathering:
    """One tensor of each rank of a group on its way to the first rank; begun at once, so that it goes on beside the forward pass."""

    def __init__(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._values = values.contiguous()
        self._parts: list[torch.Tensor] = [self._values]
        self._work: Any = None
        if size_of(group) > 1:
            leads = rank_of(group) == 0
            self._parts = [torch.empty_like(self._values) for _ in range(size_of(group))] if leads else []
            self._work = dist.gather(self._values, self._parts if leads else None, group=group, group_dst=0, async_op=True)

    def wait(self) -> list[torch.Tensor]:
        """All parts in the order of ranks; empty on ranks that are not the first."""
        if self._work is not None:
            self._work.wait()
        return self._parts


def gather_rows(rows_VD: torch.Tensor, group: dist.ProcessGroup | None, vocab_size: int) -> torch.Tensor | None:
    """A whole table without its padding on the group's first rank, on the CPU; None elsewhere. Every rank of the group must call it."""
    parts = Gathering(rows_VD.detach(), group).wait()
    return torch.cat([part.cpu() for part in parts])[:vocab_size] if parts else None


def join_context(local_PBD: torch.Tensor, groups: Groups, packing: Packing | None) -> torch.Tensor | None:
    """All tokens of a micro-batch `TBD` from context-parallel ranks that hold `PBD`, on the first rank; None elsewhere."""
    ranks = size_of(groups.context)
    parts = Gathering(local_PBD, groups.context).wait()
    if not parts:
        return None
    if ranks == 1:
        return parts[0]
    whole_TBD = local_PBD.new_empty(ranks * local_PBD.shape[0], *local_PBD.shape[1:])
    for rank, part in enumerate(parts):
        positions_P = context_positions(rank, ranks, whole_TBD.shape[0], packing.bounds if packing else ())
        whole_TBD[positions_P.to(part.device)] = part
    return whole_TBD
