"""PPO's arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch

from medusa_ppo.ppo import arithmetic


def test_masked_mean_counts_every_token_once():
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert arithmetic.masked_mean(values, mask).item() == pytest.approx(4.0)
    assert arithmetic.masked_mean(values, torch.zeros_like(mask)).item() == 0.0


def test_masked_mean_ignores_nan_on_padding():
    values = torch.tensor([[1.0, float("nan")]])
    assert arithmetic.masked_mean(values, torch.tensor([[True, False]])).item() == 1.0


def test_score_lands_on_the_last_real_token_and_kl_on_every_token():
    logprobs = torch.tensor([[-1.0, -2.0, 7.0], [-0.5, -0.5, -0.5]])
    reference = torch.tensor([[-2.0, -1.0, -7.0], [-0.5, -1.5, -0.5]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = arithmetic.token_rewards(
        torch.tensor([5.0, -1.0]), logprobs, reference, mask, kl_coefficient=0.1
    )
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 5.1, 0.0], [0.0, -0.1, -1.0]]))


def test_gae_of_three_tokens_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.4, 0.2]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = arithmetic.generalized_advantages(
        rewards, values, mask, gamma=0.9, lam=0.5
    )
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
    advantages, returns = arithmetic.generalized_advantages(
        rewards, values, mask, gamma=0.99, lam=0.95
    )
    short, _ = arithmetic.generalized_advantages(
        rewards[:1, :4], values[:1, :4], mask[:1, :4], gamma=0.99, lam=0.95
    )
    torch.testing.assert_close(advantages[:1, :4], short)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_lambda_one_gives_the_discounted_return():
    torch.manual_seed(1)
    rewards = torch.randn(1, 5)
    values = torch.randn(1, 5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    _, returns = arithmetic.generalized_advantages(rewards, values, mask, gamma=0.9, lam=1.0)
    expected = [sum(0.9**j * rewards[0, r + j].item() for j in range(5 - r)) for r in range(5)]
    torch.testing.assert_close(returns[0], torch.tensor(expected))


def test_whitening_is_over_all_real_tokens():
    torch.manual_seed(2)
    values = torch.randn(7, 9) * 3 + 2
    mask = torch.arange(9)[None] < torch.randint(1, 10, (7, 1))
    white = arithmetic.whiten(values, mask)
    assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white[mask].std(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)
    assert not white[~mask].any()


def test_whitening_equal_values_gives_zeros_not_nan():
    assert not arithmetic.whiten(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool)).any()


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
    terms = arithmetic.clipped_surrogate(new, torch.zeros(1), torch.tensor([advantage]), 0.2)
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
    arithmetic.clipped_surrogate(new, new.detach().clone(), advantages, 0.2).loss.backward()
    torch.testing.assert_close(new.grad, -advantages)


def test_kl_of_the_update_is_never_negative():
    torch.manual_seed(4)
    new = torch.randn(100)
    old = torch.randn(100)
    for n, o in zip(new, old, strict=True):
        assert arithmetic.clipped_surrogate(n[None], o[None], torch.ones(1), 0.2).kl.item() >= 0


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    old = torch.tensor([0.5, 0.0])
    returns = torch.tensor([1.0, 1.0])
    loss = arithmetic.clipped_value_loss(values, old, returns, 0.2)
    # First: moved past the clip, so the clipped error (0.7 - 1)^2 is the worse one. Second: not
    # moved, error 1.
    assert loss.item() == pytest.approx(0.5 * (0.09 + 1.0))
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.0]))


def test_the_three_estimates_by_hand_and_on_average():
    new = torch.tensor([-1.0, -2.0])
    old = torch.tensor([-2.0, -1.0])
    assert arithmetic.kl_estimates(new, old, "k1").tolist() == [1.0, -1.0]
    assert arithmetic.kl_estimates(new, old, "k2").tolist() == [0.5, 0.5]
    torch.testing.assert_close(
        arithmetic.kl_estimates(new, old, "k3"), torch.tensor([1 / math.e, math.e - 2])
    )
    p = torch.tensor([0.7, 0.2, 0.1])
    q = torch.tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(
            (p * arithmetic.kl_estimates(p.log(), q.log(), estimator)).sum(), exact
        )


def test_k2_as_a_loss_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    q = torch.tensor([0.5, 0.3, 0.2])
    logp = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad(
        (logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True
    )
    (found,) = torch.autograd.grad(
        (logp.exp().detach() * arithmetic.kl_estimates(logp, q.log(), "k2")).sum(), logits
    )
    torch.testing.assert_close(found, wanted)


def test_group_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 5.0, 2.0, 9.0, 3.0])
    prompts = torch.tensor([0, 0, 1, 1, 1, 2])
    trained = torch.tensor([True, True, True, True, False, True])
    found = arithmetic.group_advantages(rewards, rewards, prompts, trained, "rloo")
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0, 3.0, -3.0, 0.0, 0.0]))
    found = arithmetic.group_advantages(rewards, rewards, prompts, trained, "grpo")
    torch.testing.assert_close(
        found, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0]), rtol=1e-3, atol=0
    )
    assert not arithmetic.group_advantages(
        torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64), trained[:4], "grpo"
    ).any()


def test_the_penalty_of_a_group_is_not_divided_by_a_spread():
    """Two groups with the same penalties: one where all rewards are equal, one where half are."""
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    penalties = torch.tensor([0.01, 0.03, 0.0, 0.0] * 2)
    prompts = torch.tensor([0] * 4 + [1] * 4)
    trained = torch.ones(8, dtype=torch.bool)
    found = arithmetic.group_advantages(rewards, rewards - penalties, prompts, trained, "grpo")
    alone = torch.tensor([0.0, -0.02, 0.01, 0.01])
    wanted = torch.cat([alone, torch.tensor([1.0, -1.0, 1.0, -1.0]) / (1 + 2e-4) + alone])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_rewards_of_steps_stand_where_they_were_earned():
    mask = torch.tensor([[True, True, True], [True, True, False]])
    steps = torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]])
    none = torch.zeros(2, 3)
    assert torch.equal(arithmetic.token_rewards(steps, none, none, mask, 0.1), steps)
    _, returns = arithmetic.generalized_advantages(steps, none, mask, gamma=1.0, lam=1.0)
    assert returns.tolist() == [[3, 2, 2], [5, 5, 0]]


def test_a_value_clip_that_never_binds_is_none():
    values, old, returns = (
        torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    found = [arithmetic.clipped_value_loss(values, old, returns, clip) for clip in (1e9, None)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_importance_weights_by_hand():
    gap = torch.tensor([0.0, math.log(1.5), math.log(5.0), -math.log(2.0)])
    torch.testing.assert_close(
        arithmetic.importance_weights(gap, 2.0), torch.tensor([1.0, 1.5, 2.0, 0.5])
    )
    logprobs = torch.zeros(4)
    old = torch.zeros(4)
    advantages = torch.arange(4.0)
    plain = arithmetic.clipped_surrogate(logprobs, old, advantages, 0.2).loss
    assert torch.equal(
        arithmetic.clipped_surrogate(logprobs, old, advantages, 0.2, torch.ones(4)).loss, plain
    )
    weighted = arithmetic.clipped_surrogate(
        logprobs, old, advantages, 0.2, torch.tensor([9.0, 2.0, 0.0, 1.0])
    ).loss
    assert weighted.item() == -5.0
