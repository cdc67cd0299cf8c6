"""What a drafting call reads of its batch and what it gives, in tensors that stay where they are.

A captured CUDA graph reads its inputs at the addresses that it was captured with, for as many
requests. So every step writes its batch here, and fills up with rows that are nobody's: their slot
is the spare one, which nobody reads.

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
        hidden_BnD: the states of each request's last n rows, the newest first.
        ids_Bn: int64, the token behind each of them.
        sampled_B: int64, how many of these are new: those that the step sampled.
        slots_B, positions_B: int64, whose they are, and the position of the newest.
        temperature_B: float32.
        seeds_B: int64.
        top_k_B, top_p_B: read by calls that cut.
        drafts_BK, lengths_B: int64, what the call gives.
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
    """What a step left, where its own tensors have it.

    Attributes:
        hidden_TD, ids_T, positions_T: of all requests' rows, one behind the other.
        rows_B: row of the state that each request's last token was sampled from.
        last_ids_B, sampled_B: that token, and how many the request sampled.
        slots_B: int64, where `temperature_S` and `seeds_S` have it.
        cuts: top-k and top-p of each request; None where nobody asked.
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
        """Somebody asked for a cut."""
        return any(cut_B is not None for cut_B in self.cuts)


class BatchInputs:
    """Room for S requests.

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
        """The first so many rows."""
        # Views are made once: each is an operation for the host.
        if batch not in self._views:
            parts = {name: tensor[:batch] for name, tensor in vars(self._all).items()}
            self._views[batch] = BatchRows(**parts)
        return self._views[batch]

    def clear(self, first: int, last: int) -> None:
        """The rows from `first` up to `last` are nobody's."""
        if first < last:
            rows = self._all
            rows.slots_B[first:last].fill_(self.spare)
            rows.sampled_B[first:last].zero_()
            rows.temperature_B[first:last].zero_()

    def write(self, found: Found) -> BatchRows:
        """A step's batch, in the first rows."""
        rows = self.rows(len(found.slots_B))
        width = found.hidden_TD.shape[1]
        if self.newest == 1:
            rows_N = found.rows_B
        else:
            rows_Bn = (found.rows_B.unsqueeze(1) - self._back_n).clamp_min(0)
            rows_N = rows_Bn.flatten()
            # An accepted draft is what the next row read.
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
