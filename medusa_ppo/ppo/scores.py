"""Scores of a rollout batch before the update: what actor, reference and critic compute for each
token, and what follows for the update.

Shape letters: S sequences of the rollout batch, R response positions (padded to the longest), M
response tokens of a micro batch, packed row after row. All tensors are float32, on the CPU, and
zero on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_ppo.ppo.batch import MicroBatch, PPOBatch
from medusa_ppo.ppo.token_stats import TokenStats


@dataclass(frozen=True)
class PolicyScores:
    """What actor and reference compute for a rollout batch.

    Attributes:
        logprobs_SR, entropy_SR: the actor's, as in `TokenStats`.
        reference_SR: log-probs of the reference.
    """

    logprobs_SR: Tensor
    reference_SR: Tensor
    entropy_SR: Tensor

    @classmethod
    def zeros(cls, batch: PPOBatch) -> PolicyScores:
        """Empty scores, to be filled micro batch by micro batch."""
        shape = batch.mask_SR.shape
        return cls(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape))

    def add_share(self, share: PolicyScores) -> None:
        """Add what another replica found about its own sequences of the same batch."""
        self.logprobs_SR.add_(share.logprobs_SR)
        self.reference_SR.add_(share.reference_SR)
        self.entropy_SR.add_(share.entropy_SR)

    def put_actor(self, batch: PPOBatch, micro: MicroBatch, stats: TokenStats) -> None:
        """Write the actor's scores of a micro batch to their places."""
        assert stats.entropy_M is not None, "asked for"
        batch.unpack(stats.logprobs_M, micro, self.logprobs_SR)
        batch.unpack(stats.entropy_M, micro, self.entropy_SR)


@dataclass(frozen=True)
class Measured:
    """What the models compute for a rollout batch.

    Attributes:
        values_SR: the critic's; 0 without a critic.
    """

    policy: PolicyScores
    values_SR: Tensor

    @classmethod
    def join(cls, batch: PPOBatch, pieces: Sequence[tuple[int, Measured]]) -> Measured:
        """Join pieces of the batch, each with the place of its first sequence."""

        def joined(parts: list[tuple[int, Tensor]]) -> Tensor:
            # A piece is only as wide as its longest response.
            whole_SR = torch.zeros(batch.mask_SR.shape)
            for first, part_SR in parts:
                sequences, width = part_SR.shape
                whole_SR[first : first + sequences, :width] = part_SR
            return whole_SR

        policy = PolicyScores(
            joined([(first, piece.policy.logprobs_SR) for first, piece in pieces]),
            joined([(first, piece.policy.reference_SR) for first, piece in pieces]),
            joined([(first, piece.policy.entropy_SR) for first, piece in pieces]),
        )
        return cls(policy, joined([(first, piece.values_SR) for first, piece in pieces]))


@dataclass(frozen=True)
class Scores:
    """All that the update needs to know about a rollout batch.

    Attributes:
        weights_SR: importance of each token; None: 1.
        sequences: those that are learned from.
        kl_coefficient: weight of the penalty, if it is part of the loss.
    """

    logprobs_SR: Tensor
    reference_SR: Tensor
    values_SR: Tensor
    advantages_SR: Tensor
    returns_SR: Tensor
    weights_SR: Tensor | None
    sequences: tuple[int, ...]
    kl_coefficient: float
