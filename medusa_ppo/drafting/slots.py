"""What drafting keeps by slot: who has which slot, and q of the drafts that the next step verifies.

All of it stands in tensors that stay where they are. A draft is verified one step after it was
drawn, against the q that it was drawn from. In between its request may have been preempted, its
drafts replaced by placeholders, its slot given to another. So beside q stands a stamp of who
drafted and at which position: what does not bear the stamp that verification expects was not drawn
from this q, and is verified as a one-hot draft, which is right for any draft.

Shape letters: B requests, R rows of a batch, S slots, K drafts, W width of the draft vocabulary, X
= W - 1, T drafts of all requests one after the other, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from medusa_ppo.drafting import sending
from medusa_ppo.drafting.noise import drawn_from, keys_of

POSITIONS = 1 << 24
"""Positions that a stamp tells apart; 2^39 requests beside them."""
NOTHING = -1


def stamps(requests_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """One int64 for a request (a serial number that is never given twice) at a position."""
    return requests_B * POSITIONS + positions_B


# ---- who has which slot


@dataclass(frozen=True)
class Traits:
    """What a request is throughout its life.

    Attributes:
        seed: None without one.
        one_hot: its drafts are cut by their own values (a grammar removes what it forbids), so none
            may be verified against a q.
    """

    seed: int | None = None
    one_hot: bool = False


@dataclass(frozen=True)
class Seats:
    """The requests of a batch, in its order.

    Attributes:
        slots_B: int64.
        requests_B: int64, serial numbers; none is ever given twice.
        keys_B: int64 noise keys; None where no request has a seed.
        seeded_B: bool; None where all requests have a seed, or none.
        drawn_B: float32, 0 for requests whose drafts must be one-hot, 1 for the others; None where
            there are only others.
        host_2B: slots and serial numbers once more, on the host.
    """

    slots_B: torch.Tensor
    requests_B: torch.Tensor
    keys_B: torch.Tensor | None
    seeded_B: torch.Tensor | None
    drawn_B: torch.Tensor | None
    host_2B: np.ndarray


@dataclass(frozen=True)
class _Seat:
    slot: int
    serial: int
    traits: Traits


class Seating:
    """Slots for `size` requests at a time. One that waits (preempted, not scheduled) keeps its slot
    until a running one needs it.

    A batch that is the one of the step before costs nothing; a request that is new costs a few
    numbers that are copied to the device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._free = list(range(size - 1, -1, -1))
        self._seats: dict[str, _Seat] = {}
        self._serials = itertools.count()
        self._last: tuple[list[str], Seats] | None = None

    def seat(
        self,
        request_ids: Sequence[str],
        traits: Callable[[str], Traits],
        live: Mapping[str, object],
    ) -> Seats:
        """
        Args:
            traits: asked once for each request.
            live: requests that have not ended; the others' slots are free.
        """
        # Most decode steps have the batch of the step before: no tensor is made for them.
        if self._last is not None and self._last[0] == request_ids:
            return self._last[1]
        new = [key for key in request_ids if key not in self._seats]
        # Ended requests keep their slots until somebody needs one, so a step without a new request
        # does not look for them.
        if new:
            self._make_room(len(new), set(request_ids), live)
            for key in new:
                self._seats[key] = _Seat(self._free.pop(), next(self._serials), traits(key))
        seats = self._tensors([self._seats[key] for key in request_ids])
        self._last = (list(request_ids), seats)
        return seats

    def _make_room(self, count: int, running: set[str], live: Mapping[str, object]) -> None:
        for gone in [key for key in self._seats if key not in live]:
            self._free.append(self._seats.pop(gone).slot)
        waiting = [key for key in self._seats if key not in running]
        for key in waiting[: max(count - len(self._free), 0)]:
            # Its drafts are verified as one-hot ones, should it come back.
            self._free.append(self._seats.pop(key).slot)

    def _tensors(self, seats: list[_Seat]) -> Seats:
        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return sending.sent(values, self._device, dtype)

        seeds = [seat.traits.seed for seat in seats]
        seeded = [seed is not None for seed in seeds]
        return Seats(
            tensor([seat.slot for seat in seats]),
            tensor([seat.serial for seat in seats]),
            tensor(keys_of([seed or 0 for seed in seeds])) if any(seeded) else None,
            tensor(seeded, torch.bool) if any(seeded) and not all(seeded) else None,
            (
                tensor([not seat.traits.one_hot for seat in seats], torch.float32)
                if any(seat.traits.one_hot for seat in seats)
                else None
            ),
            np.array([[seat.slot for seat in seats], [seat.serial for seat in seats]]),
        )


# ---- q of the drafts


@dataclass(frozen=True)
class KeptDrafts:
    """q of the drafts that a step verifies.

    Attributes:
        rows_B: where each request's drafts stand.
        sampled_BK: bool, drafts that were drawn from q; the others are one-hot.
        q_BK: float32, the probability of each draft under its q; 1 for one-hot ones.
        slots: where to look for whole rows.
    """

    rows_B: torch.Tensor
    sampled_BK: torch.Tensor
    q_BK: torch.Tensor
    slots: DraftSlots

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        """The probabilities of the drafts `ids_BK`, which are those that were kept."""
        return self.q_BK

    def part(self, requests: slice | torch.Tensor) -> KeptDrafts:
        """Of some requests."""
        return KeptDrafts(
            self.rows_B[requests], self.sampled_BK[requests], self.q_BK[requests], self.slots
        )

    def rows(self, at_B1: torch.Tensor) -> torch.Tensor:
        """q `[B, W]` of the draft at index `at_B1` of each request; only to be read where that was
        sampled.
        """
        return self.slots.q(self.rows_B, at_B1.squeeze(1))

    def residual(
        self, mass_BV: torch.Tensor, at_B1: torch.Tensor, refused_B1: torch.Tensor
    ) -> torch.Tensor:
        """max(mass - q, 0) where the draft `refused_B1` at index `at_B1` was refused; the mass
        where that is below 0.

        q is one-hot, and the mass without the draft is left, where it was not sampled.
        """
        refused = refused_B1 >= 0
        sampled_B1 = self.sampled_BK.gather(1, at_B1)
        q_BW = torch.where(refused & sampled_B1, self.rows(at_B1), 0.0)
        ids_W = self.slots.ids_W
        ids_B1 = refused_B1.clamp_min(0)
        if ids_W is None:
            left_BV = (mass_BV - q_BW).clamp_min(0)
        else:
            left_BV = mass_BV.index_add(1, ids_W, q_BW, alpha=-1).clamp_min(0)
        # All rows go through the scatter, also those that keep what they have: a branch would read
        # a host value.
        at_draft_B1 = torch.where(
            refused & sampled_B1.logical_not(), 0.0, left_BV.gather(1, ids_B1)
        )
        return left_BV.scatter(1, ids_B1, at_draft_B1)


class Places(NamedTuple):
    """Where a batch is drawn: cumulative sums `[B, X]` and columns `[B, 1]` of each head, and room
    `[B, W]` for two things.
    """

    cumulative: Sequence[torch.Tensor]
    columns: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]


class DraftSlots:
    """What the drafts of the last step were drawn by, row by row of its batch, and stamps; `rows_S`
    says which row a slot had.

    A request that sits out a step finds its row overwritten, and its stamp with it. One row and one
    slot more than requests are for padding of a batch.

    Attributes:
        cumulative_KRX: float32, the W - 1 sums that `drafting.cumulate` makes; what q is follows
            from them.
        columns_KR: int64, what was drawn.
        ids_W: the tokens of the columns; None: all of them.
    """

    def __init__(
        self,
        slots: int,
        drafts: int,
        width: int,
        device: torch.device,
        ids_W: torch.Tensor | None = None,
    ) -> None:
        self.size = slots
        self.drafts = drafts
        self.ids_W = ids_W
        self.cumulative_KRX = torch.zeros(drafts, slots + 1, width - 1, device=device)
        self.columns_KR = torch.full((drafts, slots + 1), NOTHING, device=device)
        self.stamps_R = torch.full((slots + 1,), NOTHING, device=device)
        self.rows_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._scratch_2RW = torch.empty(2, slots + 1, width, device=device)
        self._views: dict[tuple[int, int], Places] = {}
        self._numbers_R = torch.arange(max(slots + 1, drafts), device=device)

    @property
    def spare(self) -> int:
        """The slot for rows that pad a batch."""
        return self.size

    def places(self, count: int, batch: int) -> Places:
        """Where `count` heads draw for a batch."""
        # A view is an operation for each head and step, and costs as much as a small product.
        if (count, batch) not in self._views:
            columns = self.columns_KR[:count, :batch].unsqueeze(2).unbind(0)
            self._views[count, batch] = Places(
                self.cumulative_KRX[:count, :batch].unbind(0),
                columns,
                self._scratch_2RW[:, :batch].unbind(0),
            )
        return self._views[count, batch]

    @property
    def width(self) -> int:
        """Columns, as many as tokens that drafts come from."""
        return self._scratch_2RW.shape[2]

    def renew(self) -> None:
        """Its memory was thrown away: nothing was drafted, at the same addresses."""
        self.cumulative_KRX.zero_()
        self.columns_KR.fill_(NOTHING)
        self.rows_S.zero_()
        self._scratch_2RW.zero_()
        torch.arange(len(self._numbers_R), out=self._numbers_R)
        self.forget()

    def use_ids(self, ids_W: torch.Tensor | None) -> None:
        """The columns are of other tokens, as many as before; whatever was drafted is one-hot."""
        self.ids_W = ids_W
        self.forget()

    def forget(self) -> None:
        """Whatever was drafted is one-hot from here on (a draft vocabulary that changes; never
        because of what was drafted).
        """
        self.stamps_R.fill_(NOTHING)

    def stamp(self, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int) -> None:
        """Say whose the drafts are that were just drawn, `count` each.

        Args:
            stamps_B: from `stamps`; NOTHING for requests whose drafts are one-hot. (Where all of a
                step are, nothing needs to be said: what stands here bears the stamp of an earlier
                position.)
        """
        batch = slots_B.shape[0]
        self.rows_S.index_copy_(0, slots_B, self._numbers_R[:batch])
        self.stamps_R[:batch] = stamps_B
        # An earlier, longer run may have left columns there.
        if count < self.drafts:
            self.columns_KR[count:, :batch].fill_(NOTHING)

    def look_up(self, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int) -> KeptDrafts:
        """What is known of the first `count` drafts of each request."""
        rows_B = self.rows_S.index_select(0, slots_B)
        columns_BK = self.columns_KR[:count].index_select(1, rows_B).t()
        # NOTHING stands for no draft on both sides, and two of them are no match.
        same_B = (self.stamps_R.index_select(0, rows_B) == stamps_B) & (stamps_B >= 0)
        sampled_BK = same_B.unsqueeze(1) & (columns_BK >= 0)
        drafts_K = self._numbers_R[:count]
        most = self.cumulative_KRX.shape[2] - 1

        def below(columns_BK: torch.Tensor) -> torch.Tensor:
            """The sums before some columns, 0 before the first and 1 after the last."""
            sums_BK = self.cumulative_KRX[
                drafts_K, rows_B.unsqueeze(1), (columns_BK - 1).clamp(0, most)
            ].clamp_max(1)
            return torch.where(
                columns_BK > most + 1, 1.0, torch.where(columns_BK > 0, sums_BK, 0.0)
            )

        # What a uniform lands on between two sums is drawn: their difference is q to the last bit.
        q_BK = torch.where(sampled_BK, below(columns_BK + 1) - below(columns_BK), 1.0)
        return KeptDrafts(rows_B, sampled_BK, q_BK, self)

    def q(self, rows_N: torch.Tensor, drafts_N: torch.Tensor) -> torch.Tensor:
        """q `[N, W]` of some drafts, by row and place among the drafts."""
        return drawn_from(self.cumulative_KRX[drafts_N, rows_N])
