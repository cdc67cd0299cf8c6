"""Heads with a context in drafting: the last n pairs (h_j, x_{j+1}) of each request by slot, and
the arithmetic of `MedusaHeads`.

A pair's key and value depend on that pair alone, so they are computed once, when its token is
known, and kept in a ring. A token's contribution to a matrix product is looked up in a precomputed
table if that is small, and multiplied otherwise.

Shape letters: B requests, N pairs, S slots, n pairs of a context, D hidden, H width of the cell, A
parts of the attention, w width of a part, R width of what is kept of a pair (2 D for each
layer), V vocabulary.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from heads.heads_config import context_prefix
from heads.modules import MedusaHeads
from medusa_ppo.drafting import sending
from medusa_ppo.drafting.products import (
    EMBED,
    LINEAR,
    PACK,
    TABLE_ENTRIES,
    cast,
    normalised,
    pieces,
    plain_linear,
    token_tables,
)
from medusa_ppo.drafting.slots import NOTHING, stamps


class PairRing:
    """The stored values of the last n pairs of each request, with one spare slot that is never
    read.

    A pair is stored at its position modulo n, together with that position. A missing pair (of the
    prompt, of a request that lost its slot, of swapped heads) is recognised by it: its place holds
    another position or another request.
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
        """Mark all pairs as missing, because other heads have other keys."""
        self.stamps_N.fill_(NOTHING)

    def renew(self) -> None:
        """Restore the initial state at the same addresses, after the memory was thrown away. Masked
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
        """Write pairs at their positions (>= 0). In one call, no two pairs may have the same place:
        at most n consecutive positions of a request.
        """
        place_N = slots_N * self.pairs + positions_N % self.pairs
        self.kept_NR.index_copy_(0, place_N, kept_NR)
        self.stamps_N.index_copy_(0, place_N, stamps(requests_N, positions_N))

    def read(
        self, slots_B: torch.Tensor, requests_B: torch.Tensor, positions_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored values `[B, n, R]` and a mask `[B, n]` of the n positions that end at
        `positions_B`, oldest first.

        Masked entries are meaningless.
        """
        wanted_Bn = positions_B.unsqueeze(1) + self._back_n
        place_Bn = slots_B.unsqueeze(1) * self.pairs + wanted_Bn % self.pairs
        same_Bn = self.stamps_N[place_Bn] == stamps(requests_B.unsqueeze(1), wanted_Bn)
        # A position below 0 must not match a stamp: for request 0 at position -1 it would be
        # NOTHING, the stamp of every empty place.
        return self.kept_NR[place_Bn], same_Bn & (wanted_Bn >= 0)


@dataclass(frozen=True)
class Standing:
    """Where B requests stand after a step: their slots, serial numbers, and the positions of their
    newest pairs.
    """

    slots_B: torch.Tensor
    requests_B: torch.Tensor
    positions_B: torch.Tensor


@dataclass(frozen=True)
class Arrived:
    """The new pairs of a step.

    Attributes:
        hidden_ND, ids_N: h_j and x_{j+1}.
        slots_N, requests_N, positions_N: where they belong; the spare slot if they belong to no
            request.
        own_B: index of each request's newest pair.
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
        """Build from a step's own tensors, without reading anything on the host. Each request has
        as many pairs as it sampled tokens, at most `most`.

        Args:
            hidden_TD, ids_T: the model's inputs and outputs, the rows of all requests one after the
                other; they include verified drafts.
            rows_B: row of the state from which each request's last token was sampled.
            last_ids_B: these tokens.
            sampled_B: how many tokens each request sampled; 0 where the prompt isn't finished.
        """
        back_n = torch.arange(most, device=rows_B.device)
        rows_Bn = (rows_B.unsqueeze(1) - back_n).clamp_min(0)
        # An accepted draft is the input of the next row.
        next_rows_Bn = (rows_Bn + 1).clamp_max(len(ids_T) - 1)
        ids_Bn = ids_T[next_rows_Bn].long()
        ids_Bn[:, 0] = last_ids_B
        # The host doesn't know how many pairs a request has: all get `most`, and the surplus is
        # written to the slot that is never read.
        slots_Bn = torch.where(back_n < sampled_B.unsqueeze(1), at.slots_B.unsqueeze(1), spare)
        positions_Bn = (at.positions_B.unsqueeze(1) - back_n).clamp_min(0)
        requests_Bn = at.requests_B.unsqueeze(1).expand_as(rows_Bn)
        own_B = torch.arange(len(rows_B), device=rows_B.device) * most
        hidden_ND = hidden_TD[rows_Bn.flatten()]
        return cls(
            hidden_ND,
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
        """Build for steps whose tokens are on the host. Each request has as many pairs as it
        sampled tokens, at most `most`.

        Args:
            hidden_TD: the states that verification read: one more than drafts for each request, so
                one for a request without drafts.
            sampled_token_ids: empty for a request whose prompt isn't finished.
            drafted: number of verified drafts, by request.
        """
        # Row of the state, token, request, and how far before the request's last token.
        found: list[tuple[int, int, int, int]] = []
        own = []
        row = 0
        alike = hidden_TD.shape[0] == len(sampled_token_ids)
        for request, (tokens, count) in enumerate(zip(sampled_token_ids, drafted, strict=True)):
            # The oldest pair comes first, so that the last one found is the request's newest.
            ago = range(min(len(tokens), most) - 1, -1, -1)
            found += [
                (row + len(tokens) - 1 - back, tokens[-1 - back], request, back) for back in ago
            ]
            # A request without a token points at another request's pair; its drafts are never read.
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
        """These pairs together with those of earlier steps, which were not needed then: only those
        of requests that still have the same slots, and no more than fit into a context.
        """
        if not before:
            return self
        slots_N = torch.cat([part.slots_N for part in before])
        requests_N = torch.cat([part.requests_N for part in before])
        positions_N = torch.cat([part.positions_N for part in before])
        holder_2S = torch.full((2, ring.spare + 1), NOTHING, device=slots_N.device)
        holder_2S[:, at.slots_B] = torch.stack([at.requests_B, at.positions_B])
        holder_N, newest_N = holder_2S[:, slots_N].unbind(0)
        # A pair that is too old would overwrite one that a request attends to.
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
    """Steps after which nothing was drafted. Their pairs are not needed yet, so nothing is computed
    from them; their tensors are held until the engine drafts again.
    """

    def __init__(self, pairs: int) -> None:
        """
        Args:
            pairs: number of pairs in a context, including the newest one.
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
        """Hold a step; arguments as in `Arrived.of_lists`, with `at` called when needed. None of
        the tensors may change afterwards.
        """
        self._steps.append((hidden_TD, sampled_token_ids, drafted, at))

    def hold_pairs(self, arrived: Arrived) -> None:
        """Hold a step's pairs, copied because the next step overwrites its tensors."""
        self._steps.append(arrived)

    def take(self) -> list[Arrived]:
        """The pairs of the held steps, oldest first; afterwards none is held."""
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

    def __len__(self) -> int:
        """Number of steps held."""
        return len(self._steps)

    def forget(self) -> None:
        """Discard all: other heads, or another actor, have other pairs."""
        self._steps.clear()


@dataclass(frozen=True)
class Seen:
    """What B requests attend to.

    Attributes:
        query_BD: query of each request's newest pair, for the first layer of the context.
        ids_B: token of that pair.
        kept: reads, for some of the requests, the values `[., n, R]` and the mask `[., n]` of
            `PairRing.read`; the newest pair is the last one, and never masked.
        told_BKH: what copying found in the text (`drafting.texts`); None: nothing.
    """

    query_BD: torch.Tensor
    ids_B: torch.Tensor
    kept: Callable[[slice], tuple[torch.Tensor, torch.Tensor]]
    told_BKH: torch.Tensor | None = None


class CellState:
    """The state passed from head to head: h_t with its context, and the cell's state before its
    token is added.
    """

    def __init__(
        self, base_BD: torch.Tensor, inner_BH: torch.Tensor, told_BKH: torch.Tensor | None
    ) -> None:
        self.base_BD = base_BD
        self.inner_BH = inner_BH
        self.told_BKH = told_BKH


class ContextHeads:
    """Features of heads with a context. It holds copies of the heads' values from the last call of
    `load`.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        embed: EMBED | None,
        pack: PACK = plain_linear,
        with_embedding: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            embed: the engine's own lookup, whatever shards the table.
            pack: turns a weight into the function that multiplies by it; it chooses the dtype.
            with_embedding: read the embedding table now; otherwise `read_embedding` has to be
                called before the first drafts.
            dtype: what `pack` chooses, if that is known; None: a product is made to see it.
        """
        assert embed is not None, "hydra heads read embeddings"
        self.config = heads.config
        self.heads = heads
        self._embed = embed
        self._pack = pack
        self._known_dtype = dtype
        self._queries: Sequence[torch.Tensor] = ()
        self._next_weight: weakref.ref[torch.Tensor] | None = None
        self.load(with_embedding)

    @torch.no_grad()
    def load(self, with_embedding: bool = True) -> None:
        """Reread the heads and the embedding table after a swap. What products read stays where it
        is: a new place for it would not lie in the memory that a sleeping engine gives away, and
        one rank of several might have no room.
        """
        heads = self.heads
        D = self.config.hidden_size
        layers = range(self.config.context_layers)
        into = [self._layer(layer, "in") for layer in layers]
        # One product for the first layer's query and all layers' keys and values; the queries of
        # further layers need the output of the previous layers.
        kept = [weight_3D2D[D:] for weight_3D2D in into]
        parts = [[into[0][:D], *kept], *([weight_3D2D[:D]] for weight_3D2D in into[1:])]
        before: Sequence[torch.Tensor | None] = self._queries or [None for _ in parts]
        self._queries = [
            torch.cat(below, out=held) for below, held in zip(parts, before, strict=True)
        ]
        # Attention divides scores by sqrt(w). This factor is put into the queries' weights, once
        # per swap.
        scale = (D // self.config.context_parts) ** 0.5
        for weight_X2D in self._queries:
            weight_X2D[:D] /= scale
        first_R2D, *asked = self._queries
        self._into = self._pack(first_R2D[:, :D])
        # `pack` chooses the dtype but doesn't report it; multiplying one row shows it.
        self.dtype = self._known_dtype or self._into(first_R2D[:1, :D]).dtype
        self._ask = [self._pack(weight_D2D[:, :D]) for weight_D2D in asked]
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
        # Packed products have a copy of their own, and nothing else holds this weight then.
        held = None if self._next_weight is None else self._next_weight()
        next_XH = torch.cat([heads.cell_out, heads.cell_step], out=held)
        self._next_weight = weakref.ref(next_XH)
        self._next = self._pack(next_XH)
        self._blocks = [
            [self._pack(block_DD.detach()) for block_DD in block_KDD] for block_KDD in heads.blocks
        ]
        # In the order in which `_token` counts them.
        self._of_tokens = [
            first_R2D[:, D:],
            heads.cell_token.detach(),
            *(weight_D2D[:, D:] for weight_D2D in asked),
        ]
        self._products = [] if self._tabled else [self._pack(weight) for weight in self._of_tokens]
        if with_embedding:
            self.read_embedding()

    @property
    def _tabled(self) -> bool:
        """Whether the tables of what tokens add are small enough."""
        rows = sum(weight.shape[0] for weight in self._of_tokens)
        return self.config.vocab_size * rows <= TABLE_ENTRIES

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
        """1 / rms of every token's embedding; and, if they are small, tables of what tokens add to
        a pair `[V, D + R]`, to the cell `[V, H]`, and to the queries of further layers `[V, D]`.
        Renewed after a sync of the actor.
        """
        size = self.config.vocab_size
        device = self._of_tokens[0].device
        sizes_V1, self._tables = token_tables(
            self._embed, size, self._of_tokens if self._tabled else [], self.dtype, device
        )
        self._sizes_V1 = sizes_V1.to(self.dtype)

    def _token(self, which: int, ids_N: torch.Tensor) -> torch.Tensor:
        """What tokens add to a pair (0), to the cell (1) or to the query of layer `which` - 1."""
        if self._tables:
            return self._tables[which].index_select(0, ids_N)
        return self._products[which](
            # RMS normalisation is one factor per row, so it is applied after the product, whose
            # input then needs no copy.
            cast(self._embed(ids_N), self.dtype)
        ) * self._sizes_V1.index_select(0, ids_N)

    # ---- the context

    def pairs(self, hidden_ND: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        """Query of the first layer, then keys and values of all, `[N, D + R]`."""
        into_NX = self._into(normalised(hidden_ND, self.dtype))
        return cast(into_NX + self._token(0, ids_N), self.dtype)

    def seen(self, hidden_BnD: torch.Tensor, ids_Bn: torch.Tensor, there_Bn: torch.Tensor) -> Seen:
        """What requests see if each one's newest pair is the last of its n pairs."""
        pairs_BnX = self.pairs(hidden_BnD.flatten(0, 1), ids_Bn.flatten()).view(*ids_Bn.shape, -1)
        D = self.config.hidden_size
        kept_BnR = pairs_BnX[:, :, D:]
        return Seen(
            pairs_BnX[:, -1, :D], ids_Bn[:, -1], lambda rows: (kept_BnR[rows], there_Bn[rows])
        )

    def note(self, ring: PairRing, arrived: Arrived) -> torch.Tensor:
        """Write a step's pairs to the ring; returns the queries of all, `ND`."""
        D = self.config.hidden_size
        queries = []
        # The product, what the tokens add, and their sum.
        row_bytes = 3 * (D + self.kept_width) * self.dtype.itemsize
        for rows in pieces(len(arrived.ids_N), row_bytes):
            pairs_nX = self.pairs(arrived.hidden_ND[rows], arrived.ids_N[rows])
            ring.write(
                arrived.slots_N[rows],
                arrived.requests_N[rows],
                arrived.positions_N[rows],
                pairs_nX[:, D:],
            )
            queries.append(pairs_nX[:, :D])
        # A copy of several, so that nothing else of the pairs stays.
        return queries[0] if len(queries) == 1 else torch.cat(queries)

    def look_back(self, ring: PairRing, arrived: Arrived, at: Standing) -> Seen:
        """Write a step's pairs to the ring, from which each request's are read."""
        query_ND = self.note(ring, arrived)

        def read(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            kept_BnR, there_Bn = ring.read(
                at.slots_B[rows], at.requests_B[rows], at.positions_B[rows]
            )
            # This is true except for requests whose prompt isn't finished; their drafts are never
            # read.
            there_Bn[:, -1] = True
            return kept_BnR, there_Bn

        own_B = arrived.own_B
        return Seen(query_ND[own_B], arrived.ids_N[own_B], read)

    def alone(self, hidden_BD: torch.Tensor, ids_B: torch.Tensor) -> Seen:
        """What requests see if each sees only its newest pair."""
        return self.seen(
            hidden_BD.unsqueeze(1),
            ids_B.unsqueeze(1),
            torch.ones_like(ids_B, dtype=torch.bool).unsqueeze(1),
        )

    def start(self, hidden_BD: torch.Tensor, seen: Seen) -> CellState:
        """h_t plus its context."""
        row_bytes = self.config.context * self.kept_width * self.dtype.itemsize
        found = [
            self._with_context(hidden_BD[rows], seen.query_BD[rows], seen.ids_B[rows], seen, rows)
            for rows in pieces(len(hidden_BD), row_bytes)
        ]
        base_BD = found[0] if len(found) == 1 else torch.cat(found)
        return CellState(base_BD, self._start(normalised(base_BD, self.dtype)), seen.told_BKH)

    def _with_context(
        self,
        hidden_BD: torch.Tensor,
        query_BD: torch.Tensor,
        ids_B: torch.Tensor,
        seen: Seen,
        rows: slice,
    ) -> torch.Tensor:
        """h_t of some rows plus their context."""
        D = self.config.hidden_size
        base_BD = hidden_BD
        kept_BnR, there_Bn = seen.kept(rows)
        for layer in range(self.config.context_layers):
            if layer:
                asked_BD = self._ask[layer - 1](normalised(base_BD, self.dtype))
                query_BD = cast(asked_BD + self._token(layer + 1, ids_B), self.dtype)
            kept_Bn2D = kept_BnR[:, :, 2 * D * layer : 2 * D * (layer + 1)]
            mixed_BD = self._attend(query_BD, kept_Bn2D, there_Bn)
            base_BD = base_BD + self._out[layer](mixed_BD)
            if self._feed:
                feed_in, feed_out = self._feed[layer]
                inner_BF = F.silu(feed_in(normalised(base_BD, self.dtype)))
                base_BD = base_BD + feed_out(cast(inner_BF, self.dtype))
        return base_BD

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
            # The queries' weights already contain 1 / sqrt(w) (`load`).
            attn_mask=there_Bn[:, None, None],
            scale=1.0,
        )
        return mixed_BA1w.flatten(1)

    # ---- the heads

    def features(self, state: CellState, k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """The input of lm_head for the head with index k (from 0), `BD`; call it for the heads in
        order, once each.
        """
        inner_BH = state.inner_BH + self._token(1, last_ids_B)
        if state.told_BKH is not None:
            inner_BH = inner_BH + state.told_BKH[:, k]
        cell_BH = normalised(F.silu(inner_BH), self.dtype)
        if k + 1 < self.config.num_heads:
            sizes = (self.config.hidden_size, cell_BH.shape[1])
            out_BD, state.inner_BH = self._next(cell_BH).split(sizes, dim=1)
        else:  # No head follows.
            out_BD = self._last(cell_BH)
        features_BD = state.base_BD + out_BD
        for layer in self._blocks:
            features_BD = features_BD + F.silu(layer[k](cast(features_BD, self.dtype)))
        return features_BD
