"""Draft heads as drafting asks them: the arithmetic of `MedusaHeads` in few products, prepared once per swap.

What reads h_t alone is one product for all heads. What a token adds to the heads after it is one row of a table made beforehand where
that is small, and one product for all of these heads where not. The first residual block reads its input's two parts by themselves,
W (h + out s) = W h + (W out) s, so that it needs no product of its own. Sums are kept in float32.

Shape letters: B requests, K heads, C of them asked, D hidden, H inner width of the hydra MLP, R inner rows of several heads, E = D (K + 1)
what the last head reads, V vocabulary.
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
    """The features of all kinds; `heads.config` says which. Parameters of hydra heads become views of what is multiplied with here."""

    def __init__(self, heads: MedusaHeads, embed: EMBED | None, pack: PACK = plain_linear) -> None:
        """
        Args:
            embed: the engine's own lookup, whatever shards the table; kind hydra only.
            pack: how a weight becomes a product, in a dtype of its own choice; what it was given stays where it is.
        """
        self.config = heads.config
        self.heads = heads
        self._embed, self._pack = embed, pack
        if self.config.kind == "hydra":
            self._adopt()
        self.load()

    @torch.no_grad()
    def _adopt(self) -> None:
        """Lay the MLPs of all heads side by side: one product reads what several heads have in common, and nothing is held twice."""
        heads, K, D = self.heads, self.config.num_heads, self.config.hidden_size
        self._H = H = D * self.config.mlp_ratio
        self._in_RE = heads.mlp_out.new_zeros(K * H, D * (K + 1))
        self._out_KRH = heads.mlp_out.new_empty(K, 2 * D, H)
        for k, weight in enumerate(heads.mlp_in):
            place = self._in_RE[k * H : (k + 1) * H, : D * (k + 2)]
            place[:] = weight
            weight.data = place
        self._out_KRH[:, :D] = heads.mlp_out
        heads.mlp_out.data = self._out_KRH[:, :D]

    @torch.no_grad()
    def load(self) -> None:
        """Read the heads again, and the embedding table: after a swap."""
        self._products: dict[tuple[str, int, int], LINEAR] = {}
        self._blocks = [block_KDD.detach() for block_KDD in self.heads.blocks]
        if self.config.kind == "hydra":
            D = self.config.hidden_size
            self._out_KRH[:, D:] = _wide_product(self._blocks[0], self._out_KRH[:, :D])
            self.read_embedding()

    @torch.no_grad()
    def read_embedding(self) -> None:
        """1 / rms of every token's embedding, and, where they are small: what a token at each place j after h_t adds to the inner rows of
        heads j.. (from 0), `[V, (K - j) H]`. After a sync of the actor."""
        if self.config.kind != "hydra":
            return
        assert self._embed is not None, "hydra heads read embeddings"
        count, size, weights_RE = self.config.num_heads, self.config.vocab_size, self._in_RE
        small = size * self._H * count * (count + 1) // 2 <= TABLE_ENTRIES
        weights = [self._token_weights(j, count) for j in range(count)] if small else []
        self._sizes_V1, self._tables = token_tables(self._embed, size, weights, weights_RE.dtype, weights_RE.device)

    def _token_weights(self, j: int, count: int) -> torch.Tensor:
        """What reads the token at place j after h_t, for the heads j .. count."""
        D = self.config.hidden_size
        return self._in_RE[j * self._H : count * self._H, D * (1 + j) : D * (2 + j)]

    def _product(self, name: str, index: int, count: int) -> LINEAR:
        """The packed product with a weight `[out, in]`; made when it is first asked for."""
        key = (name, index, count)
        if key not in self._products:
            self._products[key] = self._pack(self._weight(*key))
        return self._products[key]

    def _weight(self, name: str, index: int, count: int) -> torch.Tensor:
        D = self.config.hidden_size
        if name == "in":
            return self._in_RE[: count * self._H, :D]
        if name == "token":
            return self._token_weights(index, count)
        if name == "out":
            return self._out_KRH[index]
        return self._blocks[index][:count].flatten(0, 1) if name == "blocks" else self._blocks[index][count]

    def _first_blocks(self, base_BD: torch.Tensor, count: int) -> torch.Tensor:
        """The first residual blocks of `count` heads, before SiLU, `[B, C, D]`."""
        return self._product("blocks", 0, count)(base_BD).view(-1, count, base_BD.shape[-1])

    # ---- kinds whose features need no tokens ------------------------------------------------------------------------------

    def features_at_once(self, hidden_BD: torch.Tensor, count: int) -> torch.Tensor:
        """What lm_head reads for the first `count` heads, `[B, C, D]`; kinds medusa and markov."""
        features_BCD = hidden_BD.unsqueeze(1) + F.silu(self._first_blocks(hidden_BD, count))
        for block_KDD in self._blocks[1:]:
            inner_CBD = torch.bmm(features_BCD.transpose(0, 1), block_KDD[:count].transpose(1, 2).to(features_BCD.dtype))
            features_BCD = features_BCD + F.silu(inner_CBD.transpose(0, 1))
        return features_BCD

    # ---- hydra --------------------------------------------------------------------------------------------------------------

    def start(self, hidden_BD: torch.Tensor, count: int) -> HydraState:
        """What h_t alone says to the first `count` heads."""
        inner_BR = self._product("in", 0, count)(hidden_BD) * inverse_rms(hidden_BD)
        base_BCD = hidden_BD.unsqueeze(1).expand(-1, count, -1)
        return HydraState(inner_BR, torch.cat([base_BCD, self._first_blocks(hidden_BD, count)], dim=2).unbind(1))

    def features(self, state: HydraState, k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """What lm_head reads for the head with index k (from 0), `BD`; ask for the heads in order, once each."""
        inner_BR, H = state.inner_BR, self._H
        left = inner_BR.shape[1]
        if self._tables:
            added_BR = self._tables[k].index_select(0, last_ids_B)
            inner_BR.add_(added_BR if added_BR.shape[1] == left else added_BR[:, :left])
        else:
            assert self._embed is not None, "hydra heads read embeddings"
            count = k + left // H
            added_BR = self._product("token", k, count)(self._embed(last_ids_B))
            inner_BR.addcmul_(added_BR, self._sizes_V1.index_select(0, last_ids_B))
        if left > H:
            state.inner_BR = inner_BR.narrow(1, H, left - H)
        D = self.config.hidden_size
        out_B2D = self._product("out", k, 1)(F.silu(inner_BR.narrow(1, 0, H))) + state.base[k]
        features_BD = out_B2D.narrow(1, 0, D) + F.silu(out_B2D.narrow(1, D, D))
        for layer in range(1, len(self._blocks)):
            features_BD = features_BD + F.silu(self._product("block", layer, k)(features_BD))
        return features_BD


class HydraState:
    """What goes from one head to the next: inner rows of the heads not asked yet, float32, before SiLU; and the bases `B2D` of all."""

    def __init__(self, inner_BR: torch.Tensor, base: tuple[torch.Tensor, ...]) -> None:
        self.inner_BR, self.base = inner_BR, base


def token_tables(
    embed: EMBED, size: int, weights: list[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """1 / rms of every token's embedding, float32 `[V, 1]`, and what each weight `[R, D]` makes of it after its normalisation, `[V, R]` in
    `dtype`."""
    sizes_V1 = torch.empty((size, 1), device=device)
    tables = [torch.empty((size, len(weight)), dtype=dtype, device=device) for weight in weights]
    weights = [weight.to(dtype) for weight in weights]
    for first in range(0, size, ROWS_AT_ONCE):
        ids_N = torch.arange(first, min(first + ROWS_AT_ONCE, size), device=device)
        rows_ND = embed(ids_N)
        sizes_V1[first : first + len(ids_N)] = inverse_rms(rows_ND)
        rows_ND = rms_normalise(rows_ND).to(dtype)
        for table, weight in zip(tables, weights, strict=True):
            table[first : first + len(ids_N)] = F.linear(rows_ND, weight)
    return sizes_V1, tables


def inverse_rms(rows_ND: torch.Tensor) -> torch.Tensor:
    """1 / rms of each row, float32 `[N, 1]`."""
    return rows_ND.float().square().mean(-1, keepdim=True).add_(RMS_EPS).rsqrt_()


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Without asking torch where there is nothing to do: a call costs as much as a small product."""
    return values if values.dtype == dtype else values.to(dtype)


def _wide_product(left_KDD: torch.Tensor, right_KDH: torch.Tensor) -> torch.Tensor:
    """In float32 at least: its rounding would come on top of the weights'."""
    wide = torch.promote_types(left_KDD.dtype, torch.float32)
    return torch.bmm(left_KDD.to(wide), right_KDH.to(wide)).to(left_KDD.dtype)
