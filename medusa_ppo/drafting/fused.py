"""Draft heads as drafting asks them: the arithmetic of `MedusaHeads` in few products, prepared once per swap.

What reads h_t alone is one product for all heads. What a token adds to the heads after it is one row of a table made beforehand where
that is small, and one product for all of these heads where not. The first residual block reads its input's two parts by themselves,
W (h + out s) = W h + (W out) s, so that it needs no product of its own. Sums are kept in float32.

Shape letters: B requests, K heads, C of them asked, D hidden, H inner width of the hydra MLP, V vocabulary, r rank of the markov bias.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from heads.modules import RMS_EPS, MedusaHeads, rms_normalise
from medusa_ppo.drafting.draft_vocabulary import LINEAR, PACK, plain_linear

EMBED = Callable[[torch.Tensor], torch.Tensor]
"""Ids int64 `[B]` -> rows `[B, D]` of the actor's embedding table."""

TABLE_ENTRIES = 1 << 24
"""Most numbers in the tables of what tokens add: memory, and the time that every sync takes to make them."""
ROWS_AT_ONCE = 4096


class FusedHeads:
    """The features of all kinds; `heads.config` says which. What it holds are copies of the heads' values of when `load` was called."""

    def __init__(self, heads: MedusaHeads, embed: EMBED | None, pack: PACK = plain_linear, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            embed: the engine's own lookup, whatever shards the table; kind hydra only.
            pack: how a weight becomes a product.
            dtype: what to compute in; default: as the heads.
        """
        self.config = heads.config
        self.heads = heads
        self.out_dtype = heads.dtype
        self.dtype = dtype or heads.dtype
        self._embed, self._pack = embed, pack
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        """Read the heads again, and the embedding table: after a swap."""
        heads, config = self.heads, self.config
        self._products: dict[tuple[str, int, int], LINEAR] = {}
        first_KDD = heads.blocks[0].detach()
        self._more_blocks = [block_KDD.detach().to(self.dtype) for block_KDD in list(heads.blocks)[1:]]
        if config.kind != "hydra":
            self._start_KRD = first_KDD.to(self.dtype)
            return
        D = config.hidden_size
        self._H = D * config.mlp_ratio
        self._into = [weight.detach() for weight in heads.mlp_in]
        self._start_KRD = torch.cat([torch.stack([w[:, :D] for w in self._into]), first_KDD], dim=1).to(self.dtype)
        out_KDH = heads.mlp_out.detach()
        self._out_KRH = torch.cat([out_KDH, _wide_product(first_KDD, out_KDH)], dim=1).to(self.dtype)
        self._tokens = [
            torch.stack([w[:, D * (1 + j) : D * (2 + j)] for w in self._into[j:]]).to(self.dtype) for j in range(config.num_heads)
        ]
        self.read_embedding()

    @torch.no_grad()
    def read_embedding(self) -> None:
        """1 / rms of every token's embedding, and, where they are small: what a token at each place j after h_t adds to the inner rows of
        heads j.. (from 0), `[V, (K - j) H]`. After a sync of the actor."""
        if self.config.kind != "hydra":
            return
        assert self._embed is not None, "hydra heads read embeddings"
        count, size, device = self.config.num_heads, self.config.vocab_size, self._start_KRD.device
        small = size * self._H * count * (count + 1) // 2 <= TABLE_ENTRIES
        sizes_V11 = torch.empty((size, 1, 1), device=device)
        weights = [weight_CHD.reshape(-1, weight_CHD.shape[-1]) for weight_CHD in self._tokens] if small else []
        tables = [torch.empty((size, len(weight)), dtype=self.dtype, device=device) for weight in weights]
        for first in range(0, size, ROWS_AT_ONCE):
            ids_N = torch.arange(first, min(first + ROWS_AT_ONCE, size), device=device)
            rows_ND = self._embed(ids_N)
            sizes_V11[first : first + len(ids_N), 0] = inverse_rms(rows_ND)
            rows_ND = rms_normalise(rows_ND).to(self.dtype)
            for table, weight in zip(tables, weights, strict=True):
                table[first : first + len(ids_N)] = F.linear(rows_ND, weight)
        self._sizes_V11, self._tables = sizes_V11, tables

    def _product(self, name: str, weights: torch.Tensor, index: int, count: int) -> LINEAR:
        """The packed product of the first `count` matrices of a stack; made when it is first asked for."""
        key = (name, index, count)
        if key not in self._products:
            self._products[key] = self._pack(weights[:count].reshape(-1, weights.shape[-1]))
        return self._products[key]

    # ---- kinds whose features need no tokens ------------------------------------------------------------------------------

    def features_at_once(self, hidden_BD: torch.Tensor, count: int) -> torch.Tensor:
        """What lm_head reads for the first `count` heads, `[B, C, D]`; kinds medusa and markov."""
        base_BD = _as(hidden_BD, self.dtype)
        inner_BCD = self._product("start", self._start_KRD, 0, count)(base_BD).view(-1, count, base_BD.shape[-1])
        features_BCD = base_BD.unsqueeze(1) + F.silu(inner_BCD)
        for block_KDD in self._more_blocks:
            inner_CBD = torch.bmm(features_BCD.transpose(0, 1), block_KDD[:count].transpose(1, 2))
            features_BCD = features_BCD + F.silu(inner_CBD.transpose(0, 1))
        return _as(features_BCD, self.out_dtype)

    # ---- hydra --------------------------------------------------------------------------------------------------------------

    def start(self, hidden_BD: torch.Tensor, count: int) -> HydraState:
        """What h_t alone says to the first `count` heads."""
        base_BD = _as(hidden_BD, self.dtype)
        both_BCR = self._product("start", self._start_KRD, 0, count)(base_BD).view(base_BD.shape[0], count, -1)
        inner_BCH = both_BCR[:, :, : self._H] * inverse_rms(base_BD).unsqueeze(1)
        base_BC2D = torch.cat([base_BD.unsqueeze(1).expand(-1, count, -1), both_BCR[:, :, self._H :]], dim=2)
        return HydraState(inner_BCH, base_BC2D.unbind(1))

    def features(self, state: HydraState, k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """What lm_head reads for the head with index k (from 0), `BD` in the heads' dtype; ask for the heads in order, once each."""
        inner_BCH, count = state.inner_BCH, state.inner_BCH.shape[1]
        if self._tables:
            added_BCH = self._tables[k].index_select(0, last_ids_B).view(-1, self.config.num_heads - k, self._H)
            inner_BCH = inner_BCH + (added_BCH if count == added_BCH.shape[1] else added_BCH[:, :count])
        else:
            assert self._embed is not None, "hydra heads read embeddings"
            rows_BD = _as(self._embed(last_ids_B), self.dtype)
            added_BCH = self._product("token", self._tokens[k], k, count)(rows_BD).view(-1, count, self._H)
            inner_BCH = inner_BCH + added_BCH * self._sizes_V11.index_select(0, last_ids_B)
        state.inner_BCH = inner_BCH[:, 1:]
        inner_BH = _as(F.silu(inner_BCH[:, 0]), self.dtype)
        out_B2D = self._product("out", self._out_KRH[k : k + 1], k, 1)(inner_BH) + state.base[k]
        sum_BD, gate_BD = out_B2D.chunk(2, dim=1)
        features_BD = sum_BD + F.silu(gate_BD)
        for layer, block_KDD in enumerate(self._more_blocks):
            product = self._product(f"block{layer}", block_KDD[k : k + 1], k, 1)
            features_BD = features_BD + F.silu(product(features_BD))
        return _as(features_BD, self.out_dtype)


class HydraState:
    """What goes from one head to the next: the inner rows of the heads not asked yet, before SiLU, and the bases `B2D` of all."""

    def __init__(self, inner_BCH: torch.Tensor, base: tuple[torch.Tensor, ...]) -> None:
        self.inner_BCH, self.base = inner_BCH, base


def inverse_rms(rows_ND: torch.Tensor) -> torch.Tensor:
    """1 / rms of each row, float32 `[N, 1]`."""
    return torch.rsqrt(_as(rows_ND, torch.float32).square().mean(-1, keepdim=True) + RMS_EPS)


def _as(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Without asking torch where there is nothing to do: a call costs as much as a small product."""
    return values if values.dtype == dtype else values.to(dtype)


def _wide_product(left_KDD: torch.Tensor, right_KDH: torch.Tensor) -> torch.Tensor:
    """In float32 at least: its rounding would come on top of the weights'."""
    wide = torch.promote_types(left_KDD.dtype, torch.float32)
    return torch.bmm(left_KDD.to(wide), right_KDH.to(wide)).to(left_KDD.dtype)
