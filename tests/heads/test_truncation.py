"""Top-k and top-p: by hand, and as vLLM does it."""

from __future__ import annotations

import pytest
import torch

from heads.vocabulary import truncate_logits


def kept(logits_NV: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> list[list[int]]:
    return [
        row.nonzero().flatten().tolist()
        for row in truncate_logits(logits_NV, top_k, top_p) > -torch.inf
    ]


def test_by_hand() -> None:
    logits_NV = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.25, 0.25, 0.3, 0.2]]).log()
    assert kept(logits_NV) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(logits_NV, top_k=1) == [[1], [2]]
    assert kept(logits_NV, top_k=2) == [[1, 2], [0, 1, 2]]  # Ties with the second stay.
    assert kept(logits_NV, top_p=0.7) == [[1, 2], [0, 1, 2]]
    assert kept(logits_NV, top_p=1e-6) == [[1], [2]]
    assert kept(logits_NV, top_k=3, top_p=0.6)[0] == [
        1,
        2,
    ]  # Top-p counts the mass of what top-k left.


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (7, 0.6), (100, 0.999)])
def test_as_vllm_cuts(top_k: int, top_p: float) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits_NV = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    k_N = torch.full((50,), top_k) if 0 < top_k < 40 else None
    p_N = torch.full((50,), top_p) if top_p < 1 else None
    assert torch.equal(
        truncate_logits(logits_NV, top_k, top_p),
        apply_top_k_top_p_pytorch(logits_NV.clone(), k_N, p_N),
    )
