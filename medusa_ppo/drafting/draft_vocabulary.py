"""A truncated draft vocabulary: the tokens that the rollouts really use, and lm_head's rows for them.

Most of a vocabulary never occurs in the responses of one task, yet every draft would pay for it in lm_head's product. The map holds the
`size` most frequent tokens of what the engine has sampled so far (with forgetting); it begins by itself when enough was counted, and is
picked anew whenever heads or actor change. Drafts come from it alone; q is zero elsewhere, which
verification is told, so nothing is lost but the acceptance of rare tokens. FR-Spec (Zhao et al., 2025) fixes such a map beforehand;
here it follows the policy.

Shape letters: N rows, D hidden, V vocabulary, W width of the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

LINEAR = Callable[[torch.Tensor], torch.Tensor]
"""Rows `[N, in]` -> `[N, out]`."""
PACK = Callable[[torch.Tensor], LINEAR]
"""A weight `[out, in]` -> its product."""
LM_HEAD = LINEAR
FORGET = 0.5
"""What is left of the counts at each refresh."""
MIN_TOKENS_PER_ENTRY = 2
"""The map begins when so many tokens for each of its places were counted; before, drafts use the whole vocabulary."""
ROWS_AT_ONCE = 256


def plain_linear(weight: torch.Tensor) -> LINEAR:
    """Nothing packed: the reference, and what GPUs use."""
    return lambda rows: F.linear(rows, weight)


class TokenMap:
    """Counts tokens, picks the most frequent ones, and multiplies by their rows of lm_head.

    Attributes:
        ids_W: int64, ids in the map, ascending; None while there is none.
    """

    def __init__(self, size: int, vocab_size: int, pack: PACK = plain_linear, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            size: W; 0 or `vocab_size` and more: never a map.
            vocab_size: V.
            pack: how its rows become a product.
            dtype: what to compute in; None: as lm_head.
        """
        self.size = size if 0 < size < vocab_size else 0
        self.ids_W: torch.Tensor | None = None
        self._counts_V = torch.zeros(vocab_size, dtype=torch.float64)
        self._counted = 0
        self._pack, self._dtype = pack, dtype
        self._product: LINEAR | None = None
        self._bias_W: torch.Tensor | None = None

    def observe(self, sampled_token_ids: Sequence[Sequence[int]]) -> None:
        """Count what a step sampled."""
        if self.size:
            ids = torch.tensor([token for tokens in sampled_token_ids for token in tokens if token >= 0], dtype=torch.int64)
            self._counts_V += torch.bincount(ids, minlength=self._counts_V.numel())
            self._counted += ids.numel()

    @property
    def due(self) -> bool:
        """Whether enough was counted for a first map."""
        return self.ids_W is None and 0 < MIN_TOKENS_PER_ENTRY * self.size <= self._counted

    def refresh(self, lm_head: LM_HEAD, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Pick the map anew and read its rows of lm_head; after every change of the actor or the heads. Nothing before enough was counted.

        The rows are read through the engine's own product (of the unit vectors), so that they are what it serves, however it is packed
        or sharded.
        """
        if self.size and float(self._counts_V.sum()) >= MIN_TOKENS_PER_ENTRY * self.size:
            # By count, ties by id: the same counts give the same map.
            order_V = torch.sort(self._counts_V, descending=True, stable=True).indices
            self.ids_W = order_V[: self.size].sort().values.to(device)
            self._counts_V *= FORGET
        if self.ids_W is not None:
            self._read_rows(self.ids_W, lm_head, hidden_size, dtype, device)

    def logits(self, features_ND: torch.Tensor) -> torch.Tensor:
        """Logits `[N, W]` of the tokens in the map."""
        assert self._product is not None, "the map has no rows before its first refresh"
        logits_NW = self._product(features_ND.to(self._dtype or features_ND.dtype))
        return logits_NW if self._bias_W is None else logits_NW + self._bias_W

    def _read_rows(self, ids_W: torch.Tensor, lm_head: LM_HEAD, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        bias_W = lm_head(torch.zeros(1, hidden_size, dtype=dtype, device=device))[0, ids_W]
        parts = []
        for start in range(0, hidden_size, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, hidden_size - start)
            units_ND = torch.zeros(count, hidden_size, dtype=dtype, device=device)
            units_ND[torch.arange(count), start + torch.arange(count)] = 1
            parts.append(lm_head(units_ND)[:, ids_W] - bias_W)
        dtype = self._dtype or dtype
        self._product = self._pack(torch.cat(parts).T.to(dtype).contiguous())
        self._bias_W = bias_W.to(dtype) if bool(bias_W.any()) else None


def spread(values_NW: torch.Tensor, ids_W: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Probabilities of the map's tokens in their places of the whole vocabulary `[N, V]`, zero elsewhere."""
    whole_NV = torch.zeros(values_NW.shape[0], vocab_size, dtype=values_NW.dtype, device=values_NW.device)
    return whole_NV.index_copy_(1, ids_W, values_NW)
