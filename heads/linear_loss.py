"""Which code computes the plain cross-entropy of heads, and the forms that libraries bring: one place chooses.

    chunks   our own (heads/losses.py): any loss, markov's bias, a vocabulary over ranks; the logits of one small chunk at a time
    torch    torch.nn.functional.linear_cross_entropy with chunks of the same size
    liger    Liger's fused kernel (package liger_kernel), on CUDA

All three compute the gradient in the forward pass and never hold all logits. The actor's lm_head is passed detached, so no form
makes a gradient for it.

Shape letters: N rows, K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from heads.modules import FactoredLogits
from heads.vocabulary import Vocabulary

CHUNKS, TORCH, LIGER = "chunks", "torch", "liger"
CPU_CHUNK = 1 << 22  # Float32 logits of one chunk (16 MiB): about what the caches of a CPU hold.
GPU_CHUNK = 1 << 26  # 256 MiB. A chunk reads the whole lm_head: it takes some hundred rows until that is hidden by the products.
IGNORED = -100  # Target of a row that does not count.

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(features_ND, weight_VD, targets_N, rows of a chunk) -> the sum over rows."""


def choose_form(factored: FactoredLogits, vocabulary: Vocabulary) -> str:
    """The form for plain cross-entropy of these heads, here. Any other loss is computed in our chunks."""
    if factored.bias_NKr is not None or type(vocabulary) is not Vocabulary:
        return CHUNKS
    if factored.weight.device.type == "cuda" and liger_installed():
        return LIGER
    return CHUNKS


def rows_of_a_chunk(device: torch.device, vocab: int) -> int:
    """Rows whose logits are computed at once."""
    return max(1, (GPU_CHUNK if device.type == "cuda" else CPU_CHUNK) // vocab)


@cache
def liger_installed() -> bool:
    """Whether the package is there; it is imported when it is first used."""
    return importlib.util.find_spec("liger_kernel") is not None


def fused_cross_entropy(
    form: str, factored: FactoredLogits, targets_NK: torch.Tensor, mask_NK: torch.Tensor, temperature: float, chunk_rows: int
) -> torch.Tensor:
    """Mean cross-entropy of each head, float32 `K`; 0 for a head without a position. `form` is `torch` or `liger`."""
    heads = targets_NK.shape[1]
    weights = factored.weight.unbind(0) if factored.weight.dim() == 3 else (factored.weight.detach(),) * heads
    features_NKD = factored.features_NKD.to(factored.weight.dtype)
    if temperature != 1.0:
        features_NKD = features_NKD / temperature
    labels_NK = torch.where(mask_NK, targets_NK, IGNORED)
    sums = [
        FORMS[form](features_ND.contiguous(), weight_VD, labels_N.contiguous(), chunk_rows)
        for features_ND, weight_VD, labels_N in zip(features_NKD.unbind(1), weights, labels_NK.unbind(1), strict=True)
    ]
    return torch.stack(sums).float() / mask_NK.sum(0).clamp(min=1)


def _torch_sum(features_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """Rounded to the dtype of the features, as that function does."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_rows, chunking_method=None)
    return F.linear_cross_entropy(features_ND, weight_VD, targets_N, ignore_index=IGNORED, reduction="sum", options=options)


def _liger_sum(features_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """Liger sizes its chunks itself: as much memory as the features of one head. The gradient of own lm_heads adds up in float32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(
        features_ND, weight_VD, targets_N, ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32
    )


FORMS: dict[str, Form] = {TORCH: _torch_sum, LIGER: _liger_sum}
