"""The actor's loss, and the sums of its update for the log.

Shape letters: M response tokens of a micro batch, packed row after row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo import arithmetic
from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.optimization import GradientNorms
from medusa_ppo.ppo.scores import Scores
from medusa_ppo.ppo.token_stats import TokenStats


class UpdateTotals:
    """Sums over all tokens of all passes of the actor's update."""

    def __init__(self) -> None:
        self.tokens = 0
        self.policy_loss = 0.0
        self.clipped = 0.0
        self.kl = 0.0
        self.norms = GradientNorms()
        self.text_losses: list[float] = []

    @classmethod
    def over(cls, shares: Sequence[UpdateTotals]) -> UpdateTotals:
        """Combine replicas that took the same steps, each on its own sequences.

        Sums are added, and so are the replicas' parts of a text loss. Tokens and norms already
        cover all replicas.
        """
        total = cls()
        total.tokens = shares[0].tokens
        total.norms = shares[0].norms
        for share in shares:
            total.policy_loss += share.policy_loss
            total.clipped += share.clipped
            total.kl += share.kl
        total.text_losses = [
            sum(losses) for losses in zip(*(share.text_losses for share in shares), strict=True)
        ]
        return total

    def policy_loss_of(
        self,
        batch: PPOBatch,
        scores: Scores,
        micro: MicroBatch,
        stats: TokenStats,
        config: PPOConfig,
    ) -> Tensor:
        """The loss of a micro batch, summed over its tokens; its figures are added to the totals.

        loss = clipped surrogate + kl_coefficient KL(pi || pi_ref) - entropy_coefficient entropy.
        Every token has the same weight, wherever it is.
        """
        terms = arithmetic.clipped_surrogate(
            stats.logprobs_M,
            batch.pack(scores.logprobs_SR, micro),
            batch.pack(scores.advantages_SR, micro),
            config.clip_range,
            None if scores.weights_SR is None else batch.pack(scores.weights_SR, micro),
        )
        self.policy_loss += terms.loss.item()
        self.clipped += terms.clipped.item()
        self.kl += terms.kl.item()
        loss = terms.loss
        if config.kl_in_loss:
            reference_M = batch.pack(scores.reference_SR, micro)
            kl_M = arithmetic.kl_estimates(stats.logprobs_M, reference_M, config.kl_estimator)
            loss = loss + scores.kl_coefficient * kl_M.sum()
        if stats.entropy_M is not None:
            loss = loss - config.entropy_coefficient * stats.entropy_M.sum()
        return loss

    def report(self) -> dict[str, float]:
        """Means over tokens and steps.

        Raises:
            RunError: no gradient was finite.
        """
        tokens = max(1, self.tokens)
        values = {
            names.POLICY_LOSS: self.policy_loss / tokens,
            names.CLIP_FRAC: self.clipped / tokens,
            names.KL_UPDATE: self.kl / tokens,
            names.ACTOR_GRAD_NORM: self.norms.mean("actor"),
            names.ACTOR_STEPS: float(len(self.norms.norms)),
            names.STEPS_SKIPPED: float(self.norms.skipped),
        }
        if self.text_losses:
            values[names.PTX_LOSS] = sum(self.text_losses) / len(self.text_losses)
        return values
