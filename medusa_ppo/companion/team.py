"""Processes that train the same heads on different rows: what the trainer asks of the others, and the form of it over Gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)


class TeamLostError(Exception):
    """Somebody of the team is gone, or did not answer in time. Nothing that was summed since the last step can be trusted."""


class Team(Protocol):
    """Other processes that train the same heads on other rows, and take every optimizer step together with this one."""

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of everybody's, in place."""

    def most(self, count: int) -> int:
        """The largest of everybody's counts."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Everybody's rows, in the order of the processes."""


class GlooTeam:
    """Sums over all workers. The process group is its own, not torch's global one."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta = TIMEOUT) -> None:
        """Meet the others; waits until all are there.

        Raises:
            TeamLostError: they did not come in time.
        """
        self._store, self._rank, self._size = store, rank, size
        try:
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)  # torch's stubs lack its collectives.
        except RuntimeError as error:
            raise TeamLostError(f"The workers did not meet: {error}") from error

    @classmethod
    def at(cls, place: tuple[str, int], rank: int, size: int, timeout: timedelta = TIMEOUT) -> GlooTeam:
        """Meet the others at the place that one of them has opened with `open_place`."""
        try:
            store = dist.TCPStore(*place, size, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise TeamLostError(f"The meeting place {place} does not answer: {error}") from error
        return cls(store, rank, size, timeout)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum of all workers' tensors, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def most(self, count: int) -> int:
        """The largest of all workers' counts."""
        found = torch.tensor([count], dtype=torch.int64)
        self._reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All workers' rows, those of the first one first. A sum in which every row has one summand."""
        counts = torch.zeros(self._size, dtype=torch.int64)
        counts[self._rank] = rows.shape[0]
        self.add_up(counts)
        start = int(counts[: self._rank].sum())
        everything = rows.new_zeros((int(counts.sum()), *rows.shape[1:]))
        everything[start : start + rows.shape[0]] = rows
        self.add_up(everything)
        return everything

    def leave(self) -> None:
        """Close the connections: whoever waits for this one gets an error at once."""
        self._group.abort()

    def _reduce(self, tensor: torch.Tensor, how: Any) -> None:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = how
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise TeamLostError(str(error)) from error


def open_place(host: str, size: int, timeout: timedelta = TIMEOUT) -> tuple[dist.TCPStore, tuple[str, int]]:
    """Open a place where the workers find each other: its store, and its address."""
    store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, (host, store.port)
