"""Draft heads whose vocabulary is spread over tensor-parallel ranks: each holds some rows of
lm_head and tables, none gathers logits.

Shape letters: N ids or rows, C rows of one chunk, V vocabulary rows held here, W ranks, K heads, D
hidden.

Rank i holds the tokens `first ... first + rows - 1`, as vocabulary-parallel layers do (Megatron's
`output_layer.weight` without its padding is used as it is). Residual blocks and MLPs are whole on
every rank, and stay equal because every rank sees the same gradient. What crosses between ranks,
per row of one head: the largest logit, the sum of exponentials and the target's logit (one number
each), and once per backward pass the gradient of the features, D numbers. The losses are those of
heads/losses.py:

    vocabulary = ShardedVocabulary(V, group)
    heads = ParallelHeads.shard(heads, vocabulary)
    loss_K = head_loss(heads.factored(hidden, lm_head_shard), targets, mask, config,
    vocabulary=vocabulary) loss_K.sum().backward() heads.clip_gradients(1.0)

Logits that `forward` and `multiply_out` return are this rank's columns; autograd through them gives
a part of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heads.checkpoint import HeadsMetadata, load_heads
from heads.errors import ConfigError
from heads.heads_config import HeadsConfig
from heads.modules import SHARED_PREFIXES, MedusaHeads
from heads.vocabulary import Vocabulary

SHARDED_KEYS = ("lm_heads.",)  # File keys of tensors with one row per token.
SHARDED_PARAMETERS = ("lm_heads",)
KEY_BITS = 32


class ShardedVocabulary(Vocabulary):
    """The operations of `Vocabulary` across the ranks of a process group. Every rank calls them in
    the same order, with the same rows.

    Attributes:
        size: tokens of the whole vocabulary.
        first, rows: the first token that this rank holds, and how many.
        rows_per_rank: rows of every rank but the last, which may hold fewer.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, *, rows_per_rank: int = 0) -> None:
        """
        Args:
            size: tokens of the whole vocabulary, padding left out.
            group: the tensor-parallel ranks.
            rows_per_rank: rows of a rank with padding, as Megatron cuts the table; 0: size / ranks,
                rounded up.
        """
        self.size = size
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.rows_per_rank = rows_per_rank or -(-size // self.ranks)
        self.first = self.rank * self.rows_per_rank
        self.rows = min(self.rows_per_rank, size - self.first)
        if size > self.rows_per_rank * self.ranks or size <= self.rows_per_rank * (self.ranks - 1):
            raise ConfigError(
                "This vocabulary can't be spread over these ranks.",
                given=f"{size} tokens, {self.rows_per_rank} on each of {self.ranks} ranks",
                expected="all tokens held, at least one on each rank",
                do="Use fewer ranks, or correct rows_per_rank.",
            )

    def width(self, held: int) -> int:
        return self.rows_per_rank

    def own_rows(self, table: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of a whole table, or of a shard that still has its padding (a view)."""
        start = self.first if table.shape[dim] == self.size else 0
        return table.narrow(dim, start, self.rows)

    def look_up(self, ids_N: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        index_N, mine_N = self._local(ids_N)
        rows_ND = torch.where(
            mine_N.unsqueeze(-1), torch.nn.functional.embedding(index_N, table_VD), 0.0
        )
        return _SumOverRanks.apply(rows_ND, self._group)

    def logsumexp(self, logits_CV: torch.Tensor) -> torch.Tensor:
        highest_C1 = self._reduce(logits_CV.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        return (
            highest_C1 + self._reduce((logits_CV - highest_C1).exp_().sum(-1, keepdim=True)).log()
        )

    def log_softmax(self, logits_CV: torch.Tensor) -> torch.Tensor:
        return logits_CV - self.logsumexp(logits_CV)

    def pick(self, values_CV: torch.Tensor, ids_C: torch.Tensor) -> torch.Tensor:
        index_C, mine_C = self._local(ids_C)
        return self._reduce(torch.where(mine_C, super().pick(values_CV, index_C), 0.0))

    def add_at(
        self, values_CV: torch.Tensor, ids_C: torch.Tensor, amounts_C: torch.Tensor
    ) -> torch.Tensor:
        index_C, mine_C = self._local(ids_C)
        return super().add_at(values_CV, index_C, torch.where(mine_C, amounts_C, 0.0))

    def total(self, values_CV: torch.Tensor) -> torch.Tensor:
        return self._reduce(values_CV.sum(-1))

    def argmax(self, logits_CV: torch.Tensor) -> torch.Tensor:
        best = logits_CV.max(-1)
        highest_C = self._reduce(best.values.clone(), dist.ReduceOp.MAX)
        return self._reduce(
            torch.where(best.values == highest_C, best.indices + self.first, self.size),
            dist.ReduceOp.MIN,
        )

    def truncate(self, logits_CV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
        """Ties with the last token that is kept are kept (the whole vocabulary's top-p keeps some
        of them).
        """
        if 0 < top_k < self.size:
            best_CK = torch.full(
                (logits_CV.shape[0], min(top_k, self.rows_per_rank)),
                -torch.inf,
                device=logits_CV.device,
            )
            held = min(best_CK.shape[1], self.rows)
            best_CK[:, :held] = logits_CV.topk(held, dim=-1).values
            all_WCK = self._gather(best_CK)
            threshold_C1 = all_WCK.transpose(0, 1).flatten(1).topk(top_k, dim=-1).values[:, -1:]
            logits_CV = logits_CV.masked_fill(logits_CV < threshold_C1, -torch.inf)
        return logits_CV if top_p >= 1.0 else self._top_p(logits_CV, top_p)

    def _top_p(self, logits_CV: torch.Tensor, top_p: float) -> torch.Tensor:
        """Bisection on the bits of the lowest logit that stays: as many sums of one number per row
        as a float has bits.
        """
        mass_CV = self.log_softmax(logits_CV).exp().double()
        keys_CV = _ordered_bits(logits_CV)
        high_C = self._reduce(keys_CV.amax(-1), dist.ReduceOp.MAX)
        low_C = torch.full_like(high_C, -(1 << (KEY_BITS - 1)))
        for _ in range(KEY_BITS):
            middle_C = (low_C + high_C).div(2, rounding_mode="floor")
            enough_C = (
                self.total(torch.where(keys_CV <= middle_C.unsqueeze(1), mass_CV, 0.0)) > 1 - top_p
            )
            high_C = torch.where(enough_C, middle_C, high_C)
            low_C = torch.where(enough_C, low_C, middle_C + 1)
            low_C = torch.minimum(low_C, high_C)
        return logits_CV.masked_fill(keys_CV < high_C.unsqueeze(1), -torch.inf)

    def sum_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._reduce(gradient)

    def whole(self, rows_V: torch.Tensor) -> torch.Tensor:
        """A table (not logits: these are never gathered) from all ranks' rows, on every rank."""
        padded = rows_V.new_zeros((self.rows_per_rank, *rows_V.shape[1:]))
        padded[: self.rows] = rows_V
        return self._gather(padded).flatten(0, 1)[: self.size]

    def _local(self, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each id here (0 where another rank has it), and whether it is here."""
        mine_N = (ids_N >= self.first) & (ids_N < self.first + self.rows)
        return torch.where(mine_N, ids_N - self.first, 0), mine_N

    def _reduce(
        self, values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        dist.all_reduce(values, how, group=self._group)
        return values

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """Everyone's values, `W...`; small ones: per row a number or top_k of them."""
        out = values.new_empty((self.ranks, *values.shape))
        dist.all_gather(list(out.unbind(0)), values.contiguous(), group=self._group)
        return out


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; each rank's part gets the gradient of the sum, which is the same
    everywhere.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        out = values.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class ParallelHeads(MedusaHeads):
    """One rank's share of a set of heads. `config` has the sizes of the share, `whole_config` those
    of the whole.

    lm_head and embedding table are passed to its methods as this rank's rows, without padding
    (`ShardedVocabulary.own_rows`).
    """

    vocabulary: ShardedVocabulary

    def __init__(self, config: HeadsConfig, vocabulary: ShardedVocabulary) -> None:
        """Random parts are not those of whole heads; use `shard` or `load`."""
        if config.vocab_size != vocabulary.size:
            raise ConfigError(
                "The vocabulary is of another size.",
                given=vocabulary.size,
                expected=config.vocab_size,
                do="Correct it.",
            )
        with torch.random.fork_rng(
            devices=[]
        ):  # Shares of unequal size would leave ranks with unequal random states.
            super().__init__(replace(config, vocab_size=vocabulary.rows))
        self.whole_config = config
        self.vocabulary = vocabulary

    @classmethod
    def shard(cls, heads: MedusaHeads, vocabulary: ShardedVocabulary) -> ParallelHeads:
        """This rank's share of heads that every rank has whole and alike."""
        share = cls(heads.config, vocabulary).to(heads.dtype)
        share.load_trainable_state(share.own_state(heads.trainable_state()))
        return share

    @classmethod
    def load(
        cls, path: str | Path, vocabulary: ShardedVocabulary, **actor: int
    ) -> tuple[ParallelHeads, HeadsMetadata]:
        """This rank's share of a native directory, whatever tensor-parallel size wrote it;
        arguments and errors of `load_heads`.
        """
        heads, metadata = load_heads(path, **actor)
        return cls.shard(heads, vocabulary), metadata

    def own_state(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's share of a whole state (file keys)."""
        return {
            name: self.vocabulary.own_rows(value) if name.startswith(SHARDED_KEYS) else value
            for name, value in whole.items()
        }

    def whole_heads(self) -> MedusaHeads:
        """The whole set, on every rank; for `heads.checkpoint.save_heads` on one of them. All ranks
        must call it.
        """
        heads = MedusaHeads(self.whole_config).to(self.dtype)
        state = self.trainable_state()
        heads.load_trainable_state(
            {
                name: self.vocabulary.whole(value) if name.startswith(SHARDED_KEYS) else value
                for name, value in state.items()
            }
        )
        return heads

    @torch.no_grad()
    def clip_gradients(self, clip_norm: float) -> torch.Tensor:
        """Scale each head's gradient to at most `clip_norm`, and that of what they share; the norms
        before, float32 `K` and one more where they share something, are those of the whole heads on
        every rank.
        """
        heads = self.config.num_heads
        squares_K = torch.zeros(2, heads + bool(self.config.context), device=self.blocks[0].device)
        parts: list[tuple[int, torch.Tensor]] = []
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            if name.startswith(SHARED_PREFIXES):
                own = [(heads, parameter.grad)]
            else:
                own = (
                    [(int(name.split(".")[1]), parameter.grad)]
                    if name.startswith("mlp_in.")
                    else list(enumerate(parameter.grad))
                )
            sharded = int(name.startswith(SHARDED_PARAMETERS))
            for k, gradient in own:
                squares_K[sharded, k] += torch.linalg.vector_norm(gradient.float()).square()
            parts += own
        norm_K = (squares_K[0] + self.vocabulary.total(squares_K[1].unsqueeze(1))).sqrt()
        for k, gradient in parts:
            gradient.mul_((clip_norm / (norm_K[k] + 1e-12)).clamp(max=1.0))
        return norm_K


def _ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the float32 values."""
    bits = values.float().view(torch.int32).long()
    return torch.where(bits >= 0, bits, bits ^ ((1 << (KEY_BITS - 1)) - 1))
