"""Which slot each request has, and what is known of it from its first step on: kept on the host, handed out as tensors.

A batch that is the one of the step before costs nothing; a request that is new costs a few numbers that are copied to the device.

Shape letters: B requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from medusa_ppo.drafting.noise import key_of


@dataclass(frozen=True)
class Traits:
    """What a request is throughout its life.

    Attributes:
        seed: None without one.
        one_hot: its drafts are cut by their own values (a grammar removes what it forbids), so none may be verified against a q.
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
        drawn_B: float32, 0 for requests whose drafts must be one-hot, 1 for the others; None where there are only others.
    """

    slots_B: torch.Tensor
    requests_B: torch.Tensor
    keys_B: torch.Tensor | None
    seeded_B: torch.Tensor | None
    drawn_B: torch.Tensor | None


@dataclass(frozen=True)
class _Seat:
    slot: int
    serial: int
    traits: Traits


class Seating:
    """Slots for `size` requests at a time. One that waits (preempted, not scheduled) keeps its slot until a running one needs it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._free = list(range(size - 1, -1, -1))
        self._seats: dict[str, _Seat] = {}
        self._serials = itertools.count()
        self._last: tuple[list[str], Seats] | None = None

    def seat(self, request_ids: Sequence[str], traits: Callable[[str], Traits], live: Mapping[str, object]) -> Seats:
        """
        Args:
            traits: asked once for each request.
            live: requests that have not ended; the others' slots are free.
        """
        if self._last is not None and self._last[0] == request_ids:
            return self._last[1]
        new = [key for key in request_ids if key not in self._seats]
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
        for waiting in [key for key in self._seats if key not in running][: max(count - len(self._free), 0)]:
            self._free.append(self._seats.pop(waiting).slot)  # Its drafts are verified as one-hot ones, should it come back.

    def _tensors(self, seats: list[_Seat]) -> Seats:
        def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

        seeds = [seat.traits.seed for seat in seats]
        seeded = [seed is not None for seed in seeds]
        return Seats(
            tensor([seat.slot for seat in seats]),
            tensor([seat.serial for seat in seats]),
            tensor([0 if seed is None else key_of(seed) for seed in seeds]) if any(seeded) else None,
            tensor(seeded, torch.bool) if any(seeded) and not all(seeded) else None,
            tensor([not seat.traits.one_hot for seat in seats], torch.float32) if any(seat.traits.one_hot for seat in seats) else None,
        )
