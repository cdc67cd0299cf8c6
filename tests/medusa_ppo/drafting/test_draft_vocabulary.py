"""The truncated draft vocabulary: the most frequent tokens, lm_head's own rows, and a q of the
whole vocabulary.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.products import DraftVocabulary

D, V, K, B, W = 8, 40, 3, 6, 5


def counted(size: int, frequent: list[int]) -> DraftVocabulary:
    vocabulary = DraftVocabulary(size, V)
    vocabulary.observe([frequent * 4, [-1, 0], []])
    return vocabulary


def refreshed(
    vocabulary: DraftVocabulary, lm_head_VD: torch.Tensor, bias_V: torch.Tensor | None = None
) -> DraftVocabulary:
    vocabulary.refresh(
        lambda f: F.linear(f, lm_head_VD, bias_V), D, lm_head_VD.dtype, lm_head_VD.device
    )
    return vocabulary


def test_the_map_is_the_most_frequent_tokens_and_follows_the_rollouts(device: torch.device) -> None:
    lm_head_VD = torch.randn(V, D, device=device)
    vocabulary = refreshed(counted(W, [3, 9, 11, 30, 31]), lm_head_VD)
    assert vocabulary.ids_W is not None and vocabulary.ids_W.tolist() == [3, 9, 11, 30, 31]
    vocabulary.observe([[5, 6, 7, 8, 39] * 20])
    assert refreshed(vocabulary, lm_head_VD).ids_W.tolist() == [5, 6, 7, 8, 39]


def test_no_map_before_enough_was_counted_and_none_for_a_whole_vocabulary(
    device: torch.device,
) -> None:
    lm_head_VD = torch.randn(V, D, device=device)
    few = DraftVocabulary(W, V)
    few.observe([[1, 2, 3]])
    assert refreshed(few, lm_head_VD).ids_W is None
    for size in (0, V, V + 1):
        assert refreshed(counted(size, [3, 9]), lm_head_VD).ids_W is None


def test_the_first_tokens_stand_in_until_enough_was_counted(device: torch.device) -> None:
    """What is held has its final size at once, so that vLLM's profile sees no more."""
    lm_head_VD = torch.randn(V, D, device=device)
    features_ND = torch.randn(3, D, device=device)
    vocabulary = refreshed(DraftVocabulary(W, V, stand_in=True), lm_head_VD)
    assert vocabulary.ids_W is not None and vocabulary.ids_W.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(
        vocabulary.product(features_ND), F.linear(features_ND, lm_head_VD[:W])
    )
    vocabulary.observe([[3, 9, 11, 30, 31] * 4])
    assert vocabulary.due
    assert refreshed(vocabulary, lm_head_VD).ids_W.tolist() == [3, 9, 11, 30, 31]
    assert refreshed(DraftVocabulary(0, V, stand_in=True), lm_head_VD).ids_W is None


def test_the_first_map_is_due_once_enough_was_counted(device: torch.device) -> None:
    vocabulary = DraftVocabulary(W, V)
    vocabulary.observe([[1] * (2 * W - 1)])
    assert not vocabulary.due
    vocabulary.observe([[2, -1]])
    assert vocabulary.due
    refreshed(vocabulary, torch.randn(V, D, device=device))
    vocabulary.observe([[3] * 50])
    assert not vocabulary.due and not DraftVocabulary(0, V).due, (
        "later ones come with new heads and actors"
    )


@pytest.mark.parametrize("with_bias", [False, True])
def test_its_rows_are_those_of_the_product_that_serves_now(
    device: torch.device, with_bias: bool
) -> None:
    torch.manual_seed(0)
    vocabulary = counted(W, [3, 9, 11, 30, 31])
    for _ in range(2):  # the second time after an actor sync
        lm_head_VD = torch.randn(V, D, dtype=torch.float64, device=device)
        bias_V = torch.randn(V, dtype=torch.float64, device=device) if with_bias else None
        refreshed(vocabulary, lm_head_VD, bias_V)
        features_ND = torch.randn(7, D, dtype=torch.float64, device=device)
        whole_NV = F.linear(features_ND, lm_head_VD, bias_V)
        assert torch.allclose(
            vocabulary.product(features_ND), whole_NV[:, vocabulary.ids_W], atol=1e-12
        )


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_drafts_come_from_the_map_and_q_is_exact(device: torch.device, kind: str) -> None:
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(D, V, K, kind=kind)).to(device).double().requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter))
    hidden_BD, lm_head_VD, table_VD = (
        torch.randn(n, D, dtype=torch.float64, device=device) for n in (B, V, V)
    )
    last_B = torch.randint(V, (B,), device=device)
    vocabulary = refreshed(counted(W, [3, 9, 11, 30, 31]), lm_head_VD)
    ids_W = vocabulary.ids_W
    core = DraftingCore(heads, lambda f: f @ lm_head_VD.T, lambda ids_B: table_VD[ids_B])
    core.use_vocabulary(ids_W, vocabulary.product)

    def whole(ids_BK: torch.Tensor) -> torch.Tensor:
        condition_BK = torch.cat([last_B[:, None], ids_BK[:, :-1]], dim=1)
        return heads(hidden_BD, lm_head_VD, condition=condition_BK, embedding_VD=table_VD)[
            ..., ids_W
        ]

    best = core.draft(hidden_BD, last_B, K)
    assert torch.equal(best.ids_BK, ids_W[whole(best.ids_BK).argmax(-1)])
    drawn = core.draft(
        hidden_BD,
        last_B,
        K,
        DraftSampling(
            torch.full((B,), 0.7, device=device),
            torch.rand(B, K, dtype=torch.float64, device=device),
        ),
    )
    assert torch.isin(drawn.ids_BK, ids_W).all()
    q_BKW = (whole(drawn.ids_BK) / 0.7).softmax(-1)
    assert torch.allclose(torch.stack(drawn.q, dim=1), q_BKW, atol=1e-4)


def test_an_lm_head_with_a_soft_cap_is_left_to_the_engine(device: torch.device) -> None:
    vocabulary = counted(W, [3, 9, 11, 30, 31])
    lm_head_VD = 10 * torch.randn(V, D, device=device)
    vocabulary.refresh(
        lambda f: 5 * torch.tanh(F.linear(f, lm_head_VD) / 5), D, torch.float32, device
    )
    assert vocabulary.ids_W is None and vocabulary.product is None


def test_all_rows_of_a_small_lm_head_are_held_where_asked_for(device: torch.device) -> None:
    lm_head_VD = torch.randn(V, D, device=device)
    features_ND = torch.randn(3, D, device=device)
    vocabulary = refreshed(DraftVocabulary(0, V, whole=True), lm_head_VD)
    assert vocabulary.ids_W is None
    torch.testing.assert_close(vocabulary.product(features_ND), F.linear(features_ND, lm_head_VD))
