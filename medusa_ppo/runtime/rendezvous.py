"""Where processes meet: a store at an address that one of them opens, and the group of those that
came.

A group is gloo's, through the host's memory, or NCCL's between GPUs; torch's global one is left
alone. No Ray: vLLM's workers come too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 300.0
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
Backend = Literal["gloo", "nccl"]


def choose_backend(devices: Sequence[str]) -> Backend:
    """NCCL where every rank has a GPU of its own: it refuses ranks that share one."""
    return "nccl" if "cpu" not in devices and len(set(devices)) == len(devices) else "gloo"


def device_id(device: torch.device) -> str:
    """A GPU's own id, the same in all processes; `cpu` elsewhere."""
    return (
        str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    )


class PeerLostError(Exception):
    """Another process is gone, or did not answer in time. Nothing that was summed since the last
    step can be trusted.
    """


@dataclass(frozen=True)
class Place:
    """Where `size` processes meet, and which of them this is. `rank` 0 has opened it."""

    host: str
    port: int
    size: int
    rank: int = 0
    backend: Backend = "gloo"
    timeout_s: float = TIMEOUT_S

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def seen_by(self, rank: int) -> Place:
        """The same for another process."""
        return replace(self, rank=rank)


class Meeting:
    """One process's end. Rank 0 makes it with `open`, the others of its `place`; after `join` all
    are there.

    Attributes:
        place: where, and as what.
        store: torch's, for whoever makes groups of their own of it.
        device: where what crosses stands.
    """

    def __init__(self, place: Place, store: dist.TCPStore | None = None) -> None:
        """
        Args:
            store: rank 0's own; None: another process has opened it.

        Raises:
            PeerLostError: nobody answers there.
        """
        self.place = place
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if place.backend == "nccl"
            else torch.device("cpu")
        )
        self._group: Any = None  # torch's stubs lack its collectives.
        self._between_gpus: Any = None
        try:
            self.store = store or dist.TCPStore(
                place.host, place.port, timeout=place.timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise self.lost(place, "Nobody answers at the meeting place.", error) from error

    @classmethod
    def open(
        cls, host: str, size: int, *, backend: Backend = "gloo", timeout_s: float = TIMEOUT_S
    ) -> Self:
        """Rank 0's end, at this address and no other. PeerLostError when it can't be had."""
        place = Place(host, 0, size, 0, backend, timeout_s)
        try:
            # A store that opens its port itself listens on every address of the machine; it takes a
            # socket that listens already.
            listening = socket.create_server((host, 0))
        except OSError as error:
            raise cls.lost(place, "The processes can't be met here.", error) from error
        port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=place.timeout,
            # The others learn the port from what this call returns, so they can't be waited for in
            # it.
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return cls(replace(place, port=port), store)

    @staticmethod
    def lost(place: Place, problem: str, error: Exception) -> Exception:
        """What is raised when a process is gone, or does not come or answer in time."""
        return PeerLostError(f"{problem} {place}: {error}")

    def join(self) -> Self:
        """Form the group; waits until all are there. PeerLostError when they don't come in time."""
        try:
            self._group = (_nccl if self.place.backend == "nccl" else _gloo)(self.store, self.place)
        except RuntimeError as error:
            raise self.lost(self.place, "The processes did not meet.", error) from error
        # Who went on and left before all are connected would be waited for, five times as long.
        # (NCCL connects when it is first used.)
        self.add_up(torch.zeros(1, device=self.device))
        return self

    def share(self, tensor: Tensor) -> Tensor:
        """Fill the tensor with rank 0's. PeerLostError, as for all that follow, when a process is
        gone or does not answer in time.
        """
        options: Any = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait(lambda: self._group.broadcast([tensor], options))
        return tensor

    def add_up(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        """Replace the tensor by the sum of all processes' tensors, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = how
        self._wait(lambda: self._group.allreduce([tensor], options))

    def most(self, count: int) -> int:
        """The largest of all processes' counts."""
        found = torch.tensor([count], dtype=torch.int64)
        self.add_up(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, rows: Tensor) -> Tensor:
        """All processes' rows, those of the first one first. A sum in which every row has one
        summand.
        """
        # gloo's own gather wants equally many rows of each.
        counts = torch.zeros(self.place.size, dtype=torch.int64)
        counts[self.place.rank] = rows.shape[0]
        self.add_up(counts)
        start = int(counts[: self.place.rank].sum())
        everything = rows.new_zeros((int(counts.sum()), *rows.shape[1:]))
        everything[start : start + rows.shape[0]] = rows
        self.add_up(everything)
        return everything

    def process_group(self, device: torch.device) -> Any:
        """The group as torch's own wrappers take it (DDP), for tensors on this device. All
        processes call it, each with its own device.

        Between GPUs of which each process has one NCCL carries it; processes that share a GPU use
        gloo, which takes its tensors through the host. What crosses on the host stays with gloo
        either way.
        """
        # DDP asks a group for its backend by device. A bare gloo or NCCL group, made without
        # torch's global one, has no such table.
        group = dist.ProcessGroup(self.store, self.place.rank, self.place.size)
        carriers = {self.device: (self.place.backend, self._group)}
        if device.type != self.device.type:
            carriers[device] = self._carrier(device)
        for place, (backend, carrier) in carriers.items():
            kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
            group._register_backend(place, kind, carrier)
            group._set_default_backend(kind)
        return group

    def _carrier(self, device: torch.device) -> tuple[Backend, Any]:
        """What sums tensors of a device that this meeting's own group does not stand on."""
        self.store.set(f"device of {self.place.rank}", device_id(device))
        devices = [self.store.get(f"device of {rank}").decode() for rank in range(self.place.size)]
        if choose_backend(devices) == "gloo":
            return "gloo", self._group
        self._between_gpus = _nccl(dist.PrefixStore("between GPUs", self.store), self.place)
        return "nccl", self._between_gpus

    def leave(self) -> None:
        """Close the connections: whoever waits for this process gets an error at once. Harmless
        when called again.
        """
        groups = (self._group, self._between_gpus)
        # gloo closes its connections when the group is gone, not when it is aborted.
        self._group = self._between_gpus = None
        for group in groups:
            if group is not None:
                group.abort()

    def _wait(self, begin: Any) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise self.lost(self.place, "A process broke off.", error) from error


def _gloo(store: dist.Store, place: Place) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it.
    options = gloo._Options()
    options._timeout = place.timeout
    options._devices = [
        # By itself gloo takes the address that the machine's name stands for, which other machines
        # may reach.
        gloo.create_device(hostname=LOOPBACK)
        if place.host == LOOPBACK
        else gloo.create_default_device()
    ]
    return gloo(store, place.rank, place.size, options)


def _nccl(store: dist.Store, place: Place) -> Any:
    """Not run yet: no machine with GPUs. Without the blocking wait torch ends the whole process
    when a rank is lost, PPO's own too.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = place.timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # Read when the group is made.
    try:
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)
    finally:
        os.environ.pop(BLOCKING_WAIT)
        os.environ.update({} if before is None else {BLOCKING_WAIT: before})
