"""The learner: scores a rollout batch with actor, reference and critic, and makes the PPO update.

Shape letters: S sequences, R response positions, M response tokens of a micro batch.

The "old" log-probs of the ratio are the actor's own, recomputed here before the update, not the
engine's. The engine computes the same policy with other kernels (and perhaps another dtype), so its
log-probs differ from ours by rounding even when nothing was learned; in the ratio this noise would
be clipped, and its mean would pull on the policy. With our own the ratio starts at exactly 1. How
far the two are apart is logged (`logprob_gap`, `engine_kl`): it shows a broken sync. What the
engine's rounding costs all the same, `ppo.importance_bound` mends: it weighs each token by how much
likelier it is to the actor than to the engine.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_ppo.actors.hf import Actor
from medusa_ppo.actors.vision import FeatureStore, copy_without_tower, tower_of
from medusa_ppo.config.ppo_config import PPOConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo import models
from medusa_ppo.ppo.batch import Measured, MicroBatch, PolicyScores, PPOBatch, Scores, minibatches
from medusa_ppo.ppo.models import (
    Critic,
    Support,
    TokenStats,
    load_trained,
    save_trained,
    token_stats,
)
from medusa_ppo.ppo.placement import ACTOR, CRITIC, REFERENCE, Turns
from medusa_ppo.ppo.run_progress import Timeline
from medusa_ppo.ppo.shaping import (
    GradientNorms,
    Shaping,
    adamw,
    engine_gap,
    learning_rate_share,
    set_learning_rate,
)

# Signature of MedusaPlugin.actor_forward: a context around the actor's own forward pass.
Tap = Callable[[Actor, Tensor, tuple[int, ...]], contextlib.AbstractContextManager[Any]]

Done = TypeVar("Done")


class PPOLearner(ABC):
    """The critic (where advantages need one), PPO's arithmetic, and what is asked of whoever holds
    the actor.

    Attributes:
        actor: as `MedusaPlugin` and `ActorSync` take it.
        device: where batches are prepared.
        features: of the images of prompts; None: there are none.
    """

    actor: Actor
    device: torch.device
    features: FeatureStore | None = None

    def __init__(
        self, critic: Critic | None, config: PPOConfig, *, seed: int = 0, autocast: bool = False
    ) -> None:
        """
        Args:
            critic: value network; None: the advantages need none.
            config: hyper-parameters.
            seed: seed of the minibatch order.
            autocast: run products in bfloat16 (weights, optimizer and losses stay float32).
        """
        self.critic = critic
        self.config = config
        self.shaping = Shaping(config)
        self.turns = Turns(config.placement == "shared")
        self._beside = ThreadPoolExecutor(1, "medusa-ppo-beside") if config.side_by_side else None
        self.seed = seed
        self.autocast = autocast
        self.critic_optimizer = (
            adamw(list(critic.parameters()), config.critic_learning_rate)
            if critic is not None
            else None
        )
        if critic is not None:
            self.turns.add(CRITIC, critic, self.critic_optimizer)
        if config.recompute is True and critic is not None:
            models.recompute_layers(critic)

    def _meanwhile(self, work: Callable[[], Done]) -> Callable[[], Done]:
        """Begin with it in a thread beside this one, where ppo.side_by_side says so, or else do it;
        the function waits for its end.
        """
        if self._beside is not None:
            return self._beside.submit(work).result
        done = work()
        return lambda: done

    def _micros(self, batch: PPOBatch, sequences: Sequence[int]) -> list[MicroBatch]:
        config = self.config
        micros = batch.micro_batches(
            list(sequences),
            config.micro_batch_size or config.minibatch_size,
            config.micro_batch_tokens,
        )
        if (store := self.features) is None:
            return list(micros)
        return [
            replace(micro, seen=store.look(batch.prompts_of(micro), micro.input_ids_BT))
            for micro in micros
        ]

    @torch.no_grad()
    def score(
        self, batch: PPOBatch, rewards: Tensor, sampling: Sampling, tap: Tap | None = None
    ) -> tuple[Scores, dict[str, float]]:
        """Log-probs, values, advantages of a rollout batch, and what the log should say about it:
        `begin_batch`, `measure` and `conclude`.

        Args:
            rewards: float32 reward of each response (S), or of each token (S, R).
            sampling: how the rollouts were sampled.
            tap: context put around each of the actor's forward passes, e.g.
                MedusaPlugin.actor_forward.
        """
        self.begin_batch(sampling)
        return self.conclude(batch, self.measure(batch, sampling, tap), rewards)

    @abstractmethod
    def begin_batch(self, sampling: Sampling) -> None:
        """New rollouts will be measured: what was kept of those before is forgotten."""

    @torch.no_grad()
    def measure(
        self,
        batch: PPOBatch,
        sampling: Sampling,
        tap: Tap | None = None,
        timeline: Timeline | None = None,
    ) -> Measured:
        """The passes of actor, reference and critic over a rollout batch or a piece of it; one at a
        time.
        """
        timeline = timeline or Timeline()
        policy = self._begin_scoring(batch, sampling, tap, timeline)
        values_SR = torch.zeros(batch.mask_SR.shape)
        if self.critic is not None:
            with timeline.at_work("critic"), self.turns.on(CRITIC):
                for micro in self._micros(batch, range(len(batch))):
                    batch.unpack(self.critic(micro, self.autocast), micro, values_SR)
        return Measured(policy(), values_SR)

    @torch.no_grad()
    def conclude(
        self, batch: PPOBatch, measured: Measured, rewards: Tensor
    ) -> tuple[Scores, dict[str, float]]:
        """What follows for a whole rollout batch from the passes over it."""
        config = self.config
        mask_SR = batch.mask_SR
        trained_S = self.shaping.trained(batch)
        found = measured.policy
        values_SR = measured.values_SR
        coefficient = self.shaping.kl_coefficient
        earned = self.shaping.rewards(batch, rewards)
        penalty = 0.0 if config.kl_in_loss else coefficient
        rewards_SR = models.token_rewards(
            earned, found.logprobs_SR, found.reference_SR, mask_SR, penalty, config.kl_estimator
        )
        advantages_SR, returns_SR = self._advantages(batch, rewards_SR, values_SR, trained_S)
        gap_SR, gaps = engine_gap(batch, found, config.importance_bound)
        weights_SR = (
            None
            if config.importance_bound is None
            else models.importance_weights(gap_SR, config.importance_bound)
        )
        sequences = tuple(trained_S.nonzero()[:, 0].tolist())
        scores = Scores(
            found.logprobs_SR,
            found.reference_SR,
            values_SR,
            advantages_SR,
            returns_SR,
            weights_SR,
            sequences,
            coefficient,
        )
        kl = models.masked_mean(found.logprobs_SR - found.reference_SR, mask_SR).item()
        self.shaping.adapt(kl)
        entropy = models.masked_mean(found.entropy_SR, mask_SR).item()
        return scores, {
            names.KL_REFERENCE: kl,
            names.KL_COEFFICIENT: coefficient,
            names.ENTROPY: entropy,
            **gaps,
        }

    def _advantages(
        self, batch: PPOBatch, rewards_SR: Tensor, values_SR: Tensor, trained_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """advantages_SR and returns_SR: GAE, whitened over what is learned from, or those of
        groups.
        """
        config = self.config
        mask_SR = batch.mask_SR
        if config.advantages == "gae":
            advantages_SR, returns_SR = models.generalized_advantages(
                rewards_SR, values_SR, mask_SR, config.gamma, config.lam
            )
            return models.whiten(advantages_SR, mask_SR & trained_S[:, None]), returns_SR
        totals_S = rewards_SR.sum(dim=1)
        advantages_S = models.group_advantages(
            totals_S, batch.prompts_S, trained_S, config.advantages
        )
        return torch.where(mask_SR, advantages_S[:, None], 0.0), torch.where(
            mask_SR, totals_S[:, None], 0.0
        )

    def update(
        self,
        batch: PPOBatch,
        scores: Scores,
        sampling: Sampling,
        step: int,
        texts: PPOBatch | None = None,
    ) -> dict[str, float]:
        """Passes of clipped PPO over the batch; returns the means of the update.

        Optimizer steps with a gradient that is not finite are left out.

        Args:
            step: it decides the order of the minibatches and the step sizes.
            texts: to learn by heart beside it, with ppo.ptx_coefficient.

        Raises:
            RunError: no gradient of the actor or of the critic was finite; the weights are those
                before the update.
        """
        share = learning_rate_share(self.config, step)
        policy = self._begin_update(batch, scores, sampling, step, texts)
        value, skipped = (
            ({}, 0) if self.critic is None else self._update_critic(batch, scores, step, share)
        )
        report = {
            **policy().report(),
            **value,
            names.LEARNING_RATE: share * self.config.actor_learning_rate,
        }
        report[names.STEPS_SKIPPED] += skipped
        return report | (self.features.figures() if self.features is not None else {})

    def _trained_critic(self) -> tuple[Critic, torch.optim.AdamW]:
        assert self.critic is not None and self.critic_optimizer is not None, (
            "only asked for where there is one"
        )
        return self.critic, self.critic_optimizer

    def _update_critic(
        self, batch: PPOBatch, scores: Scores, step: int, share: float
    ) -> tuple[dict[str, float], int]:
        """All optimizer steps of the critic: what the log says about them, and how many were left
        out.
        """
        config = self.config
        loss = 0.0
        tokens = 0
        norms = GradientNorms()
        clip_range = config.value_clip_range
        if clip_range is not None and config.value_clip_unit == "returns":
            clip_range *= models.masked_deviation(scores.returns_SR, batch.mask_SR)
        set_learning_rate(self._trained_critic()[1], share * config.critic_learning_rate)
        with self.turns.on(CRITIC, training=True):
            for sequences in minibatches(scores.sequences, config, self.seed, step):
                loss += self._critic_minibatch(batch, scores, sequences, clip_range, norms)
                tokens += int(batch.lengths_S[sequences].sum())
        norms.mean("critic")
        return {names.VALUE_LOSS: loss / max(1, tokens)}, norms.skipped

    def _critic_minibatch(
        self,
        batch: PPOBatch,
        scores: Scores,
        sequences: list[int],
        clip_range: float | None,
        norms: GradientNorms,
    ) -> float:
        """One optimizer step of the critic; its summed loss."""
        (critic, optimizer), total, tokens = (
            self._trained_critic(),
            0.0,
            int(batch.lengths_S[sequences].sum()),
        )
        for micro in self._micros(batch, sequences):
            old_M = batch.pack(scores.values_SR, micro)
            returns_M = batch.pack(scores.returns_SR, micro)
            value_loss = models.clipped_value_loss(
                critic(micro, self.autocast), old_M, returns_M, clip_range
            )
            (
                value_loss / (2 * tokens)
            ).backward()  # Half of the squared error; its scale only matters to the clip.
            total += value_loss.item()
        if norms.sound(
            torch.nn.utils.clip_grad_norm_(list(critic.parameters()), self.config.clip_norm).item()
        ):
            optimizer.step()
        self.turns.report(CRITIC)
        optimizer.zero_grad(set_to_none=True)
        return total

    def save(self, folder: Path) -> None:
        """Write weights and moments of actor and critic: `actor`, `actor_optimizer`, `critic`,
        `critic_optimizer` (.safetensors).
        """
        self.shaping.save(folder)
        with self.turns.aside(ACTOR, CRITIC):
            self._save_policy(folder)
            if self.critic is not None:
                save_trained(folder, "critic", *self._trained_critic())

    def load(self, folder: Path) -> None:
        """Put what `save` wrote in its place. CheckpointError when a file is missing, damaged, or
        does not fit.
        """
        with self.turns.on(ACTOR, training=True):
            self._load_policy(folder)
        self.shaping.load(folder)
        if self.critic is not None:
            with self.turns.on(CRITIC, training=True):
                load_trained(folder, "critic", *self._trained_critic())

    @abstractmethod
    def save_actor(self, folder: Path) -> None:
        """Write the actor as a checkpoint of transformers, without its tokenizer."""

    @abstractmethod
    def _begin_scoring(
        self, batch: PPOBatch, sampling: Sampling, tap: Tap | None, timeline: Timeline
    ) -> Callable[[], PolicyScores]:
        """Begin with the actor's and the reference's passes; the function waits for the end of what
        goes on elsewhere.
        """

    @abstractmethod
    def _begin_update(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> Callable[[], UpdateTotals]:
        """Begin with all optimizer steps of the actor; the function waits for the end of what goes
        on elsewhere.
        """

    @abstractmethod
    def _save_policy(self, folder: Path) -> None:
        """Write `actor.safetensors` and `actor_optimizer.safetensors`, by the names that the
        checkpoint of transformers has.
        """

    @abstractmethod
    def _load_policy(self, folder: Path) -> None:
        """Read both. The reference stays what it is."""


class Learner(PPOLearner):
    """Actor, critic and reference with their optimizers, all in this process."""

    actor: PreTrainedModel

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: Critic | None,
        config: PPOConfig,
        *,
        seed: int = 0,
        autocast: bool = False,
        features: FeatureStore | None = None,
    ) -> None:
        """
        Args:
            actor: transformers causal LM, float32; the reference is copied from it now. Its vision
                tower, if it has one, is frozen.
            critic, config, seed, autocast: as `PPOLearner`.
            features: where prompts have images: what the actor's tower makes of them.
        """
        super().__init__(critic, config, seed=seed, autocast=autocast)
        self.actor = actor.eval()
        self.actor.requires_grad_(True)
        if (tower := tower_of(actor)) is not None:
            tower.requires_grad_(False)
        self.features = features
        self.reference = copy_without_tower(actor, actor).eval().requires_grad_(False)
        if config.reference_dtype == "bfloat16":
            nn.Module.to(self.reference, torch.bfloat16)
        if config.recompute:
            models.recompute_layers(self.actor)
        self.device = next(self.actor.parameters()).device
        self.actor_optimizer = adamw(list(self.actor.parameters()), config.actor_learning_rate)
        self.turns.add(ACTOR, self.actor, self.actor_optimizer)
        self.turns.add(REFERENCE, self.reference)
        self._support = Support(Sampling())  # Of the batch that was scored last.

    def begin_batch(self, sampling: Sampling) -> None:
        self._support = Support(sampling)

    def _begin_scoring(
        self, batch: PPOBatch, sampling: Sampling, tap: Tap | None, timeline: Timeline
    ) -> Callable[[], PolicyScores]:
        found = PolicyScores.zeros(batch)
        micros = self._micros(batch, range(len(batch)))

        def reference() -> None:
            with torch.no_grad(), timeline.at_work("reference"), self.turns.on(REFERENCE):
                for micro in micros:
                    stats = token_stats(
                        self.reference,
                        micro,
                        sampling,
                        support=self._support,
                        autocast=self.autocast,
                    )
                    batch.unpack(stats.logprobs_M, micro, found.reference_SR)

        # What the sampling left to the actor the reference learns from the actor's pass.
        early = self._meanwhile(reference) if self._beside and not self._support.cuts else None
        # First: whoever taps it can start while reference and critic still run.
        with timeline.at_work("actor"), self.turns.on(ACTOR):
            for micro in micros:
                with (
                    tap(self.actor, micro.response_mask_BT, micro.sequences)
                    if tap
                    else contextlib.nullcontext()
                ):
                    stats = token_stats(
                        self.actor,
                        micro,
                        sampling,
                        entropy=True,
                        support=self._support,
                        autocast=self.autocast,
                    )
                found.put(batch, micro, stats)
        refer = early or self._meanwhile(reference)
        return lambda: (refer(), found)[1]

    def _begin_update(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> Callable[[], UpdateTotals]:
        return self._meanwhile(lambda: self._update_actor(batch, scores, sampling, step, texts))

    def _update_actor(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> UpdateTotals:
        with self.turns.on(ACTOR, training=True):
            return self._actor_steps(batch, scores, sampling, step, texts)

    def _actor_steps(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> UpdateTotals:
        config = self.config
        totals = UpdateTotals()
        set_learning_rate(
            self.actor_optimizer, learning_rate_share(config, step) * config.actor_learning_rate
        )
        for number, sequences in enumerate(minibatches(scores.sequences, config, self.seed, step)):
            tokens = int(batch.lengths_S[sequences].sum())
            kl_before = totals.kl
            for micro in self._micros(batch, sequences):
                stats = token_stats(
                    self.actor,
                    micro,
                    sampling,
                    entropy=config.entropy_coefficient > 0,
                    support=self._support,
                    autocast=self.autocast,
                )
                (totals.policy_loss_of(batch, scores, micro, stats, config) / tokens).backward()
            totals.tokens += tokens
            if config.kl_stop is not None and (totals.kl - kl_before) / tokens > config.kl_stop:
                self.actor_optimizer.zero_grad(set_to_none=True)
                break
            if texts is not None:
                totals.text_losses.append(
                    self._learn_texts(texts, number * config.minibatch_size, len(sequences))
                )
            norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), config.clip_norm).item()
            if totals.norms.sound(norm):
                self.actor_optimizer.step()
            self.turns.report(ACTOR)
            self.actor_optimizer.zero_grad(set_to_none=True)
        return totals

    def _learn_texts(self, texts: PPOBatch, first: int, count: int) -> float:
        """Add the gradient of the mean loss on so many of the texts, in turn; gives that loss."""
        chosen = sorted({(first + n) % len(texts) for n in range(count)})
        total = 0.0
        tokens = int(texts.lengths_S[chosen].sum())
        for micro in self._micros(texts, chosen):
            loss = (
                -token_stats(self.actor, micro, Sampling(), autocast=self.autocast).logprobs_M.sum()
                / tokens
            )
            ((self.config.ptx_coefficient or 0.0) * loss).backward()
            total += loss.item()
        return total

    def save_actor(self, folder: Path) -> None:
        with self.turns.aside(ACTOR):
            self.actor.save_pretrained(folder)
        if self.features is not None:
            self.features.reader.save(folder)

    def _save_policy(self, folder: Path) -> None:
        save_trained(folder, "actor", self.actor, self.actor_optimizer)

    def _load_policy(self, folder: Path) -> None:
        load_trained(folder, "actor", self.actor, self.actor_optimizer)


class UpdateTotals:
    """Sums over all tokens of all passes of the actor's update."""

    def __init__(self) -> None:
        self.tokens = 0
        self.policy_loss = self.clipped = self.kl = 0.0
        self.norms = GradientNorms()
        self.text_losses: list[float] = []

    @classmethod
    def over(cls, shares: Sequence[UpdateTotals]) -> UpdateTotals:
        """Of replicas that took the same steps, each on its own sequences; tokens and norms are
        those of all already.
        """
        total = cls()
        total.tokens = shares[0].tokens
        total.norms = shares[0].norms
        for share in shares:
            total.policy_loss += share.policy_loss
            total.clipped += share.clipped
            total.kl += share.kl
        return total

    def policy_loss_of(
        self,
        batch: PPOBatch,
        scores: Scores,
        micro: MicroBatch,
        stats: TokenStats,
        config: PPOConfig,
    ) -> Tensor:
        """The loss of a micro batch, summed over its tokens; its figures are added up. Every token
        weighs the same, wherever it stands.
        """
        old_M = batch.pack(scores.logprobs_SR, micro)
        advantages_M = batch.pack(scores.advantages_SR, micro)
        weights_M = None if scores.weights_SR is None else batch.pack(scores.weights_SR, micro)
        terms = models.clipped_surrogate(
            stats.logprobs_M, old_M, advantages_M, config.clip_range, weights_M
        )
        self.policy_loss += terms.loss.item()
        self.clipped += terms.clipped.item()
        self.kl += terms.kl.item()
        loss = terms.loss
        if config.kl_in_loss:
            estimates_M = models.kl_estimates(
                stats.logprobs_M, batch.pack(scores.reference_SR, micro), config.kl_estimator
            )
            loss = loss + scores.kl_coefficient * estimates_M.sum()
        return (
            loss
            if stats.entropy_M is None
            else loss - config.entropy_coefficient * stats.entropy_M.sum()
        )

    def report(self) -> dict[str, float]:
        """Means over tokens and steps. RunError when no gradient was finite."""
        tokens = max(1, self.tokens)
        texts = self.text_losses
        return {
            names.POLICY_LOSS: self.policy_loss / tokens,
            names.CLIP_FRAC: self.clipped / tokens,
            names.KL_UPDATE: self.kl / tokens,
            names.ACTOR_GRAD_NORM: self.norms.mean("actor"),
            names.ACTOR_STEPS: float(len(self.norms.norms)),
            names.STEPS_SKIPPED: float(self.norms.skipped),
            **({names.PTX_LOSS: sum(texts) / len(texts)} if texts else {}),
        }
