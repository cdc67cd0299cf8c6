"""Operations that read or sum over all tokens of the vocabulary.

Shape letters: N ids, C rows, V vocabulary, D width of a table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from heads.heads_config import CPU_CHUNK, GPU_CHUNK


def truncate_logits(logits_NV: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Logits (already divided by the temperature) with -inf for tokens that top-k (0: off), then
    top-p (1: off), exclude.

    Ties with the k-th logit are kept. Top-p keeps the most likely tokens until their mass reaches
    `top_p`, at least one.
    """
    vocabulary = logits_NV.shape[-1]
    if 0 < top_k < vocabulary:
        threshold_N1 = logits_NV.topk(top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < threshold_N1, -torch.inf)
    if top_p >= 1.0:
        return logits_NV
    # Like vLLM's own sampler, including comparison and ties, because rollouts were sampled from the
    # tokens it kept.
    ascending_NV, order_NV = logits_NV.sort(dim=-1)
    out_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - top_p
    # At least one token is kept, whatever the rounding of the sum.
    out_NV[:, -1] = False
    return logits_NV.masked_fill(torch.zeros_like(out_NV).scatter_(1, order_NV, out_NV), -torch.inf)


class Vocabulary:
    """The operations of losses and replay that need every token. The arithmetic around them is the
    same wherever the tokens are stored.
    """

    def width(self, held: int) -> int:
        """The largest number of tokens that any process holds, if this one holds `held`."""
        return held

    def chunk_rows(self, table_VD: torch.Tensor) -> int:
        """Number of rows whose logits are computed at once with this process's lm_head; it is the
        same in all processes.
        """
        return max(
            1,
            (GPU_CHUNK if table_VD.device.type == "cuda" else CPU_CHUNK)
            // self.width(table_VD.shape[0]),
        )

    def look_up(self, ids_N: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Rows of a table of tokens, `ND`."""
        return F.embedding(ids_N, table_VD)

    def logsumexp(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """log of the sum of exponentials over all tokens, `C1`."""
        return logits_CV.logsumexp(-1, keepdim=True)

    def log_softmax(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """log-probabilities of the tokens held here, normalised over all."""
        return F.log_softmax(logits_CV, dim=-1)

    def pick(self, values_CV: torch.Tensor, ids_C: torch.Tensor) -> torch.Tensor:
        """One token's value in each row, `C`."""
        return values_CV.gather(1, ids_C.unsqueeze(1)).squeeze(1)

    def add_at(
        self, values_CV: torch.Tensor, ids_C: torch.Tensor, amounts_C: torch.Tensor
    ) -> torch.Tensor:
        """Add to one token's value in each row, in place."""
        return values_CV.scatter_add_(1, ids_C.unsqueeze(1), amounts_C.unsqueeze(1))

    def total(self, values_CV: torch.Tensor) -> torch.Tensor:
        """Sum over all tokens, `C`."""
        return values_CV.sum(-1)

    def argmax(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, int64 `C`; the smallest id among equals."""
        return logits_CV.argmax(-1)

    def truncate(self, logits_CV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
        """As `truncate_logits`."""
        return truncate_logits(logits_CV, top_k, top_p)

    def sum_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Combine the gradient of something replicated on every rank, from each rank's contribution
        for its own tokens.
        """
        return gradient


WHOLE = Vocabulary()
