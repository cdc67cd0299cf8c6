"""What a policy says about response tokens: their log-probs and entropies, over the tokens that the
sampling left.

Shape letters: B rows, T tokens (right-padded), D hidden, V vocabulary, X one of the two, M response
tokens of a micro batch, packed row after row, C some of them.

All networks stay in eval mode: dropout would make log-probs of unchanged weights differ, and the
ratio of PPO with them.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from heads.vocabulary import WHOLE, truncate_logits
from medusa_ppo.actors.actor_tables import beyond_lm_head
from medusa_ppo.actors.vision import forward
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.batch import MicroBatch
from medusa_ppo.ppo.recompute import CHECKPOINT_OPTIONS

NEVER = -1e30
"""A logit whose probability is 0, with log-probs that 0 can be multiplied with."""


@dataclass(frozen=True)
class TokenStats:
    """What a policy says about the response tokens of a micro batch. All float32.

    Attributes:
        logprobs_M: log-prob of each response token at the sampling temperature, under the
            distribution that was sampled from.
        entropy_M: entropy of the same distribution in nats; None when not asked for.
    """

    logprobs_M: Tensor
    entropy_M: Tensor | None = None


class Support:
    """Which tokens top-k and top-p left to the actor that wrote the rollouts, at each of their
    positions; nothing where neither is on.

    Old and new policy and the reference are all taken over these: the distribution that was sampled
    from, and what the same choice leaves of the others. Each policy's own choice would give tokens
    that were sampled a probability of 0 after an update.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self.cuts = sampling.top_k > 0 or sampling.top_p < 1.0
        self._bits: dict[int, np.ndarray] = {}  # A bit for each token of the vocabulary.
        self._begun: list[np.ndarray] = []  # Of a micro batch that comes in parts.

    def cut(self, logits_CV: Tensor, micro: MicroBatch, first: int = 0) -> Tensor:
        """The logits, with `NEVER` for all tokens outside the support.

        The first pass over a sequence decides its support, so it must be that of the actor that
        wrote it.

        Args:
            logits_CV: of C response tokens of the micro batch, from the one at `first` on. Whoever
                does not give all at once gives them in their order.
        """
        if not self.cuts:
            return logits_CV
        rows = slice(first, first + len(logits_CV))
        if micro.places[0] in self._bits:
            bits_CV = np.concatenate([self._bits[place] for place in micro.places])[rows]
        else:
            bits_CV = self._choose(logits_CV.detach(), micro.response_ids_M[rows])
            self._remember(bits_CV, micro, rows)
        kept_CV = torch.from_numpy(np.unpackbits(bits_CV, axis=1, count=logits_CV.shape[1]))
        return logits_CV.masked_fill(~kept_CV.to(logits_CV.device).bool(), NEVER)

    def _choose(self, logits_CV: Tensor, ids_C: Tensor) -> np.ndarray:
        """Packed bits of the tokens that the sampling leaves of these logits."""
        truncated_CV = self._truncate(logits_CV)
        # The engine rounds in its own way, so the token that it sampled may lie just outside of
        # what we would keep. It was sampled: it belongs to the support.
        kept_CV = (truncated_CV > -torch.inf) | self._sampled(logits_CV, ids_C)
        return np.packbits(kept_CV.cpu().numpy(), axis=1)

    def _truncate(self, logits_CV: Tensor) -> Tensor:
        """The logits with minus infinity for what top-k and top-p leave out."""
        return truncate_logits(logits_CV, self._sampling.top_k, self._sampling.top_p)

    def _sampled(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        """Which column is the sampled token's, bool `CV`."""
        none_CV = torch.zeros_like(logits_CV, dtype=torch.bool)
        return none_CV.scatter_(1, ids_C.unsqueeze(1), True)

    def _remember(self, bits_CV: np.ndarray, micro: MicroBatch, rows: slice) -> None:
        """Keep the bits by sequence, once those of the whole micro batch are there."""
        if rows.start == 0:
            self._begun = []
        self._begun.append(bits_CV)
        lengths = micro.response_mask_BT.sum(dim=1).tolist()
        if rows.stop == sum(lengths):
            by_sequence = np.split(np.concatenate(self._begun), np.cumsum(lengths)[:-1])
            self._bits.update(zip(micro.places, by_sequence, strict=True))


def token_stats(
    actor: nn.Module,
    micro: MicroBatch,
    sampling: Sampling,
    *,
    entropy: bool = False,
    support: Support | None = None,
    autocast: bool = False,
    chunk_rows: int | None = None,
) -> TokenStats:
    """Run the actor over a micro batch; keeps the graph when gradients are on.

    The logits are divided by the sampling temperature, as the engine's sampler does, and cut to
    `support`: the policy that PPO improves is the one that wrote the rollouts. With `autocast`
    products run in bfloat16 while weights and log-probs stay float32.

    With a large vocabulary the logits of all tokens would need more memory than the model. So they
    are made in chunks of rows, and made again in the backward pass. A model whose logits are more
    than lm_head's product gives its own, whole; then only what follows is done in chunks.

    Args:
        chunk_rows: rows of logits at a time; None: as many as in the companion's losses.
    """
    lm_head = _plain_lm_head(actor)
    with bfloat16_products(micro.input_ids_BT.device, autocast):
        if lm_head is None:
            source_MX = _response_logits(actor, micro)
        else:
            base: Any = actor.base_model
            hidden_BTD = forward(base, micro.input_ids_BT, micro.seen).last_hidden_state
            source_MX = hidden_BTD[micro.predict_mask_BT]
    ids_M = micro.response_ids_M

    def chunk_stats(source_CX: Tensor, first: int) -> tuple[Tensor, Tensor]:
        with bfloat16_products(source_CX.device, autocast):
            logits_CV = source_CX if lm_head is None else lm_head(source_CX)
        logits_CV = logits_CV.float()
        if sampling.temperature != 1.0:
            logits_CV = logits_CV / sampling.temperature
        if support is not None:
            logits_CV = support.cut(logits_CV, micro, first=first)
        logprobs_CV = logits_CV.log_softmax(dim=-1)
        ids_C = ids_M[first : first + len(source_CX)]
        logprobs_C = logprobs_CV.gather(1, ids_C[:, None]).squeeze(1)
        if not entropy:
            return logprobs_C, logprobs_C[:0]
        return logprobs_C, -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)

    rows = chunk_rows
    if rows is None:
        rows = len(ids_M) if lm_head is None else WHOLE.chunk_rows(lm_head.weight)
    recompute = torch.is_grad_enabled() and rows < len(ids_M)
    parts = []
    for first in range(0, len(ids_M), rows):
        source_CX = source_MX[first : first + rows]
        if recompute:
            parts.append(checkpoint(chunk_stats, source_CX, first, **CHECKPOINT_OPTIONS))
        else:
            parts.append(chunk_stats(source_CX, first))
    logprobs, entropies = zip(*parts, strict=True)
    return TokenStats(torch.cat(logprobs), torch.cat(entropies) if entropy else None)


def _plain_lm_head(actor: Any) -> nn.Linear | None:
    """The actor's lm_head, if its product with the final states is the logits; else None."""
    if not isinstance(actor, PreTrainedModel) or actor.base_model is actor:
        return None
    lm_head: Any = actor.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear) or beyond_lm_head(actor, lm_head):
        return None
    return lm_head


def _response_logits(actor: nn.Module, micro: MicroBatch) -> Tensor:
    """logits_MV of the positions that predict response tokens.

    A model that knows `logits_to_keep` does not run lm_head over the prompts.
    """
    extra = {}
    if "logits_to_keep" in inspect.signature(actor.forward).parameters:
        extra["logits_to_keep"] = micro.input_ids_BT.shape[1] - micro.first_predicting
    logits_BTV = forward(actor, micro.input_ids_BT, micro.seen, **extra).logits
    return logits_BTV[micro.predict_mask_BT[:, -logits_BTV.shape[1] :]]


def bfloat16_products(device: torch.device, on: bool) -> contextlib.AbstractContextManager[object]:
    """In the block products run in bfloat16, if it is on; weights stay what they are."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if on else contextlib.nullcontext()
