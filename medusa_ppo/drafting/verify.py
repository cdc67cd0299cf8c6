"""Lossless verification of draft tokens in plain torch. It is used with vLLM's V1 runner, whose
kernels have no block verification (and sample wrongly on a CPU).

Shape letters: B requests, K most drafts of a request in this step, N rows of logits (for each
request its drafts, then one more), C requests of B, T rows of drafts, V vocabulary.

Request i owns the rows `starts[i] .. starts[i] + counts[i]`: row j < counts[i] verifies draft j,
the last one is the bonus row. The run of accepted drafts ends at one row per request, and only
there a token is sampled.

Drafts x_1 .. x_n sampled from q are verified as a block (Sun et al. 2024, "Block Verification
Accelerates Speculative Decoding", Algorithm 2). The first j of them have the weight

    w_0 = 1,   w_j = min(1, w_{j-1} p(x_j) / q(x_j)),

and the run is the largest j whose own uniform number is below h_j, where

    h_n = w_n,   h_j = r_j / (r_j + 1 - w_j),   r_j = sum over x of max(w_j p(x) - q(x), 0)

with p and q after the first j drafts. The token after the run comes from p if all drafts were
accepted, otherwise from max(w_j p - q, 0). So every token has the distribution p, whatever was
drafted, and no rule accepts more. Token by token (Leviathan et al. 2023), where draft j is accepted
with probability min(1, p(x_j) / q(x_j)), the excess of p(x) / q(x) over 1 is lost; here it
compensates for an earlier or later draft. For one-hot drafts, where q is 1, there is no excess, and
both rules accept alike.

Sampling inverts the cumulative sum in float64, with one uniform number per request. That is B x V
work, without noise of size V.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from medusa_ppo.drafting import sending
from medusa_ppo.drafting.noise import draw

PLACEHOLDER = -1


@dataclass(frozen=True)
class DraftRows:
    """Where the drafts of a step are in its rows of logits.

    Attributes:
        draft_ids_BK: int64, -1 if a request has no draft j, or if it must be refused.
        counts_B: int64, drafts of each request.
        starts_B: int64, first row of logits of each request.
        rows_BK: int64, row of logits that verifies draft j (clamped to the request's rows if there
            is none).
    """

    draft_ids_BK: torch.Tensor
    counts_B: torch.Tensor
    starts_B: torch.Tensor
    rows_BK: torch.Tensor

    @classmethod
    def build(
        cls, draft_ids_T: torch.Tensor, counts: Sequence[int], *, bonus_rows: bool = True
    ) -> DraftRows:
        """Build from vLLM's flat form. `bonus_rows=False`: rows of logits exist for drafts only."""
        device = draft_ids_T.device
        counts_B, starts_B, rows_BK = _places(tuple(counts), int(bonus_rows), device)
        width = rows_BK.shape[1]
        if min(counts) == width:
            ids_BK = draft_ids_T.to(torch.int64).view(len(counts), width)
        else:
            # Filled by lookup: indexing with a mask would read its size on the host.
            _, _, drafts_BK = _places(tuple(counts), 0, device)
            there_BK = torch.arange(width, device=device) < counts_B.unsqueeze(1)
            found_BK = draft_ids_T.to(torch.int64)[drafts_BK.clamp_max(len(draft_ids_T) - 1)]
            ids_BK = torch.where(there_BK, found_BK, PLACEHOLDER)
        return cls(ids_BK, counts_B, starts_B, rows_BK)

    def part(self, requests: slice | torch.Tensor) -> DraftRows:
        """The part for some requests."""
        return DraftRows(
            self.draft_ids_BK[requests],
            self.counts_B[requests],
            self.starts_B[requests],
            self.rows_BK[requests],
        )


@functools.lru_cache(maxsize=64)
def _places(
    counts: tuple[int, ...], extra: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """counts_B, starts_B and rows_BK of `DraftRows`. Cached, because most steps have the previous
    step's counts; these tensors are never written to.
    """
    counts_B = sending.sent(counts, device)
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
    """Float64 uniforms `[B, width]`. A seeded request draws from its own generator, one number per
    draft plus one.

    The last column is for the token that ends the run.
    """
    numbers_BW = torch.rand((len(counts), width), dtype=torch.float64, device=device)
    for index, generator in generators.items():
        # Its own number of drafts decides, not `width`: what a seeded request draws must not depend
        # on its neighbours' drafts.
        own = torch.rand(counts[index] + 1, dtype=torch.float64, generator=generator, device=device)
        numbers_BW[index, : counts[index]] = own[:-1]
        numbers_BW[index, -1] = own[-1]
    return numbers_BW


class DraftQ(Protocol):
    """The distributions that the drafts of a step were drawn from."""

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        """q of each draft `[B, K]`."""
        ...

    def residual(
        self, mass_BV: torch.Tensor, at_B1: torch.Tensor, refused_B1: torch.Tensor
    ) -> torch.Tensor:
        """max(mass - q, 0) if the draft `refused_B1` at index `at_B1` was refused; the mass itself
        where `at_B1` is below 0.
        """
        ...

    def part(self, requests: slice | torch.Tensor) -> DraftQ:
        """The part for some requests."""
        ...


class OneHot:
    """Drafts that were not sampled."""

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(ids_BK, dtype=torch.float32)

    def residual(
        self, mass_BV: torch.Tensor, at_B1: torch.Tensor, refused_B1: torch.Tensor
    ) -> torch.Tensor:
        ids_B1 = refused_B1.clamp_min(0)
        return mass_BV.scatter(
            1, ids_B1, torch.where(refused_B1 >= 0, 0.0, mass_BV.gather(1, ids_B1))
        )

    def part(self, requests: slice | torch.Tensor) -> OneHot:
        return self


class WholeRows:
    """q as vLLM passes it, `[B, K, V]`.

    Args:
        requests_C: the requests to look at; None: all. The rows stay where they are.
    """

    def __init__(self, probs_BKV: torch.Tensor, requests_C: torch.Tensor | None = None) -> None:
        self._probs_BKV = probs_BKV
        self._requests_C = (
            torch.arange(len(probs_BKV), device=probs_BKV.device)
            if requests_C is None
            else requests_C
        )

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        drafts_K = torch.arange(ids_BK.shape[1], device=ids_BK.device)
        return self._probs_BKV[self._requests_C.unsqueeze(1), drafts_K, ids_BK]

    def residual(
        self, mass_BV: torch.Tensor, at_B1: torch.Tensor, refused_B1: torch.Tensor
    ) -> torch.Tensor:
        q_BV = self._probs_BKV[self._requests_C, at_B1.squeeze(1)]
        return (mass_BV - q_BV * (refused_B1 >= 0)).clamp_min(0)

    def part(self, requests: slice | torch.Tensor) -> WholeRows:
        return WholeRows(self._probs_BKV, self._requests_C[requests])


@dataclass(frozen=True)
class Proposed:
    """What our drafting passes to verification in place of vLLM's tensor of draft probabilities.

    Attributes:
        q: q of the drafts; None if none was sampled.
        uniforms_BW: float64 `[B, K + 1]`; the last column is for the token that ends the run.
    """

    q: DraftQ | None
    uniforms_BW: torch.Tensor


class Run(NamedTuple):
    """What verification accepted.

    Attributes:
        length_B: int64, accepted drafts of each request.
        weight_B: w after them, as in the module's docstring; the next token comes from w p - q.
    """

    length_B: torch.Tensor
    weight_B: torch.Tensor

    def part(self, requests: slice) -> Run:
        """The part for some consecutive requests."""
        return Run(self.length_B[requests], self.weight_B[requests])


class TargetRows:
    """Log-probs of the distribution to sample from, row by row. Given logits, it normalises only
    the rows that are asked for: with many sequences a second `[N, V]` tensor would take gigabytes.
    """

    def __init__(self, logits_NV: torch.Tensor, logprobs_NV: torch.Tensor | None = None) -> None:
        self._values_NV = logits_NV if logprobs_NV is None else logprobs_NV
        self._sums_N = None
        self.count, self.vocab_size = logits_NV.shape
        if logprobs_NV is None:
            # float32 even for 16-bit logits, because ratios of probabilities decide acceptance.
            parts = self._values_NV.split(rows_at_once(logits_NV.shape[-1]))
            self._sums_N = torch.cat([part_NV.float().logsumexp(-1) for part_NV in parts])

    def at(self, rows_BK: torch.Tensor, ids_BK: torch.Tensor) -> torch.Tensor:
        """Log-probs of single tokens, float64."""
        values_BK = self._values_NV[rows_BK, ids_BK].double()
        return values_BK if self._sums_N is None else values_BK - self._sums_N[rows_BK].double()

    def rows(self, rows_B: torch.Tensor) -> torch.Tensor:
        """Whole rows, float32 `[B, V]`."""
        rows_BV = self._values_NV[rows_B].float()
        return rows_BV if self._sums_N is None else rows_BV - self._sums_N[rows_B].unsqueeze(1)


ROW_BYTES = 64 * 1024**2
"""Maximum bytes of float64 that residuals take at a time."""


def rows_at_once(vocab_size: int) -> int:
    return max(1, ROW_BYTES // (8 * vocab_size))


def _in_parts(batch: int, vocab_size: int) -> list[slice]:
    """Requests whose residual is computed at a time; empty if all fit at once."""
    most = rows_at_once(vocab_size)
    if batch <= most:
        return []
    return [slice(first, first + most) for first in range(0, batch, most)]


def accepted_run(
    target: TargetRows, drafts: DraftRows, uniform_BK: torch.Tensor, draft_q: DraftQ
) -> Run:
    """The run of accepted drafts."""
    ids_BK = drafts.draft_ids_BK.clamp_min(0)
    logp_BK = target.at(drafts.rows_BK, ids_BK)
    if isinstance(draft_q, OneHot) or not logp_BK.shape[1]:
        accept_BK = (uniform_BK < logp_BK.exp()) & (drafts.draft_ids_BK >= 0)
        length_B = accept_BK.to(torch.int64).cumprod(1).sum(1)
        return Run(length_B, logp_BK.new_ones(len(logp_BK)))
    q_BK = draft_q.of(ids_BK).double()
    # A draft that q could not have drawn shows that it came from another q: refuse it.
    ratio_BK = torch.where(q_BK > 0, logp_BK - q_BK.log(), -torch.inf)
    # All of w_1 .. w_K (module docstring) at once: w is how far the product of ratios has fallen
    # below its maximum so far, or below 1. At the maximum, the log is 0 and w is 1 to the bit.
    product_BK = ratio_BK.cumsum(1)
    weight_BK = (product_BK - product_BK.cummax(1).values.clamp_min(0)).exp()
    # Nothing was drafted after a draft that must be refused.
    count_B1 = (drafts.draft_ids_BK >= 0).to(torch.int64).cumprod(1).sum(1, keepdim=True)
    run_K = torch.arange(1, weight_BK.shape[1] + 1, device=weight_BK.device)
    # h is at most w, equals w after the last draft, and is 1 where w is 1. All others need a pass
    # over the vocabulary, unless a longer run is already found.
    below_BK = (uniform_BK < weight_BK) & (run_K <= count_B1)
    sure_BK = below_BK & ((run_K == count_B1) | (weight_BK == 1))
    length_B = (sure_BK * run_K).amax(1)
    asked_BK = below_BK & (run_K > length_B.unsqueeze(1))
    found_BK = _passes(target, drafts, uniform_BK, draft_q, weight_BK, asked_BK)
    if found_BK is not None:
        length_B = torch.maximum(length_B, (found_BK * run_K).amax(1))
    weight_BW = torch.nn.functional.pad(weight_BK, (1, 0), value=1.0)
    return Run(length_B, weight_BW.gather(1, length_B.unsqueeze(1)).squeeze(1))


def waits_for(device: torch.device) -> bool:
    """Whether the host would wait for the device if a value there decided what to do next."""
    return device.type != "cpu"


def _passes(
    target: TargetRows,
    drafts: DraftRows,
    uniform_BK: torch.Tensor,
    draft_q: DraftQ,
    weight_BK: torch.Tensor,
    asked_BK: torch.Tensor,
) -> torch.Tensor | None:
    """Whether the uniform numbers are below h, where `asked_BK`, bool `[B, K]`, is true; None:
    nowhere.
    """
    if not waits_for(asked_BK.device):
        # Only a few runs need a pass over the vocabulary.
        requests_C, columns_C = asked_BK.nonzero().unbind(1)
        if not len(requests_C):
            return None
        weight_C = weight_BK[requests_C, columns_C]
        asked = drafts.part(requests_C), draft_q.part(requests_C)
        left_C = _left(target, *asked, weight_C, columns_C + 1)
        # u < r / (r + 1 - w), without the division.
        below_C = uniform_BK[requests_C, columns_C] * (left_C + 1 - weight_C) < left_C
        return torch.zeros_like(asked_BK).index_put_((requests_C, columns_C), below_C)
    found = torch.zeros_like(asked_BK)
    # Position after position: the vocabulary rows of all runs at once would take too much memory.
    for column in range(asked_BK.shape[1] - 1):
        weight_B = weight_BK[:, column]
        runs_B = torch.full_like(drafts.starts_B, column + 1)
        left_B = _left(target, drafts, draft_q, weight_B, runs_B)
        found[:, column] = uniform_BK[:, column] * (left_B + 1 - weight_B) < left_B
    return found & asked_BK


def _left(
    target: TargetRows,
    drafts: DraftRows,
    draft_q: DraftQ,
    weight_B: torch.Tensor,
    runs_B: torch.Tensor,
) -> torch.Tensor:
    """r of the module's docstring after runs of these lengths, float64 `[B]`."""
    parts = _in_parts(len(runs_B), target.vocab_size)
    if parts:
        return torch.cat(
            [
                _left(target, drafts.part(some), draft_q.part(some), weight_B[some], runs_B[some])
                for some in parts
            ]
        )
    rows_B = (drafts.starts_B + runs_B).clamp_max(target.count - 1)
    mass_BV = target.rows(rows_B).exp_().mul_(weight_B.unsqueeze(1))
    at_B1 = runs_B.unsqueeze(1)
    left_BV = draft_q.residual(mass_BV, at_B1, drafts.draft_ids_BK.gather(1, at_B1))
    return left_BV.sum(1, dtype=torch.float64)


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
    """The token that ends each run, int64 `[B]`. `logprobs_BV` is each request's row at the end of
    its run.
    """
    probs_BV = logprobs_BV.exp()
    width = drafts.draft_ids_BK.shape[1]
    if width:
        at_B1 = run.length_B.clamp_max(width - 1).unsqueeze(1)
        refused_B1 = drafts.draft_ids_BK.gather(1, at_B1)
        # A run of all drafts refused none: its last token comes from p itself.
        refused_B1 = torch.where(
            (run.length_B < drafts.counts_B).unsqueeze(1), refused_B1, PLACEHOLDER
        )
        mass_BV = probs_BV * run.weight_B.unsqueeze(1).to(probs_BV.dtype)
        left_BV = draft_q.residual(mass_BV, at_B1, refused_B1)
        # It also comes from p if rounding leaves nothing of the residual.
        probs_BV = torch.where(left_BV.sum(1, keepdim=True) > 0, left_BV, probs_BV)
    return draw(probs_BV, uniform_B.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Rule:
    """Which requests are greedy. `greedy_B` (bool) is None if all are, or none is."""

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
        proposed: from our drafting; or q of all drafts `[T, V]`; None: all are one-hot.

    If there is no row after a full run (no bonus rows), that token is meaningless. Both inputs are
    after temperature, top-k and top-p; logprobs_NV may be left out. Greedy requests read the logits
    themselves, because the rounding of a softmax can make ties.
    """

    def end_rows(run_B: torch.Tensor) -> torch.Tensor:
        return (drafts.starts_B + run_B).clamp_max(logits_NV.shape[0] - 1)

    if rule.all_greedy:
        argmax_N = logits_NV.argmax(-1)
        run_B = greedy_run(argmax_N, drafts)
        return run_B, argmax_N[end_rows(run_B)]
    target = TargetRows(logits_NV, logprobs_NV)
    width = drafts.draft_ids_BK.shape[1]
    if isinstance(proposed, Proposed):
        draft_q = proposed.q or OneHot()
        uniforms_BW = proposed.uniforms_BW
    else:
        draft_q = OneHot() if proposed is None else WholeRows(spread_draft_probs(proposed, counts))
        uniforms_BW = uniform_numbers(counts, width + 1, rule.generators, logits_NV.device)
    run = accepted_run(target, drafts, uniforms_BW[:, :width], draft_q)
    run_B = run.length_B
    ends_B = end_rows(run_B)
    parts = _in_parts(len(run_B), target.vocab_size)
    if parts:
        last = [
            residual_sample(
                target.rows(ends_B[some]),
                drafts.part(some),
                run.part(some),
                uniforms_BW[some, -1],
                draft_q.part(some),
            )
            for some in parts
        ]
        last_B = torch.cat(last)
    else:
        last_B = residual_sample(target.rows(ends_B), drafts, run, uniforms_BW[:, -1], draft_q)
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
    # One more column: a full run is followed by its bonus token.
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

    It has the arguments of vLLM's expand_batch_to_tokens, whose CPU version leaves the result
    uninitialised.
    """
    counts_B = torch.diff(cumulative_B, prepend=cumulative_B.new_zeros(1)).to(torch.int64)
    if replace_from != replace_to:
        values_B = torch.where(
            values_B == replace_from, torch.full_like(values_B, replace_to), values_B
        )
    return torch.repeat_interleave(values_B, counts_B, output_size=num_rows)
