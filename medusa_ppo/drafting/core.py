"""The drafting call: hidden states, last tokens and uniform numbers in, draft ids and q out, on tensors of fixed shapes.

It reads no host value and has no loop over requests, so it can be compiled whole and captured; all state stands in `slots`.

Shape letters: B requests, K drafts of a step, D hidden, V vocabulary, W width of the draft vocabulary (V where there is none), N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from heads.errors import ConfigError
from heads.modules import MedusaHeads
from medusa_ppo.drafting.draft_vocabulary import LINEAR, LM_HEAD, PACK, plain_linear
from medusa_ppo.drafting.fused import EMBED, FusedHeads
from medusa_ppo.drafting.noise import draw

SHARPEST = 1e30
"""What logits of greedy requests are multiplied with: only the largest is left."""


@dataclass(frozen=True)
class Sampling:
    """How B requests sample, on their device.

    Attributes:
        temperature_B: 0 for requests whose drafts are to be one-hot (greedy ones, and those with a grammar).
        uniforms_BK: float64 in [0, 1), from `noise.uniforms`, as many as drafts.
        top_k_B, top_p_B: None where no request of the batch asks for it; values that cut nothing for those that don't.
    """

    temperature_B: torch.Tensor
    uniforms_BK: torch.Tensor
    top_k_B: torch.Tensor | None = None
    top_p_B: torch.Tensor | None = None


@dataclass(frozen=True)
class Drafted:
    """Drafts of one step.

    Attributes:
        ids_BK: int64, tokens.
        columns_BK: int64, their columns in q; the tokens themselves without a draft vocabulary.
        q: float32 `[B, W]` for each draft; empty where all are one-hot.
    """

    ids_BK: torch.Tensor
    columns_BK: torch.Tensor
    q: tuple[torch.Tensor, ...] = ()


class DraftingCore:
    """Heads of any kind in their serving form, the engine's lm_head and embedding, and the draft vocabulary.

    Attributes:
        fused: the heads' products.
        temperatures_K: draft temperature of each head, float32; may be filled anew at any time.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: LM_HEAD,
        embed: EMBED | None = None,
        *,
        pack: PACK = plain_linear,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            lm_head: the engine's product, rows `[N, D]` -> logits `[N, V]`; read where the heads share it.
            embed: the engine's lookup; kind hydra only.
            pack: how our own weights become products.
            dtype: what these compute in; default: as the heads.
        """
        self.config = heads.config
        self.heads = heads
        self.fused = FusedHeads(heads, embed, pack, dtype)
        device = heads.blocks[0].device
        self.temperatures_K = torch.ones(self.config.num_heads, device=device)
        self._whole_lm_head, self._pack = lm_head, pack
        self.use_vocabulary(None, None)

    def actor_changed(self) -> None:
        """Read the embedding table again. A draft vocabulary's rows of lm_head are its owner's to read: `use_vocabulary`."""
        self.fused.read_embedding()

    def load(self) -> None:
        """Read heads, tables and draft vocabulary again."""
        self.fused.load()
        self.use_vocabulary(self.ids_W, self._lm_head if self.ids_W is not None else None)

    def use_vocabulary(self, ids_W: torch.Tensor | None, lm_head: LM_HEAD | None) -> None:
        """Draft from the tokens `ids_W` alone, with the product `lm_head` of their rows `[N, D] -> [N, W]`; None: from all."""
        if ids_W is not None and self.config.lm_head == "own":
            raise ConfigError(
                "The draft vocabulary can't be truncated so.",
                given="heads with lm_head=own",
                expected="heads that share the actor's lm_head",
                do="Leave engine.draft_vocab at 0.",
            )
        self.ids_W = ids_W
        self._lm_head: LM_HEAD = self._whole_lm_head if lm_head is None else lm_head
        heads, count = self.heads, self.config.num_heads
        self._own: list[LINEAR] = []
        if self.config.lm_head == "own":
            self._own = [self._pack(heads.own_lm_head(k + 1).detach()) for k in range(count)]
        self._bias_out: list[LINEAR] = []
        if self.config.kind == "markov":
            out_KVr = heads.markov_out.detach()
            self._bias_out = [self._pack(out_KVr[k] if ids_W is None else out_KVr[k][ids_W]) for k in range(count)]

    # ---- the call -----------------------------------------------------------------------------------------------------------

    def draft(self, hidden_BD: torch.Tensor, last_ids_B: torch.Tensor, count: int, sampling: Sampling | None = None) -> Drafted:
        """`count` (1..K) drafts for each request.

        Args:
            hidden_BD: h_t of each request, the state from which its last token was sampled.
            last_ids_B: int64, that last token x_{t+1}; read by conditioned kinds only.
            sampling: None for one-hot drafts.
        """
        drawing = None if sampling is None else _Drawing(sampling, self.temperatures_K, count)
        if self.config.kind == "medusa":
            return self._at_once(hidden_BD, count, drawing)
        columns, ids, q = [], [], []
        state = self.fused.start(hidden_BD, count) if self.config.kind == "hydra" else None
        ahead = self._logits_ahead(hidden_BD, count) if state is None else []
        for k in range(count):
            if state is not None:
                logits_BW = self._multiply(self.fused.features(state, k, last_ids_B), k)
            else:
                logits_BW = ahead[k] + self._bias_out[k](F.embedding(last_ids_B, self.heads.markov_in[k])).float()
            if drawing is None:
                column_B = logits_BW.argmax(-1)
            else:
                q_BW, column_B = drawing.choose(logits_BW, k)
                q.append(q_BW)
            last_ids_B = column_B if self.ids_W is None else self.ids_W.index_select(0, column_B)
            columns.append(column_B)
            ids.append(last_ids_B)
        ids_BK = torch.stack(ids, dim=1)
        return Drafted(ids_BK, ids_BK if self.ids_W is None else torch.stack(columns, dim=1), tuple(q))

    def _at_once(self, hidden_BD: torch.Tensor, count: int, drawing: _Drawing | None) -> Drafted:
        """Kind medusa: no head waits for another."""
        columns, q = [], []
        for k, logits_BW in enumerate(self._logits_ahead(hidden_BD, count)):
            if drawing is None:
                column_B = logits_BW.argmax(-1)
            else:
                q_BW, column_B = drawing.choose(logits_BW, k)
                q.append(q_BW)
            columns.append(column_B)
        columns_BK = torch.stack(columns, dim=1)
        return Drafted(columns_BK if self.ids_W is None else self.ids_W[columns_BK], columns_BK, tuple(q))

    def _logits_ahead(self, hidden_BD: torch.Tensor, count: int) -> list[torch.Tensor]:
        """lm_head's part of the logits `[B, W]` of each head, for kinds whose features do not depend on drafted tokens."""
        features_BKD = self.fused.features_at_once(hidden_BD, count)
        if self._own:
            return [self._own[k](features_BKD[:, k]).float() for k in range(count)]
        logits_NW = self._lm_head(features_BKD.reshape(-1, features_BKD.shape[-1]))
        return list(logits_NW.view(-1, count, logits_NW.shape[-1]).float().unbind(1))

    def _multiply(self, features_BD: torch.Tensor, k: int) -> torch.Tensor:
        return self._own[k](features_BD) if self._own else self._lm_head(features_BD)


class _Drawing:
    """Draws columns of logits; what all heads have in common is made once."""

    def __init__(self, sampling: Sampling, temperatures_K: torch.Tensor, count: int) -> None:
        temperature_B1 = sampling.temperature_B.clamp_min(0).unsqueeze(1)
        temperatures_K = temperatures_K if count == len(temperatures_K) else temperatures_K[:count]
        scale_BK = (temperature_B1 * temperatures_K).reciprocal().clamp_max(SHARPEST)
        # Of equal logits a greedy request takes the first, as argmax does.
        uniforms_BK = sampling.uniforms_BK * (temperature_B1 > 0)
        self._scales = scale_BK.split(1, dim=1)
        self._uniforms = uniforms_BK.split(1, dim=1)
        self._sampling = sampling

    def choose(self, logits_BW: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[B, W]` float32, and the columns `[B]` drawn from it.

        q is cut as the request's own top-k and top-p cut: any q is lossless, but what the target leaves out would only be refused.
        """
        scaled_BW = logits_BW * self._scales[k]
        if self._sampling.top_k_B is not None or self._sampling.top_p_B is not None:
            scaled_BW = cut(scaled_BW, self._sampling.top_k_B, self._sampling.top_p_B)
        q_BW = scaled_BW.softmax(-1, dtype=torch.float32)
        return q_BW, draw(q_BW, self._uniforms[k]).squeeze(1)


def cut(logits_BW: torch.Tensor, top_k_B: torch.Tensor | None, top_p_B: torch.Tensor | None) -> torch.Tensor:
    """-inf for what each row's top-k, then its top-p, leave out; ties with the k-th are kept, and at least one token.

    A top-k beyond the width cuts nothing: a draft vocabulary is narrower than what requests count in.
    """
    width = logits_BW.shape[-1]
    ascending_BW, order_BW = logits_BW.sort(dim=-1)
    if top_k_B is not None:
        place_B1 = (width - top_k_B.to(torch.int64)).clamp(0, width - 1).unsqueeze(1)
        least_B1 = ascending_BW.gather(1, place_B1)
        ascending_BW = ascending_BW.masked_fill(ascending_BW < least_B1, -torch.inf)
    if top_p_B is not None:
        out_BW = ascending_BW.softmax(-1).cumsum(-1) <= 1 - top_p_B.unsqueeze(1)
        out_BW = out_BW & (torch.arange(width, device=out_BW.device) < width - 1)
        ascending_BW = ascending_BW.masked_fill(out_BW, -torch.inf)
    return torch.empty_like(logits_BW).scatter_(1, order_BW, ascending_BW)
