"""The frozen data that loop, plugin, companion and engine exchange.

Shape letters: S sequences, M response tokens of all sequences one after the other, D hidden, K
heads.

A rollout batch is packed in *response coordinates*: row m belongs to one response token.
`hidden_MD[m]` is the state that lm_head reads to predict `response_ids_M[m]` (so the first row of a
sequence is the state of its last prompt token), and head k at row m predicts `response_ids_M[m +
k]` of the same sequence. This needs no prompts, so they are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from heads.copying import places_in_turn
from heads.errors import DataError


@dataclass(frozen=True)
class RolloutBatch:
    """Packed training data for the companion; see the module's docstring for the coordinates.

    Attributes:
        hidden_MD: final hidden states, detached, in the actor's dtype, on the CPU.
        response_ids_M: int64.
        logprobs_M: float32 behaviour log-probs.
        lengths_S: int64, response tokens of each sequence; they sum to M.
        policy_version: version of the actor that wrote the responses and gave the states.
        temperature: temperature of the behaviour log-probs.
        prompts_S: int64, which prompt each sequence answers; None: each its own. Answers to one
            prompt are much alike.
        top_k, top_p: truncation during sampling; 0 and 1: none.
        weights_M: float32, weight of each row in training; 0: its state only serves its neighbours,
            below 0: it has no state here; None: all are 1. If `hidden_MD` has fewer than M rows, it
            holds the existing states in order.
        held_S: bool, sequences to judge heads on, chosen when rows were sampled; all their rows
            have a state. None: `companion.holdout` chooses.
        before_ids_X: int32, the tokens before each response when it was written, one sequence after
            the other: earlier texts, each followed by a GAP (`heads.copying`), then the prompt.
            Tokens that must not be copied (of images) are gaps. None: unknown; heads that copy
            then search the response alone.
        before_S: int64, how many of these tokens each sequence has.
        passes: passes to train on it; None: as the companion is configured.
        lm_head_VD, embedding_VD: tables of the actor that wrote it, if these are no longer the
            newest.
        table_ids_R: int64, ascending, the tokens of the rows in these two; None: all tokens.
        left_out: response tokens that the sample omits completely.
        rising_s: train on it while acceptance on its held-out part rises, at most this many
            seconds, whatever `passes` is; None: it is an ordinary batch.
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
    before_ids_X: torch.Tensor | None = None
    before_S: torch.Tensor | None = None
    passes: float | None = None
    lm_head_VD: torch.Tensor | None = None
    embedding_VD: torch.Tensor | None = None
    table_ids_R: torch.Tensor | None = None
    left_out: int = 0
    rising_s: float | None = None

    def __post_init__(self) -> None:
        rows = self.response_ids_M.shape[0]
        states = self.hidden_MD.shape[0]
        total = int(self.lengths_S.sum())
        # Refused here, where it is made: in the companion the same fault would only lose the batch.
        if rows == 0:
            raise DataError(
                "The rollout batch holds no response token.",
                given="0 rows",
                expected="at least one",
                do="Skip empty batches.",
            )
        # Rows below 0 have no state (a sample); all others must have one.
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
        # Tensors of size S (prompts, held-out marks) are left out: a few bytes per response.
        parts = (
            self.hidden_MD,
            self.response_ids_M,
            self.logprobs_M,
            self.lengths_S,
            self.weights_M,
            self.before_ids_X,
            self.lm_head_VD,
            self.embedding_VD,
            self.table_ids_R,
        )
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @property
    def state_rows_M(self) -> torch.Tensor:
        """Row of `hidden_MD` that holds each row's state, int64; -1: it was left out."""
        rows = self.response_ids_M.shape[0]
        if self.weights_M is None or self.hidden_MD.shape[0] == rows:
            return torch.arange(rows)
        kept_M = self.weights_M >= 0
        # The states are stored in order, so each row's index is the number of rows with a state
        # before it.
        return torch.where(kept_M, kept_M.cumsum(0) - 1, -1)

    def select(self, sequences_S: torch.Tensor) -> RolloutBatch:
        """The batch of the given sequences (int64 indices), in that order."""
        ends = self.lengths_S.cumsum(0)
        spans = [
            torch.arange(int(ends[s] - self.lengths_S[s]), int(ends[s]))
            for s in sequences_S.tolist()
        ]
        # `torch.cat` refuses an empty list.
        rows = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        states = self.state_rows_M[rows]
        chosen = self._picked(rows, "response_ids_M", "logprobs_M", "weights_M")
        chosen |= self._picked(sequences_S, "lengths_S", "prompts_S", "held_S", "before_S")
        if self.before_ids_X is not None and self.before_S is not None:
            before_at = self.before_S.cumsum(0) - self.before_S
            picked = places_in_turn(before_at[sequences_S], self.before_S[sequences_S])
            chosen["before_ids_X"] = self.before_ids_X[picked]
        # In a sample, only the rows that have a state bring one along.
        return replace(self, hidden_MD=self.hidden_MD[states[states >= 0]], **chosen)

    @staticmethod
    def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Join all sequences of batches with the same sampling into one batch, in order.

        Prompt numbers and weights are kept if all parts have them.
        """
        # Nothing is copied if there is nothing to join: states can be gigabytes.
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
            "before_ids_X",
            "before_S",
        ):
            found = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            # A tensor that only some parts have would be misaligned with the sequences.
            joined[name] = torch.cat(found) if len(found) == len(parts) else None
        return replace(parts[0], left_out=sum(part.left_out for part in parts), **joined)

    def _picked(self, index: Any, *names: str) -> dict[str, Any]:
        """The same rows of several tensors, as far as they exist."""
        return {name: value[index] for name in names if (value := getattr(self, name)) is not None}
