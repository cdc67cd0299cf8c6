"""What a policy computes for response tokens: their log-probs and entropies, over the tokens that
top-k and top-p left.

Shape letters: B rows, T tokens (right-padded), D hidden, V vocabulary, X either D or V, M response
tokens of a micro batch, packed row after row, C some of them.

All networks stay in eval mode: dropout would make log-probs of unchanged weights differ, and the
ratio of PPO with them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
"""A logit with probability 0 whose log-prob can still be multiplied by 0."""


@dataclass(frozen=True)
class TokenStats:
    """A policy's statistics of the response tokens of a micro batch. All float32.

    Attributes:
        logprobs_M: log-prob of each response token at the sampling temperature, under the
            distribution that was sampled from.
        entropy_M: entropy of the same distribution in nats; None if not requested.
    """

    logprobs_M: Tensor
    entropy_M: Tensor | None = None


PACKED_BLOCK = 64
"""Rows whose kept tokens are searched at once."""


@dataclass(frozen=True)
class KeptTokens:
    """Which vocabulary tokens some rows keep, on the device of the logits: as ids if that is
    shorter (it nearly always is after top-k or top-p), otherwise as one bit per token.

    Attributes:
        counts: tokens that each row keeps.
        ids_N: int32, ids of the kept tokens, row after row; None: `bits_CX` has them.
        bits_CX: uint8, 8 tokens a byte.
    """

    counts: tuple[int, ...]
    ids_N: Tensor | None
    bits_CX: Tensor | None

    @classmethod
    def of(cls, kept_CV: Tensor) -> KeptTokens:
        """From bool `CV`."""
        count_C = kept_CV.sum(dim=1)
        counts = tuple(count_C.tolist())
        rows, width = kept_CV.shape
        if 4 * sum(counts) <= rows * -(-width // 8):
            return cls(counts, kept_CV.nonzero()[:, 1].int(), None)
        weights_8 = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=kept_CV.device)
        bits_CX = torch.empty(rows, -(-width // 8), dtype=torch.uint8, device=kept_CV.device)
        padded_CV = nn.functional.pad(kept_CV, (0, -width % 8))
        # The product is in int64, so only some rows at a time.
        for first in range(0, rows, PACKED_BLOCK):
            block = slice(first, first + PACKED_BLOCK)
            bits_CX[block] = (padded_CV[block].unflatten(1, (-1, 8)) * weights_8).sum(-1).byte()
        return cls(counts, None, bits_CX)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        held = self.ids_N if self.bits_CX is None else self.bits_CX
        return 0 if held is None else held.nbytes

    def part(self, first: int, last: int) -> KeptTokens:
        """The part for the rows from `first` up to `last`."""
        counts = self.counts[first:last]
        if self.bits_CX is not None:
            return KeptTokens(counts, None, self.bits_CX[first:last])
        assert self.ids_N is not None, "one of the two"
        start = sum(self.counts[:first])
        return KeptTokens(counts, self.ids_N[start : start + sum(counts)], None)

    def mark(self, kept_CV: Tensor) -> None:
        """Write them into bool `CV`, which is False."""
        if self.bits_CX is not None:
            shifts_8 = torch.arange(7, -1, -1, device=kept_CV.device, dtype=torch.uint8)
            bits_CX8 = (self.bits_CX.unsqueeze(-1) >> shifts_8) & 1
            kept_CV.copy_(bits_CX8.flatten(1)[:, : kept_CV.shape[1]])
            return
        assert self.ids_N is not None, "one of the two"
        counts_C = torch.tensor(self.counts, dtype=torch.int64, device=kept_CV.device)
        rows_N = torch.arange(len(self), device=kept_CV.device).repeat_interleave(counts_C)
        kept_CV[rows_N, self.ids_N.long()] = True


class Support:
    """The top-k/top-p mask of the actor that wrote the rollouts, at each of their positions; empty
    if neither is on.

    Old policy, new policy and reference all use it: the first is the distribution that was sampled
    from, and the others are restricted to the same tokens. With its own mask, an updated policy
    could give sampled tokens a probability of 0.

    It stays on the device of the logits: nothing as large as the vocabulary moves to the host or
    back.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self.cuts = sampling.top_k > 0 or sampling.top_p < 1.0
        # For each sequence, by its place in the batch: rows in order.
        self._kept: dict[int, list[KeptTokens]] = {}
        self._begun: list[KeptTokens] = []  # For a micro batch that comes in parts.

    @property
    def nbytes(self) -> int:
        """Bytes kept for the batch so far."""
        return sum(part.nbytes for parts in self._kept.values() for part in parts)

    def cut(self, logits_CV: Tensor, micro: MicroBatch, first: int = 0) -> Tensor:
        """The logits, with `NEVER` for all tokens outside the support.

        The first pass over a sequence decides its support, so it must be by the actor that wrote
        it.

        Args:
            logits_CV: logits of C response tokens of the micro batch, starting with the one at
                `first`. Parts must come in order.
        """
        if not self.cuts:
            return logits_CV
        rows = slice(first, first + len(logits_CV))
        if micro.places[0] in self._kept:
            kept_CV = torch.zeros_like(logits_CV, dtype=torch.bool)
            parts = [part for place in micro.places for part in self._kept[place]]
            for part, at in _overlapping(parts, rows):
                part.mark(kept_CV[at : at + len(part)])
        else:
            kept_CV = self._choose(logits_CV.detach(), micro.response_ids_M[rows])
            self._remember(KeptTokens.of(kept_CV), micro, rows)
        return logits_CV.masked_fill(~kept_CV, NEVER)

    def _choose(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        """Which tokens sampling keeps of these logits, bool `CV`."""
        truncated_CV = self._truncate(logits_CV)
        # The engine rounds differently, so its sampled token may be just outside of what we would
        # keep. Since it was sampled, it belongs to the support.
        return (truncated_CV > -torch.inf) | self._sampled(logits_CV, ids_C)

    def _truncate(self, logits_CV: Tensor) -> Tensor:
        """The logits with minus infinity for what top-k and top-p leave out."""
        return truncate_logits(logits_CV, self._sampling.top_k, self._sampling.top_p)

    def _sampled(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        """Which column is the sampled token's, bool `CV`."""
        none_CV = torch.zeros_like(logits_CV, dtype=torch.bool)
        return none_CV.scatter_(1, ids_C.unsqueeze(1), True)

    def _remember(self, kept: KeptTokens, micro: MicroBatch, rows: slice) -> None:
        """Store it by sequence, once the whole micro batch is there."""
        if rows.start == 0:
            self._begun = []
        self._begun.append(kept)
        lengths = micro.response_mask_BT.sum(dim=1).tolist()
        if rows.stop < sum(lengths):
            return
        start = 0
        for place, length in zip(micro.places, lengths, strict=True):
            own = _overlapping(self._begun, slice(start, start + length))
            self._kept[place] = [part for part, _ in own]
            start += length
        self._begun = []


def _overlapping(parts: Sequence[KeptTokens], rows: slice) -> Iterator[tuple[KeptTokens, int]]:
    """Which of the consecutive parts lie within these rows, and from which row on."""
    start = 0
    for part in parts:
        first, last = max(rows.start, start), min(rows.stop, start + len(part))
        if first < last:
            yield part.part(first - start, last - start), first - rows.start
        start += len(part)


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
    are computed in chunks of rows, and again in the backward pass. A model whose logits are more
    than lm_head's product computes its own, all at once; then only what follows is chunked.

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
    """Within the block products run in bfloat16, if enabled; weights don't change."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if on else contextlib.nullcontext()
