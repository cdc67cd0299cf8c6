"""The frozen data that crosses a seam: between loop, plugin, companion and engine.

Shape letters: S sequences, M response tokens of all sequences one after the other, D hidden, K
heads.

A rollout batch is packed in *response coordinates*: row m belongs to one response token.
`hidden_MD[m]` is the state that lm_head reads to predict `response_ids_M[m]` (so the first row of a
sequence is the state of its last prompt token), and head k at row m predicts `response_ids_M[m +
k]` of the same sequence. Prompts are not needed for that and do not travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from heads.errors import DataError

HOLDOUT_TOKENS = 32_768
"""Response tokens that heads are judged on, of one batch: several times what an interval of one
percent asks for.
"""
HOLDOUT_PROMPTS = 6
"""Held-out prompts that a decision about heads asks for. A batch that would hold out fewer holds
out more of its own (`held_out`).
"""
FEW_PROMPTS_SHARE = 5 / 3
"""Times as many prompts are held out where they are few: two batches of a dozen prompts then
decide, and not three.
"""


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


class ImagePrompt(tuple[int, ...]):
    """Token ids of a prompt with images, as the actor reads them: an image's token stands there
    once for each of its features.

    Attributes:
        images: the images in their order, as files hold them (PNG, JPEG, ...).
        short_ids: the same with each image's token once, as vLLM takes it.
    """

    images: tuple[bytes, ...]
    short_ids: tuple[int, ...]

    def __new__(
        cls, ids: Iterable[int], images: tuple[bytes, ...] = (), short_ids: tuple[int, ...] = ()
    ) -> ImagePrompt:
        prompt = super().__new__(cls, ids)
        prompt.images, prompt.short_ids = images, short_ids
        return prompt


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
        logprobs: behaviour log-probs, one per token: of the distribution that was really sampled
            from.
        finish_reason: `stop` (end token), `length`, or `unfinished` where the call has ended before
            it.
        versions: of the actor that wrote each token, where calls went on with it; empty: all are of
            the rollouts' version.
    """

    prompt_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...] = ()


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
            tokens=self.tokens
            + part.generated_tokens
            + sum(len(prompt) for prompt in part.prompts),
            generated_tokens=self.generated_tokens + part.generated_tokens,
            seconds=self.seconds + part.seconds,
            counters=self.counters + part.counters,
        )


@dataclass(frozen=True)
class Rollouts:
    """What one generate call returned, responses in prompt order. `engines`: each one's part, where
    a pool answered; `written_tokens`: what the call wrote, where that is not its responses' tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[Response, ...]
    counters: Counters
    seconds: float
    sampling: Sampling
    policy_version: int = 0
    heads_version: int = 0
    num_drafts: int = 0
    engines: tuple[EngineShare, ...] = ()
    written_tokens: int | None = None

    @property
    def generated_tokens(self) -> int:
        return (
            sum(len(r.token_ids) for r in self.responses)
            if self.written_tokens is None
            else self.written_tokens
        )

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


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
        prompts_S: int64, which prompt each sequence answers; None: each its own. Answers to one
            prompt are much alike.
        top_k, top_p: how the responses were cut when they were sampled; 0 and 1: not at all.
        weights_M: float32, how much each row counts in training, 0: its state only serves its
            neighbours, below 0: it has no state here; None: 1 each. Where `hidden_MD` has fewer
            than M rows, it holds the states that there are, in their order.
        held_S: bool, sequences to judge heads on, chosen where rows were left out; all their rows
            have a state. None: `hold_out` chooses.
        passes: how often to train on it; None: as the companion is configured.
        lm_head_VD, embedding_VD: the tables of the actor that wrote it, where these are no longer
            the newest.
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
    passes: float | None = None
    lm_head_VD: torch.Tensor | None = None
    embedding_VD: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, states, total = (
            self.response_ids_M.shape[0],
            self.hidden_MD.shape[0],
            int(self.lengths_S.sum()),
        )
        if rows == 0:
            raise DataError(
                "The rollout batch holds no response token.",
                given="0 rows",
                expected="at least one",
                do="Skip empty batches.",
            )
        weighted = None if self.weights_M is None else int((self.weights_M >= 0).sum())
        if not rows == self.logprobs_M.shape[0] == total or states not in (rows, weighted):
            raise DataError(
                "The parts of a rollout batch do not fit together.",
                given=(
                    f"hidden {states}, ids {rows}, logprobs {self.logprobs_M.shape[0]}, lengths sum"
                    f" to {total}, weighted rows {weighted}"
                ),
                expected=(
                    "one row per response token; states of all of them, or of those whose weight is"
                    " not below 0"
                ),
                do="Hand in one hidden state and one log-prob for each response token.",
            )
        if self.prompts_S is not None and self.prompts_S.shape != self.lengths_S.shape:
            raise DataError(
                "Each sequence needs its prompt.",
                given=(
                    f"{self.prompts_S.numel()} prompt numbers, {self.lengths_S.numel()} sequences"
                ),
                expected="one for each sequence, or None",
                do="Leave prompts_S out.",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (
            self.hidden_MD,
            self.response_ids_M,
            self.logprobs_M,
            self.lengths_S,
            self.weights_M,
            self.lm_head_VD,
            self.embedding_VD,
        )
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @property
    def state_rows_M(self) -> torch.Tensor:
        """Row of `hidden_MD` that holds the state of each row, int64; -1: it was left out."""
        rows = self.response_ids_M.shape[0]
        if self.weights_M is None or self.hidden_MD.shape[0] == rows:
            return torch.arange(rows)
        kept_M = self.weights_M >= 0
        return torch.where(kept_M, kept_M.cumsum(0) - 1, -1)

    def select(self, sequences_S: torch.Tensor) -> RolloutBatch:
        """The batch of the given sequences (int64 indices), in that order."""
        ends = self.lengths_S.cumsum(0)
        spans = [
            torch.arange(int(ends[s] - self.lengths_S[s]), int(ends[s]))
            for s in sequences_S.tolist()
        ]
        rows = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        states = self.state_rows_M[rows]
        chosen = self._picked(rows, "response_ids_M", "logprobs_M", "weights_M")
        chosen |= self._picked(sequences_S, "lengths_S", "prompts_S", "held_S")
        return replace(self, hidden_MD=self.hidden_MD[states[states >= 0]], **chosen)

    def hold_out(self, fraction: float, seed: int) -> tuple[RolloutBatch, RolloutBatch | None]:
        """Split into training and holdout by prompts, so that no held-out response answers a prompt
        that was trained on.

        Returns:
            (training, holdout); the holdout is None where there is one prompt only.
        """
        held_S = (
            held_out(self.lengths_S, self.prompts_S, fraction, seed)
            if self.held_S is None
            else self.held_S
        )
        if not 0 < int(held_S.sum()) < held_S.numel():
            return self, None
        training, holdout = (
            self.select(chosen_S.nonzero()[:, 0]) for chosen_S in (~held_S, held_S)
        )
        return replace(training, held_S=None), replace(holdout, weights_M=None, held_S=None)

    @staticmethod
    def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """All sequences of batches that were sampled in the same way as one batch, in order.

        Prompt numbers and weights stay where all parts have them.
        """
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for name in (
            "hidden_MD",
            "response_ids_M",
            "logprobs_M",
            "lengths_S",
            "prompts_S",
            "weights_M",
            "held_S",
        ):
            found = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            joined[name] = torch.cat(found) if len(found) == len(parts) else None
        return replace(parts[0], **joined)

    def _picked(self, index: Any, *names: str) -> dict[str, Any]:
        """The same rows of several tensors, of those that there are."""
        return {name: value[index] for name in names if (value := getattr(self, name)) is not None}


def held_out(
    lengths_S: torch.Tensor, prompts_S: torch.Tensor | None, fraction: float, seed: int
) -> torch.Tensor:
    """Which sequences heads are judged on, bool: all answers to a part of the prompts; none where
    there is one prompt only.

    Where that is fewer than HOLDOUT_PROMPTS, up to FEW_PROMPTS_SHARE times as many. The first of
    them always, the next ones as long as HOLDOUT_TOKENS have room for their answers.
    """
    prompts_S = torch.arange(lengths_S.numel()) if prompts_S is None else prompts_S
    groups, group_S = prompts_S.unique(return_inverse=True)
    if groups.numel() < 2:
        return torch.zeros_like(prompts_S, dtype=torch.bool)
    held = round(fraction * groups.numel())
    if held < HOLDOUT_PROMPTS:
        held = min(HOLDOUT_PROMPTS, round(FEW_PROMPTS_SHARE * fraction * groups.numel()))
    held = min(max(1, held), groups.numel() - 1)
    order = torch.randperm(groups.numel(), generator=torch.Generator().manual_seed(seed))[:held]
    tokens = (
        torch.zeros(groups.numel(), dtype=torch.int64)
        .index_add_(0, group_S, lengths_S)[order]
        .cumsum(0)
    )
    fits = tokens <= HOLDOUT_TOKENS
    fits[0] = True
    return torch.isin(group_S, order[fits])


@dataclass(frozen=True)
class PublishedHeads:
    """A version of the heads that the companion offers to the engine.

    Attributes:
        version: grows by one with every publish; 0 are the heads the run started with.
        path: safetensors file (shared memory) with the trainable tensors, keys as in
            heads/FORMAT.md.
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

    `train_s` runs while it trains, `worked_s` is what that takes from others: on a CPU the seconds
    of a core that it had. `passes` and `positions_frac` are of the last batch; `rate` is the share
    of the configured step size for the next one. The gate has judged `judged` batches, `gain` is
    what the candidate had more than the serving heads then. `versions_followed` were compared with
    the one before on later batches, `versions_worse` were surely worse. `upper` is the last upper
    mark, of batch `upper_batch`. `incarnation`: which process.
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
    judged: int = 0
    gain: float = 0.0
    versions_followed: int = 0
    versions_worse: int = 0
    positions_frac: float = 0.0
    positions_left_out: int = 0
    gpu_gib: float | None = None
    workers: int = 1
    rate: float = 1.0
    worked_s: float = 0.0
    incarnation: str = ""


@dataclass(frozen=True)
class Checked:
    """What was found of a file of weights by someone who read all of it: sound, finite, and these
    sums.

    Attributes:
        checksum: of heads `checksum`, of an actor `tensorwise_checksum` of `heads.tensorfile`.
        crc: as `heads.tensorfile.crc`; who takes the file confirms its bytes with it, several times
            as quickly.
    """

    checksum: str
    crc: int


@dataclass(frozen=True)
class SwapReceipt:
    """What the engine says after new heads or a new actor arrived."""

    version: int
    checksum: str
    seconds: float
