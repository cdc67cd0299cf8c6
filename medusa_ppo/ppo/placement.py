"""Who has memory on the devices: a ledger for all roles, and roles that take turns on the devices.

    ppo.placement=separate    every role keeps its memory
    ppo.placement=shared      engine | actor, reference, critic, reward: one at a time | engine
                              the engine sleeps while others compute, they wait in host memory while
                              it writes; with ppo.piece_prompts one at a time comes for its passes
                              beside the engine that is awake, with its weights alone

A role that leaves is copied into its own host buffers (unchanged tensors are already there), and
its tensors become empty: using them fails, and the device gets the memory back. A role that moves
in reuses the tensors of the one that leaves if shapes match, so the reference takes the actor's
place and the reward model the critic's, and nothing is allocated for them.

The ledger counts weights, gradients, AdamW's moments, and an engine's weights, keys and values, but
no activations. Without a GPU the "device" is what the ledger counts, and tensors really move
between separate buffers.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from heads.errors import ConfigError
from medusa_ppo.contract import metrics as names

ENGINE, ACTOR, REFERENCE, CRITIC, REWARD = "engine", "actor", "reference", "critic", "reward"
UNFREED = "left, held elsewhere"
"""Tensors that roles gave up but something still holds; empty unless there is a bug."""
GIB = 2**30
TRAINED_COPIES = 4  # Weights, gradients and two moments.
MOMENT = "/"


class Ledger:
    """Bytes on the devices, current and peak, by role. Any thread may report."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.peak = 0
        self._lock = threading.Lock()

    def report(self, role: str, count: int) -> None:
        """Record the role's current bytes."""
        with self._lock:
            self.now[role] = count
            self.most[role] = max(count, self.most.get(role, 0))
            self.peak = max(self.peak, sum(self.now.values()))

    def take(self) -> dict[str, Any]:
        """The peak in total and of each role since the last call."""
        with self._lock:
            found = {
                names.LEDGER_PEAK: self.peak / GIB,
                names.LEDGER_ROLES: {role: most / GIB for role, most in self.most.items() if most},
            }
            self.peak, self.most = sum(self.now.values()), dict(self.now)
        return found


class Spare:
    """Device tensors that leaving roles gave up, as far as the next role can reuse them.

    Attributes:
        freed: for each that it can't reuse, how to see whether it is gone, and its bytes.
    """

    def __init__(self, wanted: Iterable[Tensor]) -> None:
        self._wanted = Counter((tensor.shape, tensor.dtype) for tensor in wanted)
        self._kept: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.freed: list[tuple[StorageWeakRef, int]] = []

    def give(self, tensor: Tensor) -> None:
        kind = tensor.shape, tensor.dtype
        if self._wanted[kind]:
            self._wanted[kind] -= 1
            self._kept.setdefault(kind, []).append(tensor)
        else:
            self.freed.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))

    def take(self, like: Tensor, device: torch.device) -> Tensor:
        """A tensor of this shape; a new one if none is left."""
        kept = self._kept.get((like.shape, like.dtype))
        return kept.pop() if kept else torch.empty_like(like, device=device, pin_memory=False)


class Resident:
    """A role's weights, and its optimizer's moments: on the device, or in host buffers."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._module = module
        self._optimizer = optimizer
        self._device = next(module.parameters()).device
        self._host: dict[str, Tensor] = {}
        self._away: set[str] = set()
        self.changed = True  # Since it last left.

    @property
    def here(self) -> bool:
        """Whether anything of it is on the device."""
        return len(self._away) < len(self._slots())

    def _slots(self) -> dict[str, Tensor]:
        """Its tensors by name: weights, and moments as `weight/moment`."""
        own = dict(self._module.named_parameters())
        state = self._optimizer.state if self._optimizer else {}
        moments = {
            name + MOMENT + key: value
            for name in own
            for key, value in state.get(own[name], {}).items()
            if value.dim()
        }
        return {**own, **moments}

    def leave(self, spare: Spare) -> int:
        """Move everything to the host. Returns the bytes that had to be copied."""
        moved = 0
        for name, tensor in self._slots().items():
            if name in self._away:
                continue
            here = tensor.data
            if self.changed or name not in self._host:
                if name not in self._host:
                    self._host[name] = torch.empty_like(here, device="cpu", pin_memory=here.is_cuda)
                self._host[name].copy_(here)
                moved += here.nbytes
            tensor.data = here.new_empty(0)
            self._away.add(name)
            spare.give(here)
        self.changed = False
        return moved

    def lacks(self, training: bool) -> dict[str, Tensor]:
        """What would move in, as it waits on the host; moments only for training."""
        return {
            name: self._host[name]
            for name in self._slots()
            if name in self._away and (training or MOMENT not in name)
        }

    def come(self, spare: Spare, training: bool) -> int:
        """Move to the device. Returns the bytes copied."""
        slots = self._slots()
        lacking = self.lacks(training)
        for name, host in lacking.items():
            slots[name].data = spare.take(host, self._device).copy_(host)
            self._away.remove(name)
        return sum(host.nbytes for host in lacking.values())

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Within the block, tensors waiting on the host can be read there."""
        waiting = {name: tensor for name, tensor in self._slots().items() if name in self._away}
        for name, tensor in waiting.items():
            tensor.data = self._host[name]
        try:
            yield
        finally:
            for tensor in waiting.values():
                tensor.data = tensor.new_empty(0, device=self._device)

    def nbytes(self) -> int:
        """Current bytes on the device, with gradients."""
        tensors = [tensor for name, tensor in self._slots().items() if name not in self._away]
        tensors += [
            parameter.grad for parameter in self._module.parameters() if parameter.grad is not None
        ]
        return sum(
            {
                storage.data_ptr(): storage.nbytes()
                for tensor in tensors
                for storage in [tensor.untyped_storage()]
            }.values()
        )

    def full_bytes(self) -> int:
        """Peak bytes on the device."""
        return self.weight_bytes() * (TRAINED_COPIES if self._optimizer else 1)

    def weight_bytes(self) -> int:
        """Bytes on the device for a pass without gradients."""
        return sum(
            math.prod(self._host[name].shape) * parameter.itemsize
            if name in self._away
            else parameter.nbytes
            for name, parameter in self._module.named_parameters()
        )


class Turns:
    """The roles of a run and their ledger; with `shared` they take turns."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.ledger = Ledger()
        self._engine_bytes = 0
        self._turn = threading.RLock()
        self._roles: dict[str, Resident] = {}
        self._left: list[tuple[StorageWeakRef, int]] = []
        self._moved = 0
        self._move_s = 0.0
        self._wake_s = 0.0

    def add(
        self, role: str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Add a role of this process whose tensors are on the device. `optimizer`: for a role that
        learns.
        """
        self._roles[role] = Resident(module, optimizer)
        self.report(role)

    def engine_started(self, count: int) -> None:
        """Add an engine with this many bytes while it is awake."""
        self._engine_bytes = count
        self.ledger.report(ENGINE, count)

    def report(self, role: str) -> None:
        """Update the ledger with what the role has now; the learner calls this while there are
        gradients.
        """
        if role in self._roles:
            self.ledger.report(role, self._roles[role].nbytes())

    @contextlib.contextmanager
    def on(self, role: str, *, training: bool = False) -> Iterator[None]:
        """The role computes in this block. If roles take turns, the others have left, and it stays
        until another one moves in. Other threads wait: one thread may judge pieces with a reward
        model while another scores them.
        """
        turn: contextlib.AbstractContextManager[Any] = (
            self._turn if self.shared else contextlib.nullcontext()
        )
        with turn:
            if self.shared and role in self._roles:
                self._move(role, training)
                self._roles[role].changed |= training
            self.report(role)
            yield
            self.report(role)

    @contextlib.contextmanager
    def aside(self, *roles: str) -> Iterator[None]:
        """In this block roles are read and nothing computes. If roles take turns, nothing is on the
        device, and they are read from the host.
        """
        self.clear()
        with contextlib.ExitStack() as stack:
            for role in roles:
                if role in self._roles:
                    stack.enter_context(self._roles[role].read())
            yield

    def clear(self) -> None:
        """All roles leave, if they take turns."""
        with self._turn:
            if self.shared and any(resident.here for resident in self._roles.values()):
                self._move(None)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # The engine is a separate process.

    def sleep(self, engine: Any, level: int | None) -> None:
        """Put the engine to sleep, if a level is set."""
        if level:
            began = time.perf_counter()
            engine.sleep(level)
            self._wake_s += time.perf_counter() - began
            self.ledger.report(ENGINE, 0)

    def wake(self, engine: Any, level: int | None) -> None:
        """Wake the engine if `sleep` put it to sleep."""
        if level:
            began = time.perf_counter()
            engine.wake()
            self._wake_s += time.perf_counter() - began
            self.ledger.report(ENGINE, self._engine_bytes)

    def take(self) -> dict[str, Any]:
        """The step's figures; none if the actor is not in this process."""
        if ACTOR not in self._roles:
            return {}
        found = self.ledger.take() | ({names.ENGINE_WAKE_S: self._wake_s} if self._wake_s else {})
        if self.shared:
            found |= {names.OFFLOAD_S: self._move_s, names.OFFLOAD_BYTES: self._moved}
        self._moved = 0
        self._move_s = 0.0
        self._wake_s = 0.0
        return found

    def free_memory(self) -> int:
        """Room for all roles on a machine without a GPU, including what they already have. Host
        memory is the device, so waiting copies take the same memory.
        """
        full = [resident.full_bytes() for resident in self._roles.values()]
        return (
            psutil.virtual_memory().available
            + sum(self.ledger.now.values())
            - (sum(full) if self.shared else 0)
        )

    def check_room(self, room: int, engine: int = 0) -> None:
        """Raise ConfigError if the roles don't fit.

        Args:
            room: bytes available for all of them.
            engine: of these, what an engine on the same device uses while it is awake and others
                compute; if roles take turns, only for passes.
        """
        full = {role: resident.full_bytes() for role, resident in self._roles.items()}
        need = sum(full.values()) + engine
        if self.shared:
            need = max(full.values(), default=0)
            if engine:
                passes = max(resident.weight_bytes() for resident in self._roles.values())
                need = max(need, engine + passes)
        if need <= room:
            return
        parts = ", ".join(
            f"{role} {count / GIB:.2f}"
            for role, count in {**full, **({ENGINE: engine} if engine else {})}.items()
        )
        do = (
            "Set ppo.placement=shared (with engine.sleep_level=1), or shard the actor over ranks: "
            "actor.backend=megatron."
        )
        if self.shared:
            do = "Shard the actor over ranks (actor.backend=megatron), or use a smaller model."
            if engine and max(full.values()) <= room:
                do = "Lower engine.memory_fraction, or set ppo.piece_prompts=null."
        raise ConfigError(
            "The roles don't fit the device.",
            given=(
                f"ppo.placement={'shared' if self.shared else 'separate'}: {parts} GiB,"
                f" {need / GIB:.2f} at once"
            ),
            expected=f"at most {room / GIB:.2f} GiB, and room for activations",
            do=do,
        )

    def _move(self, coming: str | None, training: bool = False) -> None:
        """All other roles leave the device, and this one moves in."""
        began = time.perf_counter()
        spare = Spare(self._roles[coming].lacks(training).values() if coming is not None else ())
        for role, resident in self._roles.items():
            if role != coming and resident.here:
                self._moved += resident.leave(spare)
                self.report(role)
        if coming is not None:
            self._moved += self._roles[coming].come(spare, training)
        self._left = [
            (storage, count)
            for storage, count in [*self._left, *spare.freed]
            if not storage.expired()
        ]
        if self._left or UNFREED in self.ledger.now:
            self.ledger.report(UNFREED, sum(count for _, count in self._left))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._move_s += time.perf_counter() - began
