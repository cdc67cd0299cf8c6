"""Copying: an attention from the last tokens of a text to what followed such tokens before.

Most of what a policy writes already occurs in its prompt, or in its response so far. A head that
sees only the last few hidden states can't reach that; this attention can. It searches by tokens
only, not by hidden states, so any text can be searched: a prompt from a prefix cache, or the
response to another request.

Shape letters: G texts, T tokens of the longest, N rows, R rows of one text, U different tokens, K
heads, D hidden, A parts of the attention, w width of a part, M tokens of a key, m best places.

For a row whose newest known token x_{t+1} is at place i of its text, and n(v) = v / rms(v):

    key_j   = W_key   [n(e(x_{j-M+1})); ...; n(e(x_j))]       for every place j of the text
    query_i = W_query [n(e(x_{i-M+1})); ...; n(e(x_i))]
    a       = softmax over j of query_i key_j / sqrt(w) - AGE_STEP (i - j), and of a learned `none`,
              in A parts
    c_k     = [sum_j a_j n(e(x_{j+k}))] of all parts, A D numbers, for draft k = 1..K

A place counts if its K followers are known and in the same part of the text. A text may consist of
several parts (earlier responses, then prompt and response), and neither a key nor a follower
crosses from one part to the next. Everything is known before a draft is drawn, so the distribution
that drafts are drawn from stays exact whatever is left out: only the best places of each part of
the attention count, in training (`TRAINED_PLACES`) and in an engine (`SERVED_PLACES`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heads.heads_config import GAP, KEY_TOKENS

MISSING = -1
"""Marks padding: as the part of a token that pads a text, and as the place of a row that pads its
rows.
"""
STRETCH = 256
"""Rows this close to each other search the same text."""
SERVED_PLACES = 2
"""Best places of each part of the attention that an engine copies from. With two of them the same
heads lose less than 0.01 tokens a step compared with all places, and a step reads a few rows of the
embedding instead of multiplying by the whole text.
"""
TRAINED_PLACES = 16
"""Best places of each part that count in training. The attention finds equal tokens before anything
is learned, and is sharp, so heads learn as much as from all places, and a row does not multiply by
the whole text: in texts of 1,280 tokens copying takes a third of the time in training
(`benchmarks/copying_in_training.py`).
"""
AGE_STEP = 2.0**-14
"""How much a score falls per token of distance: almost nothing, but enough that every search picks
the newer of two places that tie to the bit.
"""
EMBED = Callable[[torch.Tensor], torch.Tensor]
"""Token ids `[N]` -> their normalised embeddings `[N, D]`."""


class Text(NamedTuple):
    """What N rows search. Created by `Text.of` and `Texts.of_rows`.

    Attributes:
        ids_GT: int64, the tokens of each text.
        parts_GT: int64, the part of its text that each token belongs to; MISSING after the text's
            end.
        places_GR: int64, the place of each row's newest known token in its text; MISSING if a text
            has fewer rows than others.
        order_N: int64, each row's place among G x R.
        window: places of a row's own part that are searched, counted back from its newest token;
            None: all of them.
    """

    ids_GT: torch.Tensor
    parts_GT: torch.Tensor
    places_GR: torch.Tensor
    order_N: torch.Tensor
    window: int | None = None

    @classmethod
    def of(
        cls,
        ids_GT: torch.Tensor,
        parts_GT: torch.Tensor,
        text_N: torch.Tensor,
        place_N: torch.Tensor,
        window: int | None = None,
    ) -> Text:
        """
        Args:
            text_N: int64, which text each row searches.
            place_N: int64, the place of its newest known token x_{t+1} there.
        """
        texts = ids_GT.shape[0]
        by_text_N = text_N.argsort(stable=True)
        counts_G = torch.bincount(text_N, minlength=texts)
        longest = int(counts_G.max()) if text_N.numel() else 0
        before_G = counts_G.cumsum(0) - counts_G
        column_N = torch.empty_like(text_N)
        numbers_N = torch.arange(text_N.numel(), device=text_N.device)
        column_N[by_text_N] = numbers_N - before_G[text_N[by_text_N]]
        order_N = text_N * longest + column_N
        places_GR = place_N.new_full((texts * longest,), MISSING)
        places_GR[order_N] = place_N
        return cls(ids_GT, parts_GT, places_GR.view(texts, longest), order_N, window)

    def to(self, device: torch.device) -> Text:
        """The same on a device."""
        return Text(
            self.ids_GT.to(device),
            self.parts_GT.to(device),
            self.places_GR.to(device),
            self.order_N.to(device),
            self.window,
        )


class Texts(NamedTuple):
    """The texts of a batch of responses, one after the other. Created by `Texts.of`.

    Attributes:
        ids_X: int64, every token of every text: earlier parts, each followed by a GAP, then the
            prompt and the response.
        starts_S, own_S: int64, where each sequence's text starts, and where its own part (its
            prompt) does.
        sequence_M, place_M: int64, the sequence of each response token, and its place.
        window: see `Text`.
    """

    ids_X: torch.Tensor
    starts_S: torch.Tensor
    own_S: torch.Tensor
    sequence_M: torch.Tensor
    place_M: torch.Tensor
    window: int | None = None

    @classmethod
    def of(
        cls,
        before_ids: torch.Tensor,
        before_S: torch.Tensor,
        response_ids_M: torch.Tensor,
        lengths_S: torch.Tensor,
        window: int | None = None,
    ) -> Texts:
        """
        Args:
            before_ids: the tokens before each response, one after the other: earlier parts, each
                followed by a GAP, then the prompt.
            before_S: int64, how many of these tokens each sequence has.
            response_ids_M, lengths_S: the responses.
        """
        sequences = lengths_S.numel()
        total_S = before_S + lengths_S
        starts_S = total_S.cumsum(0) - total_S
        ids_X = torch.empty(int(total_S.sum()), dtype=torch.int64)
        before_at = places_in_turn(starts_S, before_S)
        place_M = places_in_turn(starts_S + before_S, lengths_S)
        ids_X[before_at] = before_ids.to(torch.int64)
        ids_X[place_M] = response_ids_M
        own_S = starts_S.clone()
        gaps = before_at[before_ids == GAP]
        of_sequence = torch.repeat_interleave(torch.arange(sequences), before_S)
        own_S.scatter_reduce_(0, of_sequence[before_ids == GAP], gaps + 1, "amax")
        sequence_M = torch.repeat_interleave(torch.arange(sequences), lengths_S)
        return cls(ids_X, starts_S, own_S, sequence_M, place_M, window)

    def of_rows(self, rows_N: torch.Tensor) -> Text:
        """What some rows of the batch search: row m is at the response's token m, which is its
        x_{t+1}.
        """
        sequence_N = self.sequence_M[rows_N]
        place_N = self.place_M[rows_N]
        # Rows that are far apart in one long response get separate texts, or all of them would
        # carry the tokens in between.
        stretch_N = (place_N - self.own_S[sequence_N]) // STRETCH
        most = int(stretch_N.max()) + 1 if stretch_N.numel() else 1
        groups_G, group_N = (sequence_N * most + stretch_N).unique(return_inverse=True)
        sequence_G = groups_G // most
        last_G = place_N.new_zeros(groups_G.shape).scatter_reduce_(0, group_N, place_N, "amax")
        own_G = self.own_S[sequence_G]
        first_G = own_G
        if self.window is not None:
            stretch_start_G = own_G + groups_G % most * STRETCH
            first_G = torch.maximum(own_G, stretch_start_G - self.window - KEY_TOKENS)
        earlier_G = own_G - self.starts_S[sequence_G]
        length_G = earlier_G + last_G + 1 - first_G
        columns_T = torch.arange(int(length_G.max()) if groups_G.numel() else 0)
        skipped_G1 = (first_G - own_G).unsqueeze(1)
        source_GT = self.starts_S[sequence_G].unsqueeze(1) + columns_T
        source_GT = source_GT + skipped_G1 * (columns_T >= earlier_G.unsqueeze(1))
        there_GT = columns_T < length_G.unsqueeze(1)
        ids_GT = self.ids_X[torch.where(there_GT, source_GT, 0)]
        is_gap_GT = ids_GT == GAP
        parts_GT = torch.where(there_GT & ~is_gap_GT, is_gap_GT.cumsum(1), MISSING)
        place_N = place_N - (first_G - earlier_G)[group_N]
        return Text.of(ids_GT.clamp_min(0), parts_GT, group_N, place_N, self.window)


def places_in_turn(starts_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """start, start + 1, ... of each sequence, one after the other, int64."""
    ends_S = lengths_S.cumsum(0)
    within = torch.arange(int(ends_S[-1]) if ends_S.numel() else 0)
    return within + torch.repeat_interleave(starts_S - (ends_S - lengths_S), lengths_S)


def own_text(next_ids_BT: torch.Tensor) -> Text:
    """Text for rows that search their own sequence: row b, t is at next_ids[b, t]."""
    texts, longest = next_ids_BT.shape
    places_GR = torch.arange(longest, device=next_ids_BT.device).expand(texts, longest)
    order_N = torch.arange(texts * longest, device=next_ids_BT.device)
    return Text(next_ids_BT, torch.zeros_like(next_ids_BT), places_GR, order_N)


def copied(
    text: Text,
    embed: EMBED,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    none_A: torch.Tensor,
    value_weight: torch.Tensor,
    num_heads: int,
    *,
    places: int | None = None,
) -> torch.Tensor:
    """The result of the attention for each row and draft: `value_weight` times c_k of the module's
    docstring, `[N, K, C]`.

    Args:
        text: what is searched.
        embed: normalised embeddings of token ids.
        query_weight, key_weight: `[A w, M D]`.
        none_A: the score of copying nothing, by part.
        value_weight: `[C, A D]`.
        num_heads: K; a place needs that many followers.
        places: best places of each part that count; None: all of them.
    """
    parts = none_A.shape[0]
    used_U, index_GT = text.ids_GT.unique(return_inverse=True)
    embedded_UD = embed(used_U)
    query_GRAw = _last_tokens(text, index_GT, text.places_GR, embedded_UD, query_weight, parts)
    everywhere_GT = torch.arange(index_GT.shape[1], device=index_GT.device).expand_as(index_GT)
    key_GTAw = _last_tokens(text, index_GT, everywhere_GT, embedded_UD, key_weight, parts)
    score_GART = torch.einsum("graw,gtaw->gart", query_GRAw, key_GTAw) / key_GTAw.shape[-1] ** 0.5
    searched_GRT = searched_places(text, num_heads)
    places_T = torch.arange(index_GT.shape[1], device=index_GT.device)
    age_GRT = text.places_GR.unsqueeze(2) - places_T
    score_GART = score_GART - (AGE_STEP * age_GRT).unsqueeze(1)
    score_GART = score_GART.masked_fill(~searched_GRT.unsqueeze(1), -torch.inf)
    # What each token contributes to each part. It is computed once per token, before the sum over
    # places, because tokens repeat.
    by_part_XD = value_weight.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 1)
    value_UAC = F.linear(embedded_UD, by_part_XD).unflatten(1, (parts, -1))
    # Followers of the last places are past the end of the tensor; those places are never searched.
    followers_GT = F.pad(index_GT, (0, num_heads))
    if places is None:
        found_GKRC = _of_all_places(score_GART, none_A, value_UAC, followers_GT, num_heads)
    else:
        found_GKRC = _of_best_places(score_GART, none_A, value_UAC, followers_GT, num_heads, places)
    return found_GKRC.transpose(1, 2).flatten(0, 1).index_select(0, text.order_N)


def searched_places(text: Text, num_heads: int) -> torch.Tensor:
    """Places whose K followers are known and in the same part of the text: bool `[G, R, T]`."""
    longest = text.parts_GT.shape[1]
    there_GT = text.parts_GT != MISSING
    followed_GT = torch.zeros_like(there_GT)
    if longest > num_heads:
        followed_GT[:, :-num_heads] = text.parts_GT[:, num_heads:] == text.parts_GT[:, :-num_heads]
    own_GR = text.parts_GT.gather(1, text.places_GR.clamp_min(0))
    other_GRT = text.parts_GT.unsqueeze(1) != own_GR.unsqueeze(2)
    places_T = torch.arange(longest, device=text.parts_GT.device)
    known_GRT = places_T + num_heads <= text.places_GR.unsqueeze(2)
    if text.window is not None:
        known_GRT = known_GRT & (places_T > text.places_GR.unsqueeze(2) - text.window)
    return (there_GT & followed_GT).unsqueeze(1) & (other_GRT | known_GRT)


def _last_tokens(
    text: Text,
    index_GT: torch.Tensor,
    places_GR: torch.Tensor,
    embedded_UD: torch.Tensor,
    weight: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    """`weight` times the embeddings of the last M tokens up to each place, `[G, R, A, w]`.

    Each token's share of the product is computed once, however often it occurs. A token of another
    part of the text counts as zero.
    """
    width = embedded_UD.shape[1]
    tokens = weight.shape[1] // width
    places_GR = places_GR.clamp_min(0)
    part_GR = text.parts_GT.gather(1, places_GR)
    total: torch.Tensor | None = None
    for back in range(tokens):
        block = tokens - 1 - back  # Columns are ordered with the oldest token first.
        share_UW = F.linear(embedded_UD, weight[:, block * width : (block + 1) * width])
        before_GR = (places_GR - back).clamp_min(0)
        share_GRW = F.embedding(index_GT.gather(1, before_GR), share_UW)
        if back:
            same_GR = (text.parts_GT.gather(1, before_GR) == part_GR) & (places_GR >= back)
            share_GRW = share_GRW * same_GR.unsqueeze(2)
        total = share_GRW if total is None else total + share_GRW
    assert total is not None, "a key is made of one token at least"
    return total.unflatten(2, (parts, -1))


def _of_all_places(
    score_GART: torch.Tensor,
    none_A: torch.Tensor,
    value_UAC: torch.Tensor,
    followers_GT: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """The sum over parts, `[G, K, R, C]`, with a softmax over all places."""
    texts, parts, rows, _ = score_GART.shape
    share_GART = torch.cat([_none(none_A, score_GART), score_GART], -1).softmax(-1)[..., 1:]
    # For draft k the share of place j goes to the token at j + k: the shares move, not the values.
    moved = [F.pad(share_GART, (k, num_heads - k)) for k in range(1, num_heads + 1)]
    share_GXY = torch.stack(moved, 1).transpose(2, 3).reshape(texts, num_heads * rows, -1)
    value_GTX = F.embedding(followers_GT, value_UAC.flatten(1))
    value_GYC = value_GTX.unflatten(2, (parts, -1)).transpose(1, 2).flatten(1, 2)
    # Scores are float32, since they have the age of a place, and so are shares.
    share_GXY = share_GXY.to(value_GYC.dtype)
    return torch.bmm(share_GXY, value_GYC).unflatten(1, (num_heads, rows))


def _of_best_places(
    score_GART: torch.Tensor,
    none_A: torch.Tensor,
    value_UAC: torch.Tensor,
    followers_GT: torch.Tensor,
    num_heads: int,
    places: int,
) -> torch.Tensor:
    """The sum over parts, `[G, K, R, C]`, with a softmax over each part's best places and the
    learned `none`.
    """
    texts, parts, rows, longest = score_GART.shape
    best_GARm, place_GARm = score_GART.topk(min(places, longest), dim=3)
    share_GARm = torch.cat([_none(none_A, best_GARm), best_GARm], -1).softmax(-1)[..., 1:]
    part_A11 = torch.arange(parts, device=place_GARm.device).view(-1, 1, 1)
    bags = []
    for k in range(1, num_heads + 1):
        index_GX = followers_GT.gather(1, (place_GARm + k).view(texts, -1))
        bags.append(index_GX.view(place_GARm.shape) * parts + part_A11)
    index_GKARm = torch.stack(bags, 1)
    share_GKARm = share_GARm.unsqueeze(1).expand_as(index_GKARm).to(value_UAC.dtype)
    found_NC = F.embedding_bag(
        index_GKARm.transpose(2, 3).reshape(texts * num_heads * rows, -1),
        value_UAC.flatten(0, 1),
        mode="sum",
        per_sample_weights=share_GKARm.transpose(2, 3).reshape(texts * num_heads * rows, -1),
    )
    return found_NC.view(texts, num_heads, rows, -1)


def _none(none_A: torch.Tensor, score_GARX: torch.Tensor) -> torch.Tensor:
    """The score of copying nothing, beside the others: `[G, A, R, 1]`."""
    texts, _, rows, _ = score_GARX.shape
    return none_A.view(1, -1, 1, 1).expand(texts, -1, rows, 1)
