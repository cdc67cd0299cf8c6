"""The drafting call: it takes hidden states, last tokens and uniform numbers, and returns draft ids
and q, in tensors of fixed shapes.

It runs between two steps of the engine, so it has no loop over requests: its cost on the host must
not grow with their number. It stores nothing about a request; what one step leaves for the next
(slots, pairs, texts, remembered responses) belongs to the caller, and is passed in.

Shape letters: B requests, K drafts of a step, D hidden, V vocabulary, W width of the draft
vocabulary (V where there is none), N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from heads.errors import ConfigError
from heads.modules import MedusaHeads
from medusa_ppo.drafting.context import ContextHeads, Seen
from medusa_ppo.drafting.memory import Recall
from medusa_ppo.drafting.noise import cumulate, float32_below
from medusa_ppo.drafting.products import (
    EMBED,
    LINEAR,
    LM_HEAD,
    PACK,
    WEIGHT,
    FusedHeads,
    plain_linear,
)
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.drafting.stopping import Ending
from medusa_ppo.drafting.texts import Copier

FEATURES = Callable[[int, torch.Tensor], torch.Tensor]
"""Index of a head and the last tokens `[B]` -> input of lm_head `[B, D]`."""
SHARPEST = 1e30
"""Factor on the logits of greedy requests: only the largest survives."""


@dataclass(frozen=True)
class DraftSampling:
    """How B requests sample, on their device.

    Attributes:
        temperature_B: 0 for requests whose drafts must be one-hot (greedy ones, and those with a
            grammar).
        uniforms_BK: float64 in [0, 1), from `drafting.uniforms`, one per draft.
        top_k_B, top_p_B: None if no request of the batch has one; otherwise, values that exclude
            nothing for requests without one.
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
        q: float32 `[B, W]` for each draft, before the rounding of the sums used for drawing; only
            of a sampled call without slots.
        lengths_B: int64, number of drafts to verify; None: all.
    """

    ids_BK: torch.Tensor
    q: tuple[torch.Tensor, ...] = ()
    lengths_B: torch.Tensor | None = None


class DraftingCore:
    """Heads of any kind in their serving form, the engine's lm_head and embedding, and the draft
    vocabulary.

    Attributes:
        fused: the heads' products.
        temperatures_K: draft temperature of each head, float32: its own times the factor of
            `use_temperature`.
        changes: how often tensors that drafting reads were replaced by others.
    """

    _own: list[LINEAR]
    changes: int = 0

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: LM_HEAD,
        embed: EMBED | None = None,
        pack: PACK = plain_linear,
        never_copied: Sequence[int] = (),
        with_embedding: bool = True,
        dtype: torch.dtype | None = None,
        pack_own: PACK | None = None,
    ) -> None:
        """
        Args:
            lm_head: the engine's product, rows `[N, D]` of any dtype -> logits `[N, V]`; used if
                the heads share it.
            embed: the engine's lookup; kind hydra only.
            pack: turns our own weights into functions that multiply by them.
            never_copied: tokens that copying never drafts.
            with_embedding: read the embedding table now; otherwise `actor_changed` has to be called
                before the first drafts.
            dtype: what `pack` chooses for heads with a context, if that is known.
            pack_own: turns the heads' own lm_heads into products; None: as `pack`.
        """
        self.config = heads.config
        self.heads = heads
        self._embed = embed
        self._never_copied = tuple(never_copied)
        self.fused: FusedHeads | ContextHeads = (
            ContextHeads(heads, embed, pack, with_embedding, dtype)
            if heads.config.context
            else FusedHeads(heads, embed, pack, with_embedding)
        )
        self.copier: Copier | None = None
        if self.config.copies:
            assert embed is not None, "copying reads embeddings"
            self.copier = Copier(heads, embed, pack, never_copied, with_embedding)
        self.temperatures_K = torch.ones(self.config.num_heads, device=heads.blocks[0].device)
        self.use_temperature(1.0)
        self._whole_lm_head = lm_head
        self._pack = pack
        self._pack_own = pack_own or pack
        self.use_vocabulary(None, None)

    def actor_changed(self) -> None:
        """Read the embedding table again. The owner of a draft vocabulary renews its rows of
        lm_head: `use_vocabulary`.
        """
        self.changes += 1
        self.fused.read_embedding()
        if self.copier is not None:
            self.copier.read_embedding()

    @property
    def packed(self) -> tuple[WEIGHT, ...]:
        """The weights that are packed now, where packing waits for the first use."""
        return self.fused.packed if isinstance(self.fused, FusedHeads) else ()

    def beside(
        self,
        heads: MedusaHeads,
        lm_head: LM_HEAD,
        packed: Iterable[WEIGHT],
        count: int,
        with_embedding: bool,
    ) -> DraftingCore:
        """A complete core for other heads of the same sizes. A thread may make it while this one
        drafts, because no packed weight is multiplied here: oneDNN's products share memory.

        Args:
            packed, count: what to pack (`FusedHeads.pack_ahead`).
        """
        dtype = self.fused.dtype if isinstance(self.fused, ContextHeads) else None
        other = DraftingCore(
            heads,
            lm_head,
            self._embed,
            self._pack,
            self._never_copied,
            with_embedding,
            dtype,
            self._pack_own,
        )
        if isinstance(other.fused, FusedHeads):
            other.fused.pack_ahead(packed, count)
        return other

    @torch.no_grad()
    def take(self, other: DraftingCore) -> list[object]:
        """Draft with the heads of another core from now on, which is used up by it: only references
        are exchanged. Settings, lm_head and draft vocabulary stay.

        Returns:
            What the earlier heads occupied; letting go of so much memory takes time, too.
        """
        self.changes += 1
        before: list[object] = [self.fused, self.copier, self._own]
        for held, new in zip(self.heads.parameters(), other.heads.parameters(), strict=True):
            before.append(held.data)
            # The module stays the one that vLLM knows, and that a later swap writes to.
            held.data = new.data
        self.heads.temperatures_K.copy_(other.heads.temperatures_K)
        self.fused, self.copier, self._own = other.fused, other.copier, other._own
        self.fused.heads = self.heads
        if self.copier is not None:
            self.copier.heads = self.heads
        self.use_temperature(self._temperature)
        return before

    def use_temperature(self, temperature: float) -> None:
        """Set the factor on the heads' own draft temperatures."""
        self._temperature = temperature
        torch.mul(self.heads.temperatures_K.float(), temperature, out=self.temperatures_K)

    def load(self) -> None:
        """Read the heads, tables and draft vocabulary again."""
        self.changes += 1
        self.fused.load()
        if self.copier is not None:
            self.copier.load()
        self.use_temperature(self._temperature)
        # This also packs the heads' own lm_heads, so it is called with or without a draft
        # vocabulary.
        self.use_vocabulary(self.ids_W, self._lm_head if self.ids_W is not None else None)

    def use_vocabulary(self, ids_W: torch.Tensor | None, lm_head: LM_HEAD | None) -> None:
        """Draft only from the tokens `ids_W`, with the product `lm_head` of their rows `[N, D] ->
        [N, W]`; None: from all tokens.
        """
        if ids_W is not None and self.config.lm_head == "own":
            raise ConfigError(
                "These heads can't draft from a truncated vocabulary.",
                given="heads with lm_head=own",
                expected="heads that share the actor's lm_head",
                do="Set engine.draft_vocab=0.",
            )
        self.changes += 1
        self.ids_W = ids_W
        self._lm_head: LM_HEAD = self._whole_lm_head if lm_head is None else lm_head
        heads = self.heads
        count = self.config.num_heads
        self._own = []
        if self.config.lm_head == "own":
            self._own = [self._pack_own(heads.own_lm_head(k + 1).detach()) for k in range(count)]

    # ---- the call

    def draft(
        self,
        hidden_BD: torch.Tensor,
        last_ids_B: torch.Tensor,
        count: int,
        sampling: DraftSampling | None = None,
        seen: Seen | None = None,
        slots: DraftSlots | None = None,
        recall: Recall | None = None,
        ending: Ending | None = None,
    ) -> Drafted:
        """`count` (1..K) drafts for each request.

        Args:
            hidden_BD: h_t of each request, the state from which its last token was sampled.
            last_ids_B: int64, that last token x_{t+1}; read by conditioned kinds only.
            sampling: None for one-hot drafts.
            seen: for heads with a context, what they attend to; None: each request's newest pair
                alone.
            slots: where sampled drafts are drawn, and where verification finds them;
                `slots.stamp` then marks their owners.
            recall: what earlier responses suggest; sampled drafts then come from the mixture.
            ending: decides where the runs of sampled drafts end.
        """
        drawing = None
        if sampling is not None:
            drawing = _Drawing(
                sampling,
                self.temperatures_K,
                count,
                slots,
                self._width,
                recall,
                ending,
                may_overflow=hidden_BD.dtype == torch.float16,
            )
        if recall is not None and self.ids_W is not None:
            recall.among(self.ids_W, self.config.vocab_size)
        features = (
            self._features(hidden_BD, last_ids_B, count, seen)
            if self.config.kind == "hydra"
            else None
        )
        ahead = self._logits_ahead(hidden_BD, count) if features is None else []
        ids = []
        for k in range(count):
            logits_BW = ahead[k] if features is None else self._multiply(features(k, last_ids_B), k)
            column_B = logits_BW.argmax(-1) if drawing is None else drawing.choose(logits_BW, k)
            last_ids_B = column_B if self.ids_W is None else self.ids_W.index_select(0, column_B)
            if drawing is not None:
                drawing.tell(k, last_ids_B, column_B)
            ids.append(last_ids_B)
        q, lengths_B = (drawing.q, drawing.lengths_B) if drawing is not None else (None, None)
        return Drafted(torch.stack(ids, dim=1), tuple(q or ()), lengths_B)

    def logits_after(
        self, hidden_BD: torch.Tensor, given: Sequence[torch.Tensor], seen: Seen | None
    ) -> list[torch.Tensor]:
        """Logits `[B, W]` of the first heads divided by their temperatures, if they are given these
        tokens instead of drafting them: `[B]` for each head, the last token x_{t+1} first. The
        other arguments are those of `draft`.
        """
        count = len(given)
        if self.config.kind == "hydra":
            features = self._features(hidden_BD, given[0], count, seen)
            logits = [self._multiply(features(k, ids_B), k) for k, ids_B in enumerate(given)]
        else:
            logits = self._logits_ahead(hidden_BD, count)
        return [
            logits_BW.float() / temperature
            for logits_BW, temperature in zip(logits, self.temperatures_K[:count], strict=True)
        ]

    def _features(
        self, hidden_BD: torch.Tensor, last_ids_B: torch.Tensor, count: int, seen: Seen | None
    ) -> FEATURES:
        """Kind hydra: computes each head's features; to be called in order."""
        fused = self.fused
        if isinstance(fused, ContextHeads):
            return partial(
                fused.features, fused.start(hidden_BD, seen or fused.alone(hidden_BD, last_ids_B))
            )
        return partial(fused.features, fused.start(hidden_BD, count))

    def _logits_ahead(self, hidden_BD: torch.Tensor, count: int) -> list[torch.Tensor]:
        """lm_head's part of the logits `[B, W]` of each head, for kinds whose features do not
        depend on drafted tokens.
        """
        assert isinstance(self.fused, FusedHeads), "heads of kind medusa"
        features_BKD = self.fused.features_at_once(hidden_BD, count)
        if self._own:
            return [self._own[k](features_BKD[:, k]).float() for k in range(count)]
        logits_NW = self._lm_head(features_BKD.reshape(-1, features_BKD.shape[-1]))
        return list(logits_NW.view(-1, count, logits_NW.shape[-1]).float().unbind(1))

    def _multiply(self, features_BD: torch.Tensor, k: int) -> torch.Tensor:
        return self._own[k](features_BD) if self._own else self._lm_head(features_BD)

    @property
    def _width(self) -> int:
        return self.config.vocab_size if self.ids_W is None else len(self.ids_W)


class _Drawing:
    """Draws columns of logits; data that all heads share is computed once."""

    def __init__(
        self,
        sampling: DraftSampling,
        temperatures_K: torch.Tensor,
        count: int,
        slots: DraftSlots | None,
        width: int,
        recall: Recall | None,
        ending: Ending | None,
        may_overflow: bool,
    ) -> None:
        """`may_overflow`: logits may be inf, as float16 is beyond 65,504."""
        self._may_overflow = may_overflow
        temperature_B1 = sampling.temperature_B.clamp_min(0).unsqueeze(1)
        # A slice costs one more operation in every step; usually all heads are used.
        temperatures_K = temperatures_K if count == len(temperatures_K) else temperatures_K[:count]
        # 1 / 0 is inf, and inf times a logit of 0 is NaN: the bound keeps greedy rows finite.
        self._scales = (
            (temperature_B1 * temperatures_K).reciprocal_().clamp_max_(SHARPEST).split(1, dim=1)
        )
        # Among equal logits a greedy request takes the first, like argmax.
        uniforms_BK = float32_below(sampling.uniforms_BK) * (temperature_B1 > 0)
        self._uniforms = (
            # `searchsorted` copies non-contiguous input, and warns, once for each head.
            uniforms_BK.t().clone(memory_format=torch.contiguous_format).unsqueeze(2).unbind(0)
        )
        self._sampling = sampling
        self._recall = recall
        self._ending = ending
        self._drawn_B1 = temperature_B1 > 0
        batch = len(temperature_B1)
        self._places = (slots or DraftSlots(batch, count, width, temperature_B1.device)).places(
            count, batch
        )
        # With slots, q follows from the sums stored there, so it is not copied again.
        self.q: list[torch.Tensor] | None = [] if slots is None else None

    def choose(self, logits_BW: torch.Tensor, k: int) -> torch.Tensor:
        """Columns `[B]` drawn from the logits of the head with index k.

        They are cut with the request's own top-k and top-p: any q is lossless, but tokens that the
        target excludes would only be refused.
        """
        sampling = self._sampling
        sums_BX = self._places.cumulative[k]
        scaled_BW, mass_BW = self._places.scratch
        torch.mul(logits_BW, self._scales[k], out=scaled_BW)
        if sampling.top_k_B is not None or sampling.top_p_B is not None:
            scaled_BW = cut(scaled_BW, sampling.top_k_B, sampling.top_p_B)
        torch.softmax(scaled_BW, -1, out=mass_BW)
        if self._may_overflow and self.q is None:
            # One inf makes the whole row NaN, and verification by it biased. Without any mass the
            # last column is drawn with q = 1. The check of a swap, which asks for q, sees NaN.
            mass_BW.nan_to_num_(nan=0.0)
        # From here on the mass is q itself. `recall` changes it first, then `ending` evaluates it.
        if self._recall is not None:
            self._recall.mix(mass_BW, self._drawn_B1)
        if self._ending is not None:
            self._ending.ask(mass_BW, self._drawn_B1)
        if self.q is not None:
            # The next head reuses the same memory.
            self.q.append(mass_BW.clone())
        cumulate(mass_BW, sums_BX)
        column_B1 = self._places.columns[k]
        torch.searchsorted(sums_BX, self._uniforms[k], right=True, out=column_B1)
        return column_B1.squeeze(1)

    def tell(self, k: int, ids_B: torch.Tensor, column_B: torch.Tensor) -> None:
        """Tell everything that the next draft depends on what the head with index k has drawn."""
        if self._recall is not None or self._ending is not None:
            q_B = self._places.scratch[1].gather(1, column_B.unsqueeze(1)).squeeze(1)
            if self._recall is not None:
                self._recall.follow(k, ids_B, q_B)
            if self._ending is not None:
                self._ending.follow(k, q_B)

    @property
    def lengths_B(self) -> torch.Tensor | None:
        """Number of drafts to verify per request; None: all."""
        return None if self._ending is None else self._ending.lengths_B


CUT_RANGE, CUT_STEPS = 32.0, 18
"""Range in which a threshold is searched, in nats below the most likely token, and the number of
halvings: they make it accurate to 1e-4.
"""


def cut(
    logits_BW: torch.Tensor, top_k_B: torch.Tensor | None, top_p_B: torch.Tensor | None
) -> torch.Tensor:
    """Set to -inf what each row's top-k, then its top-p, exclude. Ties are kept, and at least one
    token.

    The threshold is found by bisection instead of sorting the vocabulary, so tokens within 1e-4 of
    it may be kept. Drafts need no exact truncation, since they are verified against the
    distribution that they were drawn from. A top-k above the width excludes nothing: a draft
    vocabulary is smaller than the vocabulary that requests refer to.
    """
    below_BW = logits_BW - logits_BW.amax(-1, keepdim=True)
    if top_k_B is not None:
        wanted_B1 = top_k_B.unsqueeze(1)
        least_B1 = _threshold(below_BW, lambda kept_BW: kept_BW.sum(1, keepdim=True) >= wanted_B1)
        below_BW = below_BW.masked_fill(below_BW < least_B1, -torch.inf)
    if top_p_B is not None:
        share_BW = below_BW.softmax(-1)
        share_B1 = top_p_B.unsqueeze(1)
        least_B1 = _threshold(
            below_BW, lambda kept_BW: (share_BW * kept_BW).sum(1, keepdim=True) >= share_B1
        )
        below_BW = below_BW.masked_fill(below_BW < least_B1, -torch.inf)
    return logits_BW.masked_fill(below_BW == -torch.inf, -torch.inf)


def _threshold(
    below_BW: torch.Tensor, enough: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The highest threshold `[B, 1]` above which there is `enough`; -inf if there is none."""
    low_B1 = torch.full_like(below_BW[:, :1], -CUT_RANGE)
    high_B1 = torch.zeros_like(low_B1)
    for _ in range(CUT_STEPS):
        middle_B1 = (low_B1 + high_B1) / 2
        good_B1 = enough(below_BW >= middle_B1)
        low_B1 = torch.where(good_B1, middle_B1, low_B1)
        high_B1 = torch.where(good_B1, high_B1, middle_B1)
    return torch.where(low_B1 > -CUT_RANGE, low_B1, -torch.inf)
