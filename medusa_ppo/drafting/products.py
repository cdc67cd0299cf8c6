"""The matrix products of drafting: few for the heads, and one with lm_head's rows of the tokens
that rollouts really use.

`FusedHeads` does the arithmetic of `MedusaHeads`, prepared once per swap. Everything that reads h_t
alone is one product for all heads. A token's contribution to the following heads is one row of a
precomputed table if that is small, and otherwise one product for all of these heads. The first
residual block multiplies the two parts of its input separately, W (h + out s) = W h + (W out) s, so
it needs no product of its own. Sums are kept in float32.

lm_head's product is the largest, and most of a vocabulary never occurs in the responses of one
task. So a `DraftVocabulary` holds the `size` most frequent tokens of the prompts and of the sampled
tokens so far (with forgetting). It becomes active once enough tokens are counted, and is renewed
whenever heads or actor change. Drafts come from it alone; q is zero elsewhere, which verification
knows, so the only loss is the acceptance of rare tokens. FR-Spec (Zhao et al., 2025) fixes such a
vocabulary in advance; here it follows the policy.

Shape letters: B requests, N rows, K heads, C of them in use, D hidden, H inner width of the hydra
MLP, R inner rows of several heads, E = D (K + 1) input of the last head, V vocabulary, W width of
the draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heads.modules import RMS_EPS, MedusaHeads, rms_normalise
from medusa_ppo.drafting import sending

LINEAR = Callable[[torch.Tensor], torch.Tensor]
"""A product: rows `[N, in]` of any floating dtype -> `[N, out]`, in a dtype that it chooses."""
PACK = Callable[[torch.Tensor], LINEAR]
"""A weight `[out, in]` -> the product with it."""
LM_HEAD = LINEAR
WEIGHT = tuple[str, int, int]
"""A weight of `FusedHeads`: its name, an index, and of how many heads."""
FORGET = 0.5
"""Share of the counts kept at each refresh."""
SMALL_ENTRIES = 1 << 24
"""Size of an lm_head up to which a copy of all its rows may be held."""
LINEAR_TOLERANCE = 0.05
"""Largest allowed root mean square difference between our product and the engine's, relative to the
logits.
"""
MIN_TOKENS_PER_ENTRY = 2
"""A draft vocabulary becomes active when this many tokens per entry were counted; until then drafts
come from the whole vocabulary.
"""
# Unit vectors in one call of lm_head: with V = 128k their float32 logits are 125 MiB.
ROWS_AT_ONCE = 256
# Random states on which a product is compared with the engine's; each costs a row of V logits.
ROWS_TRIED = 4
PIECE_BYTES = 32 << 20
"""What is made of rows for a moment, at most: of many requests one piece after the other."""
EMBED = Callable[[torch.Tensor], torch.Tensor]
"""Ids int64 `[B]` -> rows `[B, D]` of the actor's embedding table."""
TABLE_ENTRIES = 1 << 24
"""Maximum size, in numbers, of the tables of tokens' contributions: they cost memory, and time in
every sync.
"""
# Ids that are looked up at once: with D = 4,096 their float32 embeddings are 64 MiB.
TABLE_ROWS_AT_ONCE = 4096

logger = logging.getLogger(__name__)


def plain_linear(weight: torch.Tensor) -> LINEAR:
    """The product without packing: the reference, and what GPUs use."""
    return lambda rows: F.linear(cast(rows, weight.dtype), weight)


def most_frequent(counts_V: torch.Tensor, size: int) -> torch.Tensor | None:
    """The draft vocabulary, int64 `W`, ascending; the counts are halved. None until enough was
    counted.
    """
    if float(counts_V.sum()) < MIN_TOKENS_PER_ENTRY * size:
        return None
    ids_W = frequent_ids(counts_V, size)
    counts_V *= FORGET
    return ids_W


def frequent_ids(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """The tokens with the highest counts, int64 `W`, ascending."""
    # By count, ties by id: the same counts give the same ids.
    order_V = torch.sort(counts_V, descending=True, stable=True).indices
    return order_V[:size].sort().values


class ChosenIds(NamedTuple):
    """Ids that `DraftVocabulary.choosing` chose.

    Attributes:
        ids_W, product: as in `DraftVocabulary`.
        rows_ND, expected_NW: states, and the logits that the product has to give for them.
    """

    ids_W: torch.Tensor
    product: LM_HEAD
    rows_ND: torch.Tensor
    expected_NW: torch.Tensor


class DraftVocabulary:
    """Counts tokens, picks the most frequent ones, and multiplies by their rows of lm_head.

    Attributes:
        ids_W: int64, ids in the vocabulary, ascending; None while there are none.
        product: features -> logits of these tokens, or of all tokens without ids; None: the
            engine's own product.
    """

    def __init__(
        self,
        size: int,
        vocab_size: int,
        pack: PACK = plain_linear,
        whole: bool = False,
        stand_in: bool = False,
    ) -> None:
        """
        Args:
            size: W; 0, or at least `vocab_size`: always the whole vocabulary.
            vocab_size: V.
            pack: turns the rows into a product.
            whole: hold all rows if there are no ids and lm_head is small, because the engine's own
                product may be slower than `pack`'s.
            stand_in: until enough was counted, draft from the first W tokens (tokenizers number
                common pieces first), not from all, so that tensors have their final size at once.
        """
        self.size = size if 0 < size < vocab_size else 0
        self.ids_W: torch.Tensor | None = None
        self.product: LM_HEAD | None = None
        self._chosen_W: torch.Tensor | None = None
        self._counts_V = torch.zeros(vocab_size, dtype=torch.float64)
        self._counted = 0
        self._pack = pack
        self._whole = whole
        self._stand_in = stand_in
        self._reads_weight = False

    def count_on(self, device: torch.device) -> None:
        """Count on this device, if tokens are only known on a device."""
        self._counts_V = self._counts_V.to(device)

    def forget_counts(self) -> None:
        """Count anew, after the memory of the counts was thrown away. The ids stay until enough was
        counted for others.
        """
        self._counts_V.zero_()
        self._counted = 0

    def observe(self, tokens: Iterable[Sequence[int]]) -> None:
        """Count the tokens of a step, or the prompts of new requests."""
        if self.size:
            # vLLM has placeholders below 0.
            ids = [token for some in tokens for token in some if token >= 0]
            ids_N = sending.sent(ids, self._counts_V.device)
            self.count(ids_N, torch.ones_like(ids_N, dtype=torch.bool))
            self.expect(len(ids))

    def count(self, ids_N: torch.Tensor, there_N: torch.Tensor) -> None:
        """Count those of `ids_N` where `there_N` is true, on the device of the counts. The host
        learns of them by `expect`.
        """
        # Sums of ones are exact, so ranks that add them in different orders agree.
        self._counts_V.index_add_(0, ids_N, there_N.to(self._counts_V.dtype))

    def expect(self, tokens: int) -> None:
        """At least so many tokens are counted, or will be in this step."""
        self._counted += tokens

    @property
    def due(self) -> bool:
        """Whether enough tokens were counted for the first ids."""
        return self._chosen_W is None and 0 < MIN_TOKENS_PER_ENTRY * self.size <= self._counted

    def refresh(
        self,
        lm_head: LM_HEAD,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        weight_VD: torch.Tensor | None = None,
    ) -> None:
        """Renew the ids and read their rows of lm_head; call it after every change of the actor or
        the heads.

        The rows are those of `weight_VD` if the engine's own product agrees with them. Otherwise
        they are read through that product (of unit vectors), so that they are what the engine
        serves, however packed, scaled or sharded.
        """
        # The host keeps the ids, too: the device's copy may be in memory that a deep sleep throws
        # away, and after halving the counts may be too few to choose again.
        if self.size:
            chosen_W = most_frequent(self._counts_V, self.size)
            self._chosen_W = self._chosen_W if chosen_W is None else chosen_W.cpu()
        self.ids_W = self._sent_ids(device)
        whole = self._whole and self._counts_V.numel() * hidden_size <= SMALL_ENTRIES
        self.product = None
        self._reads_weight = False
        if whole or self.ids_W is not None:
            if weight_VD is not None:
                if self.ids_W is None:
                    # vLLM pads the table with rows that are not tokens.
                    rows_WD = weight_VD[: self._counts_V.numel()]
                else:
                    rows_WD = weight_VD[self.ids_W]
                self.product = self._tried(
                    self._pack(rows_WD.to(dtype)), lm_head, hidden_size, dtype, device
                )
            self._reads_weight = self.product is not None
            self.product = self.product or self._read(lm_head, hidden_size, dtype, device)
        # Without a product of the rows, no draft vocabulary is possible: the engine's own product
        # gives logits of the whole vocabulary.
        if self.product is None:
            self.ids_W = None

    def renew(self, device: torch.device) -> None:
        """Send the ids to the device again, after its memory was thrown away. Their product is
        renewed by `refresh`.
        """
        if self.ids_W is not None:
            self.ids_W = self._sent_ids(device)

    def _sent_ids(self, device: torch.device) -> torch.Tensor | None:
        ids_W = self._chosen_W
        if ids_W is None and self._stand_in and self.size:
            ids_W = torch.arange(self.size)
        return None if ids_W is None else ids_W.to(device)

    def choosing(
        self, weight_VD: torch.Tensor | None, dtype: torch.dtype
    ) -> Callable[[], ChosenIds | None] | None:
        """What `refresh` would do after a change of the heads, on the CPU, as work for a thread:
        it counts no further tokens, and multiplies by no packed weight. It returns None if too
        little was counted for other ids.

        None instead of the work: the rows can't be read from `weight_VD`; `refresh` reads them.
        """
        if weight_VD is None or not self._reads_weight or not self.size:
            return None
        counts_V = self._counts_V.clone()

        def choose() -> ChosenIds | None:
            ids_W = most_frequent(counts_V, self.size)
            if ids_W is None:
                return None
            rows_WD = weight_VD[ids_W].to(dtype)
            rows_ND = _random_rows(rows_WD.shape[1]).to(dtype)
            return ChosenIds(ids_W, self._pack(rows_WD), rows_ND, F.linear(rows_ND, rows_WD))

        return choose

    def take(self, chosen: ChosenIds) -> bool:
        """Use ids chosen since the last change of the actor. False: their product is not what it
        should be, and nothing has changed.
        """
        if not _agree(chosen.product(chosen.rows_ND), chosen.expected_NW):
            return False
        self._counts_V *= FORGET
        self._chosen_W = self.ids_W = chosen.ids_W
        self.product = chosen.product
        return True

    def _read(
        self, lm_head: LM_HEAD, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> LM_HEAD | None:
        """The product of the ids' rows; None if lm_head is not a plain product (soft caps)."""
        ids_W = slice(None) if self.ids_W is None else self.ids_W
        # The zero vector gives the bias; each unit vector gives its row plus the bias.
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
            logger.warning(
                "The engine's lm_head is not a plain product (a soft cap?); drafts come from the"
                " whole vocabulary."
            )
        return tried

    def _tried(
        self,
        product: LM_HEAD,
        lm_head: LM_HEAD,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LM_HEAD | None:
        """The product, if it agrees with the engine's own."""
        rows_ND = _random_rows(hidden_size).to(device, dtype)
        expected_NV = lm_head(rows_ND)
        expected_NW = expected_NV if self.ids_W is None else expected_NV[:, self.ids_W]
        return product if _agree(product(rows_ND), expected_NW) else None


def _random_rows(hidden_size: int) -> torch.Tensor:
    """States on which products are compared."""
    # A separate generator: the engine's random numbers stay unchanged, and all tensor-parallel
    # ranks try the same states and get the same answer.
    return torch.randn(ROWS_TRIED, hidden_size, generator=torch.Generator().manual_seed(0))


def _agree(given_NW: torch.Tensor, expected_NW: torch.Tensor) -> bool:
    apart = (given_NW.float() - expected_NW.float()).square().mean().sqrt()
    expected = expected_NW.float().square().mean().sqrt()
    # Compared in this direction, so that NaN counts as a difference.
    return bool(apart <= LINEAR_TOLERANCE * expected)


def spread(values_NW: torch.Tensor, ids_W: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Probabilities of a draft vocabulary's tokens at their places in the whole vocabulary, `[N,
    V]`, zero elsewhere.
    """
    whole_NV = torch.zeros(
        values_NW.shape[0], vocab_size, dtype=values_NW.dtype, device=values_NW.device
    )
    return whole_NV.index_copy_(1, ids_W, values_NW)


# ---- the heads


class FusedHeads:
    """The features of heads without a context. Parameters of hydra heads become views of the
    tensors that are multiplied here.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        embed: EMBED | None,
        pack: PACK = plain_linear,
        with_embedding: bool = True,
    ) -> None:
        """
        Args:
            embed: the engine's own lookup, which may be sharded; kind hydra only.
            pack: turns a weight into a product; it chooses the dtype, and does not change the
                weight.
            with_embedding: read the embedding table now; otherwise `read_embedding` has to be
                called before the first drafts.
        """
        self.config = heads.config
        self.heads = heads
        self._embed = embed
        self._pack = pack
        if self.config.kind == "hydra":
            self._adopt()
        self.load(with_embedding)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Store the MLPs of all heads side by side: one product reads the common input of several
        heads, and nothing is stored twice.
        """
        heads = self.heads
        K = self.config.num_heads
        D = self.config.hidden_size
        self._H = H = D * self.config.mlp_ratio
        # Filled with zeros: head k reads only the first k + 2 parts, but the product multiplies the
        # following parts as well.
        self._in_RE = heads.mlp_out.new_zeros(K * H, D * (K + 1))
        self._out_KRH = heads.mlp_out.new_empty(K, 2 * D, H)
        for k, weight in enumerate(heads.mlp_in):
            place = self._in_RE[k * H : (k + 1) * H, : D * (k + 2)]
            place[:] = weight
            # The parameter becomes a view, so that a swap writes to the tensor that products read.
            weight.data = place
        self._out_KRH[:, :D] = heads.mlp_out
        heads.mlp_out.data = self._out_KRH[:, :D]

    @torch.no_grad()
    def load(self, with_embedding: bool = True) -> None:
        """Read the heads and the embedding table again, after a swap."""
        # Packed products are copies of the old weights; they are renewed when next needed.
        self._products: dict[WEIGHT, LINEAR] = {}
        self._blocks = [block_KDD.detach() for block_KDD in self.heads.blocks]
        if self.config.kind == "hydra":
            D = self.config.hidden_size
            self._out_KRH[:, D:] = _wide_product(self._blocks[0], self._out_KRH[:, :D])
            if with_embedding:
                self.read_embedding()

    @torch.no_grad()
    def read_embedding(self) -> None:
        """1 / rms of every token's embedding; and, if they are small, tables of what a token at
        each place j after h_t adds to the inner rows of heads j.. (from 0), `[V, (K - j) H]`.
        Renewed after a sync of the actor.
        """
        if self.config.kind != "hydra":
            return
        assert self._embed is not None, "hydra heads read embeddings"
        count = self.config.num_heads
        size = self.config.vocab_size
        weights_RE = self._in_RE
        weights = [self._token_weights(j, count) for j in range(count)] if self._tabled else []
        self._sizes_V1, self._tables = token_tables(
            self._embed, size, weights, weights_RE.dtype, weights_RE.device
        )

    @property
    def _tabled(self) -> bool:
        """Whether the tables of tokens' contributions are small enough."""
        count = self.config.num_heads
        entries = self.config.vocab_size * self._H * count * (count + 1) // 2
        return entries <= TABLE_ENTRIES

    def _token_weights(self, j: int, count: int) -> torch.Tensor:
        """Weights that multiply the token at place j after h_t, for the heads j .. count."""
        D = self.config.hidden_size
        return self._in_RE[j * self._H : count * self._H, D * (1 + j) : D * (2 + j)]

    @property
    def packed(self) -> tuple[WEIGHT, ...]:
        """The weights that are packed now."""
        return tuple(self._products)

    def pack_ahead(self, packed: Iterable[WEIGHT], count: int) -> None:
        """Pack these weights, and those that `count` drafts multiply, instead of on first use."""
        wanted = [("blocks", 0, count)]
        if self.config.kind == "hydra":
            heads = range(count)
            wanted += [("in", 0, count), *(("out", k, 1) for k in heads)]
            wanted += [("block", layer, k) for layer in range(1, len(self._blocks)) for k in heads]
            wanted += [("token", k, count) for k in heads if not self._tabled]
        for key in dict.fromkeys([*packed, *wanted]):
            self._product(*key)

    def _product(self, name: str, index: int, count: int) -> LINEAR:
        """The packed product with a weight `[out, in]`; made on first use."""
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
        if name == "blocks":
            return self._blocks[index][:count].flatten(0, 1)
        return self._blocks[index][count]

    def _first_blocks(self, base_BD: torch.Tensor, count: int) -> torch.Tensor:
        """The first residual blocks of `count` heads, before SiLU, `[B, C, D]`."""
        return self._product("blocks", 0, count)(base_BD).view(-1, count, base_BD.shape[-1])

    # ---- kinds whose features need no tokens

    def features_at_once(self, hidden_BD: torch.Tensor, count: int) -> torch.Tensor:
        """The input of lm_head for the first `count` heads, `[B, C, D]`; kind medusa."""
        features_BCD = hidden_BD.unsqueeze(1) + F.silu(self._first_blocks(hidden_BD, count))
        for block_KDD in self._blocks[1:]:
            inner_CBD = torch.bmm(
                features_BCD.transpose(0, 1),
                block_KDD[:count].transpose(1, 2).to(features_BCD.dtype),
            )
            features_BCD = features_BCD + F.silu(inner_CBD.transpose(0, 1))
        return features_BCD

    # ---- hydra

    def start(self, hidden_BD: torch.Tensor, count: int) -> HydraState:
        """The contribution of h_t alone to the first `count` heads."""
        inner_BR = self._product("in", 0, count)(hidden_BD) * inverse_rms(hidden_BD)
        base_BCD = hidden_BD.unsqueeze(1).expand(-1, count, -1)
        return HydraState(
            inner_BR, torch.cat([base_BCD, self._first_blocks(hidden_BD, count)], dim=2).unbind(1)
        )

    def features(self, state: HydraState, k: int, last_ids_B: torch.Tensor) -> torch.Tensor:
        """The input of lm_head for the head with index k (from 0), `BD`; call it for the heads in
        order, once each.
        """
        inner_BR = state.inner_BR
        H = self._H
        left = inner_BR.shape[1]
        if self._tables:
            added_BR = self._tables[k].index_select(0, last_ids_B)
            # A table holds all heads from k on; a call for fewer heads reads the first ones.
            inner_BR.add_(added_BR if added_BR.shape[1] == left else added_BR[:, :left])
        else:
            assert self._embed is not None, "hydra heads read embeddings"
            count = k + left // H
            added_BR = self._product("token", k, count)(self._embed(last_ids_B))
            # The token's RMS normalisation, applied after the product: one factor per row.
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
    """The state passed from head to head: inner rows of the remaining heads, float32, before SiLU;
    and the bases `B2D` of all.
    """

    def __init__(self, inner_BR: torch.Tensor, base: tuple[torch.Tensor, ...]) -> None:
        self.inner_BR = inner_BR
        self.base = base


def token_tables(
    embed: EMBED, size: int, weights: list[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """1 / rms of every token's embedding, float32 `[V, 1]`, and the product of each weight `[R, D]`
    with the normalised embeddings, `[V, R]` in `dtype`.
    """
    sizes_V1 = torch.empty((size, 1), device=device)
    tables = [torch.empty((size, len(weight)), dtype=dtype, device=device) for weight in weights]
    weights = [weight.to(dtype) for weight in weights]
    for first in range(0, size, TABLE_ROWS_AT_ONCE):
        ids_N = torch.arange(first, min(first + TABLE_ROWS_AT_ONCE, size), device=device)
        rows_ND = embed(ids_N)
        sizes_V1[first : first + len(ids_N)] = inverse_rms(rows_ND)
        rows_ND = rms_normalise(rows_ND).to(dtype)
        for table, weight in zip(tables, weights, strict=True):
            table[first : first + len(ids_N)] = F.linear(rows_ND, weight)
    return sizes_V1, tables


def inverse_rms(rows_ND: torch.Tensor) -> torch.Tensor:
    """1 / rms of each row, float32 `[N, 1]`."""
    # A norm is one operation; a mean of squares takes several, and they are not small.
    wide = torch.float64 if rows_ND.dtype == torch.float64 else torch.float32
    squares_N1 = torch.linalg.vector_norm(rows_ND, dim=-1, keepdim=True, dtype=wide).square_()
    # RMS_EPS plus the mean, as one operation.
    mean_N1 = torch.rsub(squares_N1, RMS_EPS, alpha=-1 / rows_ND.shape[-1])
    return cast(mean_N1.rsqrt_(), torch.float32)


def normalised(rows_ND: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """v / rms(v) of each row, in `dtype`."""
    if rows_ND.device.type == "cpu":
        return cast(rows_ND * inverse_rms(rows_ND), dtype)
    # One kernel on a GPU; on a CPU it is composed of more operations than the above.
    return cast(F.rms_norm(rows_ND, rows_ND.shape[-1:], eps=RMS_EPS), dtype)


def pieces(rows: int, row_bytes: int) -> Iterator[slice]:
    """Cuts rows into pieces for which that many bytes each take at most PIECE_BYTES together."""
    at_once = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, rows, at_once):
        yield slice(first, min(rows, first + at_once))


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast, but skip torch if there is nothing to do: a call costs as much as a small product."""
    return values if values.dtype == dtype else values.to(dtype)


def _wide_product(left_KDD: torch.Tensor, right_KDH: torch.Tensor) -> torch.Tensor:
    """The product in at least float32, because its rounding would add to that of the weights."""
    wide = torch.promote_types(left_KDD.dtype, torch.float32)
    return torch.bmm(left_KDD.to(wide), right_KDH.to(wide)).to(left_KDD.dtype)
