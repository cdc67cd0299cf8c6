"""PPO's arithmetic, one function each: the KL penalty, advantages, and the clipped losses.

Shape letters: S sequences, R response positions (padded to the longest; mask_SR is True at real
tokens), M response tokens of a micro batch, packed row after row. All tensors are float32.

Position r of a sequence belongs to response token y_r: `logprobs_SR[s, r]` = log pi(y_r | prompt,
y_<r), `values_SR[s, r]` = the critic's value of the state *before* y_r was chosen, `rewards_SR[s,
r]` = what choosing y_r earned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8
"""Keeps the division of `whiten` finite when all advantages are equal."""
GROUP_EPSILON = 1e-4
"""The same for group advantages, when all responses to a prompt have the same reward; as in
DeepSeekMath and TRL.
"""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where mask is True, each position once (not a mean of means). 0 when
    the mask is empty.
    """
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def masked_deviation(values: Tensor, mask: Tensor) -> float:
    """Standard deviation over the positions where mask is True."""
    return float(masked_mean((values - masked_mean(values, mask)) ** 2, mask).sqrt())


def explained_share(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Share of the variance of `returns` that `values` explain where mask is True: 1 if they equal
    the returns (up to a constant), 0 if they are no better than a constant, below 0 if they are
    worse. 0 if the returns do not vary.
    """
    spread = masked_deviation(returns, mask) ** 2
    return 1 - masked_deviation(returns - values, mask) ** 2 / spread if spread else 0.0


def kl_estimates(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_ref) from tokens sampled from pi, with d = log pi - log pi_ref.

    k1 = d is unbiased and may be negative; k2 = d^2 / 2 has, as a loss, the gradient of the KL, and
    is biased; k3 = exp(-d) - 1 + d is unbiased and never negative, but heavy-tailed if the
    reference strongly prefers a token.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference


def token_rewards(
    scores: Tensor,
    logprobs_SR: Tensor,
    reference_SR: Tensor,
    mask_SR: Tensor,
    kl_coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """Rewards of tokens: the score where it was earned, minus the KL penalty at every token.

    A whole response earns its score at its last token. The penalty is an estimate from the token
    that was sampled, so it is part of the return that GAE sees.

    Args:
        scores: reward of each whole response (S), or what each token earned (S, R), float32.
        logprobs_SR: log-probs of the actor that wrote the responses.
        reference_SR: log-probs of the frozen reference.
        mask_SR: bool; every row holds at least one token, and real tokens come first.
        kl_coefficient: reward units per nat.
    """
    kl_SR = kl_estimates(logprobs_SR, reference_SR, estimator)
    rewards_SR = torch.where(mask_SR, -kl_coefficient * kl_SR, 0.0)
    if scores.dim() == 2:
        return rewards_SR + scores
    last_S = mask_SR.sum(dim=1) - 1
    rewards_SR[torch.arange(len(scores)), last_S] += scores
    return rewards_SR


def generalized_advantages(
    rewards_SR: Tensor, values_SR: Tensor, mask_SR: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE: advantages_SR and returns_SR = advantages + values, zero on padding.

    delta_r = reward_r + gamma V_{r+1} - V_r and A_r = delta_r + gamma lam A_{r+1}. The value after
    the last token is 0, for responses that ended and for responses that were cut: a cut response is
    judged by its score, like any other.
    """
    advantages_SR = torch.zeros_like(rewards_SR)
    next_advantage_S = torch.zeros_like(rewards_SR[:, 0])
    next_value_S = torch.zeros_like(next_advantage_S)
    for r in range(rewards_SR.shape[1] - 1, -1, -1):
        real_S = mask_SR[:, r]
        delta_S = rewards_SR[:, r] + gamma * next_value_S - values_SR[:, r]
        # Padding follows the last token, so it must leave the zeros that the last token starts
        # from.
        next_advantage_S = torch.where(real_S, delta_S + gamma * lam * next_advantage_S, 0.0)
        next_value_S = torch.where(real_S, values_SR[:, r], 0.0)
        advantages_SR[:, r] = next_advantage_S
    return advantages_SR, torch.where(mask_SR, advantages_SR + values_SR, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance over all real tokens of the rollout batch; zero on padding.

    Over the whole batch rather than a minibatch: a minibatch of lucky responses must not look
    average.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + WHITEN_EPSILON), 0.0)


def group_advantages(
    rewards_S: Tensor, penalized_S: Tensor, prompts_S: Tensor, trained_S: Tensor, kind: str
) -> Tensor:
    """Advantages of whole responses over the others to the same prompt: advantages_S, 0 for
    responses that are not trained on.

    `grpo`: (reward - mean of the group) / standard deviation of the group, minus what the penalty
    is above the group's mean. The penalty is not divided: where all rewards are equal, a standard
    deviation of the penalties alone would turn them, however small, into advantages as large as
    those of right and wrong answers. `rloo`: reward less penalty - mean of the others in the group.

    Args:
        rewards_S: what each response earned, without the penalty against the reference.
        penalized_S: the same minus that penalty.
        prompts_S: int64, the prompt that each response answers.
        trained_S: bool; the others belong to no group.
    """
    groups = int(prompts_S.max()) + 1
    weights_S = trained_S.to(rewards_S.dtype)

    def group_sum(values_S: Tensor) -> Tensor:
        """Sum over each response's group, for each response."""
        sums_G = torch.zeros(groups).index_add_(0, prompts_S, values_S * weights_S)
        return sums_G[prompts_S]

    counts_S = group_sum(torch.ones_like(rewards_S))

    def centred(values_S: Tensor) -> Tensor:
        mean_S = group_sum(values_S) / counts_S.clamp(min=1)
        return (values_S - mean_S) * weights_S

    if kind == "grpo":
        centred_S = centred(rewards_S)
        variance_S = group_sum(centred_S**2) / counts_S.clamp(min=1)
        compared_S = centred_S / (variance_S.sqrt() + GROUP_EPSILON)
        return compared_S + centred(penalized_S - rewards_S)
    # reward - mean of the n - 1 others = (reward - mean of all n) * n / (n - 1)
    return centred(penalized_S) * counts_S / (counts_S - 1).clamp(min=1)


@dataclass(frozen=True)
class PolicyTerms:
    """Sums over the rows of a micro batch; the caller divides by the tokens of its minibatch.

    Attributes:
        loss: sum of the clipped surrogate (to be minimised), with gradient.
        clipped: number of rows whose ratio was clipped, no gradient.
        kl: sum of (ratio - 1) - log ratio, the non-negative estimate of KL(old || new) in nats, no
            gradient.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def clipped_surrogate(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    clip_range: float,
    weights_M: Tensor | None = None,
) -> PolicyTerms:
    """PPO's pessimistic surrogate: -sum of w min(ratio A, clip(ratio, 1 - c, 1 + c) A).

    Args:
        weights_M: w of each token; None: 1.
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M = log_ratio_M.exp()
    free_M = ratio_M * advantages_M
    clipped_M = ratio_M.clamp(1 - clip_range, 1 + clip_range) * advantages_M
    surrogate_M = torch.minimum(free_M, clipped_M)
    if weights_M is not None:
        surrogate_M = weights_M * surrogate_M
    with torch.no_grad():
        clipped = (clipped_M < free_M).sum()
        kl = (ratio_M - 1 - log_ratio_M).sum()
    return PolicyTerms(-surrogate_M.sum(), clipped, kl)


def importance_weights(gap: Tensor, bound: float) -> Tensor:
    """min(pi / pi_engine, bound) of each token, from gap = log pi - log pi_engine.

    These weights turn an expectation over the engine's tokens into one over the actor's. The bound
    keeps the variance finite, at a small bias.
    """
    return gap.exp().clamp(max=bound)


def clipped_value_loss(
    values_M: Tensor, old_values_M: Tensor, returns_M: Tensor, clip_range: float | None
) -> Tensor:
    """Half the squared error to the return, summed over rows.

    With a clip range each row has the larger of two errors: that of the value, and that of the
    value clipped around the old one.
    """
    free_M = (values_M - returns_M) ** 2
    if clip_range is None:
        return 0.5 * free_M.sum()
    clipped_M = old_values_M + (values_M - old_values_M).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum(free_M, (clipped_M - returns_M) ** 2).sum()
