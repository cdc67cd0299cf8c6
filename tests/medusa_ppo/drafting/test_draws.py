"""Drafting from the heads: the same tokens as the teacher-forced heads, drawn from the q that is handed on."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.targets import condition_ids
from medusa_ppo.drafting.draft_vocabulary import plain_linear
from medusa_ppo.drafting.draws import Draft, DraftProbs, RequestSampling, ServedHeads, draft_tokens, draw

D, V, K, B = 8, 12, 3, 5


def random_heads(kind: str, lm_head: str = "shared") -> MedusaHeads:
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(D, V, K, kind=kind, lm_head=lm_head, rank=4)).double().requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return heads


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "markov", "hydra"])
def test_drafts_are_those_of_the_teacher_forced_heads(kind: str, lm_head: str) -> None:
    heads = random_heads(kind, lm_head)
    hidden_BD, lm_head_VD, table_VD = (torch.randn(n, D, dtype=torch.float64) for n in (B, V, V))
    last_B = torch.randint(V, (B,))
    served = ServedHeads(heads, lambda ids_B: table_VD[ids_B])
    draft = draft_tokens(served, hidden_BD, last_B, K, lambda f: f @ lm_head_VD.T)
    condition_BK = torch.cat([last_B[:, None], draft.ids_BK[:, :-1]], dim=1)
    logits_BKV = heads(hidden_BD, lm_head_VD, condition=condition_BK, embedding_VD=table_VD)
    assert torch.equal(draft.ids_BK, logits_BKV.argmax(-1))
    assert draft.probs_BKV is None
    fewer = draft_tokens(served, hidden_BD, last_B, 1, lambda f: f @ lm_head_VD.T)
    assert torch.equal(fewer.ids_BK, draft.ids_BK[:, :1])


@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_step_by_step_equals_teacher_forced(lm_head: str) -> None:
    """The one definition of which token conditions which head, checked from both sides."""
    heads, rows = random_heads("hydra", lm_head), 7
    hidden_BTD, table_VD = torch.randn(B, rows, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    next_ids_BT = torch.randint(V, (B, rows))
    condition_BTK = condition_ids(next_ids_BT, torch.zeros_like(next_ids_BT), K)
    features_BTKD = heads.features(hidden_BTD, condition=condition_BTK, embedding_VD=table_VD)
    served = ServedHeads(heads, lambda ids_B: table_VD[ids_B])
    for t in range(rows - K):
        state = served.start(hidden_BTD[:, t])
        for k in range(K):
            # Before head k + 1 drafts, the newest known token is next_ids[t + k]: x_{t+1} was sampled by the actor.
            features_BD = served.features(state, k, next_ids_BT[:, t + k])
            torch.testing.assert_close(features_BD, features_BTKD[:, t, k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "markov", "hydra"])
def test_sampled_drafts_come_from_the_q_that_is_handed_on(kind: str) -> None:
    heads = random_heads(kind)
    trials = 20_000
    hidden_BD, lm_head_VD, table_VD = (torch.randn(n, D, dtype=torch.float64) for n in (1, V, V))
    sampling = RequestSampling(torch.full((trials,), 0.9))
    torch.manual_seed(5)
    draft = draft_tokens(
        ServedHeads(heads, lambda ids_B: table_VD[ids_B]),
        hidden_BD.expand(trials, D),
        torch.zeros(trials, dtype=torch.int64),
        K,
        lambda f: f @ lm_head_VD.T * 0.3,
        sampling=sampling,
        draft_temperature=1.5,
    )
    expected_V = draft.probs_BKV.double().mean(0)
    for k in range(K):
        q_V = draft.probs_BKV[:, k].double()
        seen_V = torch.bincount(draft.ids_BK[:, k], minlength=V).double()
        likely = expected_V[k] * trials > 5
        observed, mean = seen_V[likely], q_V.sum(0)[likely]
        assert chisquare(observed.numpy(), (mean * observed.sum() / mean.sum()).numpy()).pvalue > 0.005


def test_greedy_requests_in_a_sampled_batch_draft_their_argmax() -> None:
    logits_BV = torch.randn(4, V)
    ids_B = draw(logits_BV, logits_BV.softmax(-1), torch.rand(4, dtype=torch.float64), torch.tensor([True, False, True, False]))
    assert ids_B[[0, 2]].tolist() == logits_BV.argmax(-1)[[0, 2]].tolist()


def test_draft_probs_wait_for_their_request_and_are_used_once() -> None:
    store = DraftProbs()
    probs = torch.rand(2, 2, V)
    store.put(["a", "b"], probs)
    # Only b is scheduled: a's drafts stay with their scheduler, and so must a's q.
    assert torch.equal(store.take(["b"], [2], torch.tensor([1, 2]), V), probs[1])
    store.put(["b"], torch.rand(1, 2, V))
    assert torch.equal(store.take(["a"], [1], torch.tensor([3]), V), probs[0, :1])
    assert store.take(["a"], [1], torch.tensor([3]), V) is None
    store.keep_only({})
    assert len(store) == 0


def test_drafts_without_an_entry_are_one_hot_beside_sampled_ones() -> None:
    store = DraftProbs()
    probs = torch.rand(1, 1, V)
    store.put(["a"], probs)
    taken = store.take(["a", "zeros", "padded"], [1, 1, 1], torch.tensor([4, 0, -1]), V)
    assert torch.equal(taken[0], probs[0, 0])
    assert taken[1].tolist() == [1.0] + [0.0] * (V - 1)
    assert taken[2].sum() == 0


# ---- kind hydra: packed products -----------------------------------------------------------------------------------------------

WIDE = 32


def hydra(dtype: torch.dtype = torch.float32) -> MedusaHeads:
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(WIDE, 50, K, kind="hydra", num_layers=2)).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return heads.to(dtype)


def table(heads: MedusaHeads) -> torch.Tensor:
    return torch.randn(50, WIDE, generator=torch.Generator().manual_seed(3)).to(heads.dtype)


def pack(heads: MedusaHeads, dtype: torch.dtype | None = None) -> ServedHeads:
    return ServedHeads(heads, lambda ids_B: table(heads)[ids_B], lambda weight: plain_linear(weight.clone()), dtype)


def drafts(served: ServedHeads, sampled: bool = False) -> Draft:
    torch.manual_seed(2)
    hidden_BD, lm_head_VD = (torch.randn(n, WIDE).to(served.heads.dtype) for n in (B, 50))
    return draft_tokens(
        served, hidden_BD, torch.arange(B), K, lambda f: f @ lm_head_VD.T, sampling=RequestSampling(torch.ones(B)) if sampled else None
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_packed_heads_draft_what_the_heads_draft(sampled: bool) -> None:
    """q is that of the teacher-forced heads after the tokens that were drafted, with two residual layers."""
    heads = hydra()
    draft = drafts(pack(heads), sampled)
    torch.manual_seed(2)
    hidden_BD, lm_head_VD = (torch.randn(n, WIDE) for n in (B, 50))
    condition_BK = torch.cat([torch.arange(B)[:, None], draft.ids_BK[:, :-1]], dim=1)
    logits_BKV = heads(hidden_BD, lm_head_VD, condition=condition_BK, embedding_VD=table(heads))
    if sampled:
        torch.testing.assert_close(draft.probs_BKV, logits_BKV.softmax(-1))
    else:
        assert torch.equal(draft.ids_BK, logits_BKV.argmax(-1))


def test_bfloat16_heads_may_be_computed_in_float32() -> None:
    """Where bfloat16 is emulated: nearer to the float32 heads than bfloat16 arithmetic is, and in the engine's dtype at the end."""
    heads = hydra(torch.bfloat16)
    hidden_BD, ids_B = torch.randn(B, WIDE).bfloat16(), torch.arange(B)

    def first(served: ServedHeads) -> torch.Tensor:
        return served.features(served.start(hidden_BD.to(served.heads.dtype)), 0, ids_B)

    expected_BD, given_BD, plain_BD = (
        first(pack(hydra(torch.bfloat16).float())),
        first(pack(heads, dtype=torch.float32)),
        first(pack(heads)),
    )
    assert given_BD.dtype == torch.bfloat16
    assert (given_BD.float() - expected_BD).abs().mean() < (plain_BD.float() - expected_BD).abs().mean()


def test_packing_copies_so_a_swap_must_pack_anew() -> None:
    heads = hydra()
    served = pack(heads)
    before = drafts(served).ids_BK
    for parameter in heads.parameters():
        parameter.mul_(-1)
    assert torch.equal(drafts(served).ids_BK, before)
    assert not torch.equal(drafts(pack(heads)).ids_BK, before)
