"""Which role has memory on the devices: a ledger for all roles, and roles that take turns on the
devices.

    ppo.placement=separate    every role keeps its memory
    ppo.placement=swapped     every role keeps its memory except the reward model, which uses the
                              memory of the critic's weights while it scores
    ppo.placement=in_turn     actor, reference, critic, reward: one at a time; engines have devices
                              of their own
    ppo.placement=shared      engines | actor, reference, critic, reward: one at a time | engines
                              the engines sleep while a role computes, and the roles wait in host
                              memory while they generate; with ppo.piece_prompts one role at a
                              time, with its weights alone, computes its passes while they are
                              awake

A role that leaves is copied to its own host buffers (except what hasn't changed since the last
copy), and its tensors become empty: using them fails, and their device memory is free. The next
role takes over the tensors of the one that leaves where shapes agree: the reference takes the
actor's place and the reward model the critic's, without new allocations. The ranks of a Megatron
actor take turns in their own way (`medusa_ppo.ppo.megatron.rank_memory`).

The ledger counts weights, gradients, AdamW's moments, and an engine's weights, keys and values, but
no activations. Without a GPU the "device" is only what the ledger counts, but tensors are still
moved between separate buffers.
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
from medusa_ppo.config.ppo_section import IN_TURN, SEPARATE, SHARED, SWAPPED
from medusa_ppo.contract import metrics as names

ENGINE, ACTOR, REFERENCE, CRITIC, REWARD = "engine", "actor", "reference", "critic", "reward"
UNFREED = "left, held elsewhere"
"""Tensors that roles gave up but something still holds; empty unless there is a bug."""
GIB = 2**30
TRAINED_COPIES = 4  # Weights, gradients and two moments.
MOMENT = "/"
"""Occurs in the names of tensors that only a training role needs."""
ALL = ("",)
"""The end of every name, so it selects all tensors."""
ROLES = (ACTOR, REFERENCE, CRITIC, REWARD)
TAKE_TURNS = {SEPARATE: (), SWAPPED: (CRITIC, REWARD), IN_TURN: ROLES, SHARED: ROLES}
"""By ppo.placement: the roles of which only one computes at a time."""


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
        """The total peak, and each role's own, since the last call."""
        with self._lock:
            found = {
                names.LEDGER_PEAK: self.peak / GIB,
                names.LEDGER_ROLES: {role: most / GIB for role, most in self.most.items() if most},
            }
            self.peak, self.most = sum(self.now.values()), dict(self.now)
        return found


class Spare:
    """Device tensors of leaving roles, as far as the next role can reuse them.

    Attributes:
        freed: for each tensor that can't be reused, a way to check that it is gone, and its bytes.
    """

    def __init__(self, wanted: Iterable[Tensor], held: Iterable[Tensor] = ()) -> None:
        """
        Args:
            wanted: tensors that the next role lacks.
            held: tensors that it already has in another role's memory.
        """
        self._held = {tensor.data_ptr() for tensor in held}
        self._wanted = Counter((tensor.shape, tensor.dtype) for tensor in wanted)
        self._kept: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, bool]]] = {}
        self.freed: list[tuple[StorageWeakRef, int]] = []

    def wants(self, tensor: Tensor) -> bool:
        """Whether the next role can use it."""
        return self._wanted[tensor.shape, tensor.dtype] > 0

    def holds(self, tensor: Tensor) -> bool:
        """Whether the next role has it already."""
        return tensor.data_ptr() in self._held

    def give(self, tensor: Tensor) -> None:
        """For good."""
        if self.wants(tensor):
            self._keep(tensor, lent=False)
        else:
            self.freed.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))

    def lend(self, tensor: Tensor) -> bool:
        """Lend it until its owner returns. Returns whether it is wanted."""
        wanted = self.wants(tensor)
        if wanted:
            self._keep(tensor, lent=True)
        return wanted

    def take(self, like: Tensor, device: torch.device) -> tuple[Tensor, bool]:
        """A tensor of this shape, and whether it is lent; a new one if none was left."""
        kept = self._kept.get((like.shape, like.dtype))
        if kept:
            return kept.pop()
        return torch.empty_like(like, device=device, pin_memory=False), False

    def _keep(self, tensor: Tensor, *, lent: bool) -> None:
        kind = tensor.shape, tensor.dtype
        self._wanted[kind] -= 1
        self._kept.setdefault(kind, []).append((tensor, lent))


class Resident:
    """A role's weights, and its optimizer's moments: on the device, or in host buffers."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._module = module
        self._optimizer = optimizer
        self._device = next(module.parameters()).device
        self._host: dict[str, Tensor] = {}
        self._current: set[str] = set()  # Names whose host copy equals the device's.
        self._away: set[str] = set()
        self._borrowed: set[str] = set()  # Names that use another role's memory.

    @property
    def here(self) -> bool:
        """Whether anything of it is on the device."""
        return len(self._away) < len(self._slots())

    def touch(self) -> None:
        """The role is about to learn, so its host copies will be out of date."""
        self._current.clear()

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

    def leave(self, spare: Spare, *, partly: bool = False) -> int:
        """Move to the host everything, or only what the next role can use. Returns the bytes that
        had to be copied.
        """
        moved = 0
        for name, tensor in self._slots().items():
            if name in self._away or (partly and not spare.wants(tensor)):
                continue
            here = tensor.data
            moved += self._copy_out(name, here)
            tensor.data = here.new_empty(0)
            self._away.add(name)
            if name in self._borrowed:
                self._borrowed.remove(name)
            else:
                spare.give(here)
        return moved

    def _copy_out(self, name: str, here: Tensor) -> int:
        """Copy to its host buffer, unless that is current. Returns the bytes."""
        if name in self._current:
            return 0
        if name not in self._host:
            self._host[name] = torch.empty_like(here, device="cpu", pin_memory=here.is_cuda)
        self._host[name].copy_(here)
        self._current.add(name)
        return here.nbytes

    def lacks(self, more: tuple[str, ...]) -> dict[str, Tensor]:
        """The host tensors that `come` would move: the weights, and of the tensors for learning
        those whose names end in one of `more`.
        """
        return {
            name: self._host[name]
            for name in self._slots()
            if name in self._away and (MOMENT not in name or name.endswith(more))
        }

    def come(self, spare: Spare, more: tuple[str, ...]) -> int:
        """Move to the device what `lacks` returns. Returns the bytes that were copied."""
        slots = self._slots()
        lacking = self.lacks(more)
        for name, host in lacking.items():
            here, lent = spare.take(host, self._device)
            slots[name].data = here.copy_(host)
            self._away.remove(name)
            if lent:
                self._borrowed.add(name)
        return sum(host.nbytes for host in lacking.values())

    def borrowed(self) -> list[Tensor]:
        """Its tensors that use another role's memory."""
        return [tensor.data for name, tensor in self._slots().items() if name in self._borrowed]

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
        """Bytes on the device now, with gradients."""
        borrowed = sum(tensor.nbytes for tensor in self.borrowed())
        tensors = [
            tensor
            for name, tensor in self._slots().items()
            if name not in self._away and name not in self._borrowed
        ]
        tensors += [
            parameter.grad for parameter in self._module.parameters() if parameter.grad is not None
        ]
        return borrowed + bytes_of(tensors)

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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors; shared memory counts once."""
    return sum(
        {
            storage._cdata: storage.nbytes()
            for tensor in tensors
            for storage in [tensor.untyped_storage()]
        }.values()
    )


class Turns:
    """The roles of a process and their ledger; they take turns as ppo.placement says.

    Attributes:
        shared: all roles leave the device between their turns.
        read_on_device: roles that wait on the host have to come onto the engines' devices to be
            read, so the engines have to sleep meanwhile.
    """

    read_on_device = False

    def __init__(self, placement: str = SEPARATE) -> None:
        self._placement = placement
        self._takers = TAKE_TURNS[placement]
        self.shared = placement in (IN_TURN, SHARED)
        self.ledger = Ledger()
        self._engine_bytes = 0
        self._turn = threading.RLock()
        self._roles: dict[str, Resident] = {}
        self._left: list[tuple[StorageWeakRef, int]] = []
        self._moved = 0
        self._move_s = 0.0
        self._wake_s = 0.0

    @property
    def judges_beside_engine(self) -> bool:
        """Whether a reward model of this process comes onto the engine's device to judge."""
        return self._placement == SHARED and REWARD in self._roles

    def add(
        self, role: str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Add a role of this process whose tensors are on the device. `optimizer`: for a role that
        learns.
        """
        self.settle(role, Resident(module, optimizer))

    def settle(self, role: str, resident: Resident) -> None:
        """Add a role whose memory is managed differently from a module's."""
        self._roles[role] = resident
        if self._placement == SWAPPED and role == REWARD:  # It has no memory of its own.
            self._moved += resident.leave(Spare(()))
        self.report(role)

    def engine_started(self, count: int) -> None:
        """Add an engine with this many bytes while it is awake."""
        self._engine_bytes = count
        self.engine_has(count)

    def engine_has(self, count: int) -> None:
        """Note that the engine has this many bytes from now on."""
        self.ledger.report(ENGINE, count)

    def report(self, role: str) -> None:
        """Update the ledger with the role's present memory; the learner calls this while gradients
        exist.
        """
        if role in self._roles:
            self.ledger.report(role, self._roles[role].nbytes())

    @contextlib.contextmanager
    def on(
        self, role: str, *, training: bool = False, more: tuple[str, ...] = ()
    ) -> Iterator[None]:
        """The role computes in this block. If roles take turns, the others have left, and this one
        stays until another one comes. Other threads wait for their turn: one thread scores pieces
        with the reward model and another with the other models.

        Args:
            training: the role learns, so its tensors for learning come too.
            more: endings of names: tensors for learning with these names come too, but are only
                read.
        """
        turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        takes = role in self._takers and role in self._roles
        with self._turn if takes else turn:
            if takes:
                self._move(role, ALL if training else more)
                if training:
                    self._roles[role].touch()
            self.report(role)
            yield
            self.report(role)

    @contextlib.contextmanager
    def aside(self, *roles: str) -> Iterator[None]:
        """In this block roles are read and none computes. If roles take turns, the device is empty,
        and they are read from the host; other threads wait for their turn.
        """
        with contextlib.ExitStack() as stack:
            if self.shared:
                stack.enter_context(self._turn)
            self.clear()
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
            self.engine_has(0)

    def wake(self, engine: Any, level: int | None) -> None:
        """Wake the engine if `sleep` put it to sleep; roles leave first, if they take turns."""
        if level:
            self.clear()
            began = time.perf_counter()
            engine.wake()
            self._wake_s += time.perf_counter() - began
            self.engine_has(self._engine_bytes)

    def take(self) -> dict[str, Any]:
        """The step's figures; none if the actor is not in this process."""
        if ACTOR not in self._roles:
            return {}
        found = self.ledger.take() | ({names.ENGINE_WAKE_S: self._wake_s} if self._wake_s else {})
        if self._takers:
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
            room: bytes available to all of them.
            engine: of these, the bytes of an engine on the same device that is awake while roles
                compute; if roles take turns with it, they only run passes meanwhile.
        """
        full = {role: resident.full_bytes() for role, resident in self._roles.items()}
        one_at_a_time = [count for role, count in full.items() if role in self._takers]
        need = sum(full.values()) - sum(one_at_a_time) + max(one_at_a_time, default=0)
        if self._placement != SHARED:
            need += engine
        elif engine:
            weights = [resident.weight_bytes() for resident in self._roles.values()]
            need = max(need, engine + max(weights, default=0))
        if need <= room:
            return
        parts = ", ".join(
            f"{role} {count / GIB:.2f}"
            for role, count in {**full, **({ENGINE: engine} if engine else {})}.items()
        )
        do = (
            "Set ppo.placement=shared (with engine.sleep_level=1) or in_turn, or shard the actor"
            " over ranks: actor.backend=megatron."
        )
        if self.shared:
            do = "Shard the actor over ranks (actor.backend=megatron), or use a smaller model."
            if engine and max(full.values(), default=0) <= room:
                do = "Lower engine.memory_fraction, or set ppo.piece_prompts=null."
                if self._placement == IN_TURN:
                    do = "Lower engine.memory_fraction, or give the engine a device of its own."
        raise ConfigError(
            "The roles don't fit the device.",
            given=(f"ppo.placement={self._placement}: {parts} GiB, {need / GIB:.2f} at once"),
            expected=f"at most {room / GIB:.2f} GiB, and room for the activations of passes",
            do=do,
        )

    def _move(self, coming: str | None, more: tuple[str, ...] = ()) -> None:
        """Move all others off the device, and this role onto it. If only two roles take turns, only
        memory that the next one can use is given up.
        """
        began = time.perf_counter()
        spare = Spare(())
        if coming is not None:
            role = self._roles[coming]
            spare = Spare(role.lacks(more).values(), role.borrowed())
        for name, resident in self._roles.items():
            if name != coming and name in self._takers and resident.here:
                self._moved += resident.leave(spare, partly=not self.shared and name == CRITIC)
                self.report(name)
        if coming is not None:
            self._moved += self._roles[coming].come(spare, more)
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
