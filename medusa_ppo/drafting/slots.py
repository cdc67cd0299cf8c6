"""What drafting remembers of each request from one step to the next, by slot, in tensors that stand where they are.

A draft is verified one step after it was drawn, against the q that it was drawn from. In between its request may have been preempted, its
drafts replaced by placeholders, its slot given to another. So beside q stands a stamp of who drafted and at which position: what does not
bear the stamp that verification expects was not drawn from this q, and is verified as a one-hot draft, which is right for any draft.

Shape letters: B requests, S slots, K drafts, W width of the draft vocabulary, T drafts of all requests one after the other, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

POSITIONS = 1 << 24
"""Positions that a stamp tells apart; 2^39 requests beside them."""
NOTHING = -1


def stamps(requests_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """One int64 for a request (a serial number that is never given twice) at a position."""
    return requests_B * POSITIONS + positions_B


@dataclass(frozen=True)
class KeptDrafts:
    """q of the drafts that a step verifies.

    Attributes:
        slots_B: where each request's q stands.
        sampled_BK: bool, drafts that were drawn from q; the others are one-hot.
        q_BK: float32, the probability of each draft under its q; 1 for one-hot ones.
        slots: where to look for whole rows.
    """

    slots_B: torch.Tensor
    sampled_BK: torch.Tensor
    q_BK: torch.Tensor
    slots: DraftSlots

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        """The probabilities of the drafts `ids_BK`, which are those that were kept."""
        return self.q_BK

    def rows(self, at_B1: torch.Tensor) -> torch.Tensor:
        """q `[B, W]` of the draft at index `at_B1` of each request; only to be read where that was sampled."""
        row_B = self.slots_B * self.slots.drafts + at_B1.squeeze(1)
        return self.slots.q_NW.index_select(0, row_B)

    def residual(self, probs_BV: torch.Tensor, at_B1: torch.Tensor, refused_B1: torch.Tensor) -> torch.Tensor:
        """max(p - q, 0) where the draft `refused_B1` at index `at_B1` was refused; p where that is below 0.

        q is one-hot, and p without the draft is left, where it was not sampled.
        """
        refused = refused_B1 >= 0
        sampled_B1 = self.sampled_BK.gather(1, at_B1)
        q_BW = torch.where(refused & sampled_B1, self.rows(at_B1), 0.0)
        ids_W, ids_B1 = self.slots.ids_W, refused_B1.clamp_min(0)
        left_BV = (probs_BV - q_BW if ids_W is None else probs_BV.index_add(1, ids_W, q_BW, alpha=-1)).clamp_min(0)
        return left_BV.scatter(1, ids_B1, torch.where(refused & ~sampled_B1, 0.0, left_BV.gather(1, ids_B1)))


class DraftSlots:
    """q, the columns that were drawn, and stamps of `slots` requests; one more slot takes what nobody reads (padding of a batch).

    Attributes:
        q_NW: float32 `[(S + 1) K, W]`, row s K + k is q of draft k of slot s.
        ids_W: the tokens of the columns; None: all of them.
    """

    def __init__(self, slots: int, drafts: int, width: int, device: torch.device, ids_W: torch.Tensor | None = None) -> None:
        self.size, self.drafts = slots, drafts
        self.ids_W = ids_W
        self.q_NW = torch.zeros((slots + 1) * drafts, width, device=device)
        self.columns_SK = torch.full((slots + 1, drafts), NOTHING, device=device)
        self.stamps_S = torch.full((slots + 1,), NOTHING, device=device)
        self._drafts_K = torch.arange(drafts, device=device)

    @property
    def spare(self) -> int:
        """The slot for rows that pad a batch."""
        return self.size

    def forget(self) -> None:
        """Whatever was drafted is one-hot from here on (a draft vocabulary that changes; never because of what was drafted)."""
        self.stamps_S.fill_(NOTHING)

    def keep(self, slots_B: torch.Tensor, stamps_B: torch.Tensor, columns_BK: torch.Tensor, q: Sequence[torch.Tensor]) -> None:
        """
        Args:
            stamps_B: from `stamps`; NOTHING for requests whose drafts are one-hot. (Where all of a step are, nothing needs to be kept: what
                stands here bears the stamp of an earlier position.)
            columns_BK: int64, what was drawn; as many as there are q, at most `drafts`.
            q: `[B, W]` for each draft.
        """
        count = len(q)
        rows_BK = slots_B.unsqueeze(1) * self.drafts + self._drafts_K[:count]
        for row_B, q_BW in zip(rows_BK.unbind(1), q, strict=True):
            self.q_NW.index_copy_(0, row_B, q_BW)
        if count < self.drafts:
            columns_BK = torch.nn.functional.pad(columns_BK, (0, self.drafts - count), value=NOTHING)
        self.columns_SK.index_copy_(0, slots_B, columns_BK)
        self.stamps_S.index_copy_(0, slots_B, stamps_B)

    def look_up(self, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int) -> KeptDrafts:
        """What is known of the first `count` drafts of each request."""
        columns_BK = self.columns_SK.index_select(0, slots_B)[:, :count]
        same_B = (self.stamps_S.index_select(0, slots_B) == stamps_B) & (stamps_B >= 0)
        sampled_BK = same_B.unsqueeze(1) & (columns_BK >= 0)
        rows_BK = slots_B.unsqueeze(1) * self.drafts + self._drafts_K[:count]
        q_BK = self.q_NW[rows_BK, columns_BK.clamp_min(0)]
        return KeptDrafts(slots_B, sampled_BK, torch.where(sampled_BK, q_BK, 1.0), self)

    def whole_rows(
        self, kept: KeptDrafts, requests_T: torch.Tensor, drafts_T: torch.Tensor, draft_ids_T: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        """q of all drafts `[T, V]` as vLLM's kernels read it: rows of zeros for placeholders (ids below 0), one-hot where not sampled.

        Args:
            requests_T: int64, the index in the batch of each draft's request.
            drafts_T: int64, its place among the drafts of that request.
        """
        q_TW = self.q_NW.index_select(0, kept.slots_B[requests_T] * self.drafts + drafts_T)
        q_TV = q_TW
        if self.ids_W is not None:
            q_TV = q_TW.new_zeros(q_TW.shape[0], vocab_size).index_copy_(1, self.ids_W, q_TW)
        ids_T1 = draft_ids_T.to(torch.int64).unsqueeze(1)
        one_hot_TV = torch.zeros_like(q_TV).scatter_(1, ids_T1.clamp_min(0), (ids_T1 >= 0).float())
        sampled_T1 = kept.sampled_BK[requests_T, drafts_T].unsqueeze(1) & (ids_T1 >= 0)
        return torch.where(sampled_T1, q_TV, one_hot_TV)
