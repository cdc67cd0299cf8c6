"""The actor's final states of a batch that is scored piece by piece, before all of it is written:
as many as may be in the batch's sample, and no more, wherever its passes run.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from medusa_ppo.actors.hf import Actor, as_view
from medusa_ppo.companion.collector import filled_responses, places_of
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.config.companion_section import MOST_OF_PIECES
from medusa_ppo.contract.rollouts import Response

SPARE = 1.25
"""States to keep of the whole batch, as a multiple of the sample's rows: how many tokens it will
have is known only by the responses that have ended.
"""


class PickingTap(ABC):
    """A tap that says beforehand which states it wants, so that actors in other processes hand in
    no others.
    """

    @property
    @abstractmethod
    def wanted(self) -> tuple[torch.Tensor, ...] | None:
        """For each response that is scored, the tokens whose states are wanted, bool; None: no
        tokens.
        """

    @abstractmethod
    def put(self, states: Mapping[int, torch.Tensor]) -> None:
        """Take the wanted states of some responses, by index."""

    @abstractmethod
    def __call__(
        self, model: Actor, response_mask_BT: torch.Tensor, sequences: Sequence[int]
    ) -> contextlib.AbstractContextManager[None]:
        """A context around a forward pass of an actor in this process."""


class PieceStates:
    """The states of all pieces of a batch that were scored so far.

    Pieces are scored in a thread of their own, and the last ones after all of the batch is written.

    Attributes:
        sample: the batch's sample. Its `most` falls as more tokens come, until `settle`.
    """

    def __init__(self, sample: EarlySample, responses: int, prompts: int) -> None:
        """
        Args:
            sample: which rows are wanted, if the whole batch has more than that.
            responses, prompts: how many the whole batch has.
        """
        self.sample = sample
        self._responses = responses
        self._prompts = prompts
        self._pieces: dict[int, tuple[Response, ...]] = {}  # By the index of the first response.
        self._wanted: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._settled = False
        self._lock = threading.Lock()

    def tap(self, first: int, piece: Sequence[Response]) -> PieceTap:
        """The tap for the passes over all responses to some prompts.

        Args:
            first: index of their first in the batch.
        """
        with self._lock:
            self._pieces[first] = tuple(piece)
            seen = [response for known in self._pieces.values() for response in known]
            if not self._settled:
                tokens = sum(len(response.token_ids) for response in seen)
                self._expect(tokens * self._responses / len(seen))
            self._wanted |= self._candidates(first)
            # Then those are dropped that the sample can't have any more.
            kept = sum(int(wanted.sum()) for wanted in self._wanted.values())
            if kept > MOST_OF_PIECES * self.sample.rows:
                self._leave_out()
        return PieceTap(self, first, len(piece))

    def settle(self, tokens: int) -> EarlySample:
        """The batch's sample from now on, also for pieces that have not been scored yet.

        Args:
            tokens: how many the whole batch has.
        """
        with self._lock:
            self._expect(tokens)
            self._settled = True
        return self.sample

    def _expect(self, tokens: float) -> None:
        """Lower the sample's `most` to what a batch with that many tokens allows."""
        if tokens > self.sample.rows:
            # Never raised again: what was left out is gone, and all rows are to be as likely.
            most = min(self.sample.most, SPARE * self.sample.rows / tokens)
            self.sample = replace(self.sample, most=most)

    def wanted(self, sequence: int) -> torch.Tensor:
        """The tokens of a response whose states are wanted, bool."""
        return self._wanted[sequence]

    def put(self, sequence: int, states_ND: torch.Tensor) -> None:
        """Take the wanted states of a response."""
        self._states[sequence] = states_ND

    def take(self, sequence: int, wanted: torch.Tensor) -> torch.Tensor:
        """The states of some wanted tokens of a response, `ND`; the others are dropped."""
        held = self._wanted.pop(sequence)
        return self._states.pop(sequence)[wanted[held]]

    @property
    def kept(self) -> int:
        """Number of states that are kept now."""
        return sum(len(states_ND) for states_ND in self._states.values())

    def _candidates(self, first: int) -> dict[int, torch.Tensor]:
        piece = self._pieces[first]
        lengths = [len(response.token_ids) for response in piece]
        if self.sample.most < 1.0 and any(lengths):
            wanted_M = self.sample.candidates(
                *filled_responses(piece), places_of(piece, self._responses, self._prompts, first)
            )
        else:  # All may fit.
            wanted_M = torch.ones(sum(lengths), dtype=torch.bool)
        return {first + place: wanted for place, wanted in enumerate(wanted_M.split(lengths))}

    def _leave_out(self) -> None:
        """Drop states that the sample can't have any more."""
        for first in self._pieces:
            for sequence, wanted in self._candidates(first).items():
                if sequence in self._states:
                    kept = wanted[self._wanted[sequence]]
                    self._states[sequence] = self._states[sequence][kept]
                    self._wanted[sequence] = wanted


class PieceTap(PickingTap):
    """The tap for one piece; its responses count from 0."""

    def __init__(self, held: PieceStates, first: int, responses: int) -> None:
        self._held = held
        self._first = first
        self._responses = responses

    @property
    def wanted(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._held.wanted(self._first + place) for place in range(self._responses))

    def put(self, states: Mapping[int, torch.Tensor]) -> None:
        for place, states_ND in states.items():
            self._held.put(self._first + place, states_ND)

    @contextlib.contextmanager
    def __call__(
        self, model: Actor, response_mask_BT: torch.Tensor, sequences: Sequence[int]
    ) -> Iterator[None]:
        with as_view(model).tap() as tap:
            yield
        wanted = self.wanted
        row_M, token_M = response_mask_BT.nonzero(as_tuple=True)
        # Token t is predicted from the state one position before it.
        index_M = row_M * tap.hidden_BTD.shape[1] + token_M - 1
        wanted_M = torch.cat([wanted[s] for s in sequences]).to(index_M.device)
        index_N = index_M[wanted_M].to(tap.hidden_BTD.device)
        states_ND = tap.hidden_BTD.detach().flatten(0, 1).index_select(0, index_N).cpu()
        counts = [int(wanted[s].sum()) for s in sequences]
        self.put(dict(zip(sequences, states_ND.split(counts), strict=True)))
