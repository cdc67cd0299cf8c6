"""The learner: scores a rollout batch with actor, reference and critic, and makes the PPO update.

Shape letters: S sequences, R response positions, M response tokens of a micro batch.

The "old" log-probs of the ratio are the actor's own, recomputed here before the update, not the engine's. The engine computes the
same policy with other kernels (and perhaps another dtype), so its log-probs differ from ours by rounding even when nothing was
learned; in the ratio this noise would be clipped, and its mean would pull on the policy. With our own the ratio starts at exactly 1.
How far the two are apart is logged as `logprob_gap`: it is the one number that shows a broken sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.errors import RunError
from medusa_ppo import metrics as names
from medusa_ppo.config import PPOConfig
from medusa_ppo.ppo import losses
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.models import Critic, frozen_copy, token_stats
from medusa_ppo.types import Sampling

# Signature of MedusaPlugin.actor_forward: a context around the actor's own forward pass.
Tap = Callable[[nn.Module, Tensor, tuple[int, ...]], contextlib.AbstractContextManager[Any]]

ADAM_BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-8


@dataclass(frozen=True)
class Scores:
    """What is known about a rollout batch before the update. All float32, on the CPU, zero on padding."""

    logprobs_SR: Tensor
    reference_SR: Tensor
    values_SR: Tensor
    advantages_SR: Tensor
    returns_SR: Tensor


class Learner:
    """Actor, critic and reference with their optimizers."""

    def __init__(self, actor: PreTrainedModel, critic: Critic, config: PPOConfig, *, seed: int = 0, autocast: bool = False) -> None:
        """
        Args:
            actor: transformers causal LM, float32; the reference is copied from it now.
            critic: value network.
            config: hyper-parameters.
            seed: seed of the minibatch order.
            autocast: run products in bfloat16 (weights, optimizer and losses stay float32).
        """
        self.actor = actor.eval()
        self.actor.requires_grad_(True)
        self.critic = critic
        self.reference = frozen_copy(actor)
        self.config = config
        self.seed = seed
        self.autocast = autocast
        self.actor_optimizer = _adamw(self.actor, config.actor_learning_rate)
        self.critic_optimizer = _adamw(self.critic, config.critic_learning_rate)

    @property
    def device(self) -> torch.device:
        return next(self.actor.parameters()).device

    @torch.no_grad()
    def score(self, batch: PPOBatch, rewards_S: Tensor, sampling: Sampling, tap: Tap | None = None) -> tuple[Scores, dict[str, float]]:
        """Log-probs, values, advantages of a rollout batch, and what the log should say about it.

        Args:
            rewards_S: float32 reward of each response.
            sampling: how the rollouts were sampled.
            tap: context put around each of the actor's forward passes, e.g. MedusaPlugin.actor_forward.
        """
        logprobs_SR, reference_SR, values_SR, entropy_SR, kept_SR = (torch.zeros(batch.mask_SR.shape) for _ in range(5))
        micros = list(batch.micro_batches(list(range(len(batch))), self.config.micro_batch_size))
        for micro in micros:  # The actor first: whoever taps it can start while reference and critic still run.
            with tap(self.actor, micro.response_mask_BT, micro.sequences) if tap else contextlib.nullcontext():
                stats = token_stats(self.actor, micro, sampling, entropy=True, kept=True, autocast=self.autocast)
            for values_M, into_SR in ((stats.logprobs_M, logprobs_SR), (stats.entropy_M, entropy_SR), (stats.log_kept_M, kept_SR)):
                assert values_M is not None, "asked for above"
                batch.unpack(values_M, micro, into_SR)
        for micro in micros:
            batch.unpack(token_stats(self.reference, micro, sampling, autocast=self.autocast).logprobs_M, micro, reference_SR)
            batch.unpack(self.critic(micro, self.autocast), micro, values_SR)
        rewards_SR = losses.token_rewards(rewards_S, logprobs_SR, reference_SR, batch.mask_SR, self.config.kl_coefficient)
        advantages_SR, returns_SR = losses.generalized_advantages(rewards_SR, values_SR, batch.mask_SR, self.config.gamma, self.config.lam)
        scores = Scores(logprobs_SR, reference_SR, values_SR, losses.whiten(advantages_SR, batch.mask_SR), returns_SR)
        report = {
            names.KL_REFERENCE: losses.masked_mean(logprobs_SR - reference_SR, batch.mask_SR).item(),
            names.ENTROPY: losses.masked_mean(entropy_SR, batch.mask_SR).item(),
            names.LOGPROB_GAP: losses.masked_mean((batch.behaviour_SR - (logprobs_SR - kept_SR)).abs(), batch.mask_SR).item(),
        }
        return scores, report

    def update(self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int) -> dict[str, float]:
        """Passes of clipped PPO over the batch; returns the means of the update.

        Raises:
            RunError: a loss or gradient is not finite; the weights are those before the optimizer step that would have spoiled them.
        """
        # Seeded by the step and by nothing else, so that a resumed run draws the same minibatches.
        order = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        totals = _UpdateTotals()
        for _ in range(self.config.epochs):
            for minibatch in torch.randperm(len(batch), generator=order).split(self.config.minibatch_size):
                self._minibatch(batch, scores, sampling, minibatch.tolist(), totals)
        return totals.report()

    def _minibatch(self, batch: PPOBatch, scores: Scores, sampling: Sampling, sequences: list[int], totals: _UpdateTotals) -> None:
        """One optimizer step of actor and critic. Every token weighs the same, in whichever micro batch it stands."""
        config = self.config
        tokens = int(batch.lengths_S[sequences].sum())
        for micro in batch.micro_batches(sequences, config.micro_batch_size):
            policy_loss = self._policy_loss(batch, scores, sampling, micro, totals)
            (policy_loss / tokens).backward()
            values_M, old_M, returns_M = (
                self.critic(micro, self.autocast),
                batch.pack(scores.values_SR, micro),
                batch.pack(scores.returns_SR, micro),
            )
            value_loss = losses.clipped_value_loss(values_M, old_M, returns_M, config.value_clip_range)
            (config.value_coefficient * value_loss / tokens).backward()
            totals.value_loss += value_loss.item()
        totals.tokens += tokens
        totals.grad_norms.append(_clip(self.actor, config.clip_norm, "actor"))
        _clip(self.critic, config.clip_norm, "critic")
        for optimizer in (self.actor_optimizer, self.critic_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _policy_loss(self, batch: PPOBatch, scores: Scores, sampling: Sampling, micro: MicroBatch, totals: _UpdateTotals) -> Tensor:
        bonus = self.config.entropy_coefficient
        stats = token_stats(self.actor, micro, sampling, entropy=bonus > 0, autocast=self.autocast)
        old_M, advantages_M = batch.pack(scores.logprobs_SR, micro), batch.pack(scores.advantages_SR, micro)
        terms = losses.clipped_surrogate(stats.logprobs_M, old_M, advantages_M, self.config.clip_range)
        totals.policy_loss += terms.loss.item()
        totals.clipped += terms.clipped.item()
        totals.kl += terms.kl.item()
        return terms.loss if stats.entropy_M is None else terms.loss - bonus * stats.entropy_M.sum()


class _UpdateTotals:
    """Sums over all tokens of all passes."""

    def __init__(self) -> None:
        self.tokens = 0
        self.policy_loss = self.value_loss = self.clipped = self.kl = 0.0
        self.grad_norms: list[float] = []

    def report(self) -> dict[str, float]:
        return {
            names.POLICY_LOSS: self.policy_loss / self.tokens,
            names.VALUE_LOSS: self.value_loss / self.tokens,
            names.CLIP_FRAC: self.clipped / self.tokens,
            names.KL_UPDATE: self.kl / self.tokens,
            names.ACTOR_GRAD_NORM: sum(self.grad_norms) / len(self.grad_norms),
        }


def _adamw(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    # No weight decay: it would pull the policy towards zero and away from the reference.
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=ADAM_BETAS, eps=ADAM_EPSILON, weight_decay=0.0, fused=True)


def _clip(model: nn.Module, clip_norm: float, who: str) -> float:
    """Clip by the global norm; returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item()
    if norm != norm or norm == float("inf"):
        raise RunError(
            f"The gradient of the {who} is not finite.",
            given=f"norm {norm}",
            expected="a finite norm",
            do=f"Lower ppo.{who}_learning_rate, check the rewards for huge values, and go on with --resume.",
        )
    return norm
