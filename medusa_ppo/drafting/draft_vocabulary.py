"""A truncated draft vocabulary: the tokens that the rollouts really use, and lm_head's rows for them.

Most of a vocabulary never occurs in the responses of one task, yet every draft would pay for it in lm_head's product. The map holds the
`size` most frequent tokens of the prompts and of what was sampled so far (with forgetting); it begins by itself when enough was counted,
and is picked anew whenever heads or actor change. Drafts come from it alone; q is zero elsewhere, which verification is told, so nothing
is lost but the acceptance of rare tokens. FR-Spec (Zhao et al., 2025) fixes such a map beforehand; here it follows the policy.

Shape letters: N rows, D hidden, V vocabulary, W width of the map.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

LINEAR = Callable[[torch.Tensor], torch.Tensor]
"""Rows `[N, in]` of any floating dtype -> `[N, out]` in the dtype that the product has chosen."""
PACK = Callable[[torch.Tensor], LINEAR]
"""A weight `[out, in]` -> its product."""
LM_HEAD = LINEAR
FORGET = 0.5
"""What is left of the counts at each refresh."""
SMALL_ENTRIES = 1 << 24
"""Numbers in an lm_head up to which a copy of all its rows may be held."""
LINEAR_TOLERANCE = 0.05
"""Largest root mean square of the difference between our product and the engine's, as a share of the logits' own."""
MIN_TOKENS_PER_ENTRY = 2
"""The map begins when so many tokens for each of its places were counted; before, drafts use the whole vocabulary."""
ROWS_AT_ONCE = 256
ROWS_TRIED = 4

logger = logging.getLogger(__name__)


def plain_linear(weight: torch.Tensor) -> LINEAR:
    """Nothing packed: the reference, and what GPUs use."""
    return lambda rows: F.linear(rows.to(weight.dtype), weight)


def most_frequent(counts_V: torch.Tensor, size: int) -> torch.Tensor | None:
    """The tokens that drafts come from, int64 `W`, ascending, and half of the counts forgotten; None before enough was counted."""
    if float(counts_V.sum()) < MIN_TOKENS_PER_ENTRY * size:
        return None
    # By count, ties by id: the same counts give the same map.
    order_V = torch.sort(counts_V, descending=True, stable=True).indices
    counts_V *= FORGET
    return order_V[:size].sort().values


class TokenMap:
    """Counts tokens, picks the most frequent ones, and multiplies by their rows of lm_head.

    Attributes:
        ids_W: int64, ids in the map, ascending; None while there is none.
        product: features -> logits of the map's tokens, or of all where there is no map; None: the engine's own product.
    """

    def __init__(self, size: int, vocab_size: int, pack: PACK = plain_linear, whole: bool = False) -> None:
        """
        Args:
            size: W; 0 or `vocab_size` and more: never a map.
            vocab_size: V.
            pack: how its rows become a product.
            whole: hold all rows where there is no map and lm_head is small: the engine's own product may be slower than `pack`'s.
        """
        self.size = size if 0 < size < vocab_size else 0
        self.ids_W: torch.Tensor | None = None
        self.product: LM_HEAD | None = None
        self._counts_V = torch.zeros(vocab_size, dtype=torch.float64)
        self._counted = 0
        self._pack, self._whole = pack, whole

    def observe(self, tokens: Iterable[Sequence[int]]) -> None:
        """Count what a step sampled, or the prompts of new requests."""
        if self.size:
            ids = torch.tensor([token for some in tokens for token in some if token >= 0], dtype=torch.int64)
            self._counts_V.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
            self._counted += ids.numel()

    @property
    def due(self) -> bool:
        """Whether enough was counted for a first map."""
        return self.ids_W is None and 0 < MIN_TOKENS_PER_ENTRY * self.size <= self._counted

    def refresh(
        self, lm_head: LM_HEAD, hidden_size: int, dtype: torch.dtype, device: torch.device, weight_VD: torch.Tensor | None = None
    ) -> None:
        """Pick the map anew and read its rows of lm_head; after every change of the actor or the heads. Nothing before enough was counted.

        The rows are those of `weight_VD` where the engine's own product agrees; else they are read through it (of the unit vectors), so
        that they are what it serves, however it is packed, scaled or sharded.
        """
        ids_W = most_frequent(self._counts_V, self.size) if self.size else None
        if ids_W is not None:
            self.ids_W = ids_W.to(device)
        whole = self._whole and self._counts_V.numel() * hidden_size <= SMALL_ENTRIES
        self.product = None
        if whole or self.ids_W is not None:
            if weight_VD is not None:
                rows_WD = weight_VD[: self._counts_V.numel()] if self.ids_W is None else weight_VD[self.ids_W]
                self.product = self._tried(self._pack(rows_WD.to(dtype)), lm_head, hidden_size, dtype, device)
            self.product = self.product or self._read(lm_head, hidden_size, dtype, device)
        if self.product is None:
            self.ids_W = None

    def _read(self, lm_head: LM_HEAD, hidden_size: int, dtype: torch.dtype, device: torch.device) -> LM_HEAD | None:
        """The product of the map's rows; None where lm_head is not a product (soft caps)."""
        ids_W = slice(None) if self.ids_W is None else self.ids_W
        bias_W = lm_head(torch.zeros(1, hidden_size, dtype=dtype, device=device))[0, ids_W]
        parts = []
        for start in range(0, hidden_size, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, hidden_size - start)
            units_ND = torch.zeros(count, hidden_size, dtype=dtype, device=device)
            units_ND[torch.arange(count), start + torch.arange(count)] = 1
            parts.append(lm_head(units_ND)[:, ids_W] - bias_W)
        plain = self._pack(torch.cat(parts).T.to(dtype).contiguous())
        product = (lambda rows: plain(rows) + bias_W) if bool(bias_W.any()) else plain
        tried = self._tried(product, lm_head, hidden_size, dtype, device)
        if tried is None:
            logger.warning("The engine's lm_head is not a plain product (a soft cap?); drafts come from the whole vocabulary.")
        return tried

    def _tried(self, product: LM_HEAD, lm_head: LM_HEAD, hidden_size: int, dtype: torch.dtype, device: torch.device) -> LM_HEAD | None:
        """The product, if it gives what the engine's own gives."""
        rows_ND = torch.randn(ROWS_TRIED, hidden_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        expected_NV = lm_head(rows_ND).float()
        expected_NW = expected_NV if self.ids_W is None else expected_NV[:, self.ids_W]
        apart = (product(rows_ND).float() - expected_NW).square().mean().sqrt()
        return product if bool(apart <= LINEAR_TOLERANCE * expected_NW.square().mean().sqrt()) else None


def spread(values_NW: torch.Tensor, ids_W: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Probabilities of the map's tokens in their places of the whole vocabulary `[N, V]`, zero elsewhere."""
    whole_NV = torch.zeros(values_NW.shape[0], vocab_size, dtype=values_NW.dtype, device=values_NW.device)
    return whole_NV.index_copy_(1, ids_W, values_NW)
