"""Top-k and top-p on logits, as vLLM cuts them: the replay and the teacher need the distribution that was really sampled from.

Shape letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch


def truncate_logits(logits_NV: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Logits (already divided by the temperature) with -inf for what top-k (0: off), then top-p (1: off), leave out.

    Ties with the k-th logit are kept. Top-p keeps the likeliest tokens until their mass reaches `top_p`, at least one.
    """
    vocabulary = logits_NV.shape[-1]
    if 0 < top_k < vocabulary:
        threshold_N1 = logits_NV.topk(top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < threshold_N1, -torch.inf)
    if top_p >= 1.0:
        return logits_NV
    ascending_NV, order_NV = logits_NV.sort(dim=-1)
    out_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - top_p
    out_NV[:, -1] = False
    return logits_NV.masked_fill(torch.zeros_like(out_NV).scatter_(1, order_NV, out_NV), -torch.inf)
