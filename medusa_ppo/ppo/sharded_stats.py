"""What the actor says about response tokens where each rank has some columns of the logits: `TokenStats` without gathering them.

Shape letters: M response tokens of a micro batch, V the tokens of the vocabulary that this rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.vocabulary import Vocabulary
from medusa_ppo.ppo.models import TokenStats
from medusa_ppo.types import Sampling


def sharded_stats(
    logits_MV: Tensor, ids_M: Tensor, vocabulary: Vocabulary, sampling: Sampling, *, entropy: bool = False, kept: bool = False
) -> TokenStats:
    """As `token_stats`, from this rank's logits; the same on every rank. Gradients reach this rank's logits only.

    Args:
        logits_MV: without the vocabulary's padding, before the temperature.
        ids_M: the response tokens.
        vocabulary: how the tokens are spread over ranks.
    """
    scaled_MV = logits_MV.float() / sampling.temperature
    logprobs_M, entropy_M = _LogprobAndEntropy.apply(scaled_MV, ids_M, vocabulary)
    log_kept_M = _log_kept(scaled_MV.detach(), vocabulary, sampling) if kept else None
    return TokenStats(logprobs_M, entropy_M if entropy else None, log_kept_M)


class _LogprobAndEntropy(torch.autograd.Function):
    """log p of the given token, and the entropy of the distribution."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, ids_M: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        logprobs_MV = vocabulary.log_softmax(logits_MV)
        entropy_M = -vocabulary.total(logprobs_MV.exp() * logprobs_MV)
        ctx.save_for_backward(logprobs_MV, ids_M, entropy_M)
        ctx.vocabulary = vocabulary
        return vocabulary.pick(logprobs_MV, ids_M), entropy_M

    @staticmethod
    def backward(ctx: Any, picked_M: Tensor, entropy_grad_M: Tensor) -> tuple[Tensor, None, None]:
        logprobs_MV, ids_M, entropy_M = ctx.saved_tensors
        mass_MV = logprobs_MV.exp()
        grad_MV = -mass_MV * (picked_M[:, None] + entropy_grad_M[:, None] * (logprobs_MV + entropy_M[:, None]))
        return ctx.vocabulary.add_at(grad_MV, ids_M, picked_M), None, None


def _log_kept(logits_MV: Tensor, vocabulary: Vocabulary, sampling: Sampling) -> Tensor:
    """As `log_kept_mass`."""
    if not sampling.top_k and sampling.top_p >= 1.0:
        return torch.zeros_like(logits_MV[:, 0])
    cut_MV = vocabulary.truncate(logits_MV, sampling.top_k, sampling.top_p)
    return (vocabulary.logsumexp(cut_MV) - vocabulary.logsumexp(logits_MV)).squeeze(1)
