"""The frozen data that crosses a seam: between loop, plugin, companion and engine.

Shape letters: S sequences, M response tokens of all sequences one after the other, D hidden, K
heads.

A rollout batch is packed in *response coordinates*: row m belongs to one response token.
`hidden_MD[m]` is the state that lm_head reads to predict `response_ids_M[m]` (so the first row of a
sequence is the state of its last prompt token), and head k at row m predicts `response_ids_M[m +
k]` of the same sequence. Prompts are not needed for that and do not travel.
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
        temperature: temperature the behaviour log-probs were taken at.
        prompts_S: int64, which prompt each sequence answers; None: each its own. Answers to one
            prompt are much alike.
        top_k, top_p: how the responses were cut when they were sampled; 0 and 1: not at all.
        weights_M: float32, how much each row counts in training, 0: its state only serves its
            neighbours, below 0: it has no state here; None: 1 each. Where `hidden_MD` has fewer
            than M rows, it holds the states that there are, in their order.
        held_S: bool, sequences to judge heads on, chosen where rows were left out; all their rows
            have a state. None: `companion.holdout` chooses.
        before_ids_X: int32, what stood before each response when it was written, one sequence after
            the other: earlier texts, each with a GAP behind it (`heads.copying`), then the prompt.
            Tokens that must not be copied (of images) are gaps. None: not known, and heads that
            copy search the response alone.
        before_S: int64, how many of these tokens each sequence has.
        passes: how often to train on it; None: as the companion is configured.
        lm_head_VD, embedding_VD: the tables of the actor that wrote it, where these are no longer
            the newest.
        table_ids_R: int64, ascending, the tokens whose rows these two hold; None: all of them.
        left_out: response tokens that are not here at all, of a sample.
        rising_s: train on it for as long as acceptance on its held-out part rises, at most so many
            seconds, whatever `passes` says; None: it is an ordinary batch.
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
        # Refused where it is made: in the companion the same fault would only be a lost batch.
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
        # Shapes of sequences (prompts, held-out marks) are left out: a few bytes a response.
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
        """Row of `hidden_MD` that holds the state of each row, int64; -1: it was left out."""
        rows = self.response_ids_M.shape[0]
        if self.weights_M is None or self.hidden_MD.shape[0] == rows:
            return torch.arange(rows)
        kept_M = self.weights_M >= 0
        # States that are there lie one after the other: each row's place is the number of those
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
        # Of a sample only the rows that have a state bring one along.
        return replace(self, hidden_MD=self.hidden_MD[states[states >= 0]], **chosen)

    @staticmethod
    def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """All sequences of batches that were sampled in the same way as one batch, in order.

        Prompt numbers and weights stay where all parts have them.
        """
        # Nothing is copied where there is nothing to join: states can be gigabytes.
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
            # What only some parts know would stand beside the wrong sequences.
            joined[name] = torch.cat(found) if len(found) == len(parts) else None
        return replace(parts[0], left_out=sum(part.left_out for part in parts), **joined)

    def _picked(self, index: Any, *names: str) -> dict[str, Any]:
        """The same rows of several tensors, of those that there are."""
        return {name: value[index] for name in names if (value := getattr(self, name)) is not None}
