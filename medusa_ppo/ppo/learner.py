"""The learner: scores a rollout batch with actor, reference and critic, and runs the PPO update.

`PPOLearner` holds what does not depend on where the actor is trained; `Learner` trains it in this
process.

Shape letters: S sequences, R response positions, M response tokens of a micro batch.

The "old" log-probs of the ratio are the actor's own, recomputed here before the update, not the
engine's. The engine computes the same policy with other kernels (and perhaps another dtype), so its
log-probs differ from ours by rounding even before anything is learned; in the ratio this noise
would be clipped, and its mean would pull on the policy. With our own the ratio starts at exactly 1.
The difference of the two is logged (`logprob_gap`, `engine_kl`), because it reveals a broken sync.
The tokens were still drawn with the engine's rounding; `ppo.importance_bound` corrects for that: it
weights each token by how much more likely it is under the actor than under the engine.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_ppo.actors.hf import Actor, Tap
from medusa_ppo.actors.vision import FeatureStore, copy_without_tower, tower_of
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo import arithmetic
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch, chosen_texts, minibatches
from medusa_ppo.ppo.critic import Critic, ValueTotals, value_clip
from medusa_ppo.ppo.optimization import (
    adamw,
    learning_rate_share,
    set_learning_rate,
)
from medusa_ppo.ppo.placement import ACTOR, CRITIC, REFERENCE, Turns
from medusa_ppo.ppo.recompute import recompute_layers
from medusa_ppo.ppo.run_progress import Timeline
from medusa_ppo.ppo.scores import Measured, PolicyScores, Scores
from medusa_ppo.ppo.shaping import Shaping
from medusa_ppo.ppo.token_stats import Support, token_stats
from medusa_ppo.ppo.trained_files import load_trained, save_trained
from medusa_ppo.ppo.update_totals import UpdateTotals
from medusa_ppo.runtime.processes import SharedPlace

Done = TypeVar("Done")

DISCOUNT = 1.0
"""Discount per token. There is none: a right answer is worth the same at token 500 as at token 5.
"""
IMPORTANCE_BOUND = 2.0
"""Ratios of actor to engine above this are counted if ppo.importance_bound is not set."""


class PPOLearner(ABC):
    """The critic (if advantages need one), PPO's arithmetic, and the interface to whoever holds the
    actor.

    Attributes:
        actor: the actor in the form that `MedusaPlugin` and `ActorSync` accept.
        device: where batches are prepared.
        features: features of the prompts' images; None: there are none, or they are elsewhere.
        has_critic: whether there is a critic, here or elsewhere.
    """

    actor: Actor
    device: torch.device
    features: FeatureStore | None = None

    def __init__(
        self,
        critic: Critic | None,
        config: PPOConfig,
        *,
        seed: int = 0,
        autocast: bool = False,
        turns: Turns | None = None,
    ) -> None:
        """
        Args:
            critic: value network; None if the advantages need none.
            config: hyper-parameters.
            seed: seed of the minibatch order.
            autocast: run matrix products in bfloat16; weights, optimizer and losses stay float32.
            turns: who has memory on the devices when; None: only roles of this process do.
        """
        self.critic = critic
        self.has_critic = critic is not None
        self.config = config
        self.shaping = Shaping(config)
        self.turns = turns or Turns(config.placement)
        self._beside = ThreadPoolExecutor(1, "medusa-ppo-beside") if config.side_by_side else None
        self.seed = seed
        self.autocast = autocast
        self.critic_optimizer: torch.optim.AdamW | None = None
        if critic is not None:
            self.critic_optimizer = adamw(list(critic.parameters()), config.critic_learning_rate)
            self.turns.add(CRITIC, critic, self.critic_optimizer)
            if config.recompute is True:
                recompute_layers(critic)

    def _meanwhile(self, work: Callable[[], Done]) -> Callable[[], Done]:
        """With ppo.side_by_side start the work in another thread, otherwise do it now.

        Returns:
            A function that waits for the work and returns its result.
        """
        if self._beside is not None:
            return self._beside.submit(work).result
        done = work()
        return lambda: done

    def _micros(self, batch: PPOBatch, sequences: Sequence[int]) -> list[MicroBatch]:
        config = self.config
        size = config.micro_batch_size or config.minibatch_size
        return batch.seen_micros(list(sequences), size, config.micro_batch_tokens, self.features)

    def prefetch_images(self, prompts: Iterable[Sequence[int]]) -> None:
        """Start computing the features of the prompts' images, wherever the tower is."""
        if self.features is not None:
            self.features.prefetch(prompts)

    def _image_figures(self, batch: PPOBatch) -> dict[str, float]:
        """The step's figures of the images, whose prompts are in the batch."""
        return {} if self.features is None else self.features.figures()

    @torch.no_grad()
    def score(
        self, batch: PPOBatch, rewards: Tensor, sampling: Sampling, tap: Tap | None = None
    ) -> tuple[Scores, dict[str, float]]:
        """Log-probs, values and advantages of a rollout batch, and figures for the log:
        `begin_batch`, `measure` and `conclude`.

        Args:
            rewards: float32 reward of each response (S), or of each token (S, R).
            sampling: how the rollouts were sampled.
            tap: context put around each of the actor's forward passes, e.g.
                MedusaPlugin.actor_forward.
        """
        self.begin_batch(sampling)
        return self.conclude(batch, self.measure(batch, sampling, tap), rewards)

    def engine_places(self) -> list[SharedPlace]:
        """Where each engine goes if it shares its devices with ranks of the actor; none: engines
        find places of their own.
        """
        return []

    @abstractmethod
    def begin_batch(self, sampling: Sampling) -> None:
        """Forget what was kept from the previous rollouts; new ones will be measured."""

    @torch.no_grad()
    def read(self, batch: PPOBatch, sampling: Sampling, tap: Tap) -> None:
        """Run the actor over a batch without learning from it, for whoever taps its passes."""
        self.begin_batch(sampling)
        self._begin_scoring(batch, sampling, tap, Timeline())()

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
        if not self.has_critic:
            return Measured(policy(), torch.zeros(batch.mask_SR.shape))
        values = self._begin_values(batch, timeline)
        return Measured(policy(), values())

    def _begin_values(self, batch: PPOBatch, timeline: Timeline) -> Callable[[], Tensor]:
        """Start the critic's passes. Returns a function that waits for those that run elsewhere,
        and returns values_SR.
        """
        critic, _ = self._trained_critic()
        values_SR = torch.zeros(batch.mask_SR.shape)
        with timeline.at_work("critic"), self.turns.on(CRITIC):
            for micro in self._micros(batch, range(len(batch))):
                batch.unpack(critic(micro, self.autocast), micro, values_SR)
        return lambda: values_SR

    @torch.no_grad()
    def conclude(
        self, batch: PPOBatch, measured: Measured, rewards: Tensor
    ) -> tuple[Scores, dict[str, float]]:
        """Rewards and advantages of a whole rollout batch, from the passes over it."""
        config = self.config
        policy = measured.policy
        mask_SR = batch.mask_SR
        trained_S = self.shaping.trained(batch)
        coefficient = self.shaping.kl_coefficient
        shaped = self.shaping.rewards(batch, rewards)
        rewards_SR = arithmetic.token_rewards(
            shaped,
            policy.logprobs_SR,
            policy.reference_SR,
            mask_SR,
            0.0 if config.kl_in_loss else coefficient,
            config.kl_estimator,
        )
        advantages_SR, returns_SR = self._advantages(
            batch, shaped, rewards_SR, measured.values_SR, trained_S
        )
        gap_SR = torch.where(mask_SR, policy.logprobs_SR - batch.behaviour_SR, 0.0)
        weights_SR = None
        if config.importance_bound is not None:
            weights_SR = arithmetic.importance_weights(gap_SR, config.importance_bound)
        scores = Scores(
            logprobs_SR=policy.logprobs_SR,
            reference_SR=policy.reference_SR,
            values_SR=measured.values_SR,
            advantages_SR=advantages_SR,
            returns_SR=returns_SR,
            weights_SR=weights_SR,
            sequences=tuple(trained_S.nonzero()[:, 0].tolist()),
            kl_coefficient=coefficient,
        )
        kl = arithmetic.masked_mean(policy.logprobs_SR - policy.reference_SR, mask_SR).item()
        self.shaping.adapt(kl)
        explained = {}
        if config.advantages == "gae":
            explained[names.VALUE_EXPLAINED] = arithmetic.explained_share(
                measured.values_SR, returns_SR, mask_SR
            )
        return scores, {
            **explained,
            names.KL_REFERENCE: kl,
            names.KL_COEFFICIENT: coefficient,
            names.ENTROPY: arithmetic.masked_mean(policy.entropy_SR, mask_SR).item(),
            **_engine_gap_figures(gap_SR, mask_SR, config.importance_bound or IMPORTANCE_BOUND),
        }

    def _advantages(
        self,
        batch: PPOBatch,
        shaped: Tensor,
        rewards_SR: Tensor,
        values_SR: Tensor,
        trained_S: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """advantages_SR and returns_SR, by GAE (whitened over the responses that are learned from)
        or by group.

        Args:
            shaped: rewards of responses (S) or of their tokens (S, R), as `Shaping` returns them.
            rewards_SR: the same at the tokens, minus the penalty if it is part of the reward.
        """
        config = self.config
        mask_SR = batch.mask_SR
        if config.advantages == "gae":
            advantages_SR, returns_SR = arithmetic.generalized_advantages(
                rewards_SR, values_SR, mask_SR, DISCOUNT, config.lam
            )
            return arithmetic.whiten(advantages_SR, mask_SR & trained_S[:, None]), returns_SR
        # Groups compare whole responses, so each token gets its response's advantage and return.
        totals_S = rewards_SR.sum(dim=1)
        advantages_S = arithmetic.group_advantages(
            shaped.sum(dim=1) if shaped.dim() == 2 else shaped,
            totals_S,
            batch.prompts_S,
            trained_S,
            config.advantages,
        )
        advantages_SR = torch.where(mask_SR, advantages_S[:, None], 0.0)
        returns_SR = torch.where(mask_SR, totals_S[:, None], 0.0)
        return advantages_SR, returns_SR

    def update(
        self,
        batch: PPOBatch,
        scores: Scores,
        sampling: Sampling,
        step: int,
        texts: PPOBatch | None = None,
    ) -> dict[str, float]:
        """Passes of clipped PPO over the batch; returns the means of the update.

        Optimizer steps whose gradient is not finite are skipped.

        Args:
            step: decides the order of the minibatches and the learning rates.
            texts: other texts to train on, with weight ppo.ptx_coefficient.

        Raises:
            RunError: no gradient of the actor or of the critic was finite; the weights are those
                before the update.
        """
        share = learning_rate_share(self.config, step)
        wait_for_actor = self._begin_update(batch, scores, sampling, step, texts)
        values = None
        if self.has_critic:
            values = self._update_critic(batch, scores, step, share)
        report = wait_for_actor().report()
        report[names.LEARNING_RATE] = share * self.config.actor_learning_rate
        if values is not None:
            report |= values.report()
            report[names.STEPS_SKIPPED] += values.norms.skipped
        return report | self._image_figures(batch)

    def _trained_critic(self) -> tuple[Critic, torch.optim.AdamW]:
        assert self.critic is not None and self.critic_optimizer is not None, (
            "only called if there is one"
        )
        return self.critic, self.critic_optimizer

    def _update_critic(
        self, batch: PPOBatch, scores: Scores, step: int, share: float
    ) -> ValueTotals:
        """All optimizer steps of the critic."""
        totals = ValueTotals()
        clip_range = value_clip(self.config, batch, scores)
        _, optimizer = self._trained_critic()
        set_learning_rate(optimizer, share * self.config.critic_learning_rate)
        with self.turns.on(CRITIC, training=True):
            for sequences in minibatches(scores.sequences, self.config, self.seed, step):
                self._critic_minibatch(batch, scores, sequences, clip_range, totals)
        return totals

    def _critic_minibatch(
        self,
        batch: PPOBatch,
        scores: Scores,
        sequences: list[int],
        clip_range: float | None,
        totals: ValueTotals,
    ) -> None:
        """One optimizer step of the critic."""
        critic, optimizer = self._trained_critic()
        tokens = int(batch.lengths_S[sequences].sum())
        for micro in self._micros(batch, sequences):
            old_M = batch.pack(scores.values_SR, micro)
            returns_M = batch.pack(scores.returns_SR, micro)
            values_M = critic(micro, self.autocast)
            loss = arithmetic.clipped_value_loss(values_M, old_M, returns_M, clip_range)
            # Halved once more; AdamW ignores the scale, so it only matters for clipping the norm.
            (loss / (2 * tokens)).backward()
            totals.loss += loss.item()
        totals.tokens += tokens
        norm = nn.utils.clip_grad_norm_(list(critic.parameters()), self.config.clip_norm).item()
        if totals.norms.sound(norm):
            optimizer.step()
        self.turns.report(CRITIC)
        optimizer.zero_grad(set_to_none=True)

    def take_memory(self) -> dict[str, Any]:
        """The step's figures: how much memory the roles had on their devices, and what moved."""
        return self.turns.take()

    def save(self, folder: Path) -> None:
        """Write weights and moments of actor and critic, and the state of the shaping.

        Files: `actor`, `actor_optimizer`, `critic`, `critic_optimizer` (.safetensors).
        """
        self.shaping.save(folder)
        with self.turns.aside(ACTOR, CRITIC):
            self._save_policy(folder)
            if self.has_critic:
                self._save_critic(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: a file is missing, damaged, or does not fit.
        """
        with self.turns.on(ACTOR, training=True):
            self._load_policy(folder)
        self.shaping.load(folder)
        if self.has_critic:
            with self.turns.on(CRITIC, training=True):
                self._load_critic(folder)

    def _save_critic(self, folder: Path) -> None:
        save_trained(folder, "critic", *self._trained_critic())

    def _load_critic(self, folder: Path) -> None:
        load_trained(folder, "critic", *self._trained_critic())

    @abstractmethod
    def save_actor(self, folder: Path) -> None:
        """Write the actor as a checkpoint of transformers, without its tokenizer."""

    @abstractmethod
    def _begin_scoring(
        self, batch: PPOBatch, sampling: Sampling, tap: Tap | None, timeline: Timeline
    ) -> Callable[[], PolicyScores]:
        """Start the passes of actor and reference.

        Returns:
            A function that waits for those that run elsewhere, and returns what they found.
        """

    @abstractmethod
    def _begin_update(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> Callable[[], UpdateTotals]:
        """Start all optimizer steps of the actor.

        Returns:
            A function that waits for them, if they run elsewhere, and returns their totals.
        """

    @abstractmethod
    def _save_policy(self, folder: Path) -> None:
        """Write `actor.safetensors` and `actor_optimizer.safetensors`.

        Names are those of the transformers checkpoint, so that a run can move between learners.
        """

    @abstractmethod
    def _load_policy(self, folder: Path) -> None:
        """Read both. The reference does not change."""


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
            critic, config, seed, autocast: as for `PPOLearner`.
            features: if prompts have images, the tower's features of them.
        """
        super().__init__(critic, config, seed=seed, autocast=autocast)
        self.actor = actor.eval()
        self.actor.requires_grad_(True)
        tower = tower_of(actor)
        if tower is not None:
            tower.requires_grad_(False)
        self.features = features
        self.reference = copy_without_tower(actor, actor).eval().requires_grad_(False)
        if config.reference_dtype == "bfloat16":
            # Not its buffers: in bfloat16 the frequencies of rotary positions are off by up to a
            # radian at token 1,000.
            for parameter in self.reference.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if config.recompute:
            recompute_layers(self.actor)
        self.device = next(self.actor.parameters()).device
        self.actor_optimizer = adamw(list(self.actor.parameters()), config.actor_learning_rate)
        self.turns.add(ACTOR, self.actor, self.actor_optimizer)
        self.turns.add(REFERENCE, self.reference)
        self._support = Support(Sampling())  # From the last scored batch.

    def begin_batch(self, sampling: Sampling) -> None:
        self._support = Support(sampling)

    @torch.no_grad()
    def read(self, batch: PPOBatch, sampling: Sampling, tap: Tap) -> None:
        with self.turns.on(ACTOR):  # The reference does not need it.
            for micro in self._micros(batch, range(len(batch))):
                with _tapped(tap, self.actor, micro):
                    token_stats(self.actor, micro, sampling, autocast=self.autocast)

    def _begin_scoring(
        self, batch: PPOBatch, sampling: Sampling, tap: Tap | None, timeline: Timeline
    ) -> Callable[[], PolicyScores]:
        found = PolicyScores.zeros(batch)
        micros = self._micros(batch, range(len(batch)))

        def score_reference() -> None:
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

        def score_actor() -> None:
            with timeline.at_work("actor"), self.turns.on(ACTOR):
                for micro in micros:
                    with _tapped(tap, self.actor, micro):
                        stats = token_stats(
                            self.actor,
                            micro,
                            sampling,
                            entropy=True,
                            support=self._support,
                            autocast=self.autocast,
                        )
                    found.put_actor(batch, micro, stats)

        if self._beside is not None and not self._support.cuts:
            wait_for_reference = self._meanwhile(score_reference)
            score_actor()
        else:
            # The reference reuses the top-k/top-p mask from the actor's pass, so it runs after it.
            # Even without a mask the actor goes first, so that whoever taps its pass can start
            # while reference and critic still run.
            score_actor()
            wait_for_reference = self._meanwhile(score_reference)

        def wait() -> PolicyScores:
            wait_for_reference()
            return found

        return wait

    def _begin_update(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> Callable[[], UpdateTotals]:
        def update_actor() -> UpdateTotals:
            with self.turns.on(ACTOR, training=True):
                return self._actor_steps(batch, scores, sampling, step, texts)

        return self._meanwhile(update_actor)

    def _actor_steps(
        self, batch: PPOBatch, scores: Scores, sampling: Sampling, step: int, texts: PPOBatch | None
    ) -> UpdateTotals:
        config = self.config
        totals = UpdateTotals()
        share = learning_rate_share(config, step)
        set_learning_rate(self.actor_optimizer, share * config.actor_learning_rate)
        begun = 0  # Responses of the minibatches so far.
        for sequences in minibatches(scores.sequences, config, self.seed, step):
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
                loss = totals.policy_loss_of(batch, scores, micro, stats, config)
                (loss / tokens).backward()
            totals.tokens += tokens
            # The policy has moved far enough from the one that wrote the rollouts.
            if config.kl_stop is not None and (totals.kl - kl_before) / tokens > config.kl_stop:
                self.actor_optimizer.zero_grad(set_to_none=True)
                break
            if texts is not None:
                chosen = chosen_texts(texts, begun, len(sequences))
                totals.text_losses.append(self._learn_texts(texts, chosen))
            begun += len(sequences)
            norm = nn.utils.clip_grad_norm_(self.actor.parameters(), config.clip_norm).item()
            if totals.norms.sound(norm):
                self.actor_optimizer.step()
            self.turns.report(ACTOR)
            self.actor_optimizer.zero_grad(set_to_none=True)
        return totals

    def _learn_texts(self, texts: PPOBatch, chosen: list[int]) -> float:
        """Add the gradient of the mean loss on these texts, and return that loss."""
        total = 0.0
        tokens = int(texts.lengths_S[chosen].sum())
        for micro in self._micros(texts, chosen):
            stats = token_stats(self.actor, micro, Sampling(), autocast=self.autocast)
            loss = -stats.logprobs_M.sum() / tokens
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


def _tapped(
    tap: Tap | None, actor: Actor, micro: MicroBatch
) -> contextlib.AbstractContextManager[Any]:
    if tap is None:
        return contextlib.nullcontext()
    return tap(actor, micro.response_mask_BT, micro.sequences)


def _engine_gap_figures(gap_SR: Tensor, mask_SR: Tensor, bound: float) -> dict[str, float]:
    """Figures for the log about gap = log pi - log pi_engine, which is 0 on padding."""
    ratio_SR = gap_SR.exp()
    above_SR = (ratio_SR > bound).float()
    return {
        names.LOGPROB_GAP: arithmetic.masked_mean(gap_SR.abs(), mask_SR).item(),
        names.LOGPROB_GAP_MAX: gap_SR.abs().max().item(),
        names.ENGINE_KL: arithmetic.masked_mean(ratio_SR - 1 - gap_SR, mask_SR).item(),
        names.IMPORTANCE_CUT: arithmetic.masked_mean(above_SR, mask_SR).item(),
    }
