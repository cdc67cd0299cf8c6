"""Log-probs against the plain formula, the sampler's temperature and truncation."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.token_stats import KeptTokens, Support, token_stats

VOCAB = 16


def one_by_one(actor, batch: PPOBatch, temperature: float) -> torch.Tensor:
    """Reference: each sequence alone, no padding, no slicing."""
    out = torch.zeros(batch.mask_SR.shape)
    for s in range(len(batch)):
        (micro,) = batch.micro_batches([s], 1)
        ids = micro.input_ids_BT[0]
        logprobs = (actor(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        first = len(ids) - int(batch.lengths_S[s])
        for r in range(int(batch.lengths_S[s])):
            out[s, r] = logprobs[first + r - 1, ids[first + r]]
    return out


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    ).eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_logprobs_do_not_depend_on_padding_or_company(
    make_rollouts, tiny_actor, family: str, temperature: float
):
    actor = tiny_actor() if family == "llama" else gpt2()
    batch = PPOBatch(make_rollouts(8))
    found = torch.zeros(batch.mask_SR.shape)
    for micro in batch.micro_batches(list(range(8)), 3):
        batch.unpack(
            token_stats(actor, micro, Sampling(temperature=temperature)).logprobs_M, micro, found
        )
    torch.testing.assert_close(found, one_by_one(actor, batch, temperature), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_entropy_is_that_of_the_sampled_distribution(make_rollouts, tiny_actor):
    actor = tiny_actor()
    batch = PPOBatch(make_rollouts(4))
    (micro,) = batch.micro_batches([2], 1)
    stats = token_stats(actor, micro, Sampling(temperature=0.5), entropy=True)
    p = (actor(micro.input_ids_BT).logits[0] / 0.5).softmax(-1)[micro.predict_mask_BT[0]]
    torch.testing.assert_close(stats.entropy_M, torch.distributions.Categorical(p).entropy())


def kept_by_hand(p: list[float], top_k: int, top_p: float) -> float:
    ordered = sorted(p, reverse=True)[: top_k or len(p)]
    total = sum(ordered)
    taken = []
    for value in ordered:
        if sum(taken) / total < top_p:
            taken.append(value)
    return sum(taken)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (2, 1.0), (0, 0.6), (0, 0.85), (3, 0.7), (1, 0.1)]
)
def test_what_a_cut_leaves_against_a_loop(top_k: int, top_p: float):
    """The likeliest token was sampled, so nothing else is kept than what the cut leaves."""
    p = torch.tensor([0.4, 0.3, 0.17, 0.08, 0.05])
    micro = MicroBatch((0,), torch.tensor([[3, 0]]), torch.tensor([[False, True]]))
    cut_MV = Support(Sampling(top_k=top_k, top_p=top_p)).cut(p.log()[None], micro)
    expected = p[0] / (kept_by_hand(p.tolist(), top_k, top_p) if (top_k or top_p < 1) else 1.0)
    torch.testing.assert_close(cut_MV.softmax(-1)[0, 0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("width", [16, 100, 1001])
@pytest.mark.parametrize("share", [0.002, 0.02, 0.3, 1.0])
def test_kept_tokens_are_the_same_again_row_by_row(width: int, share: float):
    """As ids where few are kept, as bits where many are; a row may keep one or all."""
    kept_CV = torch.rand(150, width, generator=torch.Generator().manual_seed(1)) < share
    kept_CV[:, 3] = True
    kept = KeptTokens.of(kept_CV)
    assert (kept.bits_CX is None) == (4 * int(kept_CV.sum()) <= 150 * -(-width // 8))
    assert kept.nbytes <= 150 * -(-width // 8)
    for first, last in ((0, 150), (0, 1), (149, 150), (17, 90), (5, 5)):
        found = torch.zeros(last - first, width, dtype=torch.bool)
        kept.part(first, last).mark(found)
        assert torch.equal(found, kept_CV[first:last])


@torch.no_grad()
def test_the_support_stays_on_the_device_and_is_small(make_rollouts):
    """V = 152k: a bit for each token is 19 KB a response token, on the host in earlier releases."""
    batch = PPOBatch(make_rollouts(8))
    (micro,) = batch.micro_batches(list(range(8)), 8)
    tokens = len(micro.response_ids_M)
    moved: list[str] = []

    class Moves(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("cpu", "numpy", "from_numpy", "to"):
                moved.append(func.__name__)
            return func(*args, **(kwargs or {}))

    for sampling in (Sampling(top_k=20), Sampling(top_p=0.9)):
        support = Support(sampling)
        logits_MV = torch.randn(tokens, 152_000) * (1 if sampling.top_k else 8)
        with Moves():
            first = support.cut(logits_MV, micro)
            again = support.cut(logits_MV, micro)
        assert torch.equal(first, again) and not moved
        assert support.nbytes <= (4 * 21 if sampling.top_k else 19_000) * tokens


def test_bfloat16_products_stay_close_and_weights_float32(make_rollouts, tiny_actor):
    actor = tiny_actor()
    (micro,) = PPOBatch(make_rollouts(4)).micro_batches([0, 1, 2, 3], 4)
    exact = token_stats(actor, micro, Sampling()).logprobs_M
    rough = token_stats(actor, micro, Sampling(), autocast=True).logprobs_M
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.6)]
)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_logits_in_chunks_are_the_whole_ones(
    make_rollouts, tiny_actor, sampling: Sampling, rows: int
):
    """Values and gradients of log-probs and entropy, against all rows at once."""
    found = []
    for chunk_rows in (1000, rows):
        actor = tiny_actor()
        batch = PPOBatch(make_rollouts(8))
        support = Support(sampling)
        values = []
        for micro in batch.micro_batches(list(range(8)), 3):
            with torch.no_grad():  # The first to ask decides what is kept, in chunks too.
                token_stats(
                    actor, micro, sampling, entropy=True, support=support, chunk_rows=chunk_rows
                )
            stats = token_stats(
                actor, micro, sampling, entropy=True, support=support, chunk_rows=chunk_rows
            )
            (stats.logprobs_M.sum() + 0.3 * stats.entropy_M.sum()).backward()
            values += [stats.logprobs_M.detach(), stats.entropy_M.detach()]
        found.append([*values, *(parameter.grad for parameter in actor.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_soft_cap_stays_the_models_own(make_rollouts):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    capped = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCAB, head_dim=16, final_logit_softcapping=0.5, **sizes)
    ).eval()
    capped.lm_head.weight.mul_(50)
    batch = PPOBatch(make_rollouts(4))
    found = torch.zeros(batch.mask_SR.shape)
    for micro in batch.micro_batches(list(range(4)), 2):
        batch.unpack(token_stats(capped, micro, Sampling(), chunk_rows=2).logprobs_M, micro, found)
    torch.testing.assert_close(found, one_by_one(capped, batch, 1.0), rtol=1e-5, atol=1e-5)


def test_support_is_of_the_actor_that_sampled(tiny_actor, make_rollouts):
    """Another policy's probabilities are taken over the same tokens; without a cut nothing
    changes.
    """
    batch = PPOBatch(make_rollouts(4))
    actor = tiny_actor()
    other = tiny_actor(seed=1)
    for model in (actor, other):
        model.lm_head.weight.data.mul_(8.0)
    (micro,) = batch.micro_batches(list(range(4)), 4)
    whole = token_stats(other, micro, Sampling(), entropy=True)
    same = token_stats(other, micro, Sampling(), entropy=True, support=Support(Sampling()))
    assert torch.equal(whole.logprobs_M, same.logprobs_M) and torch.equal(
        whole.entropy_M, same.entropy_M
    )
    sampling = Sampling(top_k=3)
    support = Support(sampling)
    mine = token_stats(actor, micro, sampling, entropy=True, support=support)
    theirs = token_stats(other, micro, sampling, entropy=True, support=support)
    for row, s in enumerate(micro.sequences):  # Slowly, from the definition.
        (alone,) = batch.micro_batches([s], 1)
        ids_MV = alone.response_ids_M
        logits = {
            m: m(alone.input_ids_BT).logits[0, alone.first_predicting : -1].detach()
            for m in (actor, other)
        }
        kept = (
            torch.zeros_like(logits[actor])
            .scatter_(1, logits[actor].topk(3).indices, 1.0)
            .scatter_(1, ids_MV[:, None], 1.0)
            .bool()
        )
        place = slice(sum(int(batch.lengths_S[x]) for x in micro.sequences[:row]), None)
        for stats, model in ((mine, actor), (theirs, other)):
            p = (logits[model].softmax(-1) * kept) / (logits[model].softmax(-1) * kept).sum(
                -1, keepdim=True
            )
            count = len(ids_MV)
            torch.testing.assert_close(
                stats.logprobs_M[place][:count].exp(),
                p.gather(1, ids_MV[:, None])[:, 0],
                rtol=1e-3,
                atol=1e-6,
            )
            torch.testing.assert_close(
                stats.entropy_M[place][:count], torch.special.entr(p).sum(-1), rtol=1e-3, atol=1e-4
            )


def test_a_cut_leaves_gradients_finite(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(4))
    actor = tiny_actor()
    sampling = Sampling(top_p=0.3)
    (micro,) = batch.micro_batches(list(range(4)), 4)
    stats = token_stats(actor, micro, sampling, entropy=True, support=Support(sampling))
    (stats.logprobs_M.sum() + stats.entropy_M.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in actor.parameters())
