"""Log-probs against the plain formula, the sampler's temperature and truncation, the critic, the
reference; PPO's formulas by hand.
"""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from heads.errors import ModelError
from medusa_ppo.config.ppo_config import PPOConfig
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.ppo import models as losses
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.models import Critic, Support, token_stats

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


def test_critic_starts_at_zero_and_shares_nothing(make_rollouts, tiny_actor):
    actor = tiny_actor()
    critic = Critic(actor)
    (micro,) = PPOBatch(make_rollouts(4)).micro_batches([0, 1, 2, 3], 4)
    values = critic(micro)
    assert (
        values.shape == micro.response_ids_M.shape
        and values.dtype == torch.float32
        and not values.any()
    )
    assert not {p.data_ptr() for p in actor.parameters()} & {
        p.data_ptr() for p in critic.parameters()
    }
    assert all(p.requires_grad for p in critic.parameters())


def test_critic_reads_the_state_before_the_token(make_rollouts, tiny_actor):
    critic = Critic(tiny_actor())
    torch.nn.init.normal_(critic.value_head.weight)
    (micro,) = PPOBatch(make_rollouts(2)).micro_batches([0], 1)
    last = micro.input_ids_BT.clone()
    last[0, -1] = (last[0, -1] + 1) % VOCAB
    changed = type(micro)(micro.sequences, last, micro.response_mask_BT)
    torch.testing.assert_close(
        critic(micro),
        critic(changed),
        msg="V must not see the token that it judges the state before",
    )


def test_reference_never_moves(tiny_actor):
    actor = tiny_actor()
    reference = Learner(actor, Critic(actor), PPOConfig()).reference
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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive at once, and those of `held`; what a kernel
    takes for itself is not seen.
    """

    def __init__(self, held: torch.nn.Module) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for parameter in held.parameters():
            self._note(parameter)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._note, out)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def peak_bytes(work, held: torch.nn.Module) -> int:
    with LiveBytes(held) as live:
        work()
    return live.peak


def test_scoring_with_a_large_vocabulary_takes_little_more_than_the_model(tiny_actor):
    """V = 152k: logits of these 192 tokens alone would be 111 MiB, the log-softmax as much
    again.
    """
    actor = tiny_actor(vocab=152_000, hidden=256, layers=2)
    ids = tuple(range(1, 25))
    rollouts = Rollouts(
        (ids[:8],),
        tuple(Response(0, ids, (-1.0,) * 24, "stop") for _ in range(8)),
        Counters(),
        1.0,
        Sampling(),
    )
    (micro,) = PPOBatch(rollouts).micro_batches(list(range(8)), 8)
    with torch.no_grad():
        own = peak_bytes(
            lambda: actor.base_model(input_ids=micro.input_ids_BT, use_cache=False), actor
        )
        scored = peak_bytes(lambda: token_stats(actor, micro, Sampling(), entropy=True), actor)
        whole = peak_bytes(
            lambda: token_stats(actor, micro, Sampling(), entropy=True, chunk_rows=1000), actor
        )
    assert scored < 1.3 * own < whole


def test_recomputation_works_in_eval_mode_and_changes_no_bit(make_rollouts, tiny_actor):
    (micro,), found = PPOBatch(make_rollouts(16)).micro_batches(list(range(16)), 16), []
    for again in (False, True):
        actor = tiny_actor(layers=6)
        critic = Critic(actor)
        weights = sum(p.numel() * 4 for p in actor.parameters())
        if again:
            losses.recompute_layers(actor)
            losses.recompute_layers(critic)
        stats = token_stats(actor, micro, Sampling())
        stats.logprobs_M.sum().backward()
        (critic(micro) - 1).square().sum().backward()
        found.append(
            [
                stats.logprobs_M.detach(),
                *(p.grad for p in (*actor.parameters(), *critic.parameters())),
            ]
        )
        actor.zero_grad()
        peak = (
            peak_bytes(
                lambda a=actor: token_stats(a, micro, Sampling()).logprobs_M.sum().backward(), actor
            )
            - weights
        )
        found.append(peak)
        assert not actor.training
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert found[3] < 0.6 * found[1], "gradients, and the layer that is being made again, included"


def test_a_model_without_known_layers_is_refused():
    with pytest.raises(ModelError, match="layers are not known"):
        losses.recompute_layers(torch.nn.Linear(2, 2))


def test_masked_mean_counts_every_token_once():
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert losses.masked_mean(values, mask).item() == pytest.approx(4.0)
    assert losses.masked_mean(values, torch.zeros_like(mask)).item() == 0.0


def test_masked_mean_ignores_nan_on_padding():
    values = torch.tensor([[1.0, float("nan")]])
    assert losses.masked_mean(values, torch.tensor([[True, False]])).item() == 1.0


def test_score_lands_on_the_last_real_token_and_kl_on_every_token():
    logprobs = torch.tensor([[-1.0, -2.0, 7.0], [-0.5, -0.5, -0.5]])
    reference = torch.tensor([[-2.0, -1.0, -7.0], [-0.5, -1.5, -0.5]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = losses.token_rewards(
        torch.tensor([5.0, -1.0]), logprobs, reference, mask, kl_coefficient=0.1
    )
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 5.1, 0.0], [0.0, -0.1, -1.0]]))


def test_gae_of_three_tokens_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.4, 0.2]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = losses.generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.5)
    a2 = 1.0 - 0.2
    a1 = (0.9 * 0.2 - 0.4) + 0.45 * a2
    a0 = (0.9 * 0.4 - 0.5) + 0.45 * a1
    torch.testing.assert_close(advantages, torch.tensor([[a0, a1, a2]]))
    torch.testing.assert_close(returns, advantages + values)


def test_gae_does_not_see_what_stands_behind_the_last_token():
    torch.manual_seed(0)
    rewards = torch.randn(2, 6)
    values = torch.randn(2, 6)
    mask = torch.arange(6)[None] < torch.tensor([[4], [6]])
    advantages, returns = losses.generalized_advantages(rewards, values, mask, gamma=0.99, lam=0.95)
    short, _ = losses.generalized_advantages(
        rewards[:1, :4], values[:1, :4], mask[:1, :4], gamma=0.99, lam=0.95
    )
    torch.testing.assert_close(advantages[:1, :4], short)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_lambda_one_gives_the_discounted_return():
    torch.manual_seed(1)
    rewards = torch.randn(1, 5)
    values = torch.randn(1, 5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    _, returns = losses.generalized_advantages(rewards, values, mask, gamma=0.9, lam=1.0)
    expected = [sum(0.9**j * rewards[0, r + j].item() for j in range(5 - r)) for r in range(5)]
    torch.testing.assert_close(returns[0], torch.tensor(expected))


def test_whitening_is_over_all_real_tokens():
    torch.manual_seed(2)
    values = torch.randn(7, 9) * 3 + 2
    mask = torch.arange(9)[None] < torch.randint(1, 10, (7, 1))
    white = losses.whiten(values, mask)
    assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white[mask].std(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)
    assert not white[~mask].any()


def test_whitening_equal_values_gives_zeros_not_nan():
    assert not losses.whiten(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.5, 1.0, -1.2, 1),
        (1.5, -1.0, 1.5, 0),
        (0.5, 1.0, -0.5, 0),
        (0.5, -1.0, 0.8, 1),
        (1.1, 2.0, -2.2, 0),
    ],
)
def test_clipped_surrogate_takes_the_worse_of_the_two(
    ratio: float, advantage: float, expected: float, clipped: int
):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    terms = losses.clipped_surrogate(new, torch.zeros(1), torch.tensor([advantage]), 0.2)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)
    assert terms.clipped.item() == clipped
    terms.loss.backward()
    assert (new.grad.item() == 0) == bool(clipped), (
        "a clipped token must not push the policy, every other one must"
    )


def test_first_pass_gradient_is_the_policy_gradient():
    torch.manual_seed(3)
    new = torch.randn(6, requires_grad=True)
    advantages = torch.randn(6)
    losses.clipped_surrogate(new, new.detach().clone(), advantages, 0.2).loss.backward()
    torch.testing.assert_close(new.grad, -advantages)


def test_kl_of_the_update_is_never_negative():
    torch.manual_seed(4)
    new = torch.randn(100)
    old = torch.randn(100)
    for n, o in zip(new, old, strict=True):
        assert losses.clipped_surrogate(n[None], o[None], torch.ones(1), 0.2).kl.item() >= 0


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    old = torch.tensor([0.5, 0.0])
    returns = torch.tensor([1.0, 1.0])
    loss = losses.clipped_value_loss(values, old, returns, 0.2)
    # First: moved past the clip, so the clipped error (0.7 - 1)^2 is the worse one. Second: not
    # moved, error 1.
    assert loss.item() == pytest.approx(0.5 * (0.09 + 1.0))
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.0]))


def test_the_three_estimates_by_hand_and_on_average():
    new = torch.tensor([-1.0, -2.0])
    old = torch.tensor([-2.0, -1.0])
    assert losses.kl_estimates(new, old, "k1").tolist() == [1.0, -1.0]
    assert losses.kl_estimates(new, old, "k2").tolist() == [0.5, 0.5]
    torch.testing.assert_close(
        losses.kl_estimates(new, old, "k3"), torch.tensor([1 / math.e, math.e - 2])
    )
    p = torch.tensor([0.7, 0.2, 0.1])
    q = torch.tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(
            (p * losses.kl_estimates(p.log(), q.log(), estimator)).sum(), exact
        )


def test_k2_as_a_loss_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    q = torch.tensor([0.5, 0.3, 0.2])
    logp = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad(
        (logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True
    )
    (found,) = torch.autograd.grad(
        (logp.exp().detach() * losses.kl_estimates(logp, q.log(), "k2")).sum(), logits
    )
    torch.testing.assert_close(found, wanted)


def test_group_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 5.0, 2.0, 9.0, 3.0])
    prompts = torch.tensor([0, 0, 1, 1, 1, 2])
    trained = torch.tensor([True, True, True, True, False, True])
    found = losses.group_advantages(rewards, prompts, trained, "rloo")
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0, 3.0, -3.0, 0.0, 0.0]))
    found = losses.group_advantages(rewards, prompts, trained, "grpo")
    torch.testing.assert_close(
        found, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0]), rtol=1e-3, atol=0
    )
    assert not losses.group_advantages(
        torch.ones(4), torch.zeros(4, dtype=torch.int64), trained[:4], "grpo"
    ).any()


def test_rewards_of_steps_stand_where_they_were_earned():
    mask = torch.tensor([[True, True, True], [True, True, False]])
    steps = torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]])
    none = torch.zeros(2, 3)
    assert torch.equal(losses.token_rewards(steps, none, none, mask, 0.1), steps)
    _, returns = losses.generalized_advantages(steps, none, mask, gamma=1.0, lam=1.0)
    assert returns.tolist() == [[3, 2, 2], [5, 5, 0]]


def test_a_value_clip_that_never_binds_is_none():
    values, old, returns = (
        torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    found = [losses.clipped_value_loss(values, old, returns, clip) for clip in (1e9, None)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_importance_weights_by_hand():
    gap = torch.tensor([0.0, math.log(1.5), math.log(5.0), -math.log(2.0)])
    torch.testing.assert_close(
        losses.importance_weights(gap, 2.0), torch.tensor([1.0, 1.5, 2.0, 0.5])
    )
    logprobs = torch.zeros(4)
    old = torch.zeros(4)
    advantages = torch.arange(4.0)
    plain = losses.clipped_surrogate(logprobs, old, advantages, 0.2).loss
    assert torch.equal(
        losses.clipped_surrogate(logprobs, old, advantages, 0.2, torch.ones(4)).loss, plain
    )
    weighted = losses.clipped_surrogate(
        logprobs, old, advantages, 0.2, torch.tensor([9.0, 2.0, 0.0, 1.0])
    ).loss
    assert weighted.item() == -5.0


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
