"""Heads with a context as drafting asks them: the last n pairs (h_j, x_{j+1}) of each request by
slot, and the arithmetic of `MedusaHeads`.

A key and a value of a pair depend on that pair alone, so they are made once, when its token is
there, and kept in a ring. What a token adds to a product is a row of a table made beforehand where
that is small, and a product where not.

Shape letters: B requests, N pairs, S slots, n pairs of a context, D hidden, H width of the cell, A
parts of the attention, w width of a part, R width of what is kept of a pair (2 D for each
layer), V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from heads.heads_config import context_prefix
from heads.modules import MedusaHeads
from medusa_ppo.drafting import sending
from medusa_ppo.drafting.fixed import Fixed
from medusa_ppo.drafting.products import (
    EMBED,
    LINEAR,
    PACK,
    TABLE_ENTRIES,
    cast,
    inverse_rms,
    plain_linear,
    token_tables,
)
from medusa_ppo.drafting.slots import NOTHING, stamps


class PairRing:
    """What is kept of the last n pairs of each request; one spare slot for what nobody reads.

    A pair stands at its position modulo n, beside that position: a pair that is missing (of the
    prompt, of a request that lost its slot, of heads that were swapped) is seen to be missing,
    because what stands in its place is of another position or another request.
    """

    def __init__(
        self, slots: int, pairs: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pairs = pairs
        self.spare = slots
        self.kept_NR = torch.zeros((slots + 1) * pairs, width, dtype=dtype, device=device)
        self.stamps_N = torch.full(((slots + 1) * pairs,), NOTHING, device=device)
        self._back_n = torch.arange(1 - pairs, 1, device=device)

    def forget(self) -> None:
        """All pairs count as missing from now on, because other heads have other keys."""
        self.stamps_N.fill_(NOTHING)

    def renew(self) -> None:
        """Its memory was thrown away: restore the initial state at the same addresses. Masked
        values are multiplied by 0, so they must be finite.
        """
        self.kept_NR.zero_()
        torch.arange(1 - self.pairs, 1, out=self._back_n)
        self.forget()

    def write(
        self,
        slots_N: torch.Tensor,
        requests_N: torch.Tensor,
        positions_N: torch.Tensor,
        kept_NR: torch.Tensor,
    ) -> None:
        """Pairs at their positions (>= 0); of one call, no two may fall on the same place: at most
        n positions of a request in a row.
        """
        place_N = slots_N * self.pairs + positions_N % self.pairs
        self.kept_NR.index_copy_(0, place_N, kept_NR)
        self.stamps_N.index_copy_(0, place_N, stamps(requests_N, positions_N))

    def read(
        self, slots_B: torch.Tensor, requests_B: torch.Tensor, positions_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept `[B, n, R]` and a mask `[B, n]` of the n positions that end at
        `positions_B`, oldest first.

        Masked entries are meaningless.
        """
        wanted_Bn = positions_B.unsqueeze(1) + self._back_n
        place_Bn = slots_B.unsqueeze(1) * self.pairs + wanted_Bn % self.pairs
        same_Bn = self.stamps_N[place_Bn] == stamps(requests_B.unsqueeze(1), wanted_Bn)
        # The stamp of a position below 0 is no stamp of this request: that of request 0 at
        # position -1 is NOTHING, which every empty place bears.
        return self.kept_NR[place_Bn], same_Bn & (wanted_Bn >= 0)


@dataclass(frozen=True)
class Standing:
    """Where B requests are after a step: their slots, serial numbers, and the position of each
    one's newest pair.
    """

    slots_B: torch.Tensor
    requests_B: torch.Tensor
    positions_B: torch.Tensor


@dataclass(frozen=True)
class Arrived:
    """The new pairs of a step.

    Attributes:
        hidden_ND, ids_N: h_j and x_{j+1}.
        slots_N, requests_N, positions_N: whose they are, and where; the spare slot for what is
            nobody's.
        own_B: which of them each request stands at.
    """

    hidden_ND: torch.Tensor
    ids_N: torch.Tensor
    slots_N: torch.Tensor
    requests_N: torch.Tensor
    positions_N: torch.Tensor
    own_B: torch.Tensor

    @classmethod
    def of_step(
        cls,
        hidden_TD: torch.Tensor,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
        at: Standing,
        spare: int,
        most: int,
    ) -> Arrived:
        """Of a step's own tensors, with nothing read on the host: of each request so many pairs as
        it sampled, `most` at most.

        Args:
            hidden_TD, ids_T: what the model read and gave, all requests' rows one behind the other;
                verified drafts are among them.
            rows_B: row of the state that each request's last token was sampled from.
            last_ids_B: that token.
            sampled_B: how many tokens each request sampled; 0 where the prompt isn't finished.
        """
        back_n = torch.arange(most, device=rows_B.device)
        rows_Bn = (rows_B.unsqueeze(1) - back_n).clamp_min(0)
        # An accepted draft is what the next row read.
        next_rows_Bn = (rows_Bn + 1).clamp_max(len(ids_T) - 1)
        ids_Bn = ids_T[next_rows_Bn].long()
        ids_Bn[:, 0] = last_ids_B
        return cls.of_rows(hidden_TD[rows_Bn], ids_Bn, sampled_B, at, spare)

    @classmethod
    def of_rows(
        cls,
        hidden_BnD: torch.Tensor,
        ids_Bn: torch.Tensor,
        sampled_B: torch.Tensor,
        at: Standing,
        spare: int,
    ) -> Arrived:
        """The same of rows that were looked up, n of each request, the newest first.

        Args:
            ids_Bn: the token behind each state.
        """
        batch, most = ids_Bn.shape
        back_n = torch.arange(most, device=ids_Bn.device)
        # How many pairs a request has isn't known on the host: all have `most`, and those that are
        # not its own are written where nobody reads.
        slots_Bn = torch.where(back_n < sampled_B.unsqueeze(1), at.slots_B.unsqueeze(1), spare)
        positions_Bn = (at.positions_B.unsqueeze(1) - back_n).clamp_min(0)
        requests_Bn = at.requests_B.unsqueeze(1).expand_as(ids_Bn)
        own_B = torch.arange(batch, device=ids_Bn.device) * most
        return cls(
            hidden_BnD.flatten(0, 1),
            ids_Bn.flatten(),
            slots_Bn.flatten(),
            requests_Bn.flatten(),
            positions_Bn.flatten(),
            own_B,
        )

    @classmethod
    def of_lists(
        cls,
        hidden_TD: torch.Tensor,
        sampled_token_ids: Sequence[Sequence[int]],
        drafted: Sequence[int],
        at: Standing,
        most: int,
    ) -> Arrived:
        """Where the host has a step's tokens: of each request so many pairs as it sampled, `most`
        at most.

        Args:
            hidden_TD: the states that verification read: of each request one more than drafts, or
                where nothing was drafted one.
            sampled_token_ids: none for a request whose prompt isn't finished.
            drafted: drafts that were verified, by request.
        """
        # Row of the state, token, request, and how far before the request's last token.
        found: list[tuple[int, int, int, int]] = []
        own = []
        row = 0
        alike = hidden_TD.shape[0] == len(sampled_token_ids)
        for request, (tokens, count) in enumerate(zip(sampled_token_ids, drafted, strict=True)):
            # Oldest first: the last pair found is then the one that the request stands at.
            ago = range(min(len(tokens), most) - 1, -1, -1)
            found += [
                (row + len(tokens) - 1 - back, tokens[-1 - back], request, back) for back in ago
            ]
            # A request without a token points at somebody else's pair; nobody reads its drafts.
            own.append(max(len(found) - 1, 0))
            row += 1 if alike else count + 1
        # One copy to the device for all four columns.
        numbers = sending.sent([*zip(*found, strict=True)], hidden_TD.device)
        own_B = sending.sent(own, hidden_TD.device)
        row_N, ids_N, request_N, back_N = numbers.unbind(0)
        positions_N = at.positions_B[request_N] - back_N
        return cls(
            hidden_TD[row_N],
            ids_N,
            at.slots_B[request_N],
            at.requests_B[request_N],
            positions_N,
            own_B,
        )

    def after(self, before: Sequence[Arrived], at: Standing, ring: PairRing) -> Arrived:
        """These pairs, and those of steps before them that nobody needed then: of the requests that
        have the same slots still, and as many as a context has room for.
        """
        if not before:
            return self
        slots_N = torch.cat([part.slots_N for part in before])
        requests_N = torch.cat([part.requests_N for part in before])
        positions_N = torch.cat([part.positions_N for part in before])
        holder_2S = torch.full((2, ring.spare + 1), NOTHING, device=slots_N.device)
        holder_2S[:, at.slots_B] = torch.stack([at.requests_B, at.positions_B])
        holder_N, newest_N = holder_2S[:, slots_N].unbind(0)
        # What is too old would stand in the place of a pair that a request attends to.
        seen_N = (holder_N == requests_N) & (positions_N > newest_N - ring.pairs)
        slots_N = torch.where(seen_N, slots_N, ring.spare)
        return Arrived(
            torch.cat([*(part.hidden_ND for part in before), self.hidden_ND]),
            torch.cat([*(part.ids_N for part in before), self.ids_N]),
            torch.cat([slots_N, self.slots_N]),
            torch.cat([requests_N, self.requests_N]),
            torch.cat([positions_N, self.positions_N]),
            self.own_B + len(slots_N),
        )


_Unread = tuple[torch.Tensor, Sequence[Sequence[int]], Sequence[int], Callable[[], Standing]]


class UnreadSteps:
    """Steps after which nothing was drafted. Nobody reads their pairs, so nothing is computed of
    them: what the steps left is only held, until drafts are wanted again.
    """

    def __init__(self, pairs: int) -> None:
        """
        Args:
            pairs: of a context; the pair that drafts are wanted at is one of them.
        """
        self._steps: deque[_Unread | Arrived] = deque(maxlen=max(pairs - 1, 1))
        self._pairs = pairs

    def hold(
        self,
        hidden_TD: torch.Tensor,
        sampled_token_ids: Sequence[Sequence[int]],
        drafted: Sequence[int],
        at: Callable[[], Standing],
    ) -> None:
        """A step; arguments as of `Arrived.of_lists`, `at` once somebody asks. None of the tensors
        may change afterwards.
        """
        self._steps.append((hidden_TD, sampled_token_ids, drafted, at))

    def hold_pairs(self, arrived: Arrived) -> None:
        """A step whose tensors the next one writes over, so that its pairs were copied out."""
        self._steps.append(arrived)

    def take(self) -> list[Arrived]:
        """The pairs of the steps that are held, oldest first; none is held afterwards."""
        found = []
        for step in self._steps:
            if isinstance(step, Arrived):
                found.append(step)
            elif any(step[1]):
                hidden_TD, sampled_token_ids, drafted, at = step
                found.append(
                    Arrived.of_lists(hidden_TD, sampled_token_ids, drafted, at(), self._pairs)
                )
        self._steps.clear()
        return found

    def forget(self) -> None:
        """Other heads, or a different actor, have other pairs."""
        self._steps.clear()


@dataclass(frozen=True)
class Seen:
    """What B requests attend to.

    Attributes:
        query_BD: of the pair that each stands at, for the first layer of the context.
        ids_B: the token of that pair.
        kept_BnR, there_Bn: from `PairRing.read`; the pair that it stands at is the last, and there.
        told_BKH: what heads that copy found in the text (`drafting.texts`); None: nothing.
    """

    query_BD: torch.Tensor
    ids_B: torch.Tensor
    kept_BnR: torch.Tensor
    there_Bn: torch.Tensor
    told_BKH: torch.Tensor | None = None


class CellState:
    """The state passed from head to head: h_t with its context, and what the cell adds its token
    to, as a product and the rows' scales.
    """

    def __init__(
        self,
        base_BD: torch.Tensor,
        product_BH: torch.Tensor,
        scale_B1: torch.Tensor,
        told_BKH: torch.Tensor | None,
    ) -> None:
        self.base_BD = base_BD
        self.product_BH = product_BH
        self.scale_B1 = scale_B1
        self.told_BKH = told_BKH


class ContextHeads:
    """Features of heads with a context. What it holds are copies of the heads' values of when
    `load` was called.
    """

    def __init__(self, heads: MedusaHeads, embed: EMBED | None, pack: PACK = plain_linear) -> None:
        """
        Args:
            embed: the engine's own lookup, whatever shards the table.
            pack: how a weight becomes a product, in a dtype of its own choice.
        """
        assert embed is not None, "hydra heads read embeddings"
        self.config = heads.config
        self.heads = heads
        self._embed = embed
        self._pack = pack
        self.fixed = Fixed()
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        """Reread the heads and the embedding table after a swap."""
        heads = self.heads
        D = self.config.hidden_size
        scale = (D // self.config.context_parts) ** 0.5
        # Attention divides scores by sqrt(w). That is put into the queries' weights, once per swap;
        # they are cloned, because what was trained must not change.
        into = [self._layer(layer, "in").clone() for layer in range(self.config.context_layers)]
        for weight_3D2D in into:
            weight_3D2D[:D] /= scale
        # One product for the first layer's query and all layers' keys and values; the queries of
        # further layers read what the layers before said.
        kept = [weight_3D2D[D:] for weight_3D2D in into]
        first_R2D = self.fixed.put("first", torch.cat([into[0][:D], *kept]))
        asked = [
            self.fixed.put(f"asked {layer}", weight_3D2D[:D].clone())
            for layer, weight_3D2D in enumerate(into[1:], start=1)
        ]
        self._into = self._pack(first_R2D[:, :D])
        # `pack` chooses the dtype and tells nobody: one row shows it.
        self.dtype = self._into(first_R2D[:1, :D]).dtype
        self._ask = [self._pack(weight_D2D[:, :D]) for weight_D2D in asked]
        layers = range(self.config.context_layers)
        self._out = [self._pack(self._layer(layer, "out")) for layer in layers]
        self._feed: list[tuple[LINEAR, LINEAR]] = []
        if self.config.feed_forward:
            self._feed = [
                (
                    self._pack(self._layer(layer, "feed_in")),
                    self._pack(self._layer(layer, "feed_out")),
                )
                for layer in layers
            ]
        self._start = self._pack(heads.cell_start.detach())
        self._last = self._pack(heads.cell_out.detach())
        both = torch.cat([heads.cell_out, heads.cell_step]).detach()
        self._next = self._pack(self.fixed.put("next", both))
        self._blocks = [
            [self._pack(block_DD.detach()) for block_DD in block_KDD] for block_KDD in heads.blocks
        ]
        # In the order in which `_token` counts them.
        self._of_tokens = [
            first_R2D[:, D:],
            heads.cell_token.detach(),
            *(weight_D2D[:, D:] for weight_D2D in asked),
        ]
        self.read_embedding()

    def _layer(self, layer: int, name: str) -> torch.Tensor:
        """A weight of one layer of the context."""
        prefix = context_prefix(layer).replace(".", "_")
        return self.heads.get_parameter(f"{prefix}_{name}").detach()

    @property
    def kept_width(self) -> int:
        """Numbers stored per pair: a key and a value for each layer."""
        return 2 * self.config.hidden_size * self.config.context_layers

    @torch.no_grad()
    def read_embedding(self) -> None:
        """1 / rms of every token's embedding, and, where they are small, tables of what tokens add
        to a pair `[V, D + R]`, to the cell `[V, H]`, and to the queries of further layers `[V, D]`.
        Made anew after a sync of the actor.
        """
        size = self.config.vocab_size
        device = self._of_tokens[0].device
        small = size * sum(weight.shape[0] for weight in self._of_tokens) <= TABLE_ENTRIES
        sizes_V1, tables = token_tables(
            self._embed, size, self._of_tokens if small else [], self.dtype, device
        )
        self._tables = [self.fixed.put(f"table {i}", tables[i]) for i in range(len(tables))]
        self._sizes_V1 = self.fixed.put("sizes", sizes_V1.to(self.dtype))
        self._products = [] if small else [self._pack(weight) for weight in self._of_tokens]

    def _token(self, which: int, ids_N: torch.Tensor) -> torch.Tensor:
        """What tokens add to a pair (0), to the cell (1) or to the query of layer `which` - 1."""
        if self._tables:
            return self._tables[which].index_select(0, ids_N)
        return self._products[which](
            # RMS normalisation is one number a row, so it is applied behind the product, whose
            # input is then read as it is.
            cast(self._embed(ids_N), self.dtype)
        ) * self._sizes_V1.index_select(0, ids_N)

    # ---- the context

    def pairs(self, hidden_ND: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        """Query of the first layer, then keys and values of all, `[N, D + R]`."""
        return cast(
            torch.addcmul(
                self._token(0, ids_N),
                self._into(cast(hidden_ND, self.dtype)),
                inverse_rms(hidden_ND),
            ),
            self.dtype,
        )

    def seen(self, hidden_BnD: torch.Tensor, ids_Bn: torch.Tensor, there_Bn: torch.Tensor) -> Seen:
        """Requests that stand at the last of n pairs each."""
        pairs_BnX = self.pairs(hidden_BnD.flatten(0, 1), ids_Bn.flatten()).view(*ids_Bn.shape, -1)
        D = self.config.hidden_size
        return Seen(pairs_BnX[:, -1, :D], ids_Bn[:, -1], pairs_BnX[:, :, D:], there_Bn)

    def look_back(self, ring: PairRing, arrived: Arrived, at: Standing) -> Seen:
        """Put a step's pairs into the ring, and look up what each request attends to."""
        D = self.config.hidden_size
        pairs_NX = self.pairs(arrived.hidden_ND, arrived.ids_N)
        ring.write(arrived.slots_N, arrived.requests_N, arrived.positions_N, pairs_NX[:, D:])
        kept_BnR, there_Bn = ring.read(at.slots_B, at.requests_B, at.positions_B)
        # It is, but for requests whose prompt isn't finished; nobody reads their drafts.
        there_Bn[:, -1].fill_(True)
        own_B = arrived.own_B
        return Seen(pairs_NX[own_B, :D], arrived.ids_N[own_B], kept_BnR, there_Bn)

    def alone(self, hidden_BD: torch.Tensor, ids_B: torch.Tensor) -> Seen:
        """Each request sees only its newest pair."""
        return self.seen(
            hidden_BD.unsqueeze(1),
            ids_B.unsqueeze(1),
            torch.ones_like(ids_B, dtype=torch.bool).unsqueeze(1),
        )

    def start(self, hidden_BD: torch.Tensor, seen: Seen) -> CellState:
        """h_t plus its context."""
        D = self.config.hidden_size
        base_BD = hidden_BD
        for layer in range(self.config.context_layers):
            query_BD = seen.query_BD
            if layer:
                asked_BD = self._ask[layer - 1](cast(base_BD, self.dtype))
                token_BD = self._token(layer + 1, seen.ids_B)
                query_BD = cast(torch.addcmul(token_BD, asked_BD, inverse_rms(base_BD)), self.dtype)
            kept_Bn2D = seen.kept_BnR[:, :, 2 * D * layer : 2 * D * (layer + 1)]
            mixed_BD = self._attend(query_BD, kept_Bn2D, seen.there_Bn)
            base_BD = base_BD + self._out[layer](mixed_BD)
            if self._feed:
                feed_in, feed_out = self._feed[layer]
                inner_BF = F.silu(feed_in(cast(base_BD, self.dtype)) * inverse_rms(base_BD))
                base_BD = base_BD + feed_out(cast(inner_BF, self.dtype))
        product_BH = self._start(cast(base_BD, self.dtype))
        return CellState(base_BD, product_BH, inverse_rms(base_BD), seen.told_BKH)

    def _attend(
        self, query_BD: torch.Tensor, kept_Bn2D: torch.Tensor, there_Bn: torch.Tensor
    ) -> torch.Tensor:
        parts = self.config.context_parts
        keys_BnAw, values_BnAw = (
            half.unflatten(2, (parts, -1)) for half in kept_Bn2D.chunk(2, dim=2)
        )
        mixed_BA1w = F.scaled_dot_product_attention(
            query_BD.unflatten(1, (parts, 1, -1)),
            keys_BnAw.transpose(1, 2),
            values_BnAw.transpose(1, 2),
            # The queries' weights hold 1 / sqrt(w) already (`load`).
            attn_mask=there_Bn[:, None, None],
            scale=1.0,
        )
        return mixed_BA1w.flatten(1)

    # ---- the heads

    def features(self, state: CellState, k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """The input of lm_head for the head with index k (from 0), `BD`; call it for the heads in
        order, once each.
        """
        inner_BH = torch.addcmul(self._token(1, last_ids_B), state.product_BH, state.scale_B1)
        if state.told_BKH is not None:
            inner_BH = inner_BH + state.told_BKH[:, k]
        cell_BH = F.silu(inner_BH)
        scale_B1 = inverse_rms(cell_BH)
        # The last head has none after it to tell anything.
        product = self._next if k + 1 < self.config.num_heads else self._last
        both_BX = product(cast(cell_BH, self.dtype))
        D = self.config.hidden_size
        features_BD = torch.addcmul(state.base_BD, both_BX[:, :D], scale_B1)
        # Its scale is applied where the next token's part is added: one operation instead of two.
        state.product_BH = both_BX[:, D:]
        state.scale_B1 = scale_B1
        for layer in self._blocks:
            features_BD = features_BD + F.silu(layer[k](cast(features_BD, self.dtype)))
        return features_BD
