"""The arithmetic of PPO, one function per formula, on masked tensors in response coordinates.

Shape letters: S sequences, R response positions (padded to the longest; mask_SR is True at real tokens), M rows of a micro batch
packed one after the other. All float32.

Position r of a sequence belongs to response token y_r: `logprobs_SR[s, r]` = log pi(y_r | prompt, y_<r), `values_SR[s, r]` = the
critic's value of the state *before* y_r was chosen, `rewards_SR[s, r]` = what choosing y_r earned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Keeps the division of `whiten` finite when all advantages are equal.
WHITEN_EPSILON = 1e-8


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where mask is True, each position once (not a mean of means). 0 when the mask is empty."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def token_rewards(scores_S: Tensor, logprobs_SR: Tensor, reference_SR: Tensor, mask_SR: Tensor, kl_coefficient: float) -> Tensor:
    """Per-token rewards: minus the KL penalty at every token, the sequence's score at its last one.

    The penalty is the single-sample estimate log pi(y_r) - log pi_ref(y_r), so it is part of the return that GAE sees.

    Args:
        scores_S: reward of each whole response, float32.
        logprobs_SR: log-probs of the actor that wrote the responses.
        reference_SR: log-probs of the frozen reference.
        mask_SR: bool; every row holds at least one token, and real tokens come first.
        kl_coefficient: reward units per nat.
    """
    rewards_SR = torch.where(mask_SR, -kl_coefficient * (logprobs_SR - reference_SR), 0.0)
    last_S = mask_SR.sum(dim=1) - 1
    rewards_SR[torch.arange(len(scores_S)), last_S] += scores_S
    return rewards_SR


def generalized_advantages(rewards_SR: Tensor, values_SR: Tensor, mask_SR: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE: advantages_SR and returns_SR = advantages + values, zero on padding.

    delta_r = reward_r + gamma V_{r+1} - V_r and A_r = delta_r + gamma lam A_{r+1}. The value after the last token is 0, for
    responses that ended and for responses that were cut: a cut response is judged by its score, like any other.
    """
    advantages_SR = torch.zeros_like(rewards_SR)
    next_advantage_S = torch.zeros_like(rewards_SR[:, 0])
    next_value_S = torch.zeros_like(next_advantage_S)
    for r in range(rewards_SR.shape[1] - 1, -1, -1):
        real_S = mask_SR[:, r]
        delta_S = rewards_SR[:, r] + gamma * next_value_S - values_SR[:, r]
        # Padding stands behind the last token, so it must leave the zeros that the last token starts from.
        next_advantage_S = torch.where(real_S, delta_S + gamma * lam * next_advantage_S, 0.0)
        next_value_S = torch.where(real_S, values_SR[:, r], 0.0)
        advantages_SR[:, r] = next_advantage_S
    return advantages_SR, torch.where(mask_SR, advantages_SR + values_SR, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance over all real tokens of the rollout batch; zero on padding.

    Over the whole batch and not over a minibatch: a minibatch of lucky responses must not look average to itself.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + WHITEN_EPSILON), 0.0)


@dataclass(frozen=True)
class PolicyTerms:
    """Sums over the rows of a micro batch; the caller divides by the tokens of its minibatch.

    Attributes:
        loss: sum of the clipped surrogate (to be minimised), with gradient.
        clipped: number of rows whose ratio was clipped away, no gradient.
        kl: sum of (ratio - 1) - log ratio, the non-negative estimate of KL(old || new) in nats, no gradient.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def clipped_surrogate(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip_range: float) -> PolicyTerms:
    """PPO's pessimistic surrogate: -min(ratio A, clip(ratio, 1 - c, 1 + c) A), summed over rows."""
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M = log_ratio_M.exp()
    free_M = ratio_M * advantages_M
    clipped_M = ratio_M.clamp(1 - clip_range, 1 + clip_range) * advantages_M
    with torch.no_grad():
        clipped = (clipped_M < free_M).sum()
        kl = (ratio_M - 1 - log_ratio_M).sum()
    return PolicyTerms(loss=-torch.minimum(free_M, clipped_M).sum(), clipped=clipped, kl=kl)


def clipped_value_loss(values_M: Tensor, old_values_M: Tensor, returns_M: Tensor, clip_range: float) -> Tensor:
    """Half the squared error to the return, the worse of free and clipped around the old value, summed over rows."""
    clipped_M = old_values_M + (values_M - old_values_M).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values_M - returns_M) ** 2, (clipped_M - returns_M) ** 2).sum()
