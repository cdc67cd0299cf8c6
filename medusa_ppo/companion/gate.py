"""The candidate (a running mean of the heads in training) and the gate: it is published only when
it beats the serving heads on rollouts that it was not trained on.

Answers to one prompt are much alike, so the counts of all answers to a prompt are one observation,
and nothing is decided before there are enough of these. A small batch holds out too few prompts, so
the counts of all batches since the last decision are pooled.

Candidates are compared with the same serving heads again and again, and each look is a chance to be
wrong. So looks follow a schedule, each when the evidence has grown by a fifth, and look j spends
the share 1 / (j (j + 1)) of three quarters of the allowed error: together they stay within it,
however many there are and whatever was seen before.

A policy that begins to change its wording late leaves serving heads behind suddenly, when much
evidence without a gain is pooled and the scheduled looks have become strict. So the newest few
batches are looked at by themselves as well (RECENT); those looks share the other quarter, over
KEPT_BATCHES batches.

Shape letters: M rows of the holdout, S its responses, G prompts, K heads, V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from heads.acceptance import (
    TEMPERATURES,
    Interval,
    ReplayResult,
    better_temperatures,
    block_acceptance,
    draft_ids_for_rows,
    draft_logprobs_for_rows,
    draft_ratios,
    extra_tokens,
    one_hot_acceptance,
    replay_probabilities,
    student_interval,
    student_quantile,
)
from heads.modules import MedusaHeads
from heads.targets import condition_ids, head_targets, segments_from_lengths
from heads.tensorfile import is_finite
from medusa_ppo.companion.holdout import HOLDOUT_PROMPTS
from medusa_ppo.companion.positions import context_of, texts_of
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.status import ReplayRow
from medusa_ppo.runtime.rendezvous import Meeting

LEAST_PROMPTS, LEAST_TOKENS = HOLDOUT_PROMPTS, 64
"""Held-out prompts and response tokens needed before anything is decided."""
KEPT_BATCHES = 64
"""Maximum number of pooled holdouts; heads and policy have moved on since older ones."""
NEWER = 2 / 3
"""Share of the batches, the newest ones, by which a look decides: the first candidates had hardly
begun to learn.
"""
GROWTH = 1.2  # From one look to the next.
RECENT = (2, 4, 8)
"""Numbers of newest batches that are looked at by themselves, each when half of them are new."""
RECENT_SHARE = 0.25
"""Share of the allowed error that these looks have together, within KEPT_BATCHES batches."""
FALLEN = 0.9
"""Confidence with which a candidate counts as worse, for each batch separately: an unnecessary
rollback costs training, not acceptance.
"""
PIECE_TOKENS = 8192  # Tokens of the holdout replayed at once.
# Share of the allowed error that the interval aims at: ratios of few, uneven prompts are not quite
# normal.
STRICTER = 0.9
# Trained heads stay below 10; beyond this, products overflow in 16-bit engines although argmax may
# look sound here.
MAX_WEIGHT = 1e4


@dataclass(frozen=True)
class Served:
    """How the engine drafts, as far as it affects what heads are worth; the batch has the rollouts'
    temperature, top-k and top-p.

    Attributes:
        draft_temperature: times the rollouts' own; 0: one-hot drafts.
        num_drafts: maximum drafts in a step; None: one per head.
        ids_W: tokens that drafts come from, int64; None: all.
        mix: for sampled drafts: turns the heads' log q of the rollouts' tokens `[M, K]` into the
            log q of the distribution that drafts are drawn from. Takes a piece of the batch, the
            heads' log q, and the largest log q of any token.
    """

    draft_temperature: float = 0.0
    num_drafts: int | None = None
    ids_W: torch.Tensor | None = None
    mix: Callable[[RolloutBatch, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Verdict:
    """What the gate decided, and why.

    Attributes:
        publish: the candidate may be served.
        worse: the candidate is significantly worse than the serving heads.
        reason: one sentence.
        serving, candidate, frozen: replay estimates on the same holdout; None if a set of heads
            could not be judged.
        difference: candidate minus serving, mean acceptance length, with its interval; None if
            there is too little to decide on.
    """

    publish: bool
    worse: bool
    reason: str
    serving: ReplayRow | None = None
    candidate: ReplayRow | None = None
    frozen: ReplayRow | None = None
    difference: Interval | None = None


def replay(
    heads: MedusaHeads,
    holdout: RolloutBatch,
    lm_head_VD: torch.Tensor,
    *,
    embedding_VD: torch.Tensor | None = None,
    served: Served | None = None,
    team: Meeting | None = None,
    give_way: Callable[[], None] = lambda: None,
) -> ReplayResult:
    """Replay estimate of heads on a batch, on the device of the heads. A team shares the responses;
    each process gets all counts.
    """
    all_S = torch.arange(holdout.lengths_S.numel())
    shares = [all_S[rank :: team.place.size] for rank in range(team.place.size)] if team else []
    here = (
        holdout.select(shares[team.place.rank])
        if team and shares[team.place.rank].numel()
        else None
        if team
        else holdout
    )
    accepts = []
    for piece in _pieces(here) if here else ():
        give_way()
        accepts.append(_acceptance(heads, piece, lm_head_VD, embedding_VD, served or Served()))
    # All pieces in one call: it goes row by row, so the longest response determines its time.
    result = replay_probabilities(torch.cat(accepts), here.lengths_S) if here else None
    columns = (
        torch.cat([result.drafts_S[:, None], result.accepted_SK, result.unseen_S[:, None]], dim=1)
        if result
        else torch.zeros(0, 2 + heads.config.num_heads, dtype=torch.float64)
    )
    if team is not None:
        columns = team.gather(columns)[torch.cat(shares).argsort()]
    rows_M2 = None if team or result is None else result.rows_M2
    return ReplayResult(columns[:, 0], columns[:, 1:-1], columns[:, -1], rows_M2)


def _pieces(batch: RolloutBatch) -> list[RolloutBatch]:
    """Consecutive whole responses, about PIECE_TOKENS tokens per piece."""
    piece_S = (batch.lengths_S.cumsum(0) - batch.lengths_S) // PIECE_TOKENS
    cuts = [0, *((piece_S.diff() > 0).nonzero()[:, 0] + 1).tolist(), piece_S.numel()]
    return (
        [batch.select(torch.arange(first, last)) for first, last in pairwise(cuts)]
        if len(cuts) > 2
        else [batch]
    )


def fit_temperatures(
    heads: MedusaHeads,
    holdout: RolloutBatch,
    lm_head_VD: torch.Tensor,
    *,
    embedding_VD: torch.Tensor | None = None,
    served: Served,
    team: Meeting | None = None,
) -> None:
    """Give each head the draft temperature with which most of its drafts are accepted on the first
    PIECE_TOKENS of a holdout, as far as that is significant (`better_temperatures`). In a team the
    first process finds them.
    """
    if served.draft_temperature <= 0:
        return
    if team is None or team.place.rank == 0:
        batch = _pieces(holdout)[0]
        grid_Q = torch.tensor(TEMPERATURES)
        now_K = (heads.temperatures_K.cpu().float().unsqueeze(1) - grid_Q).abs().argmin(1)
        heads.temperatures_K.fill_(1.0)
        ratios_QMK = _sampled_ratios(
            heads, batch, lm_head_VD, embedding_VD, replace(served, mix=None), TEMPERATURES
        )
        prompts_M = _prompts(batch).repeat_interleave(batch.lengths_S)
        heads.temperatures_K.copy_(
            grid_Q[better_temperatures(ratios_QMK, prompts_M, now_K.tolist())]
        )
    if team is not None:  # Tensors exchanged between processes are on the host.
        heads.temperatures_K.copy_(team.share(heads.temperatures_K.cpu()))


def _acceptance(
    heads: MedusaHeads,
    batch: RolloutBatch,
    lm_head_VD: torch.Tensor,
    embedding_VD: torch.Tensor | None,
    served: Served,
) -> torch.Tensor:
    """Probability that each head's draft at each row is accepted, given that the earlier ones were,
    float64 `MK`.
    """
    if served.draft_temperature <= 0:
        ids_MK = draft_ids_for_rows(
            heads,
            batch.hidden_MD.to(lm_head_VD.device).float(),
            lm_head_VD,
            **_tables(heads, batch, embedding_VD, served.ids_W, lm_head_VD.device),
        ).cpu()
        accept_MK = one_hot_acceptance(
            ids_MK if served.ids_W is None else served.ids_W[ids_MK],
            batch.response_ids_M,
            batch.lengths_S,
        )
        if served.num_drafts is not None:
            accept_MK[:, served.num_drafts :] = 0
    else:
        accept_MK = block_acceptance(
            _sampled_ratios(heads, batch, lm_head_VD, embedding_VD, served)[0]
        )
    return accept_MK


def _sampled_ratios(
    heads: MedusaHeads,
    batch: RolloutBatch,
    lm_head_VD: torch.Tensor,
    embedding_VD: torch.Tensor | None,
    served: Served,
    factors: Sequence[float] = (1.0,),
) -> torch.Tensor:
    """`draft_ratios` of sampled drafts, float64 `QMK`: for each factor of their temperature; -inf
    where nothing is drafted, and after a response's end.
    """
    device = lm_head_VD.device
    ids_W = served.ids_W
    segment_M = segments_from_lengths(batch.lengths_S)
    targets_MK, mask_MK = head_targets(batch.response_ids_M, segment_M, heads.config.num_heads)
    place_V = torch.arange(lm_head_VD.shape[0])
    if ids_W is not None:  # A token that can't be drafted is never accepted.
        place_V = torch.full_like(place_V, -1).index_copy_(0, ids_W, torch.arange(ids_W.numel()))
    places_MK = place_V[targets_MK]
    tops_1MK = None if served.mix is None else torch.zeros(1, *places_MK.shape, device=device)
    # As the engine drafts: request temperature x draft temperature.
    temperatures = tuple(
        batch.temperature * served.draft_temperature * factor for factor in factors
    )
    logprobs_QMK = draft_logprobs_for_rows(
        heads,
        batch.hidden_MD.to(device).float(),
        places_MK.clamp(min=0).to(device),
        lm_head_VD,
        temperatures=temperatures,
        top_k=batch.top_k,
        top_p=batch.top_p,
        tops_QMK=tops_1MK,
        **_tables(heads, batch, embedding_VD, ids_W, device),
    )
    logprobs_QMK = logprobs_QMK.cpu().masked_fill(places_MK < 0, -math.inf)
    if served.mix is not None and tops_1MK is not None:
        logprobs_QMK = served.mix(batch, logprobs_QMK[0], tops_1MK[0].cpu()).unsqueeze(0)
    ratios = [
        draft_ratios(logprobs_MK, batch.logprobs_M, batch.lengths_S) for logprobs_MK in logprobs_QMK
    ]
    ratios_QMK = torch.stack(ratios).masked_fill(~mask_MK, -math.inf)
    if served.num_drafts is not None:
        ratios_QMK[:, :, served.num_drafts :] = -math.inf
    return ratios_QMK


def _tables(
    heads: MedusaHeads,
    batch: RolloutBatch,
    embedding_VD: torch.Tensor | None,
    ids_W: torch.Tensor | None,
    device: torch.device,
) -> dict[str, Any]:
    """What heads read from a batch besides its states."""
    config = heads.config
    segment_M = segments_from_lengths(batch.lengths_S)
    condition_MK = (
        condition_ids(batch.response_ids_M, segment_M, config.num_heads).to(device)
        if config.needs_embedding
        else None
    )
    context_Mn = context_of(batch, config.context)
    return {
        "condition_MK": condition_MK,
        "context_Mn": None if context_Mn is None else context_Mn.to(device),
        "texts": texts_of(batch) if config.copies else None,
        "embedding_VD": embedding_VD,
        "ids_W": None if ids_W is None else ids_W.to(device),
    }


class Evidence:
    """How a first set of heads compares with a second one on held-out prompts, from one batch or
    several consecutive ones.

    Attributes:
        counts_G5: of each prompt: its batch's number, accepted drafts and draft steps of the first
            heads, the same of the second. float64.
        tokens: response tokens of each batch's holdout, by the batch's number.
        looks: how many times the first heads could have replaced the second ones so far.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self, *, same_second: bool = False) -> None:
        """Forget the counts, because the first heads have changed. With `same_second` the looks so
        far still count, because each could have replaced these heads.
        """
        self.counts_G5 = torch.zeros(0, 5, dtype=torch.float64)
        self.tokens: dict[int, int] = {}
        self._added = 0
        self._next = 1
        if not same_second:
            self.looks = 0

    def add(
        self, batch: int, first: ReplayResult, second: ReplayResult, holdout: RolloutBatch
    ) -> None:
        """Add the counts of one more holdout."""
        group_S = _prompts(holdout)
        a = first.by_group(group_S)
        b = second.by_group(group_S)
        columns = [
            torch.full_like(a.drafts_S, batch),
            a.accepted_SK.sum(1),
            a.drafts_S,
            b.accepted_SK.sum(1),
            b.drafts_S,
        ]
        self.counts_G5 = torch.cat([self.counts_G5, torch.stack(columns, dim=1)])
        self.tokens[batch] = int(holdout.lengths_S.sum())
        self._added += 1
        if len(self.tokens) > KEPT_BATCHES:
            oldest = min(self.tokens)
            self.counts_G5 = self.counts_G5[self.counts_G5[:, 0] > oldest]
            del self.tokens[oldest]

    def look(self) -> bool:
        """Whether there is enough evidence, and GROWTH times what the last look had. A look that is
        due is counted.
        """
        if not self.enough or self._added < self._next:
            return False
        self.looks += 1
        self._next = max(self._added + 1, math.ceil(GROWTH * self._added))
        return True

    def confidence(self, over_all_looks: float) -> float:
        """The confidence of one scheduled look, if all looks together have this confidence."""
        look = max(1, self.looks)
        return 1 - (1 - RECENT_SHARE) * (1 - over_all_looks) / (look * (look + 1))

    def recent(self, over_all_looks: float) -> list[Interval]:
        """Differences on only the newest batches, for each number in RECENT that is due and below
        the number that `difference` uses. `over_all_looks`: the confidence of all looks together.
        """
        found = []
        for count in RECENT:
            if self._added % (count // 2) == 0 and count < math.ceil(NEWER * len(self.tokens)):
                looks = KEPT_BATCHES / (count // 2)
                error = RECENT_SHARE * (1 - over_all_looks) / (len(RECENT) * looks)
                found.append(self.difference(1 - error, count))
        return found

    @property
    def enough(self) -> bool:
        """Whether there are enough prompts and tokens for a decision."""
        return _enough(self.counts_G5.shape[0], sum(self.tokens.values()))

    def difference(self, confidence: float, batches: int | None = None) -> Interval:
        """Mean acceptance length of the first heads minus that of the second, on this many of the
        newest holdouts (None: NEWER of them); `confidence` applies to each end of the interval
        separately.

        Candidates of several batches differ, and learning heads improve from batch to batch. That
        is not noise, so a prompt's deviation is taken from the mean of its own batch.
        """
        batch_G, *columns = self._newer(batches).unbind(1)
        first, first_G = extra_tokens(*columns[:2])
        second, second_G = extra_tokens(*columns[2:])
        return _stratified_interval(first - second, first_G - second_G, batch_G, _tail(confidence))

    def _newer(self, count: int | None) -> torch.Tensor:
        """Counts of this many of the newest batches (None: NEWER of them), and of more where these
        are not enough.
        """
        batches = sorted(self.tokens, reverse=True)
        count = math.ceil(NEWER * len(batches)) if count is None else count
        while count < len(batches) and not _enough(
            int((self.counts_G5[:, 0] >= batches[count - 1]).sum()),
            sum(self.tokens[batch] for batch in batches[:count]),
        ):
            count += 1
        return (
            self.counts_G5[self.counts_G5[:, 0] >= batches[count - 1]] if count else self.counts_G5
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state, tensors only."""
        tokens = torch.tensor(
            [[batch, count] for batch, count in self.tokens.items()], dtype=torch.int64
        )
        return {
            "counts": self.counts_G5,
            "tokens": tokens.view(-1, 2),
            "looks": torch.tensor([self.looks, self._added, self._next], dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state (an empty one: nothing)."""
        self.clear()
        if state:
            self.counts_G5 = state["counts"]
            self.tokens = dict(state["tokens"].tolist())
            if "looks" in state:  # States before 0.4 have none.
                self.looks, self._added, self._next = state["looks"].tolist()


def extra_over_prompts(result: ReplayResult, holdout: RolloutBatch, confidence: float) -> Interval:
    """Accepted drafts a step (mean acceptance length less 1), with an interval over prompts as in
    `Evidence.difference`.
    """
    counts = result.by_group(_prompts(holdout))
    value, pull_G = extra_tokens(counts.accepted_SK.sum(1), counts.drafts_S)
    return student_interval(value, pull_G, _tail(confidence))


def _stratified_interval(
    value: float, pull_G: torch.Tensor, stratum_G: torch.Tensor, tail: float
) -> Interval:
    """`student_interval` for strata with different means. Observations that are alone in theirs
    form one common stratum.
    """
    numbers, place_G, count_N = stratum_G.unique(return_inverse=True, return_counts=True)
    alone_N = count_N == 1
    place_G = torch.where(alone_N[place_G], numbers.numel(), place_G)
    count = torch.bincount(place_G, minlength=numbers.numel() + 1).double()
    freedom = int((count - 1).clamp(min=0).sum())
    if freedom < 1:
        return Interval(value, -math.inf, math.inf)
    mean = torch.zeros_like(count).index_add_(0, place_G, pull_G) / count.clamp(min=1)
    spread = torch.zeros_like(count).index_add_(0, place_G, (pull_G - mean[place_G]).square())
    error = math.sqrt(float((spread * count / (count - 1).clamp(min=1)).sum()))
    reach = student_quantile(1 - tail, freedom) * error
    return Interval(value, value - reach, value + reach)


def _tail(confidence: float) -> float:
    return STRICTER * (1 - confidence)


def _prompts(holdout: RolloutBatch) -> torch.Tensor:
    """Number of each response's prompt, 0 to G - 1."""
    prompts_S = (
        torch.arange(holdout.lengths_S.numel()) if holdout.prompts_S is None else holdout.prompts_S
    )
    return prompts_S.unique(return_inverse=True)[1]


def _enough(prompts: int, tokens: int) -> bool:
    return prompts >= LEAST_PROMPTS and tokens >= LEAST_TOKENS


def judge(
    candidate: ReplayResult,
    serving: ReplayResult,
    frozen: ReplayResult,
    evidence: Evidence,
    confidence: float = 0.95,
) -> Verdict:
    """The verdict on a candidate, by all evidence; the three replays are on the newest holdout.

    Args:
        candidate, serving, frozen: replays of the newly trained heads, of the serving heads, and
            of the frozen control.
        evidence: candidates against these serving heads, the newest holdout included.
        confidence: probability, over all looks at these serving heads, that no candidate is
            published unless it is better.
    """
    rows = (replay_row(serving), replay_row(candidate), replay_row(frozen))
    if not math.isfinite(candidate.accepted):
        return Verdict(False, True, "The candidate's logits overflow.", rows[0], None, rows[2])
    if not candidate.drafts:
        return Verdict(
            False, False, "The holdout has no draft step: its responses are one token long.", *rows
        )
    if not evidence.enough:
        prompts = evidence.counts_G5.shape[0]
        tokens = sum(evidence.tokens.values())
        asked = f"a decision needs {LEAST_PROMPTS} and {LEAST_TOKENS}"
        return Verdict(
            False,
            False,
            f"Too little is held out so far: {prompts} prompts, {tokens} tokens; {asked}.",
            *rows,
        )
    due = evidence.look()
    for_looks = evidence.difference(evidence.confidence(confidence))
    # The first look that shows a gain is what the verdict reports.
    gains = [found for found in evidence.recent(confidence) if found.low > 0]
    if gains and not (due and for_looks.low > 0):
        due, for_looks = True, gains[0]
    difference = replace(for_looks, high=evidence.difference(FALLEN).high)
    seen = (
        f"{difference.value:+.4f} (interval {difference.low:+.4f} to {difference.high:+.4f}, look"
        f" {evidence.looks}) against the serving heads"
    )
    if difference.high < 0:
        return Verdict(False, True, f"Worse: {seen}.", *rows, difference)
    if due and difference.low > 0:
        return Verdict(True, False, f"Better: {seen}.", *rows, difference)
    waits = "Not significantly better" if due else "Next look only with more evidence"
    return Verdict(False, False, f"{waits}: {seen}.", *rows, difference)


def find_fault(candidate: MedusaHeads, serving: MedusaHeads) -> str:
    """Why these heads may not even be replayed: wrong sizes, or values that are huge or not finite.
    Empty if nothing is wrong.
    """
    if candidate.config != serving.config:
        return f"The candidate's sizes differ from the serving heads': {candidate.config}."
    for name, tensor in candidate.trainable_state(copied=False).items():
        if not is_finite(tensor):
            return f"The candidate's {name} holds values that are not finite."
        if float(tensor.abs().max()) > MAX_WEIGHT:
            return f"The candidate's {name} exploded: a weight of {float(tensor.abs().max()):.1e}."
    return ""


def equal(first: MedusaHeads, second: MedusaHeads, *, temperatures: bool = True) -> bool:
    """Whether they are the same to the bit, ignoring draft temperatures if these don't count."""
    if temperatures and not torch.equal(first.temperatures_K, second.temperatures_K):
        return False
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def replay_row(result: ReplayResult) -> ReplayRow:
    """The summary of a replay."""
    return ReplayRow(result.mean_acceptance_length, result.acceptance_per_position)


# ---- the candidate

AVERAGE = 0.95
"""Share of a running mean that stays with each optimizer step (`benchmarks/companion_defaults.py`
compares others).
"""
WARM = 1_000_000
"""Steps credited to heads that start out trained, so that their mean has its full length from the
first step on.
"""


class RunningMean:
    """A running mean of the heads' weights over optimizer steps: what is judged and served, while
    the heads themselves go on learning.

    A rollout batch is small, so each step moves the heads as much by noise as by signal; the mean
    keeps the signal. (Polyak and Juditsky 1992; exponential form as in Tarvainen and Valpola 2017,
    arXiv 1703.01780.)

    Attributes:
        heads: the mean, never trained.
        steps: optimizer steps that it has seen. The first ones weigh more, so that untrained heads
            are left behind at once.
    """

    def __init__(self, heads: MedusaHeads, decay: float = AVERAGE, *, steps: int = 0) -> None:
        """
        Args:
            heads: a copy of what training begins with, changed in place.
            decay: share of the mean that stays with each step, in [0, 1).
            steps: 0 for untrained heads, WARM for trained ones.
        """
        self.heads = heads.requires_grad_(False)
        self.steps = steps
        self._decay = decay

    @torch.no_grad()
    def add(self, trained: Iterable[torch.Tensor]) -> None:
        """Add the parameters after a step, in the order of `heads.parameters()`."""
        kept = min(self._decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.heads.parameters()), list(trained), 1.0 - kept)
        self.steps += 1

    def restart(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from trained heads (keys of `trainable_state`)."""
        self.heads.load_trainable_state(state)
        self.steps = WARM

    def state_dict(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """The whole state, under keys that begin with `mean`; a copy, or the tensors themselves."""
        state = self.heads.trainable_state(copied=copied)
        return {f"mean.{name}": tensor for name, tensor in state.items()} | {
            "mean_steps": torch.tensor(self.steps)
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what is under such keys. Raises KeyError or CheckpointError if something is
        missing.
        """
        self.heads.load_trainable_state(under(state, "mean."))
        self.steps = int(state["mean_steps"])


def under(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The part of a state with this prefix, which is removed."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
