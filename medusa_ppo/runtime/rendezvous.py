"""How processes meet: a store at an address that one of them opens, and the group of those that
joined.

A group uses gloo, through host memory, or NCCL between GPUs; torch's global group is not touched.
It does not use Ray, since vLLM's workers join too.
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
INTERFACES = "GLOO_SOCKET_IFNAME"
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
Backend = Literal["gloo", "nccl"]


def choose_backend(devices: Sequence[str]) -> Backend:
    """NCCL if every rank has its own GPU: it refuses ranks that share one."""
    return "nccl" if "cpu" not in devices and len(set(devices)) == len(devices) else "gloo"


def device_id(device: torch.device) -> str:
    """A GPU's id, the same in all processes; `cpu` otherwise."""
    return (
        str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    )


class PeerLostError(Exception):
    """Another process is gone, or did not answer in time. Sums since the last step can't be
    trusted.
    """


@dataclass(frozen=True)
class Place:
    """Where `size` processes meet, and which of them this one is. `rank` 0 has opened it."""

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
    """One process's end. Rank 0 creates it with `open`, the others from its `place`; after `join`
    all are there.

    Attributes:
        place: the meeting place, and this process's rank.
        store: torch's store, for making other groups from it.
        device: where exchanged tensors are.
    """

    def __init__(self, place: Place, store: dist.TCPStore | None = None) -> None:
        """
        Args:
            store: rank 0's own; None: another process has opened it.

        Raises:
            PeerLostError: there is no answer.
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
        """Rank 0's end, at this address only. Raises PeerLostError if it can't be opened."""
        place = Place(host, 0, size, 0, backend, timeout_s)
        try:
            # The store gets a listening socket: one that it opened itself would listen on every
            # address of the machine.
            listening = socket.create_server((host, 0))
        except OSError as error:
            raise cls.lost(place, "The processes can't be met here.", error) from error
        port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=place.timeout,
            # The others learn the port from this call's result, so it can't wait for them.
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return cls(replace(place, port=port), store)

    @staticmethod
    def lost(place: Place, problem: str, error: Exception) -> Exception:
        """The error for a process that is gone, or does not come or answer in time."""
        return PeerLostError(f"{problem} {place}: {error}")

    def join(self) -> Self:
        """Form the group; waits until all are there. Raises PeerLostError if they don't come in
        time.
        """
        try:
            self._group = (_nccl if self.place.backend == "nccl" else _gloo)(self.store, self.place)
        except (OSError, RuntimeError) as error:
            raise self.lost(self.place, "The processes did not meet.", error) from error
        # If one left before all are connected, the others would wait for it five times as long.
        # (NCCL connects when it is first used.)
        self.add_up(torch.zeros(1, device=self.device))
        return self

    def share(self, tensor: Tensor) -> Tensor:
        """Fill the tensor with rank 0's. Like all methods below, raises PeerLostError if a process
        is gone or does not answer in time.
        """
        options: Any = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait(lambda: self._group.broadcast([tensor], options))
        return tensor

    def add_up(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        """Replace the tensor with the sum of all processes' tensors, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = how
        self._wait(lambda: self._group.allreduce([tensor], options))

    def most(self, count: int) -> int:
        """The maximum of all processes' counts."""
        found = torch.tensor([count], dtype=torch.int64)
        self.add_up(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, rows: Tensor) -> Tensor:
        """All processes' rows, the first process's first. Implemented as a sum in which every row
        has one summand.
        """
        # gloo's own gather needs equally many rows from each.
        counts = torch.zeros(self.place.size, dtype=torch.int64)
        counts[self.place.rank] = rows.shape[0]
        self.add_up(counts)
        start = int(counts[: self.place.rank].sum())
        everything = rows.new_zeros((int(counts.sum()), *rows.shape[1:]))
        everything[start : start + rows.shape[0]] = rows
        self.add_up(everything)
        return everything

    def process_group(self, device: torch.device) -> Any:
        """The group as torch's wrappers (DDP) need it, for tensors on this device. All processes
        call it, each with its own device.

        It uses NCCL if each process has its own GPU; processes that share a GPU use gloo, which
        sends tensors through the host. Host tensors always use gloo.
        """
        # DDP asks a group for its backend by device. A bare gloo or NCCL group, made without
        # torch's global group, has no such table.
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
        """The backend that sums tensors on a device other than this group's own."""
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
    # torch looks at this variable only for groups that it creates by itself.
    interfaces = os.environ.get(INTERFACES) if place.host != LOOPBACK else None
    options._devices = (
        [gloo.create_device(interface=name.strip()) for name in interfaces.split(",")]
        if interfaces
        else [gloo.create_device(hostname=own_address(place))]
    )
    return gloo(store, place.rank, place.size, options)


def own_address(place: Place) -> str:
    """This machine's address on the way to the place; nothing is sent. By default gloo would use
    that of the machine's name, which on Debian and Ubuntu is 127.0.1.1 to itself.
    """
    kind, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect(address)
        return str(way.getsockname()[0])


def _nccl(store: dist.Store, place: Place) -> Any:
    """Not run yet, for lack of a machine with GPUs. Without the blocking wait torch kills the whole
    process when a rank is lost, even PPO's.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = place.timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # torch reads it when the group is created.
    try:
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)
    finally:
        os.environ.pop(BLOCKING_WAIT)
        os.environ.update({} if before is None else {BLOCKING_WAIT: before})
