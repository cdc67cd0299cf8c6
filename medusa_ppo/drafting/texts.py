"""The texts that copying searches: the last tokens of each request with their keys, by slot, and
the arithmetic of `heads.copying` on them.

A key depends on tokens alone. It is computed once, when its token arrives, and stays valid until
heads or embedding change. Searching needs no hidden states, so a prompt from a prefix cache is
searched like any other, and a preempted request is rewritten from its tokens.

The result does not depend on the step's drafts, so it is looked up for all heads at once, before
the first of them drafts.

Shape letters: B requests, N tokens, S slots, L places kept of a request, K heads, A parts of the
attention, w width of a part, m best places, M tokens of a key, D hidden, H width of the cell, r
rank through which copies enter the cell, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from heads.copying import AGE_STEP, SERVED_PLACES
from heads.modules import MedusaHeads
from medusa_ppo.drafting.products import (
    EMBED,
    PACK,
    TABLE_ENTRIES,
    cast,
    pieces,
    plain_linear,
    token_tables,
)

ROUND_PLACES = 32
"""If the longest text's length is known, the number of searched places is a multiple of this."""


class TextRing:
    """The last L tokens of each request and their keys, with one spare slot that is never read.

    A token is stored at its position modulo L. Another request's tokens in a slot are never read:
    when a request takes a slot, it is written from its beginning, or from L tokens before its
    newest.
    """

    def __init__(
        self,
        slots: int,
        places: int,
        parts: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.places = places
        self.spare = slots
        self.ids_SL = torch.zeros(slots + 1, places, dtype=torch.int64, device=device)
        self.keys_SALw = torch.zeros(slots + 1, parts, places, width, dtype=dtype, device=device)
        self.newest_S = torch.full((slots + 1,), -1, device=device)
        # The host knows slots without waiting; a call that is recorded can't ask it.
        self.one_by_one = device.type == "cpu"
        self._numbers_L = torch.arange(places, device=device)

    def renew(self) -> None:
        """Restore the empty state at the same addresses, after the memory was thrown away. Masked
        places are looked up, too, so they must hold valid tokens.
        """
        self.ids_SL.zero_()
        self.keys_SALw.zero_()
        self.newest_S.fill_(-1)
        torch.arange(self.places, out=self._numbers_L)

    def write_ids(
        self, slots_N: torch.Tensor, positions_N: torch.Tensor, ids_N: torch.Tensor
    ) -> None:
        """Write tokens at their positions; at most L of a request in one call."""
        self.ids_SL[slots_N, positions_N % self.places] = ids_N
        self.newest_S.scatter_reduce_(0, slots_N, positions_N, "amax")

    def ids_at(self, slots_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """The tokens at stored positions, int64, in the shape of `positions_N`."""
        return self.ids_SL[slots_N, positions_N % self.places]

    def begin(self, slots_N: torch.Tensor) -> None:
        """Call this when other requests take these slots."""
        self.newest_S.index_fill_(0, slots_N, -1)

    def write_keys(
        self, slots_N: torch.Tensor, positions_N: torch.Tensor, keys_NAw: torch.Tensor
    ) -> None:
        """Store the keys of tokens that were written."""
        self.keys_SALw[slots_N, :, positions_N % self.places] = keys_NAw

    def scores(self, slots_B: torch.Tensor, query_BAw: torch.Tensor, searched: int) -> torch.Tensor:
        """Product of each request's queries with the keys of its first places, `[B, A, searched]`
        in the dtype of the keys.
        """
        keys_SALw = self.keys_SALw[:, :, :searched]
        # In this order: keys times a column take two to four times as long on a CPU.
        query_BA1w = cast(query_BAw, self.keys_SALw.dtype).unsqueeze(2)
        score_BA1L = query_BA1w.new_empty((*query_BAw.shape[:2], 1, searched))
        if self.one_by_one:
            # By request, where its keys are: to copy them takes longer than the product.
            keys_SAwL = keys_SALw.transpose(2, 3)
            for slot, query_A1w, score_A1L in zip(
                slots_B.tolist(), query_BA1w.unbind(0), score_BA1L.unbind(0), strict=True
            ):
                torch.bmm(query_A1w, keys_SAwL[slot], out=score_A1L)
            return score_BA1L.squeeze(2)
        for rows in pieces(len(slots_B), keys_SALw[0].numel() * keys_SALw.itemsize):
            keys_BALw = keys_SALw.index_select(0, slots_B[rows])
            torch.bmm(
                query_BA1w[rows].flatten(0, 1),
                keys_BALw.flatten(0, 1).transpose(1, 2),
                out=score_BA1L[rows].view(-1, 1, searched),
            )
        return score_BA1L.squeeze(2)

    def ages(self, newest_B: torch.Tensor, searched: int) -> torch.Tensor:
        """How far before the newest token of each request the first places' tokens are, `[B,
        searched]`; above its position: there is none.
        """
        return (newest_B.unsqueeze(1) - self._numbers_L[:searched]) % self.places


class WrittenTexts:
    """The host's record of a `TextRing`: which request each slot holds, and how much of it."""

    def __init__(self, ring: TextRing) -> None:
        self._places = ring.places
        self._writer_S = np.full(ring.spare + 1, -1)
        self._count_S = np.zeros(ring.spare + 1, dtype=np.int64)

    def forget(self) -> None:
        """Mark every text as missing: other heads have other keys."""
        self._writer_S.fill(-1)

    def missing(
        self, slots_B: np.ndarray, serials_B: np.ndarray, counts_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which positions of which requests in the batch must be written now; afterwards they count
        as written.

        Args:
            counts_B: number of tokens of each request.
        """
        known_B = np.where(self._writer_S[slots_B] == serials_B, self._count_S[slots_B], 0)
        first_B = np.maximum(known_B, counts_B - self._places)
        new_B = np.maximum(counts_B - first_B, 0)
        self._writer_S[slots_B] = serials_B
        self._count_S[slots_B] = counts_B
        request_N = np.repeat(np.arange(len(slots_B)), new_B)
        before_B = np.cumsum(new_B) - new_B
        position_N = np.arange(len(request_N)) + np.repeat(first_B - before_B, new_B)
        return request_N, position_N


class Copier:
    """Copying from the texts of a `TextRing`. It holds copies of the heads' values from the last
    call of `load`.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        embed: EMBED,
        pack: PACK = plain_linear,
        never: Sequence[int] = (),
        with_embedding: bool = True,
    ) -> None:
        """
        Args:
            heads: heads with copying.
            embed: the engine's own lookup.
            pack: turns a weight into a product.
            never: tokens that are not copied, because they stand for images.
            with_embedding: read the embedding table now; otherwise `read_embedding` has to be
                called before the first search.
        """
        self._never = tuple(never)
        self.heads = heads
        self.config = heads.config
        self._embed = embed
        self._pack = pack
        self._query: torch.Tensor | None = None
        self.load(with_embedding)

    @torch.no_grad()
    def load(self, with_embedding: bool = True) -> None:
        """Read the heads and the embedding table again, as `ContextHeads.load` does. Existing keys
        become stale.
        """
        heads = self.heads
        config = self.config
        device = heads.copy_query.device
        # Attention divides scores by sqrt(w). This factor is put into the queries' weights.
        scale = (config.copy_width // config.copy_parts) ** 0.5
        self._query = torch.div(heads.copy_query, scale, out=self._query)
        self._query_and_key = (self._query, heads.copy_key.detach())
        self._none_A = heads.copy_none.detach().float()
        self._value = heads.copy_value.detach()
        self._out = heads.copy_out.detach()
        self._enter = self._pack(self._out)
        self._gather = self._pack(self._value)
        self.dtype = self._out.dtype
        # The oldest token first, as in the weights' columns.
        self._back_M = torch.arange(config.copy_tokens - 1, -1, -1, device=device)
        self._starts_M = torch.arange(config.copy_tokens, device=device) * config.vocab_size
        self._followers_K11 = torch.arange(1, config.num_heads + 1, device=device).view(-1, 1, 1)
        self._parts_A1 = torch.arange(config.copy_parts, device=device).unsqueeze(1)
        if with_embedding:
            self.read_embedding()

    @torch.no_grad()
    def read_embedding(self) -> None:
        """Tables, if they are small: what each token adds to keys and queries, and to the cell when
        it is copied. Renewed after a sync of the actor.
        """
        size = self.config.vocab_size
        device = self._none_A.device
        parts, tokens = self.config.copy_parts, self.config.copy_tokens
        D = self.config.hidden_size
        weights: list[torch.Tensor] = []
        if size * 2 * tokens * self.config.copy_width <= TABLE_ENTRIES:
            weights = [block for half in self._query_and_key for block in half.split(D, dim=1)]
        meanings: list[torch.Tensor] = []
        if size * parts * self._out.shape[0] <= TABLE_ENTRIES:
            values = self._value.float().split(D, dim=1)
            meanings = [(self._out.float() @ value).to(self.dtype) for value in values]
        sizes_V1, tables = token_tables(
            self._embed, size, [*weights, *meanings], self.dtype, device
        )
        # The last row stands for tokens that are not there.
        self._sizes_X1 = F.pad(sizes_V1.to(self.dtype), (0, 0, 0, 1))
        self._shares_XC = [
            F.pad(torch.cat(half), (0, 0, 0, 1))
            for half in (tables[:tokens], tables[tokens : len(weights)])
            if half and weights
        ]
        # One row for each token and part, side by side: a lookup names both.
        self._meanings_XH = (
            torch.stack(tables[len(weights) :], 1).flatten(0, 1) if meanings else None
        )

    def _embedded(self, ids: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Normalised embeddings, one row for each id.

        Args:
            sizes: rows of `_sizes_X1` for each id; None: its own.
        """
        ids_N = ids.flatten()
        sizes_N = ids_N if sizes is None else sizes.flatten()
        rows_ND = cast(self._embed(ids_N), self.dtype) * self._sizes_X1.index_select(0, sizes_N)
        return rows_ND.view(*ids.shape, -1)

    def _last_tokens(
        self, ring: TextRing, slots_N: torch.Tensor, positions_N: torch.Tensor, half: int
    ) -> torch.Tensor:
        """Queries (half 0) or keys (half 1) of the last M tokens up to each position, `[N, A w]`,
        from the tokens in the ring.
        """
        positions_NM = positions_N.unsqueeze(1) - self._back_M
        ids_NM = ring.ids_at(slots_N.unsqueeze(1), positions_NM)
        before_NM = positions_NM < 0
        if self._shares_XC:
            shares_XC = self._shares_XC[half]
            rows_NM = (ids_NM + self._starts_M).masked_fill_(before_NM, len(shares_XC) - 1)
            return F.embedding(rows_NM, shares_XC).sum(1)
        sizes_NM = ids_NM.masked_fill(before_NM, self.config.vocab_size)
        rows_NMD = self._embedded(ids_NM, sizes_NM)
        return F.linear(rows_NMD.flatten(1), self._query_and_key[half])

    @torch.no_grad()
    def write(
        self, ring: TextRing, slots_N: torch.Tensor, positions_N: torch.Tensor, ids_N: torch.Tensor
    ) -> None:
        """Write new tokens and their keys. The M - 1 tokens before each must be in the ring, or
        among these.
        """
        ring.write_ids(slots_N, positions_N, ids_N)
        self._write_keys(ring, slots_N, positions_N)

    def _write_keys(self, ring: TextRing, slots_N: torch.Tensor, positions_N: torch.Tensor) -> None:
        """Make the keys of tokens in the ring."""
        # The embedding's rows, and normalised.
        row_bytes = 2 * self.config.copy_tokens * self.config.hidden_size * self.dtype.itemsize
        for rows in pieces(len(slots_N), row_bytes):
            keys_NC = self._last_tokens(ring, slots_N[rows], positions_N[rows], half=1)
            keys_NAw = keys_NC.unflatten(1, (self.config.copy_parts, -1))
            ring.write_keys(slots_N[rows], positions_N[rows], keys_NAw.to(ring.keys_SALw.dtype))

    @torch.no_grad()
    def write_again(self, ring: TextRing, slots_X: torch.Tensor) -> None:
        """Renew the keys of the texts in these slots with these heads, after a swap or a sync.

        Args:
            slots_X: each of them once.
        """
        ends_X = ring.newest_S[slots_X] + 1
        count_X = ends_X.clamp_max(ring.places)
        # The one number that the host waits for, however many texts there are.
        count = int(count_X.sum())
        # The tokens of all texts, one text after the other.
        shift_X = ends_X - count_X.cumsum(0)
        shift_N = shift_X.repeat_interleave(count_X, output_size=count)
        positions_N = torch.arange(count, device=slots_X.device) + shift_N
        slots_N = slots_X.repeat_interleave(count_X, output_size=count)
        self._write_keys(ring, slots_N, positions_N)

    @torch.no_grad()
    def find(
        self,
        ring: TextRing,
        slots_B: torch.Tensor,
        newest_B: torch.Tensor,
        longest: int | None = None,
    ) -> torch.Tensor:
        """What copying gives the cell for each draft, `[B, K, H]`.

        Args:
            newest_B: position of the newest token of each request.
            longest: length of the longest text, if the host knows it, so that fewer places are
                searched.
        """
        K = self.config.num_heads
        searched = ring.places
        if longest is not None:
            searched = min(searched, -(-longest // ROUND_PLACES) * ROUND_PLACES)
        query_BC = self._last_tokens(ring, slots_B, newest_B, half=0)
        query_BAw = query_BC.unflatten(1, (self.config.copy_parts, -1))
        score_BAL = ring.scores(slots_B, query_BAw, searched)
        age_BL = ring.ages(newest_B, searched)
        not_BL = (age_BL < K) | (age_BL > newest_B.unsqueeze(1))
        older_BL = (age_BL * -AGE_STEP).masked_fill_(not_BL, -torch.inf)
        score_BAL = score_BAL + older_BL.unsqueeze(1)  # float32, like the ages.
        best_BAm, place_BAm = score_BAL.topk(min(SERVED_PLACES, searched), dim=2)
        none_BA1 = self._none_A.view(1, -1, 1).expand(len(slots_B), -1, 1)
        share_BAm = torch.cat([none_BA1, best_BAm], 2).softmax(2)[..., 1:].to(self.dtype)
        place_BKAm = (place_BAm.unsqueeze(1) + self._followers_K11) % ring.places
        ids_BKAm = ring.ids_SL[slots_B.view(-1, 1, 1, 1), place_BKAm]
        share_BKAm = share_BAm.unsqueeze(1).expand_as(ids_BKAm)
        for token in self._never:
            share_BKAm = share_BKAm * (ids_BKAm != token)
        return self._told(ids_BKAm, share_BKAm)

    def _told(self, ids_BKAm: torch.Tensor, share_BKAm: torch.Tensor) -> torch.Tensor:
        batch, count, parts, _ = ids_BKAm.shape
        if self._meanings_XH is not None:
            told_XH = F.embedding_bag(
                (ids_BKAm * parts + self._parts_A1).view(batch * count, -1),
                self._meanings_XH,
                mode="sum",
                per_sample_weights=share_BKAm.reshape(batch * count, -1),
            )
            return told_XH.view(batch, count, -1)
        told = []
        # The embedding's rows, normalised, and by shares.
        row_bytes = 3 * ids_BKAm[0].numel() * self.config.hidden_size * self.dtype.itemsize
        for rows in pieces(batch, row_bytes):
            rows_BKAmD = self._embedded(ids_BKAm[rows])
            mixed_BKAD = (rows_BKAmD * share_BKAm[rows].unsqueeze(-1)).sum(3)
            told.append(self._enter(self._gather(mixed_BKAD.view(len(mixed_BKAD) * count, -1))))
        told_XH = told[0] if len(told) == 1 else torch.cat(told)
        return told_XH.view(batch, count, -1)
