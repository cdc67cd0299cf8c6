"""The replay estimate: the acceptance that vLLM would count, computed without an engine, from
on-policy rollouts alone.

Shape letters: S sequences, M response tokens of all sequences one after the other, T longest
response, K heads, D hidden, V vocabulary. Rows are in response coordinates: row m holds the state
that predicts response_ids[m]; head k at row m drafts response_ids[m + k].

Start at a row, draft K tokens, count the run of accepted ones, jump run + 1 rows ahead, and repeat
until the response ends:
  one-hot drafts   position k is accepted when argmax q_k is the rollout's own token;
  sampled drafts   positions 1 to k are all accepted with probability min(1, R_1, ..., R_k), where
                   R_j is the product of q_i(y_i) / p(y_i) over i <= j, and p the behaviour
                   probability of a token.
Both follow from the rule of verification (as a block, docs/theory.md), given the emitted tokens.
The expectation is computed exactly instead of by drawing: `visits[t]`, the probability of a stop at
row t, flows on to the rows that a run can lead to. One-hot drafts are the case in which all
probabilities are 0 or 1, and then the counts are whole numbers.

Stops near the end of a response, as vLLM counts them:
  * the prompt pass emits response token 0 without a draft; row 0 is the first stop;
  * a stop counts as a draft step if at least one response token is left after it. A response that
    has ended (end token or length) drafts no more, so its last token is never a stop;
  * a run can pass the end: drafts are not shortened to max_tokens, and vLLM counts accepted tokens
    after an end token before it cuts them off. A rollout does not contain them. The estimate counts
    only visible tokens, so it is low by a part of one run per response (0.1 to 0.5 % for responses
    of 60 tokens and more); `accepted_upper` adds all unseen tokens that could have been accepted.
    With the heads that drafted the rollout, `drafts` equals vLLM's counter exactly, and vLLM's
    accepted tokens are between the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from heads.copying import SERVED_PLACES, Texts
from heads.errors import DataError
from heads.factored import head_logits
from heads.modules import Context, MedusaHeads
from heads.targets import head_logprobs, head_targets, segments_from_lengths

TEMPERATURES = tuple(
    n / 32 for n in (16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 40, 44, 48, 56, 64)
)
"""Possible draft temperatures of a head; 16-bit engines represent them exactly."""


@dataclass(frozen=True)
class Interval:
    """A point estimate and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ReplayResult:
    """Counts of a replay, per sequence (float64; whole numbers for one-hot drafts).

    Attributes:
        drafts_S: draft steps.
        accepted_SK: accepted drafts at position 1..K.
        unseen_S: maximum number of drafts that could have been accepted after the response's end.
        rows_M2: the same by row (drafts, accepted), if known.
    """

    drafts_S: torch.Tensor
    accepted_SK: torch.Tensor
    unseen_S: torch.Tensor
    rows_M2: torch.Tensor | None = None

    @property
    def drafts(self) -> float:
        return float(self.drafts_S.sum())

    @property
    def accepted(self) -> float:
        return float(self.accepted_SK.sum())

    @property
    def accepted_upper(self) -> float:
        """Accepted drafts if all drafts after the responses' ends had been accepted."""
        return self.accepted + float(self.unseen_S.sum())

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        return tuple(self.accepted_SK.sum(0).tolist())

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1.0 when nothing was drafted (vLLM's definition)."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Unconditional: accepted at position k / draft steps."""
        return tuple(n / self.drafts if self.drafts else 0.0 for n in self.accepted_per_position)

    def select(self, chosen_S: torch.Tensor) -> ReplayResult:
        """The counts of some sequences (bool mask or int64 indices)."""
        return ReplayResult(
            self.drafts_S[chosen_S], self.accepted_SK[chosen_S], self.unseen_S[chosen_S]
        )

    def by_group(self, group_S: torch.Tensor) -> ReplayResult:
        """Counts summed over the sequences of each group (int64, 0 to G - 1), such as all answers
        to a prompt: they are alike, and so form one observation of an interval.
        """
        groups = int(group_S.max()) + 1

        def total(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros((groups, *values.shape[1:])).index_add_(0, group_S, values)

        return ReplayResult(total(self.drafts_S), total(self.accepted_SK), total(self.unseen_S))

    def confidence_interval(self, confidence: float = 0.95) -> Interval:
        """Interval of the mean acceptance length over sequences, within what is possible."""
        value, pull_S = extra_tokens(self.accepted_SK.sum(1), self.drafts_S)
        found = student_interval(value, pull_S, (1 - confidence) / 2)
        most = self.accepted_SK.shape[1]
        return Interval(1 + value, 1 + max(0.0, found.low), 1 + min(most, found.high))


def paired_difference(a: ReplayResult, b: ReplayResult, confidence: float = 0.95) -> Interval:
    """Mean acceptance length of `a` minus that of `b` on the same sequences: common effects (hard
    prompts, long responses) cancel, sequence by sequence.
    """
    if a.drafts_S.shape != b.drafts_S.shape:
        raise DataError(
            "A paired difference needs the same sequences.",
            given=f"{a.drafts_S.numel()} and {b.drafts_S.numel()} sequences",
            expected="the same number in both",
            do="Replay both sets of heads on one batch.",
        )
    first, first_S = extra_tokens(a.accepted_SK.sum(1), a.drafts_S)
    second, second_S = extra_tokens(b.accepted_SK.sum(1), b.drafts_S)
    found = student_interval(first - second, first_S - second_S, (1 - confidence) / 2)
    # As many extra tokens per step as each has heads.
    least, most = -b.accepted_SK.shape[1], a.accepted_SK.shape[1]
    return Interval(found.value, max(least, found.low), min(most, found.high))


def extra_tokens(accepted_S: torch.Tensor, drafts_S: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Accepted drafts per step, and the influence of each observation on it: the linear form of a
    ratio of sums, whose squares add up to its variance.
    """
    drafts = drafts_S.sum().clamp(min=1e-12)
    value = accepted_S.sum() / drafts
    return float(value), (accepted_S - value * drafts_S) / drafts


def student_interval(value: float, pull_S: torch.Tensor, tail: float) -> Interval:
    """Interval of a value from the influences of independent observations; none for fewer than two.

    It uses Student's quantile: a bootstrap gives the same for many observations but needs a
    thousand draws, and is too narrow for few.

    Args:
        tail: probability that the truth is beyond one end, for each end separately.
    """
    count = pull_S.numel()
    if count < 2:
        return Interval(value, -math.inf, math.inf)
    error = math.sqrt(float(pull_S.square().sum()) * count / (count - 1))
    reach = student_quantile(1 - tail, count - 1) * error
    return Interval(value, value - reach, value + reach)


def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t for this share, by the expansion of Abramowitz and Stegun 26.7.5;
    accurate to 1 % from 4 degrees of freedom on.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def replay_estimate(
    draft_ids_MK: torch.Tensor, response_ids_M: torch.Tensor, lengths_S: torch.Tensor
) -> ReplayResult:
    """Replay of one-hot drafts; arguments of `one_hot_acceptance`."""
    return replay_probabilities(
        one_hot_acceptance(draft_ids_MK, response_ids_M, lengths_S), lengths_S
    )


def replay_sampled(
    draft_logprobs_MK: torch.Tensor, logprobs_M: torch.Tensor, lengths_S: torch.Tensor
) -> ReplayResult:
    """Replay of sampled drafts, the exact expectation over the draws; arguments of
    `draft_ratios`.
    """
    ratios_MK = draft_ratios(draft_logprobs_MK, logprobs_M, lengths_S)
    return replay_probabilities(block_acceptance(ratios_MK), lengths_S)


def one_hot_acceptance(
    draft_ids_MK: torch.Tensor, response_ids_M: torch.Tensor, lengths_S: torch.Tensor
) -> torch.Tensor:
    """Whether each one-hot draft is accepted, given that the earlier ones were: 0 or 1, float64
    `MK`, 0 after a response's end.

    Args:
        draft_ids_MK: int64, argmax of head 1..K at each row (`draft_ids_for_rows`).
        response_ids_M: int64 tokens of the rollouts.
        lengths_S: int64 response lengths; they sum to M.
    """
    _check_lengths(response_ids_M, lengths_S)
    targets_MK, mask_MK = head_targets(
        response_ids_M, segments_from_lengths(lengths_S), draft_ids_MK.shape[1]
    )
    return ((draft_ids_MK == targets_MK) & mask_MK).double()


def draft_ratios(
    draft_logprobs_MK: torch.Tensor, logprobs_M: torch.Tensor, lengths_S: torch.Tensor
) -> torch.Tensor:
    """log(q / p) of the rollout's own tokens as sampled drafts, float64 `MK`; meaningless after a
    response's end.

    Args:
        draft_logprobs_MK: log q_k of the rollout's token at each row and head, at the draft
            temperature (`draft_logprobs_for_rows`).
        logprobs_M: behaviour log-probs of the tokens, of the distribution that was actually sampled
            from.
        lengths_S: int64 response lengths; they sum to M.
    """
    _check_lengths(logprobs_M, lengths_S)
    behaviour_MK = head_logprobs(
        logprobs_M.double(), segments_from_lengths(lengths_S), draft_logprobs_MK.shape[1]
    )
    return draft_logprobs_MK.double() - behaviour_MK


def block_acceptance(ratios_MK: torch.Tensor) -> torch.Tensor:
    """Probability that each sampled draft is accepted, given that the earlier ones were, float64
    `MK`, with block verification.

    Args:
        ratios_MK: `draft_ratios`.
    """
    # Probability that the first k are all accepted: the minimum of 1 and of the products of q / p
    # up to each.
    reached_MK = ratios_MK.cumsum(1).cummin(1).values.clamp(max=0).exp()
    before_MK = torch.nn.functional.pad(reached_MK[:, :-1], (1, 0), value=1.0)
    # A position that is never reached leads to no later one, so it must not become NaN. NaN from
    # broken heads must still show.
    return torch.where(before_MK == 0, before_MK, reached_MK / before_MK)


def better_temperatures(
    ratios_QMK: torch.Tensor, group_M: torch.Tensor, now_K: Sequence[int]
) -> list[int]:
    """For each head, the index of the draft temperature (one of Q) with which most of its drafts
    are accepted.

    The search goes head by head, with the earlier heads' temperatures given. The current
    temperature is replaced only if the gain exceeds its own error: on few rows all temperatures are
    about equally good.

    Args:
        ratios_QMK: `draft_ratios` with each temperature, -inf after a response's end.
        group_M: int64, rows of a group (the answers to one prompt) are alike; the error is that
            between groups.
        now_K: indices of the current temperatures.
    """
    groups = int(group_M.max()) + 1
    # The products of q / p so far, and their minimum, as in `block_acceptance`, all as logarithms.
    product_M = ratios_QMK.new_zeros(len(group_M))
    least_M = product_M
    chosen = list(now_K)
    # The spread of a single group is unknown, so nothing can exceed it.
    for k, now in enumerate(now_K if groups > 1 else ()):
        product_QM = product_M + ratios_QMK[:, :, k]
        least_QM = torch.minimum(least_M, product_QM)
        reached_QM = least_QM.exp()
        gain_QG = reached_QM.new_zeros(len(reached_QM), groups).index_add_(
            1, group_M, reached_QM - reached_QM[now]
        )
        sure_Q = gain_QG.sum(1) - gain_QG.std(1) * groups**0.5
        best = int(sure_Q.argmax())
        chosen[k] = best if sure_Q[best] > 0 else now
        product_M = product_QM[chosen[k]]
        least_M = least_QM[chosen[k]]
    return chosen


def replay_probabilities(accept_MK: torch.Tensor, lengths_S: torch.Tensor) -> ReplayResult:
    """Replay from each position's acceptance probability (given that the earlier ones were
    accepted).

    Entries whose target is after the end of the response are ignored.
    """
    _check_lengths(accept_MK, lengths_S)
    lengths_S = lengths_S.to(torch.int64).cpu()
    count = lengths_S.numel()
    heads = accept_MK.shape[1]
    longest = int(lengths_S.max())
    segment_M = segments_from_lengths(lengths_S)
    place_M = torch.arange(accept_MK.shape[0]) - (lengths_S.cumsum(0) - lengths_S)[segment_M]
    left_M = lengths_S[segment_M] - 1 - place_M  # Tokens of the response after a row.
    # The probability that the first k drafts are all accepted, none of them after the response's
    # end.
    within_MK = torch.arange(1, heads + 1) <= left_M.unsqueeze(1)
    runs_MK = (accept_MK.double().cpu() * within_MK).cumprod(1)
    # A run of j drafts leads j + 1 rows ahead: the target model corrects the refused draft, or adds
    # a token. Rows after the end, and the last row of a response, lead nowhere.
    moves_MJ = torch.cat([torch.ones_like(runs_MK[:, :1]), runs_MK], dim=1)
    moves_MJ[:, :-1] -= runs_MK
    moves_MJ *= (left_M > 0).unsqueeze(1)
    moves_TJS = torch.zeros(longest, heads + 1, count, dtype=torch.float64)
    moves_TJS[place_M, :, segment_M] = moves_MJ
    # Runs may lead past the longest response; these entries are never read.
    visits_TS = torch.zeros(longest + heads + 1, count, dtype=torch.float64)
    visits_TS[0] = 1.0
    # Row by row in order: a row's visits are complete only when all earlier rows are done. All
    # responses at once, and one operation per row: with 8,192 rows each operation matters.
    for visits_S, moves_JS, ahead_JS in zip(
        visits_TS, moves_TJS, visits_TS[1:].unfold(0, heads + 1, 1).transpose(1, 2), strict=False
    ):
        ahead_JS.addcmul_(visits_S, moves_JS)
    visits_M = visits_TS[place_M, segment_M] * (left_M > 0)
    accepted_MK = visits_M.unsqueeze(1) * runs_MK
    # The run has passed the response's end, and drafts after it are not visible.
    ends_M = (left_M > 0) & (left_M < heads)
    run_M = runs_MK.gather(1, (left_M.clamp(1, heads) - 1).unsqueeze(1)).squeeze(1)
    unseen_M = visits_M * run_M * (heads - left_M) * ends_M

    def by_response(values_M: torch.Tensor) -> torch.Tensor:
        return values_M.new_zeros(count, *values_M.shape[1:]).index_add_(0, segment_M, values_M)

    return ReplayResult(
        by_response(visits_M),
        by_response(accepted_MK),
        by_response(unseen_M),
        torch.stack([visits_M, accepted_MK.sum(1)], dim=1),
    )


@torch.no_grad()
def draft_ids_for_rows(
    heads: MedusaHeads,
    hidden_MD: torch.Tensor,
    lm_head_VD: torch.Tensor | None = None,
    *,
    condition_MK: torch.Tensor | None = None,
    embedding_VD: torch.Tensor | None = None,
    context_Mn: torch.Tensor | None = None,
    texts: Texts | None = None,
    ids_W: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """argmax of every head at every row, int64 `MK`; conditioned heads read the rollout's own
    tokens, and pairs of the rollout before.

    With `ids_W` drafts come only from these tokens, and a token is given by its index among them.

    Args:
        condition_MK, context_Mn: `heads.targets.condition_ids` and `heads.targets.context_rows` of
            the rows.
        texts: what copying searches, for heads that have it; as in an engine, only the best places
            count.
    """
    out_MK = torch.zeros(
        hidden_MD.shape[0], heads.config.num_heads, dtype=torch.int64, device=hidden_MD.device
    )
    for part, k, logits_CV in _logits(
        heads,
        hidden_MD,
        lm_head_VD,
        condition_MK,
        embedding_VD,
        context_Mn,
        texts,
        ids_W,
        chunk_rows,
    ):
        out_MK[part, k] = heads.vocabulary.argmax(logits_CV)
    return out_MK


@torch.no_grad()
def draft_logprobs_for_rows(
    heads: MedusaHeads,
    hidden_MD: torch.Tensor,
    targets_MK: torch.Tensor,
    lm_head_VD: torch.Tensor | None = None,
    *,
    temperatures: Sequence[float] = (1.0,),
    top_k: int = 0,
    top_p: float = 1.0,
    condition_MK: torch.Tensor | None = None,
    embedding_VD: torch.Tensor | None = None,
    context_Mn: torch.Tensor | None = None,
    texts: Texts | None = None,
    ids_W: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    tops_QMK: torch.Tensor | None = None,
) -> torch.Tensor:
    """log q of the targets as the engine drafts them, float32, one `MK` for each temperature:
    `[len(temperatures), M, K]`.

    Args:
        heads, hidden_MD, lm_head_VD, condition_MK, embedding_VD, context_Mn, texts, ids_W: as in
            `draft_ids_for_rows`.
        targets_MK: int64 (`heads.targets.head_targets`).
        temperatures: divisors of head logits, besides each head's own: sampling temperature x draft
            temperature.
        top_k, top_p: those of the rollouts; the engine truncates the drafts' distribution like the
            actor's. A removed token has -inf.
        tops_QMK: filled with the largest log q of any token.
    """
    out_QMK = torch.zeros(
        len(temperatures), *targets_MK.shape, dtype=torch.float32, device=targets_MK.device
    )
    for part, k, logits_CV in _logits(
        heads,
        hidden_MD,
        lm_head_VD,
        condition_MK,
        embedding_VD,
        context_Mn,
        texts,
        ids_W,
        chunk_rows,
    ):
        for index, temperature in enumerate(temperatures):
            cut_CV = heads.vocabulary.truncate(logits_CV / temperature, top_k, top_p)
            picked_C = heads.vocabulary.pick(cut_CV, targets_MK[part, k])
            total_C = heads.vocabulary.logsumexp(cut_CV).squeeze(1)
            out_QMK[index, part, k] = picked_C - total_C
            if tops_QMK is not None:
                tops_QMK[index, part, k] = (
                    heads.vocabulary.pick(cut_CV, heads.vocabulary.argmax(cut_CV)) - total_C
                )
    return out_QMK


def _logits(
    heads: MedusaHeads,
    hidden_MD: torch.Tensor,
    lm_head_VD: torch.Tensor | None,
    condition_MK: torch.Tensor | None,
    embedding_VD: torch.Tensor | None,
    context_Mn: torch.Tensor | None,
    texts: Texts | None,
    ids_W: torch.Tensor | None,
    chunk_rows: int | None,
) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Iterate over chunks and heads (index from 0): the rows, the head, and logits_CV (only of
    `ids_W`, if given) divided by the head's own draft temperature.
    """
    table_VD = (
        heads.own_lm_head(1) if lm_head_VD is None or heads.config.lm_head == "own" else lm_head_VD
    )
    table_VD = table_VD if ids_W is None else table_VD[ids_W]
    rows = chunk_rows or heads.vocabulary.chunk_rows(table_VD)
    # Checked once, because on a GPU each check would wait for the device.
    temperatures = heads.temperatures_K.tolist()
    for start in range(0, hidden_MD.shape[0], rows):
        part = slice(start, start + rows)
        condition_CK = None if condition_MK is None else condition_MK[part]
        context = None
        # The first token since h_t is the one of the row's own pair.
        if context_Mn is not None and condition_MK is not None:
            context = Context.of(context_Mn[part], hidden_MD, condition_MK[:, 0])
        text = None
        if texts is not None:
            end = min(start + rows, hidden_MD.shape[0])
            text = texts.of_rows(torch.arange(start, end)).to(hidden_MD.device)
        factored = heads.factored(
            hidden_MD[part],
            lm_head_VD,
            condition=condition_CK,
            embedding_VD=embedding_VD,
            context=context,
            text=text,
            places=SERVED_PLACES,
        )
        if ids_W is not None:
            rows_WD = table_VD if factored.weight.dim() == 2 else None
            factored = factored.of_tokens(ids_W, rows_WD)
        for k in range(heads.config.num_heads):
            logits_CV = head_logits(factored, k, slice(None))
            yield part, k, logits_CV if temperatures[k] == 1 else logits_CV / temperatures[k]


def _check_lengths(rows_M: torch.Tensor, lengths_S: torch.Tensor) -> None:
    if (
        lengths_S.numel() == 0
        or int(lengths_S.min()) < 1
        or int(lengths_S.sum()) != rows_M.shape[0]
    ):
        raise DataError(
            "The lengths don't match the rows.",
            given=(
                f"{lengths_S.numel()} lengths that sum to"
                f" {int(lengths_S.sum()) if lengths_S.numel() else 0}, {rows_M.shape[0]} rows"
            ),
            expected="at least one response, every length >= 1, one row per response token",
            do="Leave empty responses out.",
        )
