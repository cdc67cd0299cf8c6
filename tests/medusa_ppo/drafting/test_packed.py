"""Packed products of hydra heads: the arithmetic of the heads themselves."""

from __future__ import annotations

import pytest
import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.drafting.draws import RequestSampling, draft_tokens
from medusa_ppo.drafting.packed import PackedHydra

D, V, K, B = 32, 50, 3, 4


def hydra(dtype: torch.dtype = torch.float32) -> MedusaHeads:
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(D, V, K, kind="hydra", num_layers=2)).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return heads.to(dtype)


def table(heads: MedusaHeads) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(3)).to(heads.dtype)


def pack(heads: MedusaHeads, **options: torch.dtype) -> PackedHydra:
    return PackedHydra(heads, lambda ids_B: table(heads)[ids_B], **options)


def drafts(heads: MedusaHeads, packed: PackedHydra | None, sampled: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(2)
    hidden_BD, lm_head_VD = (torch.randn(n, D).to(heads.dtype) for n in (B, V))
    draft = draft_tokens(
        heads,
        hidden_BD,
        torch.arange(B),
        K,
        lambda f: f @ lm_head_VD.T,
        embedding_VD=table(heads),
        sampling=RequestSampling(torch.ones(B)) if sampled else None,
        packed=packed,
    )
    return draft.ids_BK, draft.probs_BKV


@pytest.mark.parametrize("sampled", [False, True])
def test_packed_heads_draft_what_the_heads_draft(sampled: bool) -> None:
    heads = hydra()
    ids_BK, probs_BKV = drafts(heads, None, sampled)
    packed_ids_BK, packed_probs_BKV = drafts(heads, pack(heads), sampled)
    assert torch.equal(ids_BK, packed_ids_BK)
    if sampled:
        torch.testing.assert_close(probs_BKV, packed_probs_BKV)


def test_bfloat16_heads_may_be_computed_in_float32() -> None:
    """Where bfloat16 is emulated: nearer to the float32 heads than bfloat16 arithmetic is, and in the engine's dtype at the end."""
    heads = hydra(torch.bfloat16)
    hidden_BD, ids_B, table_VD = torch.randn(B, D).bfloat16(), torch.arange(B), table(heads)
    wide = hydra(torch.bfloat16).float()
    expected_BD = wide.draft_features(wide.start_draft(hidden_BD.float()), 0, ids_B, table_VD.float())
    packed = pack(heads, dtype=torch.float32)
    given_BD = packed.features(packed.start(hidden_BD), 0, ids_B)
    plain_BD = heads.draft_features(heads.start_draft(hidden_BD), 0, ids_B, table_VD)
    assert given_BD.dtype == torch.bfloat16
    assert (given_BD.float() - expected_BD).abs().mean() < (plain_BD.float() - expected_BD).abs().mean()


def test_packing_copies_so_a_swap_must_pack_anew() -> None:
    heads = hydra()
    packed = pack(heads)
    before, _ = drafts(heads, packed, False)
    for parameter in heads.parameters():
        parameter.mul_(-1)
    assert not torch.equal(drafts(heads, None, False)[0], before)
    assert torch.equal(drafts(heads, pack(heads), False)[0], drafts(heads, None, False)[0])
