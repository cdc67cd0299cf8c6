"""The update: what it computes, that cutting it into micro batches changes nothing, that it repeats itself, that it learns."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from heads.errors import RunError
from medusa_ppo import metrics as names
from medusa_ppo.config import PPOConfig
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.models import Critic
from medusa_ppo.types import Sampling

FAST = {"actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2}


def learner(actor, **settings) -> Learner:
    actor = copy.deepcopy(actor)
    return Learner(actor, Critic(actor), PPOConfig(**{**FAST, **settings}), seed=3)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_first_scores_by_hand(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(6))
    rewards = torch.randn(6)
    scores, report = learner(tiny_actor(), gamma=1.0, lam=1.0).score(batch, rewards, Sampling())
    assert report[names.KL_REFERENCE] == 0.0, "actor and reference are the same at first"
    assert torch.equal(scores.logprobs_SR, scores.reference_SR)
    # No value and no KL yet: with gamma = lambda = 1 the return of each token is the response's reward.
    torch.testing.assert_close(scores.returns_SR, torch.where(batch.mask_SR, rewards[:, None], 0.0))
    assert scores.advantages_SR[batch.mask_SR].mean().item() == pytest.approx(0.0, abs=1e-6)
    gap = (scores.logprobs_SR + 1.0).abs()[batch.mask_SR].mean().item()  # make_rollouts claims log-prob -1 for every token
    assert report[names.LOGPROB_GAP] == pytest.approx(gap, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_micro_batches_change_nothing_but_rounding(tiny_actor, make_rollouts, micro: int):
    """Responses of unequal length: normalising by micro batch instead of by minibatch would fail here by far."""
    batch, rewards = PPOBatch(make_rollouts(12)), torch.randn(12, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (12, micro):
        one = learner(tiny_actor(), micro_batch_size=size, minibatch_size=12, epochs=1, actor_learning_rate=1e-3, clip_norm=1e9)
        scores, _ = one.score(batch, rewards, Sampling())
        one.actor_optimizer = torch.optim.SGD(one.actor.parameters(), lr=1.0)  # Adam would divide the scale of the gradient out
        report = one.update(batch, scores, Sampling(), 0)
        found.append((weights(one.actor), report))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3, abs=1e-6)


def test_old_logprobs_are_the_actors_own(tiny_actor, make_rollouts):
    """The engine's log-probs (all -1 here, far off) must not enter the ratio: the first pass starts at ratio 1."""
    batch = PPOBatch(make_rollouts(8))
    one = learner(tiny_actor(), epochs=1, minibatch_size=8)
    scores, _ = one.score(batch, torch.randn(8), Sampling())
    report = one.update(batch, scores, Sampling(), 0)
    assert report[names.KL_UPDATE] == pytest.approx(0.0, abs=1e-9) and report[names.CLIP_FRAC] == 0.0
    assert report[names.POLICY_LOSS] == pytest.approx(0.0, abs=1e-6), "whitened advantages at ratio 1"


def test_same_seed_same_numbers(tiny_actor, make_rollouts):
    batch, rewards = PPOBatch(make_rollouts(8)), torch.arange(8.0)
    found = []
    for _ in range(2):
        one = learner(tiny_actor(), minibatch_size=4, micro_batch_size=2)
        torch.manual_seed(len(found))  # the global generator must not matter
        scores, _ = one.score(batch, rewards, Sampling())
        found.append((one.update(batch, scores, Sampling(), 5), weights(one.actor), weights(one.critic)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])


def test_another_step_draws_other_minibatches(tiny_actor, make_rollouts):
    batch, rewards = PPOBatch(make_rollouts(8)), torch.arange(8.0)
    found = []
    for step in (0, 1):
        one = learner(tiny_actor(), minibatch_size=4)
        scores, _ = one.score(batch, rewards, Sampling())
        one.update(batch, scores, Sampling(), step)
        found.append(weights(one.actor))
    assert not torch.equal(*found)


def test_a_tap_changes_no_bit_and_sees_every_response_once(tiny_actor, make_rollouts):
    batch, rewards = PPOBatch(make_rollouts(8)), torch.arange(8.0)
    seen: list[int] = []

    def tap(model, response_mask_BT, sequences):
        assert response_mask_BT.sum().item() == sum(int(batch.lengths_S[s]) for s in sequences)
        seen.extend(sequences)
        return contextlib.nullcontext()

    found = []
    for chosen in (None, tap):
        one = learner(tiny_actor(), micro_batch_size=4, minibatch_size=4)
        scores, _ = one.score(batch, rewards, Sampling(), chosen)
        one.update(batch, scores, Sampling(), 0)
        found.append(weights(one.actor))
    assert torch.equal(*found) and sorted(seen) == list(range(8))


def test_reward_moves_the_policy_towards_what_was_rewarded(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8))
    one = learner(tiny_actor(), kl_coefficient=0.0, epochs=4)
    rewards = torch.tensor([1.0, 0.0] * 4)
    before, _ = one.score(batch, rewards, Sampling())
    one.update(batch, before, Sampling(), 0)
    after, report = one.score(batch, rewards, Sampling())
    moved = (after.logprobs_SR - before.logprobs_SR).sum(1)
    assert moved[0::2].mean() > moved[1::2].mean()
    assert report[names.KL_REFERENCE] != 0.0


def test_the_kl_penalty_holds_the_policy_back(tiny_actor, make_rollouts):
    batch, moved = PPOBatch(make_rollouts(8)), []
    for coefficient in (0.0, 50.0):
        one = learner(tiny_actor(), kl_coefficient=coefficient, epochs=2, actor_learning_rate=3e-3)
        for step in range(12):
            scores, _ = one.score(batch, torch.tensor([1.0, 0.0] * 4), Sampling())
            one.update(batch, scores, Sampling(), step)
        moved.append((scores.logprobs_SR - scores.reference_SR).abs()[batch.mask_SR].mean().item())
    assert moved[1] < 0.7 * moved[0]


def test_the_critic_learns_the_rewards(tiny_actor, make_rollouts):
    batch, rewards = PPOBatch(make_rollouts(8)), torch.tensor([1.0, -1.0] * 4)
    one = learner(tiny_actor(), value_clip_range=10.0)
    values = []
    for step in range(30):
        scores, _ = one.score(batch, rewards, Sampling())
        values.append(one.update(batch, scores, Sampling(), step)[names.VALUE_LOSS])
    assert values[-1] < 0.5 * values[0]


def test_the_reference_stays(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(4))
    one = learner(tiny_actor())
    before = weights(one.reference)
    scores, _ = one.score(batch, torch.randn(4), Sampling())
    one.update(batch, scores, Sampling(), 0)
    assert torch.equal(weights(one.reference), before) and not torch.equal(weights(one.actor), before)


def test_entropy_bonus_raises_entropy(tiny_actor, make_rollouts):
    batch, entropies = PPOBatch(make_rollouts(8)), []
    actor = tiny_actor()
    with torch.no_grad():
        actor.lm_head.weight.mul_(8.0)
    for bonus in (0.0, 1.0):
        one = learner(actor, entropy_coefficient=bonus, kl_coefficient=0.0)
        for step in range(5):
            scores, _ = one.score(batch, torch.zeros(8), Sampling())
            one.update(batch, scores, Sampling(), step)
        entropies.append(one.score(batch, torch.zeros(8), Sampling())[1][names.ENTROPY])
    assert entropies[1] > entropies[0] + 0.1


def test_a_gradient_that_is_not_finite_stops_before_it_spoils_the_weights(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(4))
    one = learner(tiny_actor())
    scores, _ = one.score(batch, torch.tensor([1.0, float("inf"), 0.0, 0.0]), Sampling())
    before = weights(one.actor)
    with pytest.raises(RunError, match="not finite"):
        one.update(batch, scores, Sampling(), 0)
    assert torch.equal(weights(one.actor), before)
