"""A vocabulary sharded over tensor-parallel ranks: each rank holds the logits of some tokens. Sums
and comparisons over all tokens need no gathered logits.

Shape letters: C rows, V tokens held here, W ranks, K tokens kept by top-k.

Rank i holds the tokens `first ... first + rows - 1`, as Megatron's vocabulary-parallel layers do;
their padding is left out. A log-prob needs three numbers per row from each rank: the largest logit,
the sum of exponentials and the token's own logit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from heads.errors import ConfigError

KEY_BITS = 32


class ShardedVocabulary:
    """Operations that read or sum over all tokens. Every rank calls each method in the same order,
    with the same rows. Results are the same on every rank, except those with a V dimension: these
    are this rank's columns.

    Attributes:
        size: tokens of the whole vocabulary.
        first, rows: the first token that this rank holds, and how many.
        rows_per_rank: rows of every rank except the last, which may hold fewer.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, *, rows_per_rank: int = 0) -> None:
        """
        Args:
            size: tokens of the whole vocabulary, padding left out.
            group: the tensor-parallel ranks.
            rows_per_rank: rows of a rank with padding, as Megatron splits the table; 0: size /
                ranks, rounded up.
        """
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.size = size
        self.rows_per_rank = rows_per_rank or -(-size // self.ranks)
        self.first = self.rank * self.rows_per_rank
        self.rows = min(self.rows_per_rank, size - self.first)
        too_few = size > self.rows_per_rank * self.ranks
        last_is_empty = size <= self.rows_per_rank * (self.ranks - 1)
        # Maxima and top-k would fail on the empty dimension of a rank without tokens.
        if too_few or last_is_empty:
            raise ConfigError(
                "This vocabulary can't be sharded over these ranks.",
                given=f"{size} tokens, {self.rows_per_rank} on each of {self.ranks} ranks",
                expected="each token on a rank, at least one token on each",
                do="Use fewer ranks, or correct rows_per_rank.",
            )

    def own_rows(self, table: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of a whole table, or of a shard that still has its padding (a view)."""
        start = self.first if table.shape[dim] == self.size else 0
        return table.narrow(dim, start, self.rows)

    def log_softmax(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Log-probs of the tokens held here, normalised over all tokens."""
        return logits_CV - self.log_mass(logits_CV)

    def log_mass(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """log of the sum of exponentials over all tokens, `C1`."""
        # The largest logit over all ranks, because all sums of exponentials need the same scale.
        highest_C1 = self._reduce(logits_CV.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        sum_C1 = self._reduce((logits_CV - highest_C1).exp_().sum(-1, keepdim=True))
        return highest_C1 + sum_C1.log()

    def pick(self, values_CV: torch.Tensor, ids_C: torch.Tensor) -> torch.Tensor:
        """One token's value in each row, `C`."""
        index_C, mine_C = self._local(ids_C)
        picked_C = values_CV.gather(1, index_C.unsqueeze(1)).squeeze(1)
        # Exactly one rank adds a value other than zero.
        return self._reduce(torch.where(mine_C, picked_C, 0.0))

    def add_at(
        self, values_CV: torch.Tensor, ids_C: torch.Tensor, amounts_C: torch.Tensor
    ) -> torch.Tensor:
        """Add to one token's value in each row, in place."""
        index_C, mine_C = self._local(ids_C)
        own_C = torch.where(mine_C, amounts_C, 0.0)
        return values_CV.scatter_add_(1, index_C.unsqueeze(1), own_C.unsqueeze(1))

    def total(self, values_CV: torch.Tensor) -> torch.Tensor:
        """Sum over all tokens, `C`."""
        return self._reduce(values_CV.sum(-1))

    def truncate(self, logits_CV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
        """Like `heads.vocabulary.truncate_logits`, except that all tokens tied with the last kept
        one are kept; over a whole vocabulary, top-p keeps only some of them.
        """
        if 0 < top_k < self.size:
            logits_CV = self._top_k(logits_CV, top_k)
        return logits_CV if top_p >= 1.0 else self._top_p(logits_CV, top_p)

    def _top_k(self, logits_CV: torch.Tensor, top_k: int) -> torch.Tensor:
        """The best k of all tokens are among the best k of each rank, so only they are gathered."""
        best_CK = torch.full(
            (logits_CV.shape[0], min(top_k, self.rows_per_rank)),
            -torch.inf,
            device=logits_CV.device,
        )
        # The last rank may hold fewer tokens than it has to return.
        held = min(best_CK.shape[1], self.rows)
        best_CK[:, :held] = logits_CV.topk(held, dim=-1).values
        all_CX = self._gather(best_CK).transpose(0, 1).flatten(1)
        threshold_C1 = all_CX.topk(top_k, dim=-1).values[:, -1:]
        return logits_CV.masked_fill(logits_CV < threshold_C1, -torch.inf)

    def _top_p(self, logits_CV: torch.Tensor, top_p: float) -> torch.Tensor:
        """Bisection on the bits of the lowest kept logit. Sorting would need all logits in one
        place; this takes one sum per row for each bit of a float.
        """
        # If top-p is near 1, the tail that it cuts is lost in the rounding of a float32 sum over
        # the vocabulary.
        mass_CV = self.log_softmax(logits_CV).exp().double()
        keys_CV = _ordered_bits(logits_CV)
        # The highest logit is always kept, as in `truncate_logits`.
        high_C = self._reduce(keys_CV.amax(-1), dist.ReduceOp.MAX)
        low_C = torch.full_like(high_C, -(1 << (KEY_BITS - 1)))
        for _ in range(KEY_BITS):
            middle_C = (low_C + high_C).div(2, rounding_mode="floor")
            mass_below_C = self.total(torch.where(keys_CV <= middle_C.unsqueeze(1), mass_CV, 0.0))
            enough_C = mass_below_C > 1 - top_p
            high_C = torch.where(enough_C, middle_C, high_C)
            low_C = torch.where(enough_C, low_C, middle_C + 1)
            # If rounding leaves even the whole mass at or below 1 - top_p, the lower end would pass
            # the upper one.
            low_C = torch.minimum(low_C, high_C)
        return logits_CV.masked_fill(keys_CV < high_C.unsqueeze(1), -torch.inf)

    def _local(self, ids_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Column of each id on this rank (0 if another rank has it), and whether it is on this
        rank.
        """
        mine_C = (ids_C >= self.first) & (ids_C < self.first + self.rows)
        return torch.where(mine_C, ids_C - self.first, 0), mine_C

    def _reduce(
        self, values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        # In place: every caller passes a tensor that it has just computed.
        dist.all_reduce(values, how, group=self._group)
        return values

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """Everyone's values, `W...`."""
        out = values.new_empty((self.ranks, *values.shape))
        dist.all_gather(list(out.unbind(0)), values.contiguous(), group=self._group)
        return out


def _ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Integers that sort like the float32 values."""
    bits = values.float().view(torch.int32).long()
    # Negative floats have the sign bit set, and their other bits grow downwards.
    return torch.where(bits >= 0, bits, bits ^ ((1 << (KEY_BITS - 1)) - 1))
