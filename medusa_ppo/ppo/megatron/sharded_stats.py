"""Log-probs and entropies of response tokens from logits that are spread over tensor-parallel
ranks.

Shape letters: N rows of a micro-batch's logits, M response tokens, C some of them, V tokens of the
vocabulary held here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.heads_config import CPU_CHUNK, GPU_CHUNK
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary
from medusa_ppo.ppo.token_stats import Support, TokenStats

Cut = Callable[[Tensor, int], Tensor]


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
    logits_NV: Tensor,
    rows_M: Tensor,
    ids_M: Tensor,
    vocabulary: ShardedVocabulary,
    *,
    temperature: float = 1.0,
    cut: Cut | None = None,
    entropy: bool = False,
    chunk_rows: int | None = None,
) -> TokenStats:
    """Like `token_stats`, from this rank's logits. The result is the same on every rank. Gradients
    reach this rank's logits only.

    In float32 there are only the logits of some rows at a time, here and in the backward pass:
    those of a whole micro-batch, and what is made of them, would take more than the model.

    Args:
        logits_NV: of a micro-batch, in the model's dtype, with or without the vocabulary's padding.
        rows_M: which of its rows predict the response tokens.
        ids_M: the response tokens.
        vocabulary: how the vocabulary is sharded over ranks.
        temperature: the sampling temperature.
        cut: from the logits of consecutive response tokens, and which is the first of these, makes
            those truncated to what was sampled from; None: all tokens were.
        entropy: whether it is wanted.
        chunk_rows: rows at a time; None: as many as in the companion's losses.
    """
    if chunk_rows is None:
        most = GPU_CHUNK if logits_NV.is_cuda else CPU_CHUNK
        # Not by what this rank holds: all have to communicate equally often.
        chunk_rows = max(1, most // vocabulary.rows_per_rank)
    chunks = _Chunks(rows_M, ids_M, vocabulary, temperature, cut, entropy, chunk_rows)
    logprobs_M, entropy_M = _LogprobAndEntropy.apply(logits_NV, chunks)
    return TokenStats(logprobs_M, entropy_M if entropy else None)


@dataclass(frozen=True)
class _Chunks:
    """How the logits are read: the arguments of `sharded_stats`."""

    rows_M: Tensor
    ids_M: Tensor
    vocabulary: ShardedVocabulary
    temperature: float
    cut: Cut | None
    entropy: bool
    chunk_rows: int

    def of(self, logits_NV: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some response tokens after the other, with their logits in float32, `CV`: scaled and
        cut.
        """
        own_NV = self.vocabulary.own_rows(logits_NV, dim=1)
        for first in range(0, len(self.ids_M), self.chunk_rows):
            part = slice(first, first + self.chunk_rows)
            logits_CV = own_NV[self.rows_M[part]].float()
            if self.temperature != 1.0:
                logits_CV = logits_CV / self.temperature
            yield part, logits_CV if self.cut is None else self.cut(logits_CV, first)


class _LogprobAndEntropy(torch.autograd.Function):
    """log p of the given token, and the entropy of the distribution.

    The gradients are written out because autograd does not see communication between ranks:
    d log p_i / d logit_v = [v = i] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
    Both are 0 for what a cut left out.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, chunks: _Chunks) -> tuple[Tensor, Tensor]:
        vocabulary = chunks.vocabulary
        logprobs_M = torch.empty(len(chunks.ids_M), device=logits_NV.device)
        log_mass_M1 = torch.empty_like(logprobs_M).unsqueeze(1)
        entropy_M = torch.zeros_like(logprobs_M)
        for part, logits_CV in chunks.of(logits_NV):
            log_mass_M1[part] = vocabulary.log_mass(logits_CV)
            logprobs_CV = logits_CV - log_mass_M1[part]
            del logits_CV
            if chunks.entropy:
                entropy_M[part] = -vocabulary.total(logprobs_CV.exp() * logprobs_CV)
            logprobs_M[part] = vocabulary.pick(logprobs_CV, chunks.ids_M[part])
        ctx.save_for_backward(logits_NV, log_mass_M1, entropy_M)
        ctx.chunks = chunks
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, picked_M: Tensor, entropy_grad_M: Tensor) -> tuple[Tensor, None]:
        logits_NV, log_mass_M1, entropy_M = ctx.saved_tensors
        chunks: _Chunks = ctx.chunks
        grad_NV = torch.zeros_like(logits_NV)
        own_NV = chunks.vocabulary.own_rows(grad_NV, dim=1)
        for part, logits_CV in chunks.of(logits_NV):
            logprobs_CV = logits_CV - log_mass_M1[part]
            del logits_CV
            mass_CV = logprobs_CV.exp()
            pulls = picked_M[part].unsqueeze(1)  # On all tokens of a row alike, or on each.
            if chunks.entropy:
                of_entropy_CV = logprobs_CV.add_(entropy_M[part].unsqueeze(1))
                pulls = pulls + of_entropy_CV.mul_(entropy_grad_M[part].unsqueeze(1))
            grad_CV = mass_CV.neg_().mul_(pulls)
            grad_CV = chunks.vocabulary.add_at(grad_CV, chunks.ids_M[part], picked_M[part])
            own_NV[chunks.rows_M[part]] = grad_CV.div_(chunks.temperature).to(grad_NV.dtype)
        return grad_NV, None
