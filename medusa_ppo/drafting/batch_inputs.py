"""Inputs and results of a drafting call, in tensors whose addresses never change.

A captured CUDA graph reads its inputs at the addresses it was captured with, for a fixed number of
requests. So every step copies its batch here and pads it with rows that belong to no request: they
use the spare slot, which nobody reads.

Shape letters: B requests, S the most of them, n newest rows of a request, K drafts, D hidden, T
rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BatchRows:
    """The first B rows.

    Attributes:
        hidden_BnD: states of each request's last n rows, newest first.
        ids_Bn: int64, the token that follows each state.
        sampled_B: int64, how many of the rows are new, i.e. were sampled by this step.
        slots_B, positions_B: int64, the request's slot and the newest row's position.
        temperature_B: float32.
        seeds_B: int64.
        top_k_B, top_p_B: used only by calls with top-k or top-p.
        drafts_BK, lengths_B: int64, results of the call.
    """

    hidden_BnD: torch.Tensor
    ids_Bn: torch.Tensor
    sampled_B: torch.Tensor
    slots_B: torch.Tensor
    positions_B: torch.Tensor
    temperature_B: torch.Tensor
    seeds_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    drafts_BK: torch.Tensor
    lengths_B: torch.Tensor


@dataclass(frozen=True)
class Found:
    """The step's own tensors.

    Attributes:
        hidden_TD, ids_T, positions_T: rows of all requests, packed.
        rows_B: the row whose state each request's last token was sampled from.
        last_ids_B, sampled_B: that token, and how many the request sampled.
        slots_B: int64, each request's index into `temperature_S` and `seeds_S`.
        cuts: top-k and top-p of each request; None if no request uses it.
    """

    hidden_TD: torch.Tensor
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    rows_B: torch.Tensor
    last_ids_B: torch.Tensor
    sampled_B: torch.Tensor
    slots_B: torch.Tensor
    temperature_S: torch.Tensor
    seeds_S: torch.Tensor
    cuts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def cut(self) -> bool:
        """Whether any request uses top-k or top-p."""
        return any(cut_B is not None for cut_B in self.cuts)


class BatchInputs:
    """Tensors for S requests.

    Attributes:
        newest: n.
    """

    def __init__(
        self,
        requests: int,
        newest: int,
        drafts: int,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.newest = newest
        self.spare = requests
        self._cuts_nothing = vocab_size, 1.0

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(requests, *shape, dtype=dtype, device=device)

        self._all = BatchRows(
            hidden_BnD=zeros(newest, hidden_size, dtype=dtype),
            ids_Bn=zeros(newest),
            sampled_B=zeros(),
            slots_B=zeros().fill_(self.spare),
            positions_B=zeros(),
            temperature_B=zeros(dtype=torch.float32),
            seeds_B=zeros(),
            top_k_B=zeros().fill_(vocab_size),
            top_p_B=zeros(dtype=torch.float32).fill_(1.0),
            drafts_BK=zeros(drafts),
            lengths_B=zeros(),
        )
        self._back_n = torch.arange(newest, device=device)
        self._views: dict[int, BatchRows] = {}

    def rows(self, batch: int) -> BatchRows:
        """The first `batch` rows."""
        # Views are cached: making one costs host time.
        if batch not in self._views:
            parts = {name: tensor[:batch] for name, tensor in vars(self._all).items()}
            self._views[batch] = BatchRows(**parts)
        return self._views[batch]

    def clear(self, first: int, last: int) -> None:
        """Give the rows from `first` to before `last` to no request."""
        if first < last:
            rows = self._all
            rows.slots_B[first:last].fill_(self.spare)
            rows.sampled_B[first:last].zero_()
            rows.temperature_B[first:last].zero_()

    def write(self, found: Found) -> BatchRows:
        """Copy a step's batch into the first rows."""
        rows = self.rows(len(found.slots_B))
        width = found.hidden_TD.shape[1]
        if self.newest == 1:
            rows_N = found.rows_B
        else:
            rows_Bn = (found.rows_B.unsqueeze(1) - self._back_n).clamp_min(0)
            rows_N = rows_Bn.flatten()
            # The token after an accepted draft's state is the next row's input.
            next_Bn = (rows_Bn + 1).clamp_max(len(found.ids_T) - 1)
            rows.ids_Bn.copy_(found.ids_T[next_Bn])
        hidden_ND = rows.hidden_BnD.view(-1, width)
        torch.index_select(found.hidden_TD.to(hidden_ND.dtype), 0, rows_N, out=hidden_ND)
        rows.ids_Bn[:, 0].copy_(found.last_ids_B)
        rows.sampled_B.copy_(found.sampled_B)
        rows.slots_B.copy_(found.slots_B)
        rows.positions_B.copy_(found.positions_T[found.rows_B])
        torch.index_select(found.temperature_S, 0, found.slots_B, out=rows.temperature_B)
        torch.index_select(found.seeds_S, 0, found.slots_B, out=rows.seeds_B)
        if found.cut:
            kept = (rows.top_k_B, rows.top_p_B)
            for held_B, cut_B, nothing in zip(kept, found.cuts, self._cuts_nothing, strict=True):
                if cut_B is None:
                    held_B.fill_(nothing)
                else:
                    held_B.copy_(cut_B)
        return rows
