"""The frozen data that crosses a seam: between loop, plugin, companion and engine.

Shape letters: S sequences, M response tokens of all sequences one after the other, D hidden, K heads.

A rollout batch is packed in *response coordinates*: row m belongs to one response token. `hidden_MD[m]` is the state that
lm_head reads to predict `response_ids_M[m]` (so the first row of a sequence is the state of its last prompt token), and
head k at row m predicts `response_ids_M[m + k]` of the same sequence. Prompts are not needed for that and do not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any

import torch

from heads.errors import DataError


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. Seeds are per generate call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 96
    responses_per_prompt: int = 1
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Counters:
    """vLLM's own acceptance counters over one interval (differences, never totals since start).

    Attributes:
        drafts: draft steps, one per request and engine step that had drafts.
        draft_tokens: tokens drafted.
        accepted: drafted tokens accepted (bonus token not counted).
        accepted_per_position: accepted at position 1..K.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1.0 when nothing was drafted (vLLM's definition)."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Unconditional: accepted at position k / draft steps."""
        return tuple(n / self.drafts if self.drafts else 0.0 for n in self.accepted_per_position)

    def __add__(self, other: Counters) -> Counters:
        return self._zip(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._zip(other, -1)

    def _zip(self, other: Counters, sign: int) -> Counters:
        pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Counters(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted + sign * other.accepted,
            tuple(a + sign * b for a, b in pairs),
        )


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        prompt_index: which of the prompts it answers.
        token_ids: sampled tokens, the end token included when it was sampled.
        logprobs: behaviour log-probs, one per token: of the distribution that was really sampled from.
        finish_reason: `stop` (end token) or `length`.
    """

    prompt_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


@dataclass(frozen=True)
class EngineShare:
    """What one engine of a pool did in one generate call.

    Attributes:
        index: its place in the pool.
        pieces: calls that it answered.
        tokens: prompt and response tokens that it ran.
        generated_tokens: response tokens.
        seconds: time that it was busy.
        counters: its acceptance counters.
    """

    index: int = 0
    pieces: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    counters: Counters = field(default_factory=Counters)

    def plus(self, part: Rollouts) -> EngineShare:
        """With one more call."""
        return replace(
            self,
            pieces=self.pieces + 1,
            tokens=self.tokens + part.generated_tokens + sum(len(prompt) for prompt in part.prompts),
            generated_tokens=self.generated_tokens + part.generated_tokens,
            seconds=self.seconds + part.seconds,
            counters=self.counters + part.counters,
        )


@dataclass(frozen=True)
class Rollouts:
    """What one generate call returned, responses in prompt order. `engines`: each one's part, where a pool answered."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[Response, ...]
    counters: Counters
    seconds: float
    sampling: Sampling
    policy_version: int = 0
    heads_version: int = 0
    num_drafts: int = 0
    engines: tuple[EngineShare, ...] = ()

    @property
    def generated_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.responses)

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Whole:
    """All responses of a batch that several workers hold a part of each.

    Attributes:
        lengths_S: int64, response tokens of every response, in order.
        prompts_S: int64, which prompt each answers; None: each its own.
        first: number of the part's first response. A part is a stretch of responses that follow each other, or none.
    """

    lengths_S: torch.Tensor
    prompts_S: torch.Tensor | None
    first: int


@dataclass(frozen=True)
class RolloutBatch:
    """Packed training data for the companion; see the module's docstring for the coordinates.

    Attributes:
        hidden_MD: final hidden states, detached, in the actor's dtype, on the CPU.
        response_ids_M: int64.
        logprobs_M: float32 behaviour log-probs.
        lengths_S: int64, response tokens of each sequence; they sum to M.
        policy_version: version of the actor that wrote the responses and gave the states.
        temperature: temperature the behaviour log-probs were taken at.
        prompts_S: int64, which prompt each sequence answers; None: each its own. Answers to one prompt are much alike.
        top_k, top_p: how the responses were cut when they were sampled; 0 and 1: not at all.
        weights_M: float32, how much each row counts in training, 0: not at all; None: 1 each. Where `hidden_MD` has fewer than M rows,
            it holds the states of the rows with a weight, in their order.
        held_S: bool, sequences to judge heads on, chosen where rows were left out; all their rows have a state. None: `hold_out` chooses.
        whole: the batch that this is one worker's part of; None: it is all there is. Only a part may be empty.
    """

    hidden_MD: torch.Tensor
    response_ids_M: torch.Tensor
    logprobs_M: torch.Tensor
    lengths_S: torch.Tensor
    policy_version: int = 0
    temperature: float = 1.0
    prompts_S: torch.Tensor | None = None
    top_k: int = 0
    top_p: float = 1.0
    weights_M: torch.Tensor | None = None
    held_S: torch.Tensor | None = None
    whole: Whole | None = None

    def __post_init__(self) -> None:
        rows, states, total = self.response_ids_M.shape[0], self.hidden_MD.shape[0], int(self.lengths_S.sum())
        if rows == 0 and self.whole is None:
            raise DataError("The rollout batch holds no response token.", given="0 rows", expected="at least one", do="Skip empty batches.")
        weighted = None if self.weights_M is None else int((self.weights_M > 0).sum())
        if not rows == self.logprobs_M.shape[0] == total or states not in (rows, weighted):
            raise DataError(
                "The parts of a rollout batch do not fit together.",
                given=f"hidden {states}, ids {rows}, logprobs {self.logprobs_M.shape[0]}, lengths sum to {total}, weighted rows {weighted}",
                expected="one row per response token; states of all of them, or of those with a weight",
                do="Hand in one hidden state and one log-prob for each response token.",
            )
        if self.prompts_S is not None and self.prompts_S.shape != self.lengths_S.shape:
            raise DataError(
                "Each sequence needs its prompt.",
                given=f"{self.prompts_S.numel()} prompt numbers, {self.lengths_S.numel()} sequences",
                expected="one for each sequence, or None",
                do="Leave prompts_S out.",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; of a part: of the whole batch, so that all workers keep and forget the same."""
        if self.whole is not None:
            row = self.hidden_MD.shape[1] * self.hidden_MD.element_size()
            row += self.response_ids_M.element_size() + self.logprobs_M.element_size()
            return int(self.whole.lengths_S.sum()) * row + self.whole.lengths_S.nbytes
        parts = (self.hidden_MD, self.response_ids_M, self.logprobs_M, self.lengths_S, self.weights_M)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @property
    def state_rows_M(self) -> torch.Tensor:
        """Row of `hidden_MD` that holds the state of each row, int64; -1: it was left out."""
        rows = self.response_ids_M.shape[0]
        if self.weights_M is None or self.hidden_MD.shape[0] == rows:
            return torch.arange(rows)
        kept_M = self.weights_M > 0
        return torch.where(kept_M, kept_M.cumsum(0) - 1, -1)

    def select(self, sequences_S: torch.Tensor, whole: Whole | None = None) -> RolloutBatch:
        """The batch of the given sequences (int64 indices), in that order; with `whole` a part of that."""
        ends = self.lengths_S.cumsum(0)
        spans = [torch.arange(int(ends[s] - self.lengths_S[s]), int(ends[s])) for s in sequences_S.tolist()]
        rows = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        states = self.state_rows_M[rows]
        chosen = self._picked(rows, "response_ids_M", "logprobs_M", "weights_M")
        chosen |= self._picked(sequences_S, "lengths_S", "prompts_S", "held_S")
        return replace(self, hidden_MD=self.hidden_MD[states[states >= 0]], whole=whole, **chosen)

    def hold_out(self, fraction: float, seed: int) -> tuple[RolloutBatch, RolloutBatch | None]:
        """Split into training and holdout by prompts, so that no held-out response answers a prompt that was trained on.

        Parts of one batch are split as the whole is.

        Returns:
            (training, holdout); the holdout is None where there is one prompt only.
        """
        whole = self.whole or Whole(self.lengths_S, self.prompts_S, 0)
        prompts_S = torch.arange(whole.lengths_S.numel()) if whole.prompts_S is None else whole.prompts_S
        held_S = held_out(prompts_S, fraction, seed) if self.held_S is None else self.held_S
        if not 0 < int(held_S.sum()) < held_S.numel():
            return self, None
        training, holdout = self._chosen(~held_S, whole), self._chosen(held_S, whole)
        return replace(training, held_S=None), replace(holdout, weights_M=None, held_S=None)

    def split(self, count: int) -> tuple[RolloutBatch, ...]:
        """Cut into parts for so many workers, of about as many tokens each. Their rows are views of these."""
        assert self.weights_M is None and self.held_S is None, "positions are sampled by one worker alone"
        ends_S = self.lengths_S.cumsum(0)
        marks = torch.arange(1, count) * int(ends_S[-1]) / count
        cuts = [0, *(torch.searchsorted(ends_S - self.lengths_S / 2, marks)).tolist(), ends_S.numel()]
        rows = [0, *ends_S.tolist()]
        return tuple(
            replace(
                self,
                **self._picked(slice(rows[first], rows[last]), "hidden_MD", "response_ids_M", "logprobs_M"),
                **self._picked(slice(first, last), "lengths_S", "prompts_S"),
                whole=Whole(self.lengths_S, self.prompts_S, first),
            )
            for first, last in pairwise(cuts)
        )

    @staticmethod
    def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """All sequences as one batch, in order: neighbouring parts, or batches that were sampled in the same way.

        Prompt numbers and weights stay where all parts have them.
        """
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for name in ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S", "prompts_S", "weights_M", "held_S"):
            found = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            joined[name] = torch.cat(found) if len(found) == len(parts) else None
        return replace(parts[0], **joined)

    def _chosen(self, chosen_S: torch.Tensor, whole: Whole) -> RolloutBatch:
        """Some of all responses (bool mask over the whole): those of them that are here."""
        here_S = chosen_S[whole.first : whole.first + self.lengths_S.numel()].nonzero()[:, 0]
        if self.whole is None:
            return self.select(here_S)
        prompts_S = None if whole.prompts_S is None else whole.prompts_S[chosen_S]
        return self.select(here_S, Whole(whole.lengths_S[chosen_S], prompts_S, int(chosen_S[: whole.first].sum())))

    def _picked(self, index: Any, *names: str) -> dict[str, Any]:
        """The same rows of several tensors, of those that there are."""
        return {name: value[index] for name in names if (value := getattr(self, name)) is not None}


def held_out(prompts_S: torch.Tensor, fraction: float, seed: int) -> torch.Tensor:
    """Which sequences heads are judged on, bool: all answers to a part of the prompts; none where there is one prompt only."""
    groups = prompts_S.unique()
    if groups.numel() < 2:
        return torch.zeros_like(prompts_S, dtype=torch.bool)
    held = min(max(1, round(fraction * groups.numel())), groups.numel() - 1)
    order = groups[torch.randperm(groups.numel(), generator=torch.Generator().manual_seed(seed))]
    return torch.isin(prompts_S, order[:held])


@dataclass(frozen=True)
class PublishedHeads:
    """A version of the heads that the companion offers to the engine.

    Attributes:
        version: grows by one with every publish; 0 are the heads the run started with.
        path: safetensors file (shared memory) with the trainable tensors, keys as in heads/FORMAT.md.
        checksum: hex digest over names and bytes, the same that the engine reports after the swap.
        policy_version: version of the actor whose rollouts were trained on last.
        mean_acceptance_length: replay estimate of these heads on the holdout.
    """

    version: int
    path: str
    checksum: str
    policy_version: int
    mean_acceptance_length: float


@dataclass(frozen=True)
class ReplayRow:
    """Replay estimate of one set of heads on one batch's holdout."""

    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]


@dataclass(frozen=True)
class CompanionStatus:
    """What the companion has done so far. Totals since its start unless a name says otherwise.

    `passes`, `reason` and `positions_frac` are of the last batch; `rate` is the share of the configured step size for the next one.
    `upper` is the last upper mark, of batch number `upper_batch`, and `upper_serving` what the serving heads reached on the same holdout.
    """

    alive: bool = True
    batches_received: int = 0
    batches_dropped: int = 0
    batches_trained: int = 0
    trained_tokens: int = 0
    optimizer_steps: int = 0
    versions_published: int = 0
    candidates_rejected: int = 0
    train_s: float = 0.0
    queue_bytes: int = 0
    last_loss: float = float("nan")
    last_policy_version: int = -1
    serving: ReplayRow | None = None
    candidate: ReplayRow | None = None
    frozen: ReplayRow | None = None
    upper: ReplayRow | None = None
    upper_serving: ReplayRow | None = None
    upper_batch: int = 0
    error: str = ""
    restarts: int = 0
    losses: tuple[float, ...] = ()
    passes: float = 0.0
    reason: str = ""
    positions_frac: float = 0.0
    gpu_gib: float | None = None
    workers: int = 1
    rate: float = 1.0


@dataclass(frozen=True)
class Checked:
    """What was found of a file of weights by someone who read all of it: sound, finite, and these sums.

    Attributes:
        checksum: of heads `checksum`, of an actor `tensorwise_checksum` of `heads.tensorfile`.
        crc: as `heads.tensorfile.crc`; who takes the file confirms its bytes with it, several times as quickly.
    """

    checksum: str
    crc: int


@dataclass(frozen=True)
class SwapReceipt:
    """What the engine says after new heads or a new actor arrived."""

    version: int
    checksum: str
    seconds: float
