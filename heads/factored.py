"""Logits of draft heads before the product with lm_head; losses and replay compute that product
chunk by chunk.

Shape letters: N rows, K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class FactoredLogits(NamedTuple):
    """Logits of N rows and K heads, without the product: logits[n, k] = weight[k] features[n, k].

    Attributes:
        features_NKD: output of the residual blocks.
        weight: the actor's lm_head `VD`, or the heads' own `KVD`.
    """

    features_NKD: torch.Tensor
    weight: torch.Tensor

    def head_weight(self, head: int) -> torch.Tensor:
        """lm_head `VD` of the head with index `head` (from 0)."""
        return self.weight if self.weight.dim() == 2 else self.weight[head]

    def multiply_out(self) -> torch.Tensor:
        """Plain logits_NKV in float32; for references and small batches."""
        heads = range(self.features_NKD.shape[1])
        return torch.stack([head_logits(self, head, slice(None)) for head in heads], dim=1)

    def of_tokens(self, ids_W: torch.Tensor, rows_WD: torch.Tensor | None = None) -> FactoredLogits:
        """Logits of only some tokens, in their order. `rows_WD`: their rows of the shared lm_head,
        if already looked up.
        """
        return self._replace(weight=self.weight[..., ids_W, :] if rows_WD is None else rows_WD)


def head_logits(factored: FactoredLogits, head: int, rows: slice) -> torch.Tensor:
    """logits_NV of one head (index from 0) for some rows: product in the lm_head's dtype, result in
    float32.
    """
    weight_VD = factored.head_weight(head)
    return F.linear(factored.features_NKD[rows, head].to(weight_VD.dtype), weight_VD).float()
