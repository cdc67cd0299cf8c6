"""The only code that shifts tokens: which token head k predicts at a row, and which tokens it may
see.

Shape letters: B batch, T rows of one sequence, S sequences, M rows of all sequences one after the
other, K heads, n pairs of a context, N rows chosen from M, P pairs that they read.

Row t holds the hidden state h_t, and `next_ids[t]` is the token that lm_head predicts from h_t
(x_{t+1}). Then

    head k (1..K) predicts        next_ids[t + k]                          (x_{t+1+k})
    head k may be conditioned on  next_ids[t], ..., next_ids[t + k - 1]
                                  (x_{t+1} ... x_{t+k}: the tokens since h_t)

    a context of n pairs is      (h_{t-n+1}, next_ids[t-n+1]), ..., (h_t, next_ids[t])

as long as these rows belong to the same sequence. Everything else in this package and its callers
uses these functions.
"""

from __future__ import annotations

import torch

PADDING = -1  # Segment of rows that belong to no sequence.
MISSING = -1  # Where a context has no pair.


def segments_from_lengths(lengths_S: torch.Tensor) -> torch.Tensor:
    """Sequence index of each packed row: lengths (2, 3) -> (0, 0, 1, 1, 1). int64, on the device of
    `lengths_S`.
    """
    return torch.repeat_interleave(
        torch.arange(lengths_S.numel(), device=lengths_S.device), lengths_S
    )


def look_ahead(
    values_BT: torch.Tensor, segment_BT: torch.Tensor, count: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that are `first`, `first + 1`, ... rows further on in the same sequence.

    Args:
        values_BT: any dtype; any leading dims, a packed `[M]` included.
        segment_BT: integer sequence index of each row, `PADDING` for none; rows of one sequence are
            consecutive.
        count: how many offsets.
        first: the first offset (0: the row itself).

    Returns:
        values_BTK with K = count (zero where there is no such row), and mask_BTK bool, true where
            there is one.
    """
    if values_BT.shape != segment_BT.shape:
        raise ValueError(
            f"values and segments must have one shape, given {tuple(values_BT.shape)} and"
            f" {tuple(segment_BT.shape)}"
        )
    rows = values_BT.shape[-1]
    out_BTK = values_BT.new_zeros((*values_BT.shape, count))
    mask_BTK = torch.zeros((*values_BT.shape, count), dtype=torch.bool, device=values_BT.device)
    for index in range(count):
        left = rows - (first + index)
        if left <= 0:
            break
        # Shifted within the whole, and masked where that leaves the sequence: no loop over
        # sequences.
        here_BT = segment_BT[..., :left]
        there_BT = segment_BT[..., rows - left :]
        same_BT = (here_BT == there_BT) & (here_BT != PADDING)
        mask_BTK[..., :left, index] = same_BT
        out_BTK[..., :left, index] = torch.where(
            same_BT, values_BT[..., rows - left :], values_BT.new_zeros(())
        )
    return out_BTK, mask_BTK


def head_targets(
    next_ids_BT: torch.Tensor, segment_BT: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What head 1..K predicts at each row.

    Args:
        next_ids_BT: int64; next_ids[t] is the token that lm_head predicts from h_t. Any leading
            dims.
        segment_BT: integer sequence index of each row, -1 for padding.
        num_heads: K.

    Returns:
        targets_BTK int64 (0 where masked) and mask_BTK bool.
    """
    return look_ahead(next_ids_BT, segment_BT, num_heads, first=1)


def condition_ids(
    next_ids_BT: torch.Tensor, segment_BT: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """The tokens since h_t, oldest first: ids_BTK[..., j] = next_ids[t + j]. Head k reads the first
    k of them.

    Beyond the end of a sequence the id is 0; heads that would read it have no target there.
    """
    return look_ahead(next_ids_BT, segment_BT, num_heads, first=0)[0]


def head_logprobs(
    logprobs_BT: torch.Tensor, segment_BT: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Behaviour log-prob of the token that head 1..K predicts; same places as `head_targets` (0
    where masked).
    """
    return look_ahead(logprobs_BT, segment_BT, num_heads, first=1)[0]


def head_teacher_rows(segment_M: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Packed row whose hidden state gives the actor's own distribution of head k's target (0 where
    masked).
    """
    rows_M = torch.arange(segment_M.shape[0], device=segment_M.device)
    return look_ahead(rows_M, segment_M, num_heads, first=1)[0]


def context_rows(segment_M: torch.Tensor, count: int) -> torch.Tensor:
    """The packed rows at the last `count` positions of each row, oldest first, itself last: int64
    `[M, count]`.

    `MISSING` if the sequence has no such row. Every row of a sequence includes itself.
    """
    rows_Mn = torch.arange(segment_M.shape[0], device=segment_M.device).unsqueeze(1) + torch.arange(
        1 - count, 1, device=segment_M.device
    )
    segment_M1 = segment_M.unsqueeze(1)
    there_Mn = (
        # A negative index would read from the end.
        (rows_Mn >= 0) & (segment_M[rows_Mn.clamp_min(0)] == segment_M1) & (segment_M1 != PADDING)
    )
    return torch.where(there_Mn, rows_Mn, MISSING)


def used_rows(rows_Nn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows in a table of rows, in order (int64 `P`), and the table with places among
    them instead.
    """
    there_Nn = rows_Nn != MISSING
    used_P = rows_Nn[there_Nn].unique()
    # `unique` has sorted them, and every existing row is among them.
    return used_P, torch.where(there_Nn, torch.searchsorted(used_P, rows_Nn), MISSING)
