"""Log-probs and entropies of response tokens from logits that are spread over tensor-parallel
ranks.

Shape letters: M response tokens, C some of them, V tokens of the vocabulary held here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary
from medusa_ppo.ppo.token_stats import Support, TokenStats


class ShardedSupport(Support):
    """`Support` over the tokens that this rank holds."""

    def __init__(self, sampling: Sampling, vocabulary: ShardedVocabulary) -> None:
        super().__init__(sampling)
        self._vocabulary = vocabulary

    def _truncate(self, logits_CV: Tensor) -> Tensor:
        return self._vocabulary.truncate(logits_CV, self._sampling.top_k, self._sampling.top_p)

    def _sampled(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        # A token that this rank does not hold must mark nothing here; a plain `scatter_` would mark
        # column 0.
        one_C = torch.ones_like(logits_CV[:, 0])
        return self._vocabulary.add_at(torch.zeros_like(logits_CV), ids_C, one_C) > 0


def sharded_stats(
    logits_MV: Tensor, ids_M: Tensor, vocabulary: ShardedVocabulary, *, entropy: bool = False
) -> TokenStats:
    """Like `token_stats`, from this rank's logits. The result is the same on every rank. Gradients
    reach this rank's logits only.

    Args:
        logits_MV: float32, without the vocabulary's padding, at the sampling temperature, and
            truncated to the tokens that were sampled from.
        ids_M: the response tokens.
        vocabulary: how the vocabulary is sharded over ranks.
    """
    logprobs_M, entropy_M = _LogprobAndEntropy.apply(logits_MV, ids_M, vocabulary)
    return TokenStats(logprobs_M, entropy_M if entropy else None)


class _LogprobAndEntropy(torch.autograd.Function):
    """log p of the given token, and the entropy of the distribution.

    The gradients are written out because autograd does not see communication between ranks:
    d log p_i / d logit_v = [v = i] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, ids_M: Tensor, vocabulary: ShardedVocabulary
    ) -> tuple[Tensor, Tensor]:
        logprobs_MV = vocabulary.log_softmax(logits_MV)
        entropy_M = -vocabulary.total(logprobs_MV.exp() * logprobs_MV)
        ctx.save_for_backward(logprobs_MV, ids_M, entropy_M)
        ctx.vocabulary = vocabulary
        return vocabulary.pick(logprobs_MV, ids_M), entropy_M

    @staticmethod
    def backward(ctx: Any, picked_M: Tensor, entropy_grad_M: Tensor) -> tuple[Tensor, None, None]:
        logprobs_MV, ids_M, entropy_M = ctx.saved_tensors
        mass_MV = logprobs_MV.exp()
        grad_MV = -mass_MV * (
            picked_M[:, None] + entropy_grad_M[:, None] * (logprobs_MV + entropy_M[:, None])
        )
        return ctx.vocabulary.add_at(grad_MV, ids_M, picked_M), None, None
