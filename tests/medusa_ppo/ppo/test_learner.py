"""The update: what it computes, that cutting it into micro batches changes nothing, that it repeats
itself, that it learns.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import threading

import pytest
import torch

from heads.errors import ConfigError, RunError
from medusa_ppo.actors.hf import load_actor, load_tokenizer
from medusa_ppo.actors.vision import FeatureStore, ImageReader, tower_of
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.ppo.arithmetic import masked_deviation
from medusa_ppo.ppo.batch import PPOBatch, text_batch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner

FAST = {"actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2}


def learner(actor, device: torch.device | str = "cpu", **settings) -> Learner:
    actor = copy.deepcopy(actor).to(device)
    return Learner(actor, Critic(actor), PPOConfig(**{**FAST, **settings}), seed=3)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rounding(device: torch.device) -> float:
    """What sums in another order may change of numbers near 1."""
    return 1e-6 if device.type == "cpu" else 1e-5


def same_weights(device: torch.device, one: torch.Tensor, other: torch.Tensor) -> None:
    """To the bit on a CPU. A GPU adds the rows of an embedding's gradient up in any order, and
    Adam's first steps make that large where a gradient is next to nothing.
    """
    if device.type == "cpu":
        assert torch.equal(one, other)
    else:
        assert float(((one - other).abs() > 1e-2).double().mean()) < 0.01


def test_the_first_scores_by_hand(device: torch.device, tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(6), device=device)
    rewards = torch.randn(6)
    scores, report = learner(tiny_actor(), device, lam=1.0).score(batch, rewards, Sampling())
    assert report[names.KL_REFERENCE] == 0.0, "actor and reference are the same at first"
    assert torch.equal(scores.logprobs_SR, scores.reference_SR)
    # No value and no KL yet: with lambda = 1 the return of each token is the response's reward.
    torch.testing.assert_close(scores.returns_SR, torch.where(batch.mask_SR, rewards[:, None], 0.0))
    assert scores.advantages_SR[batch.mask_SR].mean().item() == pytest.approx(0.0, abs=1e-6)
    gap = (
        (scores.logprobs_SR + 1.0).abs()[batch.mask_SR].mean().item()
    )  # make_rollouts claims log-prob -1 for every token
    assert report[names.LOGPROB_GAP] == pytest.approx(gap, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_micro_batches_change_nothing_but_rounding(
    device: torch.device, tiny_actor, make_rollouts, micro: int
):
    """Responses of unequal length: normalising by micro batch instead of by minibatch would fail
    here by far.
    """
    batch = PPOBatch(make_rollouts(12), device=device)
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (12, micro):
        one = learner(
            tiny_actor(),
            device,
            micro_batch_size=size,
            minibatch_size=12,
            epochs=1,
            actor_learning_rate=1e-3,
            clip_norm=1e9,
        )
        scores, _ = one.score(batch, rewards, Sampling())
        one.actor_optimizer = torch.optim.SGD(
            one.actor.parameters(), lr=1.0
        )  # Adam would divide the scale of the gradient out
        report = one.update(batch, scores, Sampling(), 0)
        found.append((weights(one.actor), report))
    near = rounding(device)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=near)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3, abs=near)


def test_memory_savers_change_nothing_but_rounding(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(12))
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    found = []
    for settings in ({}, {"recompute": True}, {"micro_batch_tokens": 20}):
        one = learner(
            tiny_actor(), minibatch_size=12, epochs=2, actor_learning_rate=1e-3, **settings
        )
        scores, _ = one.score(batch, rewards, Sampling())
        one.update(batch, scores, Sampling(), 0)
        found.append(torch.cat([weights(one.actor), weights(one.critic)]))
    assert torch.equal(found[0], found[1]), "made again to the bit"
    torch.testing.assert_close(found[0], found[2], rtol=1e-3, atol=1e-4)


def test_a_reference_in_bfloat16_stays_near(device: torch.device, tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(12), device=device)
    rewards = torch.zeros(12)
    one = learner(tiny_actor(), device, reference_dtype="bfloat16")
    scores, report = one.score(batch, rewards, Sampling())
    assert {p.dtype for p in one.reference.parameters()} == {torch.bfloat16} and {
        p.dtype for p in one.actor.parameters()
    } == {torch.float32}
    # Rounded frequencies would give its tokens other positions than the actor's.
    buffers = dict(one.actor.named_buffers())
    assert any(buffer.is_floating_point() for buffer in buffers.values())
    for name, buffer in one.reference.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name
    assert scores.reference_SR.dtype == torch.float32 and 0 < abs(report[names.KL_REFERENCE]) < 0.01
    torch.testing.assert_close(scores.reference_SR, scores.logprobs_SR, rtol=0.02, atol=0.02)


def test_old_logprobs_are_the_actors_own(device: torch.device, tiny_actor, make_rollouts):
    """The engine's log-probs (all -1 here, far off) must not enter the ratio: the first pass starts
    at ratio 1.
    """
    batch = PPOBatch(make_rollouts(8), device=device)
    one = learner(tiny_actor(), device, epochs=1, minibatch_size=8)
    scores, _ = one.score(batch, torch.randn(8), Sampling())
    report = one.update(batch, scores, Sampling(), 0)
    # On a GPU the update's products are other ones than the scoring's.
    near = 1e-9 if device.type == "cpu" else 1e-6
    assert report[names.KL_UPDATE] == pytest.approx(0.0, abs=near)
    assert report[names.CLIP_FRAC] == 0.0
    assert report[names.POLICY_LOSS] == pytest.approx(0.0, abs=rounding(device)), (
        "whitened advantages at ratio 1"
    )


def test_same_seed_same_numbers(device: torch.device, tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8), device=device)
    rewards = torch.arange(8.0)
    found = []
    for _ in range(2):
        one = learner(tiny_actor(), device, minibatch_size=4, micro_batch_size=2)
        torch.manual_seed(len(found))  # the global generator must not matter
        scores, _ = one.score(batch, rewards, Sampling())
        found.append(
            (one.update(batch, scores, Sampling(), 5), weights(one.actor), weights(one.critic))
        )
    if device.type == "cpu":
        assert found[0][0] == found[1][0]
    same_weights(device, found[0][1], found[1][1])
    same_weights(device, found[0][2], found[1][2])


def test_another_step_draws_other_minibatches(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8))
    rewards = torch.arange(8.0)
    found = []
    for step in (0, 1):
        one = learner(tiny_actor(), minibatch_size=4)
        scores, _ = one.score(batch, rewards, Sampling())
        one.update(batch, scores, Sampling(), step)
        found.append(weights(one.actor))
    assert not torch.equal(*found)


def test_a_tap_changes_no_bit_and_sees_every_response_once(
    device: torch.device, tiny_actor, make_rollouts
):
    batch = PPOBatch(make_rollouts(8), device=device)
    rewards = torch.arange(8.0)
    seen: list[int] = []

    def tap(model, response_mask_BT, sequences):
        assert response_mask_BT.sum().item() == sum(int(batch.lengths_S[s]) for s in sequences)
        seen.extend(sequences)
        return contextlib.nullcontext()

    found = []
    for chosen in (None, tap):
        one = learner(tiny_actor(), device, micro_batch_size=4, minibatch_size=4)
        scores, _ = one.score(batch, rewards, Sampling(), chosen)
        one.update(batch, scores, Sampling(), 0)
        found.append(weights(one.actor))
    same_weights(device, *found)
    assert sorted(seen) == list(range(8))


def test_reward_moves_the_policy_towards_what_was_rewarded(
    device: torch.device, tiny_actor, make_rollouts
):
    batch = PPOBatch(make_rollouts(8), device=device)
    one = learner(tiny_actor(), device, kl_coefficient=0.0, epochs=4)
    rewards = torch.tensor([1.0, 0.0] * 4)
    before, _ = one.score(batch, rewards, Sampling())
    one.update(batch, before, Sampling(), 0)
    after, report = one.score(batch, rewards, Sampling())
    moved = (after.logprobs_SR - before.logprobs_SR).sum(1)
    assert moved[0::2].mean() > moved[1::2].mean()
    assert report[names.KL_REFERENCE] != 0.0


def test_the_kl_penalty_holds_the_policy_back(device: torch.device, tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8), device=device)
    moved = []
    for coefficient in (0.0, 50.0):
        one = learner(
            tiny_actor(), device, kl_coefficient=coefficient, epochs=2, actor_learning_rate=3e-3
        )
        for step in range(12):
            scores, _ = one.score(batch, torch.tensor([1.0, 0.0] * 4), Sampling())
            one.update(batch, scores, Sampling(), step)
        moved.append((scores.logprobs_SR - scores.reference_SR).abs()[batch.mask_SR].mean().item())
    assert moved[1] < 0.7 * moved[0]


def test_the_critic_learns_the_rewards(device: torch.device, tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8), device=device)
    rewards = torch.tensor([1.0, -1.0] * 4)
    one = learner(tiny_actor(), device, value_clip_range=10.0)
    values = []
    explained = []
    for step in range(30):
        scores, report = one.score(batch, rewards, Sampling())
        explained.append(report[names.VALUE_EXPLAINED])
        values.append(one.update(batch, scores, Sampling(), step)[names.VALUE_LOSS])
    assert values[-1] < 0.5 * values[0]
    assert explained[-1] > explained[0] + 0.3 and explained[-1] <= 1.0


def test_the_reference_stays(device: torch.device, tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(4), device=device)
    one = learner(tiny_actor(), device)
    before = weights(one.reference)
    scores, _ = one.score(batch, torch.randn(4), Sampling())
    one.update(batch, scores, Sampling(), 0)
    assert torch.equal(weights(one.reference), before) and not torch.equal(
        weights(one.actor), before
    )


def test_entropy_bonus_raises_entropy(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8))
    entropies = []
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


def test_a_gradient_that_is_not_finite_stops_before_it_spoils_the_weights(
    device: torch.device, tiny_actor, make_rollouts
):
    batch = PPOBatch(make_rollouts(4), device=device)
    one = learner(tiny_actor(), device)
    scores, _ = one.score(batch, torch.tensor([1.0, float("inf"), 0.0, 0.0]), Sampling())
    before = weights(one.actor)
    with pytest.raises(RunError, match="not finite"):
        one.update(batch, scores, Sampling(), 0)
    assert torch.equal(weights(one.actor), before)


def trained(
    actor, batch, count=3, rewards=None, sampling=None, texts=None, critic=True, **settings
):
    """Learner and its last report after some steps on the same rollouts."""
    one = (
        learner(actor, **settings)
        if critic
        else Learner(copy.deepcopy(actor), None, PPOConfig(**{**FAST, **settings}), seed=3)
    )
    rewards = torch.arange(float(len(batch))) / 4 if rewards is None else rewards
    for step in range(count):
        scores, report = one.score(batch, rewards, sampling or Sampling())
        report |= one.update(batch, scores, sampling or Sampling(), step, texts)
    return one, report


def both(one: Learner) -> torch.Tensor:
    return torch.cat([weights(one.actor), weights(one.critic)])


@pytest.mark.parametrize(
    "options, plain",
    [
        (
            {
                "kl_estimator": "k1",
                "scale_rewards": False,
                "length_penalty": 0.0,
                "cut_responses": 0.0,
            },
            {},
        ),
        ({"cut_responses": "mask"}, {}),  # None was cut.
        ({"kl_stop": 1e9}, {}),
        ({"kl_goal": 0.1, "kl_coefficient": 1e-30}, {"kl_coefficient": 0.0}),
        (
            {"kl_in_loss": True, "kl_estimator": "k3", "kl_coefficient": 0.0},
            {"kl_coefficient": 0.0},
        ),
        ({"learning_rate_schedule": "linear", "steps": 10**17}, {}),
        ({"importance_bound": 1e9}, {}),  # The engine's log-probs are the actor's.
    ],
)
def test_an_option_that_is_off_changes_no_bit(
    tiny_actor, make_rollouts, options: dict, plain: dict
):
    actor = tiny_actor()
    batch = PPOBatch(make_rollouts(8))
    batch.behaviour_SR = learner(actor).score(batch, torch.zeros(8), Sampling())[0].logprobs_SR
    count = 1 if "importance_bound" in options else 3
    assert torch.equal(
        *(both(trained(actor, batch, count, **settings)[0]) for settings in (options, plain))
    )


def test_a_value_clip_that_never_binds_is_none(tiny_actor, make_rollouts):
    found = [
        both(trained(tiny_actor(), PPOBatch(make_rollouts(8)), value_clip_range=clip)[0])
        for clip in (1e9, None)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_top_k_of_everything_changes_no_bit(tiny_actor, make_rollouts):
    actor = tiny_actor()
    batch = PPOBatch(make_rollouts(8))
    found = [
        both(trained(actor, batch, sampling=sampling)[0])
        for sampling in (Sampling(), Sampling(top_k=16))
    ]
    assert torch.equal(*found)


def test_the_ratio_starts_at_one_under_a_cut(tiny_actor, make_rollouts):
    _, report = trained(
        tiny_actor(), PPOBatch(make_rollouts(8)), 1, sampling=Sampling(top_p=0.5), epochs=1
    )
    assert (
        report[names.KL_UPDATE] == pytest.approx(0.0, abs=1e-9) and report[names.CLIP_FRAC] == 0.0
    )


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_groups_learn_without_a_critic(tiny_actor, make_rollouts, tmp_path, kind: str):
    batch = PPOBatch(make_rollouts(8))
    rewards = torch.tensor([1.0, 0.0] * 4)
    one, report = trained(
        tiny_actor(), batch, 6, rewards, critic=False, advantages=kind, kl_coefficient=0.0
    )
    gained = (
        one.score(batch, rewards, Sampling())[0].logprobs_SR
        - one.score(batch, rewards, Sampling())[0].reference_SR
    ).sum(1)
    assert (gained[0::2] > gained[1::2]).all(), (
        "the better of each two became likelier than the other"
    )
    assert not {names.VALUE_LOSS, names.VALUE_EXPLAINED} & set(report)
    one.save(tmp_path)
    again = Learner(tiny_actor(seed=5), None, PPOConfig(advantages=kind), seed=3)
    again.load(tmp_path)
    assert torch.equal(weights(again.actor), weights(one.actor))


def test_a_group_of_equal_rewards_learns_no_more_than_its_penalty(tiny_actor, make_rollouts):
    """The first prompts' responses all earn the same: what is left is the penalty's spread, and
    not advantages of full size.
    """
    batch = PPOBatch(make_rollouts(8))
    one, _ = trained(
        tiny_actor(), batch, 3, torch.tensor([1.0, 0.0] * 4), critic=False, advantages="grpo"
    )
    for rewards in (torch.zeros(8), torch.zeros(batch.mask_SR.shape)):
        scores, _ = one.score(batch, rewards, Sampling())
        penalty_S = 0.02 * (scores.logprobs_SR - scores.reference_SR).sum(1)
        for prompt in batch.prompts_S.unique():
            group = batch.prompts_S == prompt
            spread = float(penalty_S[group].max() - penalty_S[group].min())
            assert spread > 1e-4, "the policy has moved, else this shows nothing"
            assert float(scores.advantages_SR[group].abs().max()) <= spread


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_in_the_loss_holds_the_policy_back(tiny_actor, make_rollouts, estimator: str):
    batch = PPOBatch(make_rollouts(8))
    moved = []
    for coefficient in (0.0, 5.0):
        settings = {
            "kl_in_loss": True,
            "kl_estimator": estimator,
            "kl_coefficient": coefficient,
            "actor_learning_rate": 3e-3,
        }
        one, _ = trained(tiny_actor(), batch, 8, torch.tensor([1.0, 0.0] * 4), **settings)
        scores, _ = one.score(batch, torch.zeros(8), Sampling())
        moved.append((scores.logprobs_SR - scores.reference_SR).abs()[batch.mask_SR].mean().item())
    assert moved[1] < 0.7 * moved[0]


def test_an_update_ends_where_the_policy_went_too_far(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8))
    whole, stopped = (
        trained(tiny_actor(), batch, 1, epochs=6, kl_stop=stop)[1] for stop in (None, 0.01)
    )
    assert whole[names.ACTOR_STEPS] == 6 and 1 <= stopped[names.ACTOR_STEPS] < 6
    assert stopped[names.KL_UPDATE] < whole[names.KL_UPDATE]


def test_masked_responses_teach_nothing(tiny_actor, make_rollouts):
    """The same as if they had not been sampled, whatever their rewards."""
    rollouts = make_rollouts(8)
    responses = tuple(
        dataclasses.replace(r, finish_reason="length" if i % 2 else "stop")
        for i, r in enumerate(rollouts.responses)
    )
    cut = PPOBatch(dataclasses.replace(rollouts, responses=responses))
    without = PPOBatch(dataclasses.replace(rollouts, responses=responses[0::2]))
    found = []
    for batch, rewards in (
        (cut, [1.0, 77.0, 0.0, -5.0, 3.0, 9.0, 2.0, 1.0]),
        (without, [1.0, 0.0, 3.0, 2.0]),
    ):
        one, _ = trained(
            tiny_actor(), batch, 2, torch.tensor(rewards), cut_responses="mask", minibatch_size=8
        )
        found.append(both(one))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_nothing_is_learned_from_a_batch_of_cut_responses(tiny_actor, make_rollouts):
    rollouts = make_rollouts(4)
    responses = tuple(dataclasses.replace(r, finish_reason="length") for r in rollouts.responses)
    actor = tiny_actor()
    one, report = trained(
        actor, PPOBatch(dataclasses.replace(rollouts, responses=responses)), 1, cut_responses="mask"
    )
    assert torch.equal(weights(one.actor), weights(actor)) and report[names.ACTOR_STEPS] == 0


def test_a_step_without_a_finite_gradient_is_left_out_and_counted(
    device: torch.device, tiny_actor, make_rollouts
):
    """One of two minibatches is spoiled: the other one is learned from."""
    batch = PPOBatch(make_rollouts(8), device=device)
    actor = tiny_actor()
    one = learner(actor, device, epochs=1, minibatch_size=4)
    scores, _ = one.score(batch, torch.arange(8.0), Sampling())
    scores.advantages_SR[0, 0] = float("inf")
    report = one.update(batch, scores, Sampling(), 0)
    assert report[names.STEPS_SKIPPED] == 1 and report[names.ACTOR_STEPS] == 1
    assert weights(one.actor).isfinite().all() and not torch.equal(
        weights(one.actor).cpu(), weights(actor)
    )


def test_texts_beside_ppo_become_likelier(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(8))
    texts = text_batch([(1, 2, 3, 4), (5, 6, 7)], torch.device("cpu"), 0)
    losses = [
        trained(tiny_actor(), batch, 6, texts=texts, ptx_coefficient=weight)[1][names.PTX_LOSS]
        for weight in (1e-9, 1.0)
    ]
    assert losses[1] < 0.7 * losses[0]
    off, _ = trained(tiny_actor(), batch)
    assert not torch.equal(
        both(off), both(trained(tiny_actor(), batch, texts=texts, ptx_coefficient=1.0)[0])
    )


def test_the_gap_to_the_engine_by_hand(tiny_actor, make_rollouts):
    batch = PPOBatch(make_rollouts(4))
    one = learner(tiny_actor(), importance_bound=1.2)
    exact, _ = one.score(batch, torch.zeros(4), Sampling())
    gap = torch.where(batch.mask_SR, torch.tensor(0.1), 0.0)
    gap[0, 0] = 0.5
    batch.behaviour_SR = exact.logprobs_SR - gap
    scores, report = one.score(batch, torch.zeros(4), Sampling())
    tokens = int(batch.lengths_S.sum())
    assert report[names.LOGPROB_GAP] == pytest.approx((0.1 * (tokens - 1) + 0.5) / tokens, rel=1e-4)
    assert report[names.LOGPROB_GAP_MAX] == pytest.approx(0.5, rel=1e-4)
    assert report[names.IMPORTANCE_CUT] == pytest.approx(1 / tokens, rel=1e-4)
    kl = lambda d: math.exp(d) - 1 - d  # noqa: E731
    assert report[names.ENGINE_KL] == pytest.approx(
        (kl(0.1) * (tokens - 1) + kl(0.5)) / tokens, rel=1e-3
    )
    assert scores.weights_SR[0, 0].item() == pytest.approx(1.2)
    assert scores.weights_SR[1, 0].item() == pytest.approx(math.exp(0.1), rel=1e-4)


def test_a_value_clip_in_units_of_the_returns_follows_the_rewards_scale(tiny_actor, make_rollouts):
    """With rewards a thousand times larger the critic's loss grows by a million, and just as much
    is clipped away.
    """
    batch = PPOBatch(make_rollouts(8))
    rewards = torch.tensor([1.0, 0.0] * 4)
    shares = []
    for scale in (1.0, 1000.0):
        one = learner(
            tiny_actor(), value_clip_range=0.1, value_clip_unit="returns", kl_coefficient=0.0
        )
        scores, _ = one.score(batch, scale * rewards, Sampling())
        clip = 0.1 * masked_deviation(scores.returns_SR, batch.mask_SR)
        shares.append(clip / scale)
    assert shares[1] == pytest.approx(shares[0], rel=1e-4)
    found = [
        weights(
            trained(
                tiny_actor(), batch, 4, 1000 * rewards, value_clip_range=0.1, value_clip_unit=unit
            )[0].critic
        )
        for unit in ("reward", "returns")
    ]
    assert not torch.equal(*found)


@pytest.mark.parametrize("top_k", [0, 3])
def test_side_by_side_changes_no_bit(tiny_actor, make_rollouts, top_k: int):
    batch = PPOBatch(make_rollouts(12))
    rewards = torch.arange(12) / 4
    sampling = Sampling(top_k=top_k)
    found = []
    for beside in (False, True):
        one = learner(tiny_actor(), side_by_side=beside, minibatch_size=4)
        reports = []
        for step in range(3):
            scores, report = one.score(batch, rewards, sampling)
            reports.append(report | one.update(batch, scores, sampling, step))
        found.append((reports, weights(one.actor), weights(one.critic)))
    assert found[0][0] == found[1][0] and all(
        torch.equal(*pair) for pair in zip(found[0][1:], found[1][1:], strict=True)
    )


def test_side_by_side_is_at_once(tiny_actor, make_rollouts):
    """The actor's pass waits until the reference is in its own, and the critic's update until the
    actor is in its own.
    """
    one = learner(tiny_actor(), side_by_side=True)
    seen = {"reference": threading.Event(), "actor": threading.Event()}
    one.reference.model.register_forward_hook(lambda *_: seen["reference"].set())
    waits = one.actor.model.register_forward_hook(
        lambda *_: None if seen["reference"].wait(30) else pytest.fail("the reference waits")
    )
    batch = PPOBatch(make_rollouts(8))
    scores, _ = one.score(batch, torch.arange(8) / 4, Sampling())
    waits.remove()
    one.actor.model.register_forward_hook(lambda *_: seen["actor"].set())
    one.critic.register_forward_hook(
        lambda *_: None if seen["actor"].wait(30) else pytest.fail("the critic waits for the actor")
    )
    one.update(batch, scores, Sampling(), 0)


@pytest.mark.parametrize(
    "more",
    [
        {"actor": {"backend": "megatron"}},
        {"ppo": {"placement": "shared"}, "engine": {"sleep_level": 1}},
    ],
)
def test_side_by_side_is_refused_where_it_can_not_be(more: dict):
    with pytest.raises(ConfigError, match=r"ppo\.side_by_side"):
        build_config({**more, "ppo": {**more.get("ppo", {}), "side_by_side": True}})


def test_actor_critic_and_reference_see_images_that_the_tower_computed_once(vision_actor, picture):
    """Scoring and four epochs of updates; with the features of another image the old log-probs are
    others.
    """
    actor = load_actor(vision_actor())
    reader = ImageReader.load(vision_actor(), load_tokenizer(vision_actor()))
    runs: list[int] = []
    tower_of(actor).register_forward_hook(lambda *_: runs.append(1))
    tower = {name: weight.clone() for name, weight in tower_of(actor).named_parameters()}

    def rollouts(first: int) -> Rollouts:
        images = [(picture(first, 60, 90),), (picture(1), picture(2)), (picture(1),), ()]
        prompts = tuple(reader.prompts(["a", "b", "c", "d"], images))
        answers = [
            (65 + i, reader.image_id, 66, 67)[: 2 + i % 3] for i in range(8)
        ]  # One writes the image's token itself.
        responses = tuple(
            Response(i // 2, ids, (-1.0,) * len(ids), "stop") for i, ids in enumerate(answers)
        )
        return Rollouts(prompts, responses, Counters(), 1.0, Sampling())

    one = Learner(
        actor,
        Critic(actor),
        PPOConfig(**FAST, epochs=4, minibatch_size=4, micro_batch_size=2),
        features=FeatureStore(actor, reader),
    )
    assert tower_of(one.reference) is not tower_of(one.actor) and not list(
        tower_of(one.reference).parameters()
    )
    batch = PPOBatch(rollouts(0))
    rewards_S = torch.arange(8.0)

    scores, _ = one.score(batch, rewards_S, Sampling())
    before = weights(one.actor), weights(one.critic)
    report = one.update(batch, scores, Sampling(), 0)

    assert len(runs) == 3 == report[names.IMAGES] == report[names.TOWER_RUNS]
    assert not torch.equal(before[0], weights(one.actor)) and not torch.equal(
        before[1], weights(one.critic)
    )
    assert all(
        torch.equal(tower[name], weight) for name, weight in tower_of(one.actor).named_parameters()
    ), "frozen"
    blind = Learner(
        load_actor(vision_actor()), None, PPOConfig(advantages="rloo"), features=one.features
    )
    other, _ = blind.score(PPOBatch(rollouts(7)), rewards_S, Sampling())
    changed_S = (other.logprobs_SR - scores.logprobs_SR).abs().amax(dim=1) > 1e-4
    assert changed_S.tolist() == [True] * 2 + [False] * 6, (
        "only answers to the prompt with the other image"
    )
    one.save_actor(folder := vision_actor().parent / "saved")
    assert ImageReader.load(folder, reader._tokenizer).count(picture(0, 60, 90)) == reader.count(
        picture(0, 60, 90)
    )


def test_reference_never_moves(tiny_actor):
    actor = tiny_actor()
    reference = Learner(actor, Critic(actor), PPOConfig()).reference
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        actor.lm_head.weight.add_(1.0)
    assert not torch.equal(reference.lm_head.weight, actor.lm_head.weight)
