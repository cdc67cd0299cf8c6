"""Lossless verification of draft tokens in plain torch: what verifies on V1, where vLLM's kernels
know no block (and on a CPU sample wrongly).

Shape letters: B requests, K most drafts of a request in this step, N rows of logits (for each
request its drafts, then one more), C requests of B, T rows of drafts, V vocabulary.

Request i owns the rows `starts[i] .. starts[i] + counts[i]`: row j < counts[i] judges draft j, the
last one is the bonus row. The run of accepted drafts ends at one row per request, and only there a
token is sampled.

Drafts x_1 .. x_n that were drawn from q are verified as a block (Sun et al. 2024, "Block
Verification Accelerates Speculative Decoding", Algorithm 2). The first j of them deserve

    w_0 = 1,   w_j = min(1, w_{j-1} p(x_j) / q(x_j)),

and the run is the largest j at which a uniform number of its own lies below h_j, where

    h_n = w_n,   h_j = r_j / (r_j + 1 - w_j),   r_j = sum over x of max(w_j p(x) - q(x), 0)

with p and q behind the first j drafts. The token behind the run comes from p when all were
accepted, otherwise from max(w_j p - q, 0). So every token has the distribution p, whatever was
drafted, and no rule accepts more. Token by token (Leviathan et al. 2023), where draft j is accepted
with probability min(1, p(x_j) / q(x_j)), what p(x) / q(x) exceeds 1 by is lost; here it makes up
for a draft before or behind it. For one-hot drafts, where q is 1, nothing exceeds 1, and both
accept alike.

Sampling inverts the cumulative sum in float64 with one uniform number per request: B x V work and
no noise of size V.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from medusa_ppo.drafting.noise import draw

PLACEHOLDER = -1


@dataclass(frozen=True)
class DraftRows:
    """Where the drafts of a step stand.

    Attributes:
        draft_ids_BK: int64, -1 where a request has no draft j, or one that must be refused.
        counts_B: int64, drafts of each request.
        starts_B: int64, first row of logits of each request.
        rows_BK: int64, row of logits that judges draft j (clamped inside the request where there is
            none).
    """

    draft_ids_BK: torch.Tensor
    counts_B: torch.Tensor
    starts_B: torch.Tensor
    rows_BK: torch.Tensor

    @classmethod
    def build(
        cls, draft_ids_T: torch.Tensor, counts: Sequence[int], *, bonus_rows: bool = True
    ) -> DraftRows:
        """From vLLM's flat form. `bonus_rows=False`: rows of logits exist for drafts only."""
        counts_B, starts_B, rows_BK = _places(tuple(counts), int(bonus_rows), draft_ids_T.device)
        width = rows_BK.shape[1]
        if min(counts) == width:
            ids_BK = draft_ids_T.to(torch.int64).view(len(counts), width)
        else:
            # Not by a mask: how many it chooses would be a host value.
            steps_K = torch.arange(width, device=draft_ids_T.device)
            first_B1 = (counts_B.cumsum(0) - counts_B).unsqueeze(1)
            places_BK = (first_B1 + steps_K).clamp_max(draft_ids_T.shape[0] - 1)
            there_BK = steps_K < counts_B.unsqueeze(1)
            ids_BK = torch.where(there_BK, draft_ids_T.to(torch.int64)[places_BK], PLACEHOLDER)
        return cls(ids_BK, counts_B, starts_B, rows_BK)


@functools.lru_cache(maxsize=64)
def _places(
    counts: tuple[int, ...], extra: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """counts_B, starts_B and rows_BK of `DraftRows`. Most steps have the counts of the step before;
    nobody writes into these.
    """
    counts_B = torch.tensor(counts, dtype=torch.int64, device=device)
    starts_B = torch.cumsum(counts_B + extra, 0) - (counts_B + extra)
    steps_K = torch.arange(max(counts), device=device)
    last_B = (counts_B + extra - 1).clamp_min(0)
    return counts_B, starts_B, starts_B.unsqueeze(1) + torch.minimum(steps_K, last_B.unsqueeze(1))


def uniform_numbers(
    counts: Sequence[int],
    width: int,
    generators: Mapping[int, torch.Generator],
    device: torch.device,
) -> torch.Tensor:
    """Float64 uniforms `[B, width]`; a seeded request draws from its own generator, as many as its
    drafts plus one.

    The last column is for the token that ends the run.
    """
    numbers_BW = torch.rand((len(counts), width), dtype=torch.float64, device=device)
    for index, generator in generators.items():
        # Not `width` numbers: what a seeded request draws must not depend on its neighbours'
        # drafts.
        own = torch.rand(counts[index] + 1, dtype=torch.float64, generator=generator, device=device)
        numbers_BW[index, : counts[index]] = own[:-1]
        numbers_BW[index, -1] = own[-1]
    return numbers_BW


class DraftQ(Protocol):
    """What the drafts of a step were drawn from."""

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        """q of each draft `[B, K]`."""
        ...

    def residual(
        self,
        mass_CV: torch.Tensor,
        at_C1: torch.Tensor,
        refused_C1: torch.Tensor,
        requests_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """max(mass - q, 0) where the draft `refused_C1` at index `at_C1` was refused; the mass
        where that is below 0.

        Args:
            requests_C: which ones the rows are of; None: all, in order.
        """
        ...


class OneHot:
    """Drafts that were not sampled."""

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(ids_BK, dtype=torch.float32)

    def residual(
        self,
        mass_CV: torch.Tensor,
        at_C1: torch.Tensor,
        refused_C1: torch.Tensor,
        requests_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ids_C1 = refused_C1.clamp_min(0)
        return mass_CV.scatter(
            1, ids_C1, torch.where(refused_C1 >= 0, 0.0, mass_CV.gather(1, ids_C1))
        )


class WholeRows:
    """q as vLLM hands it on, `[B, K, V]`."""

    def __init__(self, probs_BKV: torch.Tensor) -> None:
        self._probs_BKV = probs_BKV

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        return self._probs_BKV.gather(2, ids_BK.unsqueeze(2)).squeeze(2)

    def residual(
        self,
        mass_CV: torch.Tensor,
        at_C1: torch.Tensor,
        refused_C1: torch.Tensor,
        requests_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if requests_C is None:
            requests_C = torch.arange(len(at_C1), device=at_C1.device)
        q_CV = self._probs_BKV[requests_C, at_C1.squeeze(1)]
        return (mass_CV - q_CV * (refused_C1 >= 0)).clamp_min(0)


@dataclass(frozen=True)
class Proposed:
    """What our own drafting hands to verification, in the place of vLLM's tensor of draft
    probabilities.

    Attributes:
        q: of the drafts; None when none was sampled.
        uniforms_BW: float64 `[B, K + 1]`; the last column is for the token that ends the run.
        whole_rows: q of all drafts as vLLM's kernels read it, `[T, V]`, for requests that only
            these verify; None where they never do.
    """

    q: DraftQ | None
    uniforms_BW: torch.Tensor
    whole_rows: Callable[[], torch.Tensor] | None = None


class Run(NamedTuple):
    """What verification accepted.

    Attributes:
        length_B: int64, drafts of each request.
        weight_B: w of the module's docstring behind them; what the next token comes from is p times
            this, less q.
    """

    length_B: torch.Tensor
    weight_B: torch.Tensor


def accepted_run(
    logprobs_NV: torch.Tensor, drafts: DraftRows, uniform_BK: torch.Tensor, draft_q: DraftQ
) -> Run:
    """The run of accepted drafts. logprobs are of the distribution to sample from."""
    logp_BK = logprobs_NV[drafts.rows_BK, drafts.draft_ids_BK.clamp_min(0)].double()
    if isinstance(draft_q, OneHot) or not logp_BK.shape[1]:
        accept_BK = (uniform_BK < logp_BK.exp()) & (drafts.draft_ids_BK >= 0)
        length_B = accept_BK.to(torch.int64).cumprod(1).sum(1)
        return Run(length_B, logp_BK.new_ones(len(logp_BK)))
    q_BK = draft_q.of(drafts.draft_ids_BK.clamp_min(0)).double()
    # A draft that q could not have drawn says that q is not what was drafted from: refuse it.
    ratio_BK = torch.where(q_BK > 0, logp_BK - q_BK.log(), -torch.inf)
    # The docstring's w_1 .. w_K at once: what the products of ratios have lost since their largest,
    # or since 1. That is 0, and w 1 to the bit, where they are at their largest.
    product_BK = ratio_BK.cumsum(1)
    weight_BK = (product_BK - product_BK.cummax(1).values.clamp_min(0)).exp()
    # What stands behind a draft that must be refused was never drafted.
    count_B1 = (drafts.draft_ids_BK >= 0).to(torch.int64).cumprod(1).sum(1, keepdim=True)
    run_K = torch.arange(1, weight_BK.shape[1] + 1, device=weight_BK.device)
    # h is at most w, is w behind the last draft, and 1 where w is 1; the rest asks for a pass over
    # the vocabulary, unless a longer run is found already.
    below_BK = (uniform_BK < weight_BK) & (run_K <= count_B1)
    sure_BK = below_BK & ((run_K == count_B1) | (weight_BK == 1))
    length_B = (sure_BK * run_K).amax(1)
    asked_BK = below_BK & (run_K > length_B.unsqueeze(1))
    found_BK = _passes(logprobs_NV, drafts, uniform_BK, draft_q, weight_BK, asked_BK)
    if found_BK is not None:
        length_B = torch.maximum(length_B, (found_BK * run_K).amax(1))
    weight_BW = torch.nn.functional.pad(weight_BK, (1, 0), value=1.0)
    return Run(length_B, weight_BW.gather(1, length_B.unsqueeze(1)).squeeze(1))


def waits_for(device: torch.device) -> bool:
    """Whether a value that decides what is done next has to be waited for."""
    return device.type != "cpu"


def _passes(
    logprobs_NV: torch.Tensor,
    drafts: DraftRows,
    uniform_BK: torch.Tensor,
    draft_q: DraftQ,
    weight_BK: torch.Tensor,
    asked_BK: torch.Tensor,
) -> torch.Tensor | None:
    """Whether the uniform numbers lie below h, where `asked_BK`, bool `[B, K]`; None: nowhere."""
    if not waits_for(asked_BK.device):
        # A pass over the vocabulary for a few runs in place of all.
        requests_C, columns_C = asked_BK.nonzero().unbind(1)
        if not len(requests_C):
            return None
        weight_C = weight_BK[requests_C, columns_C]
        left_C = _left(logprobs_NV, drafts, draft_q, weight_C, columns_C + 1, requests_C)
        # u < r / (r + 1 - w), without the division.
        below_C = uniform_BK[requests_C, columns_C] * (left_C + 1 - weight_C) < left_C
        return torch.zeros_like(asked_BK).index_put_((requests_C, columns_C), below_C)
    found = torch.zeros_like(asked_BK)
    # One after the other: rows of the vocabulary for all runs at once take too much room.
    for column in range(asked_BK.shape[1] - 1):
        weight_B = weight_BK[:, column]
        runs_B = torch.full_like(drafts.starts_B, column + 1)
        left_B = _left(logprobs_NV, drafts, draft_q, weight_B, runs_B, None)
        found[:, column] = uniform_BK[:, column] * (left_B + 1 - weight_B) < left_B
    return found & asked_BK


def _left(
    logprobs_NV: torch.Tensor,
    drafts: DraftRows,
    draft_q: DraftQ,
    weight_C: torch.Tensor,
    runs_C: torch.Tensor,
    requests_C: torch.Tensor | None,
) -> torch.Tensor:
    """r of the module's docstring behind runs of these lengths, float64 `[C]`."""
    starts_C = drafts.starts_B if requests_C is None else drafts.starts_B[requests_C]
    ids_CK = drafts.draft_ids_BK if requests_C is None else drafts.draft_ids_BK[requests_C]
    rows_C = (starts_C + runs_C).clamp_max(logprobs_NV.shape[0] - 1)
    mass_CV = logprobs_NV[rows_C].exp() * weight_C.unsqueeze(1).to(logprobs_NV.dtype)
    at_C1 = runs_C.unsqueeze(1)
    left_CV = draft_q.residual(mass_CV, at_C1, ids_CK.gather(1, at_C1), requests_C)
    return left_CV.sum(1, dtype=torch.float64)


def greedy_run(argmax_N: torch.Tensor, drafts: DraftRows) -> torch.Tensor:
    """Length of the run of drafts that equal the argmax of their rows, int64 `[B]`."""
    # A placeholder (-1) equals no argmax, so it ends the run by itself.
    accept_BK = argmax_N[drafts.rows_BK] == drafts.draft_ids_BK
    return accept_BK.to(torch.int64).cumprod(1).sum(1)


def residual_sample(
    logprobs_BV: torch.Tensor,
    drafts: DraftRows,
    run: Run,
    uniform_B: torch.Tensor,
    draft_q: DraftQ,
) -> torch.Tensor:
    """The token that ends each run, int64 `[B]`. logprobs_BV: the row of each request where its run
    ended.
    """
    probs_BV = logprobs_BV.exp()
    width = drafts.draft_ids_BK.shape[1]
    if width:
        at_B1 = run.length_B.clamp_max(width - 1).unsqueeze(1)
        refused_B1 = drafts.draft_ids_BK.gather(1, at_B1)
        # A run that took all drafts refused none: its last token comes from p itself.
        refused_B1 = torch.where(
            (run.length_B < drafts.counts_B).unsqueeze(1), refused_B1, PLACEHOLDER
        )
        mass_BV = probs_BV * run.weight_B.unsqueeze(1).to(probs_BV.dtype)
        left_BV = draft_q.residual(mass_BV, at_B1, refused_B1)
        # p too where rounding leaves nothing of the residual.
        probs_BV = torch.where(left_BV.sum(1, keepdim=True) > 0, left_BV, probs_BV)
    return draw(probs_BV, uniform_B.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Rule:
    """Who is greedy. `greedy_B` (bool) is None when all requests are, or none is."""

    all_greedy: bool = False
    greedy_B: torch.Tensor | None = None
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)


def verify_rows(
    logits_NV: torch.Tensor,
    logprobs_NV: torch.Tensor | None,
    drafts: DraftRows,
    counts: Sequence[int],
    proposed: Proposed | torch.Tensor | None,
    rule: Rule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Length of each run and the token sampled after it, both int64 `[B]`.

    Args:
        proposed: what our drafting handed on; or q of all drafts `[T, V]`; None: all are one-hot.

    Where no row exists after a full run (there are no bonus rows), that token means nothing. Both
    inputs are after temperature, top-k and top-p; logprobs_NV may be left out. Greedy requests read
    the logits themselves, because the rounding of a softmax can make ties.
    """

    def end_rows(run_B: torch.Tensor) -> torch.Tensor:
        return (drafts.starts_B + run_B).clamp_max(logits_NV.shape[0] - 1)

    if rule.all_greedy:
        argmax_N = logits_NV.argmax(-1)
        run_B = greedy_run(argmax_N, drafts)
        return run_B, argmax_N[end_rows(run_B)]
    if logprobs_NV is None:
        # float32 also for 16-bit logits: ratios of probabilities decide what is accepted.
        logprobs_NV = logits_NV.log_softmax(-1, dtype=torch.float32)
    width = drafts.draft_ids_BK.shape[1]
    if isinstance(proposed, Proposed):
        draft_q = proposed.q or OneHot()
        uniforms_BW = proposed.uniforms_BW
    else:
        draft_q = OneHot() if proposed is None else WholeRows(spread_draft_probs(proposed, counts))
        uniforms_BW = uniform_numbers(counts, width + 1, rule.generators, logits_NV.device)
    run = accepted_run(logprobs_NV, drafts, uniforms_BW[:, :width], draft_q)
    run_B = run.length_B
    last_B = residual_sample(logprobs_NV[end_rows(run_B)], drafts, run, uniforms_BW[:, -1], draft_q)
    if rule.greedy_B is not None:
        argmax_N = logits_NV.argmax(-1)
        run_B = torch.where(rule.greedy_B, greedy_run(argmax_N, drafts), run_B)
        last_B = torch.where(rule.greedy_B, argmax_N[end_rows(run_B)], last_B)
    return run_B, last_B


def assemble(drafts: DraftRows, run_B: torch.Tensor, last_B: torch.Tensor) -> torch.Tensor:
    """Accepted drafts, then the last token, then -1: int32 `[B, K + 1]`."""
    width = drafts.draft_ids_BK.shape[1]
    steps_W = torch.arange(width + 1, device=run_B.device)
    run_B1 = run_B.unsqueeze(1)
    # One column more: a full run is followed by its bonus token.
    ids_BW = torch.nn.functional.pad(drafts.draft_ids_BK, (0, 1), value=PLACEHOLDER)
    ids_BW = torch.where(steps_W < run_B1, ids_BW, PLACEHOLDER)
    return ids_BW.scatter(1, run_B1, last_B.unsqueeze(1)).to(torch.int32)


def spread_draft_probs(draft_probs_TV: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Flat draft probabilities `[T, V]` as `[B, K, V]`, zeros where a request has fewer drafts."""
    width = max(counts)
    if min(counts) == width:
        return draft_probs_TV.view(len(counts), width, -1)
    spread_BKV = draft_probs_TV.new_zeros(len(counts), width, draft_probs_TV.shape[1])
    counts_B1 = torch.tensor(counts, device=draft_probs_TV.device).unsqueeze(1)
    spread_BKV[torch.arange(width, device=draft_probs_TV.device) < counts_B1] = draft_probs_TV
    return spread_BKV


def expand_to_rows(
    values_B: torch.Tensor,
    cumulative_B: torch.Tensor,
    num_rows: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """One value per request -> one per row; `cumulative_B` counts the rows up to and including each
    request.

    Has the arguments of vLLM's expand_batch_to_tokens, whose CPU form leaves the result
    uninitialised.
    """
    counts_B = torch.diff(cumulative_B, prepend=cumulative_B.new_zeros(1)).to(torch.int64)
    if replace_from != replace_to:
        values_B = torch.where(
            values_B == replace_from, torch.full_like(values_B, replace_to), values_B
        )
    return torch.repeat_interleave(values_B, counts_B, output_size=num_rows)
