"""Log-probs against the plain formula, the sampler's temperature and truncation, the critic, the reference."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.models import Critic, frozen_copy, log_kept_mass, token_stats
from medusa_ppo.types import Sampling

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
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_logprobs_do_not_depend_on_padding_or_company(make_rollouts, tiny_actor, family: str, temperature: float):
    actor, batch = tiny_actor() if family == "llama" else gpt2(), PPOBatch(make_rollouts(8))
    found = torch.zeros(batch.mask_SR.shape)
    for micro in batch.micro_batches(list(range(8)), 3):
        batch.unpack(token_stats(actor, micro, Sampling(temperature=temperature)).logprobs_M, micro, found)
    torch.testing.assert_close(found, one_by_one(actor, batch, temperature), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_entropy_is_that_of_the_sampled_distribution(make_rollouts, tiny_actor):
    actor, batch = tiny_actor(), PPOBatch(make_rollouts(4))
    (micro,) = batch.micro_batches([2], 1)
    stats = token_stats(actor, micro, Sampling(temperature=0.5), entropy=True)
    p = (actor(micro.input_ids_BT).logits[0] / 0.5).softmax(-1)[micro.predict_mask_BT[0]]
    torch.testing.assert_close(stats.entropy_M, torch.distributions.Categorical(p).entropy())


def kept_by_hand(p: list[float], top_k: int, top_p: float) -> float:
    ordered = sorted(p, reverse=True)[: top_k or len(p)]
    total, taken = sum(ordered), []
    for value in ordered:
        if sum(taken) / total < top_p:
            taken.append(value)
    return sum(taken)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (2, 1.0), (0, 0.6), (0, 0.85), (3, 0.7), (1, 0.1)])
def test_kept_mass_against_a_loop(top_k: int, top_p: float):
    p = [0.4, 0.3, 0.17, 0.08, 0.05]
    found = log_kept_mass(torch.tensor([p]).log(), top_k, top_p).exp().item()
    assert found == pytest.approx(kept_by_hand(p, top_k, top_p) if (top_k or top_p < 1) else 1.0, rel=1e-5)


def test_critic_starts_at_zero_and_shares_nothing(make_rollouts, tiny_actor):
    actor = tiny_actor()
    critic = Critic(actor)
    (micro,) = PPOBatch(make_rollouts(4)).micro_batches([0, 1, 2, 3], 4)
    values = critic(micro)
    assert values.shape == micro.response_ids_M.shape and values.dtype == torch.float32 and not values.any()
    assert not {p.data_ptr() for p in actor.parameters()} & {p.data_ptr() for p in critic.parameters()}
    assert all(p.requires_grad for p in critic.parameters())


def test_critic_reads_the_state_before_the_token(make_rollouts, tiny_actor):
    critic = Critic(tiny_actor())
    torch.nn.init.normal_(critic.value_head.weight)
    (micro,) = PPOBatch(make_rollouts(2)).micro_batches([0], 1)
    last = micro.input_ids_BT.clone()
    last[0, -1] = (last[0, -1] + 1) % VOCAB
    changed = type(micro)(micro.sequences, last, micro.response_mask_BT)
    torch.testing.assert_close(critic(micro), critic(changed), msg="V must not see the token that it judges the state before")


def test_reference_never_moves(tiny_actor):
    actor = tiny_actor()
    reference = frozen_copy(actor)
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        actor.lm_head.weight.add_(1.0)
    assert not torch.equal(reference.lm_head.weight, actor.lm_head.weight)


def test_bfloat16_products_stay_close_and_weights_float32(make_rollouts, tiny_actor):
    actor = tiny_actor()
    (micro,) = PPOBatch(make_rollouts(4)).micro_batches([0, 1, 2, 3], 4)
    exact = token_stats(actor, micro, Sampling()).logprobs_M
    rough = token_stats(actor, micro, Sampling(), autocast=True).logprobs_M
    assert rough.dtype == torch.float32 and not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.02)
