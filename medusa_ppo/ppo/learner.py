"""The learner: scores a rollout batch with actor, reference and critic, and makes the PPO update.

Shape letters: S sequences, R response positions, M response tokens of a micro batch.

The "old" log-probs of the ratio are the actor's own, recomputed here before the update, not the engine's. The engine computes the
same policy with other kernels (and perhaps another dtype), so its log-probs differ from ours by rounding even when nothing was
learned; in the ratio this noise would be clipped, and its mean would pull on the policy. With our own the ratio starts at exactly 1.
How far the two are apart is logged as `logprob_gap`: it is the one number that shows a broken sync.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.checkpoint import load_state, save_state
from heads.errors import RunError
from medusa_ppo import metrics as names
from medusa_ppo.actors.hf import Actor
from medusa_ppo.config import PPOConfig
from medusa_ppo.ppo import objective
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.models import Critic, TokenStats, frozen_copy, load_moments, load_weights, moments_of, token_stats, weights_of
from medusa_ppo.types import Sampling

# Signature of MedusaPlugin.actor_forward: a context around the actor's own forward pass.
Tap = Callable[[Actor, Tensor, tuple[int, ...]], contextlib.AbstractContextManager[Any]]

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


@dataclass(frozen=True)
class PolicyScores:
    """What actor and reference say about a rollout batch. All float32, on the CPU, zero on padding."""

    logprobs_SR: Tensor
    reference_SR: Tensor
    entropy_SR: Tensor
    kept_SR: Tensor

    @classmethod
    def zeros(cls, batch: PPOBatch) -> PolicyScores:
        return cls(*(torch.zeros(batch.mask_SR.shape) for _ in range(4)))

    def add(self, other: PolicyScores) -> None:
        """Those of other sequences of the same batch."""
        for name, theirs_SR in vars(other).items():
            getattr(self, name).add_(theirs_SR)

    def put(self, batch: PPOBatch, micro: MicroBatch, stats: TokenStats) -> None:
        """What the actor says about a micro batch."""
        for values_M, into_SR in (
            (stats.logprobs_M, self.logprobs_SR),
            (stats.entropy_M, self.entropy_SR),
            (stats.log_kept_M, self.kept_SR),
        ):
            assert values_M is not None, "asked for with entropy and kept"
            batch.unpack(values_M, micro, into_SR)


class PPOLearner(ABC):
    """The critic, PPO's arithmetic, and what is asked of whoever holds the actor.

    Attributes:
        actor: as `MedusaPlugin` and `ActorSync` take it.
        device: where batches are prepared.
    """

    actor: Actor
    device: torch.device

    def __init__(self, critic: Critic, config: PPOConfig, *, seed: int = 0, autocast: bool = False) -> None:
        """
        Args:
            critic: value network.
            config: hyper-parameters.
            seed: seed of the minibatch order.
            autocast: run products in bfloat16 (weights, optimizer and losses stay float32).
        """
        self.critic = critic
        self.config = config
        self.micro_batch_size = config.micro_batch_size or config.minibatch_size
        self.seed = seed
        self.autocast = autocast
        self.critic_optimizer = adamw(list(critic.parameters()), config.critic_learning_rate)

    @torch.no_grad()
    def score(self, batch: PPOBatch, rewards_S: Tensor, sampling: Sampling, tap: Tap | None = None) -> tuple[Scores, dict[str, float]]:
        """Log-probs, values, advantages of a rollout batch, and what the log should say about it.

        Args:
            rewards_S: float32 reward of each response.
            sampling: how the rollouts were sampled.
            tap: context put around each of the actor's forward passes, e.g. MedusaPlugin.actor_forward.
        """
        policy = self._begin_scoring(batch, sampling, tap)
        values_SR = torch.zeros(batch.mask_SR.shape)
        for micro in batch.micro_batches(list(range(len(batch))), self.micro_batch_size):
            batch.unpack(self.critic(micro, self.autocast), micro, values_SR)
        found, mask_SR = policy(), batch.mask_SR
        rewards_SR = objective.token_rewards(rewards_S, found.logprobs_SR, found.reference_SR, mask_SR, self.config.kl_coefficient)
        advantages_SR, returns_SR = objective.generalized_advantages(rewards_SR, values_SR, mask_SR, self.config.gamma, self.config.lam)
        scores = Scores(found.logprobs_SR, found.reference_SR, values_SR, objective.whiten(advantages_SR, mask_SR), returns_SR)
        report = {
            names.KL_REFERENCE: objective.masked_mean(found.logprobs_SR - found.reference_SR, mask_SR).item(),
            names.ENTROPY: objective.masked_mean(found.entropy_SR, mask_SR).item(),
            names.LOGPROB_GAP: objective.masked_mean((batch.behaviour_SR - (found.logprobs_SR - found.kept_SR)).abs(), mask_SR).item(),
        }
        return scores, report

    def update(self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int) -> dict[str, float]:
        """Passes of clipped PPO over the batch; returns the means of the update.

        Raises:
            RunError: a loss or gradient is not finite; the weights are those before the optimizer step that would have spoiled them.
        """
        policy = self._begin_update(batch, scores, sampling, step)
        value_loss, tokens = 0.0, 0
        for sequences in minibatches(len(batch), self.config, self.seed, step):
            value_loss += self._critic_minibatch(batch, scores, sequences)
            tokens += int(batch.lengths_S[sequences].sum())
        return {**policy().report(), names.VALUE_LOSS: value_loss / tokens}

    def _critic_minibatch(self, batch: PPOBatch, scores: Scores, sequences: list[int]) -> float:
        """One optimizer step of the critic; its summed loss."""
        config, total, tokens = self.config, 0.0, int(batch.lengths_S[sequences].sum())
        for micro in batch.micro_batches(sequences, self.micro_batch_size):
            old_M, returns_M = batch.pack(scores.values_SR, micro), batch.pack(scores.returns_SR, micro)
            value_loss = objective.clipped_value_loss(self.critic(micro, self.autocast), old_M, returns_M, config.value_clip_range)
            (value_loss / (2 * tokens)).backward()  # Half of the squared error; its scale only matters to the clip.
            total += value_loss.item()
        parameters = list(self.critic.parameters())
        require_finite(torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm).item(), "critic")
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad(set_to_none=True)
        return total

    def save(self, folder: Path) -> None:
        """Write weights and moments of actor and critic: `actor`, `actor_optimizer`, `critic`, `critic_optimizer` (.safetensors)."""
        self._save_policy(folder)
        save_state(folder / "critic.safetensors", weights_of(self.critic))
        save_state(folder / "critic_optimizer.safetensors", moments_of(self.critic_optimizer, self.critic))

    def load(self, folder: Path) -> None:
        """Put what `save` wrote in its place. CheckpointError when a file is missing, damaged, or does not fit."""
        critic, optimizer = (load_state(folder / f"{name}.safetensors") for name in ("critic", "critic_optimizer"))
        self._load_policy(folder)
        load_weights(self.critic, critic, "critic")
        load_moments(self.critic_optimizer, self.critic, optimizer, "critic_optimizer")

    @abstractmethod
    def save_actor(self, folder: Path) -> None:
        """Write the actor as a checkpoint of transformers, without its tokenizer."""

    @abstractmethod
    def _begin_scoring(self, batch: PPOBatch, sampling: Sampling, tap: Tap | None) -> Callable[[], PolicyScores]:
        """Begin with the actor's and the reference's passes; the function waits for the end of what goes on elsewhere."""

    @abstractmethod
    def _begin_update(self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int) -> Callable[[], UpdateTotals]:
        """Begin with all optimizer steps of the actor; the function waits for the end of what goes on elsewhere."""

    @abstractmethod
    def _save_policy(self, folder: Path) -> None:
        """Write `actor.safetensors` and `actor_optimizer.safetensors`, by the names that the checkpoint of transformers has."""

    @abstractmethod
    def _load_policy(self, folder: Path) -> None:
        """Read both. The reference stays what it is."""


class Learner(PPOLearner):
    """Actor, critic and reference with their optimizers, all in this process."""

    actor: PreTrainedModel

    def __init__(self, actor: PreTrainedModel, critic: Critic, config: PPOConfig, *, seed: int = 0, autocast: bool = False) -> None:
        """
        Args:
            actor: transformers causal LM, float32; the reference is copied from it now.
            critic, config, seed, autocast: as `PPOLearner`.
        """
        super().__init__(critic, config, seed=seed, autocast=autocast)
        self.actor = actor.eval()
        self.actor.requires_grad_(True)
        self.reference = frozen_copy(actor)
        self.device = next(self.actor.parameters()).device
        self.actor_optimizer = adamw(list(self.actor.parameters()), config.actor_learning_rate)

    def _begin_scoring(self, batch: PPOBatch, sampling: Sampling, tap: Tap | None) -> Callable[[], PolicyScores]:
        found = PolicyScores.zeros(batch)
        micros = list(batch.micro_batches(list(range(len(batch))), self.micro_batch_size))
        for micro in micros:  # The actor first: whoever taps it can start while reference and critic still run.
            with tap(self.actor, micro.response_mask_BT, micro.sequences) if tap else contextlib.nullcontext():
                stats = token_stats(self.actor, micro, sampling, entropy=True, kept=True, autocast=self.autocast)
            found.put(batch, micro, stats)
        for micro in micros:
            batch.unpack(token_stats(self.reference, micro, sampling, autocast=self.autocast).logprobs_M, micro, found.reference_SR)
        return lambda: found

    def _begin_update(self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int) -> Callable[[], UpdateTotals]:
        totals, bonus = UpdateTotals(), self.config.entropy_coefficient
        for sequences in minibatches(len(batch), self.config, self.seed, step):
            tokens = int(batch.lengths_S[sequences].sum())
            for micro in batch.micro_batches(sequences, self.micro_batch_size):
                stats = token_stats(self.actor, micro, sampling, entropy=bonus > 0, autocast=self.autocast)
                (totals.policy_loss_of(batch, scores, micro, stats, self.config) / tokens).backward()
            totals.tokens += tokens
            norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), self.config.clip_norm).item()
            totals.grad_norms.append(require_finite(norm, "actor"))
            self.actor_optimizer.step()
            self.actor_optimizer.zero_grad(set_to_none=True)
        return lambda: totals

    def save_actor(self, folder: Path) -> None:
        self.actor.save_pretrained(folder)

    def _save_policy(self, folder: Path) -> None:
        save_state(folder / "actor.safetensors", weights_of(self.actor))
        save_state(folder / "actor_optimizer.safetensors", moments_of(self.actor_optimizer, self.actor))

    def _load_policy(self, folder: Path) -> None:
        actor, optimizer = (load_state(folder / f"{name}.safetensors") for name in ("actor", "actor_optimizer"))
        load_weights(self.actor, actor, "actor")
        load_moments(self.actor_optimizer, self.actor, optimizer, "actor_optimizer")


def minibatches(count: int, config: PPOConfig, seed: int, step: int) -> Iterator[list[int]]:
    """The sequences of each optimizer step of an update. Seeded by the step and by nothing else, so that a resumed run draws the same."""
    order = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    for _ in range(config.epochs):
        for sequences in torch.randperm(count, generator=order).split(config.minibatch_size):
            yield sequences.tolist()


class UpdateTotals:
    """Sums over all tokens of all passes of the actor's update."""

    def __init__(self) -> None:
        self.tokens = 0
        self.policy_loss = self.clipped = self.kl = 0.0
        self.grad_norms: list[float] = []

    @classmethod
    def over(cls, shares: Sequence[UpdateTotals]) -> UpdateTotals:
        """Of replicas that took the same steps, each on its own sequences; tokens and norms are those of all already."""
        total = cls()
        total.tokens, total.grad_norms = shares[0].tokens, shares[0].grad_norms
        for share in shares:
            total.policy_loss += share.policy_loss
            total.clipped += share.clipped
            total.kl += share.kl
        return total

    def policy_loss_of(self, batch: PPOBatch, scores: Scores, micro: MicroBatch, stats: TokenStats, config: PPOConfig) -> Tensor:
        """The loss of a micro batch, summed over its tokens; its figures are added up. Every token weighs the same, wherever it stands."""
        old_M, advantages_M = batch.pack(scores.logprobs_SR, micro), batch.pack(scores.advantages_SR, micro)
        terms = objective.clipped_surrogate(stats.logprobs_M, old_M, advantages_M, config.clip_range)
        self.policy_loss += terms.loss.item()
        self.clipped += terms.clipped.item()
        self.kl += terms.kl.item()
        return terms.loss if stats.entropy_M is None else terms.loss - config.entropy_coefficient * stats.entropy_M.sum()

    def report(self) -> dict[str, float]:
        return {
            names.POLICY_LOSS: self.policy_loss / self.tokens,
            names.CLIP_FRAC: self.clipped / self.tokens,
            names.KL_UPDATE: self.kl / self.tokens,
            names.ACTOR_GRAD_NORM: sum(self.grad_norms) / len(self.grad_norms),
        }


def adamw(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    # No weight decay: it would pull the policy towards zero and away from the reference.
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=ADAM_BETAS, eps=ADAM_EPSILON, weight_decay=0.0, fused=True)


def require_finite(norm: float, who: str) -> float:
    """A gradient's norm, or RunError."""
    if norm != norm or norm == float("inf"):
        raise RunError(
            f"The gradient of the {who} is not finite.",
            given=f"norm {norm}",
            expected="a finite norm",
            do=f"Lower ppo.{who}_learning_rate, check the rewards for huge values, and go on with --resume.",
        )
    return norm
