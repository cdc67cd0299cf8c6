"""The state of drafting by slot: which request has which slot, and q of the drafts that the next
step verifies.

All of it is in tensors at fixed addresses. A draft is verified one step after it was drawn, against
the q that it was drawn from. Meanwhile its request may have been preempted, its drafts replaced by
placeholders, or its slot given to another request. So a stamp is stored with q: who drafted, and at
which position. A draft without the stamp that verification expects was not drawn from this q, and
is verified as a one-hot draft, which is valid for any draft.

Shape letters: B requests, R rows of a batch, S slots, K drafts, W width of the draft vocabulary, X
= W - 1, N some drafts, T drafts of all requests one after the other, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from medusa_ppo.drafting import sending
from medusa_ppo.drafting.noise import drawn_from, keys_of, write_drawn_from

POSITIONS = 1 << 24
"""Positions that a stamp distinguishes; this leaves 2^39 requests."""
NOTHING = -1


def stamps(requests_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """One int64 for a request (a serial number that is never reused) at a position."""
    return requests_B * POSITIONS + positions_B


# ---- which request has which slot


@dataclass(frozen=True)
class Traits:
    """Properties of a request that never change.

    Attributes:
        seed: None without one.
        one_hot: whether its drafts must be one-hot: a grammar removes what it forbids from the
            drafts, so they may not be verified against a q.
    """

    seed: int | None = None
    one_hot: bool = False


@dataclass(frozen=True)
class Seats:
    """The requests of a batch, in its order.

    Attributes:
        slots_B: int64.
        requests_B: int64, serial numbers, which are never reused.
        keys_B: int64 noise keys; None if no request has a seed.
        seeded_B: bool; None if all requests have a seed, or none has one.
        drawn_B: float32, 0 for requests whose drafts must be one-hot, 1 for the others; None if
            there are only others.
        host_2B: slots and serial numbers again, on the host.
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
    """Assigns slots to up to `size` requests at a time. A waiting request (preempted, not
    scheduled) keeps its slot until a running one needs it.

    If the batch equals the previous step's, this costs nothing; a new request costs copying a few
    numbers to the device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._free = list(range(size - 1, -1, -1))
        self._seats: dict[str, _Seat] = {}
        self._serials = itertools.count()
        self._last: tuple[list[str], Seats] | None = None

    def arrive(self, request_ids: Iterable[str]) -> None:
        """These requests are new: whoever had the same id before has ended."""
        for key in request_ids:
            if (seat := self._seats.pop(key, None)) is not None:
                self._free.append(seat.slot)
                self._last = None

    def seat(
        self,
        request_ids: Sequence[str],
        traits: Callable[[str], Traits],
        live: Mapping[str, object],
    ) -> Seats:
        """
        Args:
            traits: gives a request's traits; called once for each.
            live: running requests; the slots of all others are free.
        """
        # Most decode steps have the previous step's batch: no tensors are made for these.
        if self._last is not None and self._last[0] == request_ids:
            return self._last[1]
        new = [key for key in request_ids if key not in self._seats]
        # Ended requests keep their slots until one is needed, so a step without a new request does
        # not search for them.
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
            # If it returns, its drafts are verified as one-hot.
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
        rows_B: row of each request's drafts.
        sampled_BK: bool, drafts that were drawn from q; the others are one-hot.
        q_BK: float32, the probability of each draft under its q; 1 for one-hot ones.
        slots: gives whole rows of q.
    """

    rows_B: torch.Tensor
    sampled_BK: torch.Tensor
    q_BK: torch.Tensor
    slots: DraftSlots

    def of(self, ids_BK: torch.Tensor) -> torch.Tensor:
        """The probabilities of the drafts `ids_BK`, which must be the kept ones."""
        return self.q_BK

    def part(self, requests: slice | torch.Tensor) -> KeptDrafts:
        """The part for some requests."""
        return KeptDrafts(
            self.rows_B[requests], self.sampled_BK[requests], self.q_BK[requests], self.slots
        )

    def rows(self, at_B1: torch.Tensor) -> torch.Tensor:
        """q `[B, W]` of the draft at index `at_B1` of each request; valid only if that draft was
        sampled.
        """
        return self.slots.q(self.rows_B, at_B1.squeeze(1))

    def residual(
        self, mass_BV: torch.Tensor, at_B1: torch.Tensor, refused_B1: torch.Tensor
    ) -> torch.Tensor:
        """max(mass - q, 0) if the draft `refused_B1` at index `at_B1` was refused; the mass itself
        where `at_B1` is below 0.

        For a draft that was not sampled, q is one-hot: what is left is the mass without the draft.
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
        # All rows go through the scatter, even unchanged ones: a branch would need a value on the
        # host.
        at_draft_B1 = torch.where(
            refused & sampled_B1.logical_not(), 0.0, left_BV.gather(1, ids_B1)
        )
        return left_BV.scatter(1, ids_B1, at_draft_B1)


class Places(NamedTuple):
    """Buffers for drawing a batch: cumulative sums `[B, X]` and columns `[B, 1]` of each head, and
    two scratch buffers `[B, W]`.
    """

    cumulative: Sequence[torch.Tensor]
    columns: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]


class DraftSlots:
    """The sums that the last step's drafts were drawn with, by row of its batch, and their stamps;
    `rows_S` has the row of each slot.

    If a request skips a step, its row and stamp are overwritten. There is one more row and one more
    slot than there are requests, to pad a batch.

    Attributes:
        cumulative_KRX: float32, the W - 1 sums of `drafting.cumulate`, from which q follows.
        columns_KR: int64, the drawn columns.
        width: W.
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
        self.width = width
        self.ids_W = ids_W
        self.cumulative_KRX = torch.zeros(drafts, slots + 1, width - 1, device=device)
        self.columns_KR = torch.full((drafts, slots + 1), NOTHING, device=device)
        self.stamps_R = torch.full((slots + 1,), NOTHING, device=device)
        self.rows_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._scratch_2RW = torch.empty(2, slots + 1, width, device=device)
        self._views: dict[tuple[int, int], Places] = {}
        self._numbers_R = torch.arange(max(slots + 1, drafts), device=device)
        self._columns_V: torch.Tensor | None = None

    def renew(self) -> None:
        """Restore the initial state at the same addresses, after the memory was thrown away. The
        tokens are given again by `use`.
        """
        self.cumulative_KRX.zero_()
        self.columns_KR.fill_(NOTHING)
        self.rows_S.zero_()
        torch.arange(len(self._numbers_R), out=self._numbers_R)
        self.use(None)

    def use(self, ids_W: torch.Tensor | None) -> None:
        """Draft from other tokens from now on, as many as before, in the same memory."""
        self.forget()
        self.ids_W = ids_W
        self._columns_V = None

    def columns_V(self, vocab_size: int) -> torch.Tensor | None:
        """int32, the column of each token, -1 for tokens without one; None: token and column are
        the same.
        """
        if self.ids_W is None:
            return None
        if self._columns_V is None:
            columns_V = torch.full((vocab_size,), -1, dtype=torch.int32, device=self.ids_W.device)
            numbers_W = torch.arange(len(self.ids_W), dtype=torch.int32, device=self.ids_W.device)
            self._columns_V = columns_V.index_copy_(0, self.ids_W.long(), numbers_W)
        return self._columns_V

    @property
    def spare(self) -> int:
        """The slot for rows that pad a batch."""
        return self.size

    def places(self, count: int, batch: int) -> Places:
        """The buffers in which `count` heads draw for a batch."""
        # Views are cached: creating one for each head in each step would cost as much as a small
        # product.
        if (count, batch) not in self._views:
            columns = self.columns_KR[:count, :batch].unsqueeze(2).unbind(0)
            self._views[count, batch] = Places(
                self.cumulative_KRX[:count, :batch].unbind(0),
                columns,
                self._scratch_2RW[:, :batch].unbind(0),
            )
        return self._views[count, batch]

    def forget(self) -> None:
        """Make all earlier drafts one-hot, because the draft vocabulary changes. This must never
        depend on what was drafted.
        """
        self.stamps_R.fill_(NOTHING)

    def stamp(self, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int) -> None:
        """Mark the owners of the drafts that were just drawn, `count` each.

        Args:
            stamps_B: from `stamps`; NOTHING for requests whose drafts are one-hot. (If all of a
                step are one-hot, no call is needed: the stamps here are of an earlier position.)
        """
        batch = slots_B.shape[0]
        self.rows_S.index_copy_(0, slots_B, self._numbers_R[:batch])
        self.stamps_R[:batch] = stamps_B
        # An earlier, longer run may have left columns behind.
        if count < self.drafts:
            self.columns_KR[count:, :batch].fill_(NOTHING)

    def look_up(self, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int) -> KeptDrafts:
        """What is stored about the first `count` drafts of each request."""
        rows_B = self.rows_S.index_select(0, slots_B)
        columns_BK = self.columns_KR[:count].index_select(1, rows_B).t()
        # NOTHING means no draft, on either side; two of them don't match.
        same_B = (self.stamps_R.index_select(0, rows_B) == stamps_B) & (stamps_B >= 0)
        sampled_BK = same_B.unsqueeze(1) & (columns_BK >= 0)
        drafts_K = self._numbers_R[:count]
        most = self.cumulative_KRX.shape[2] - 1

        def below(columns_BK: torch.Tensor) -> torch.Tensor:
            """The sums before some columns: 0 before the first and 1 after the last."""
            sums_BK = self.cumulative_KRX[
                drafts_K, rows_B.unsqueeze(1), (columns_BK - 1).clamp(0, most)
            ].clamp_max(1)
            return torch.where(
                columns_BK > most + 1, 1.0, torch.where(columns_BK > 0, sums_BK, 0.0)
            )

        # A uniform between two sums draws the column, so their difference is q to the last bit.
        q_BK = torch.where(sampled_BK, below(columns_BK + 1) - below(columns_BK), 1.0)
        return KeptDrafts(rows_B, sampled_BK, q_BK, self)

    def q(self, rows_N: torch.Tensor, drafts_N: torch.Tensor) -> torch.Tensor:
        """q `[N, W]` of some drafts, by row and index of the draft."""
        return drawn_from(self.cumulative_KRX[drafts_N, rows_N])

    def write_logits(
        self,
        slots_N: torch.Tensor,
        stamps_N: torch.Tensor,
        drafts_N: torch.Tensor,
        ids_N: torch.Tensor,
        temperature_N: torch.Tensor,
        out_NV: torch.Tensor,
    ) -> None:
        """What some drafts were drawn from, as logits before the temperature: log q times the
        temperature. Drafts without these stamps get one-hot rows, which are valid for any draft.

        Args:
            drafts_N: index of each draft among those of its request.
            ids_N: the drafts.
            out_NV: float32, written.
        """
        rows_N = self.rows_S.index_select(0, slots_N)
        same_N = (self.stamps_R.index_select(0, rows_N) == stamps_N) & (stamps_N >= 0)
        sampled_N1 = (same_N & (self.columns_KR[drafts_N, rows_N] >= 0)).unsqueeze(1)
        sums_NX = self.cumulative_KRX[drafts_N, rows_N]
        if self.ids_W is None:
            log_NW = out_NV
        else:
            log_NW = out_NV.new_empty(len(rows_N), len(self.ids_W))
            out_NV.fill_(-torch.inf)
        write_drawn_from(sums_NX, log_NW)
        log_NW.log_().mul_(temperature_N.unsqueeze(1))
        if self.ids_W is not None:
            out_NV.index_copy_(1, self.ids_W, log_NW)
        # At temperature 0 the product is NaN where q is 0; such drafts have no stamp.
        out_NV.masked_fill_(sampled_N1.logical_not(), -torch.inf)
        ids_N1 = ids_N.long().clamp_min(0).unsqueeze(1)
        at_draft_N1 = torch.where(sampled_N1, out_NV.gather(1, ids_N1), 0.0)
        out_NV.scatter_(1, ids_N1, at_draft_N1)
