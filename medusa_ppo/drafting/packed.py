"""Hydra heads as drafting asks them: the same arithmetic as `MedusaHeads.draft_features`, with products packed once per swap.

One head after the other asks for three small products; with few rows they cost more in packing and dispatch than in arithmetic. Where the
CPU has no bfloat16 units, bfloat16 heads are packed as float32: emulated products cost as many times more as there are rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from heads.modules import DraftState, MedusaHeads, rms_normalise

LINEAR = Callable[[torch.Tensor], torch.Tensor]
"""Rows `[N, in]` -> `[N, out]`."""
PACK = Callable[[torch.Tensor], LINEAR]
"""A weight `[out, in]` -> its product."""
EMBED = Callable[[torch.Tensor], torch.Tensor]
"""Ids int64 `[B]` -> rows `[B, D]` of the actor's embedding table."""


def plain_linear(weight: torch.Tensor) -> LINEAR:
    """Nothing packed: the reference, and what GPUs use."""
    return lambda rows: F.linear(rows, weight)


class PackedHydra:
    """Shape letters: B requests, D hidden."""

    def __init__(self, heads: MedusaHeads, embed: EMBED, pack: PACK = plain_linear, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            heads: of kind hydra; what is packed is a copy of their values now.
            embed: the engine's own lookup, whatever shards the table.
            pack: how a weight becomes a product.
            dtype: what to compute in; default: as the heads.
        """
        self.embed = embed
        self.out_dtype = heads.dtype
        self.dtype = dtype or heads.dtype

        def packed(weight: torch.Tensor) -> LINEAR:
            return pack(weight.detach().to(self.dtype))

        count = heads.config.num_heads
        self._into = [packed(heads.mlp_in[k]) for k in range(count)]
        self._out = [packed(heads.mlp_out[k]) for k in range(count)]
        self._blocks = [[packed(block_KDD[k]) for block_KDD in heads.blocks] for k in range(count)]

    def start(self, hidden_BD: torch.Tensor) -> DraftState:
        """As `MedusaHeads.start_draft`."""
        base_BD = hidden_BD.to(self.dtype)
        return DraftState(base_BD.unsqueeze(1), [rms_normalise(base_BD)])

    def features(self, state: DraftState, k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """As `MedusaHeads.draft_features`: what lm_head reads for the head with index k (from 0), `BD` in the heads' dtype."""
        state.inputs.append(rms_normalise(self.embed(last_ids_B)).to(self.dtype))
        inner_BH = F.silu(self._into[k](torch.cat(state.inputs[: k + 2], dim=-1)))
        features_BD = state.base_BKD[:, 0] + self._out[k](inner_BH)
        for block in self._blocks[k]:
            features_BD = features_BD + F.silu(block(features_BD))
        return features_BD.to(self.out_dtype)
