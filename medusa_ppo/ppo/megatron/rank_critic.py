"""A rank's part of the critic: values of its replica's sequences, and its optimizer steps.

Shape letters: S sequences, R response positions, P tokens of one context-parallel rank, M response
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_ppo.actors.megatron_model import RankModel
from medusa_ppo.actors.vision import FeatureStore
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.ppo import arithmetic
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch, minibatches
from medusa_ppo.ppo.critic import ValueTotals, value_clip
from medusa_ppo.ppo.megatron.rank_optimizer import RankOptimizer
from medusa_ppo.ppo.megatron.rank_share import RankShare
from medusa_ppo.ppo.optimization import learning_rate_share
from medusa_ppo.ppo.scores import Scores


class RankCritic:
    """`medusa_ppo.ppo.critic.Critic` on ranks, sharded like the actor.

    Every rank calls each method in the same order.
    """

    def __init__(
        self,
        model: RankModel,
        optimizer: RankOptimizer,
        config: PPOConfig,
        features: FeatureStore | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._config = config
        self._share = RankShare(model, config, features)

    @torch.no_grad()
    def values(self, batch: PPOBatch) -> Tensor:
        """values_SR, zero outside this replica's sequences; on the ranks of its last stage."""
        found_SR = torch.zeros(batch.mask_SR.shape)
        micros = self._share.micros(batch, self._share.dealt(batch, range(len(batch))))
        self.model.run(
            self._share.inputs(micros),
            lambda n, out_BP1: batch.unpack(self._packed(micros[n], out_BP1), micros[n], found_SR),
        )
        return found_SR

    def update(self, batch: PPOBatch, scores: Scores, seed: int, step: int) -> ValueTotals:
        """All optimizer steps of one PPO update; the loss covers this replica's sequences."""
        config = self._config
        totals = ValueTotals()
        clip_range = value_clip(config, batch, scores)
        rate = learning_rate_share(config, step) * config.critic_learning_rate
        for sequences in minibatches(scores.sequences, config, seed, step):
            tokens = int(batch.lengths_S[sequences].sum())
            micros = self._share.micros(batch, self._share.dealt(batch, sequences))

            # The defaults bind this minibatch: the function is defined anew in each iteration.
            def loss(
                n: int, out_BP1: Tensor, micros: list[MicroBatch] = micros, tokens: int = tokens
            ) -> Tensor:
                micro = micros[n]
                summed = arithmetic.clipped_value_loss(
                    self._packed(micro, out_BP1),
                    batch.pack(scores.values_SR, micro),
                    batch.pack(scores.returns_SR, micro),
                    clip_range,
                )
                totals.loss += summed.item()
                # Halved as in one process: the gradient norm's clip depends on it.
                return summed / (2 * tokens)

            self.model.clear_gradients()
            self.model.run(self._share.inputs(micros), loss, backward=True)
            self.model.gather_gradients()
            totals.tokens += tokens
            self.optimizer.step(rate, config.clip_norm, totals.norms)
        return totals

    def _packed(self, micro: MicroBatch, out_BP1: Tensor) -> Tensor:
        """values_M, on all ranks that share the micro batch."""
        own, places_P = self._share.own_predictions(micro)
        total = int(micro.response_mask_BT.sum())
        return self.model.of_all_columns(out_BP1[own.response_mask_BT][:, 0], places_P, total)
