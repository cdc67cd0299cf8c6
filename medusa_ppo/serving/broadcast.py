"""A pool whose engines take each new actor from one broadcast, all at once. For those that come late a file is written.

    check      every engine compares names, shapes and kinds of numbers with its model; where one refuses nothing has changed
    meet       a group of this process and all ranks of all engines; kept until the engines are others
    send       each engine is in one call that receives, while this process sends

Whatever breaks on the way is a SwapError within the timeout, and the caller's next step is `sync_actor` with a file, which mends engines
that are between two actors. Until then they answer nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch

from heads.errors import RunError, SwapError
from heads.tensorfile import tensorwise_checksum
from medusa_ppo.serving import engine as base
from medusa_ppo.serving import transfer
from medusa_ppo.serving.pool import EnginePool, Seat
from medusa_ppo.serving.transfer import ActorStream, Group, Place
from medusa_ppo.types import Checked, SwapReceipt


class BroadcastPool(EnginePool):
    """An `EnginePool` with `stream_actor`.

    Attributes:
        timeout_s: how long a rank may keep the others waiting.
    """

    timeout_s = transfer.TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `EnginePool`."""
        self._group: Group | None = None
        self._members: list[base.RolloutEngine | None] = []
        self._stream: ActorStream | None = None
        self._sent = ""
        self._writing = threading.Lock()
        super().__init__(*args, **kwargs)

    def stream_actor(self, stream: ActorStream, version: int) -> SwapReceipt:
        """Send an actor to all engines. It must stay as it is until the next one: engines that come late get it from `stream.write`.

        Raises:
            SwapError: no engine has it.
            CheckpointError: NaN or infinity; the engines have the buckets before.
        """
        started, header = time.perf_counter(), stream.header()
        seats, devices = self._check(header)
        group = self._meet(seats, devices)
        checksum, answers = self._together(
            seats, lambda engine: engine.receive_actor(header, version), lambda: transfer.send(group, stream)
        )
        took = [seat for seat, answer in answers if isinstance(answer, SwapReceipt) and answer.checksum == checksum]
        if not took:
            self._part()
            raise SwapError("No engine took the broadcast actor.", given=f"version {version}", expected="one engine", do="Sync a file.")
        for seat in took:
            seat.versions["actor"] = version
        self._stream, self._sent, self.policy_version = stream, checksum, version
        self._forget("actor")
        return SwapReceipt(version, checksum, time.perf_counter() - started)

    def sync_actor(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        receipt = super().sync_actor(path, version, checked)
        self._stream = None
        return receipt

    def close(self) -> None:
        self._part()
        super().close()

    def _catch_up(self, seat: Seat) -> None:
        with self._writing:
            if self._stream is not None and "actor" not in self._kept and seat.versions.get("actor") != self.policy_version:
                self._write(self._stream)
        super()._catch_up(seat)

    def _write(self, stream: ActorStream) -> None:
        """The actor that was sent last, as the file that a pool keeps. RunError when it has changed since."""
        file = self._new_file(f"actor-{self.policy_version}")
        stream.write(file)
        found = base.check_state(file, "the actor's weights", tensorwise_checksum)
        if found.checksum != self._sent:
            given = f"{found.checksum[:16]} instead of {self._sent[:16]}"
            raise RunError("The actor has changed since it was sent.", given=given, expected="the same until the next sync", do="Sync it.")
        self._kept = self._kept | {"actor": (file, self.policy_version, found)}  # Others may be reading it.

    def _check(self, header: dict[str, Any]) -> tuple[list[Seat], list[list[str]]]:
        """The engines that can take it, and where their ranks have their weights. SwapError when one refuses, or is lost over it."""
        answers = self._ask_all(self._seated(), lambda engine: engine.check_actor(header), patience_s=self.timeout_s)
        for _, answer in answers:
            if isinstance(answer, Exception):
                raise answer if isinstance(answer, SwapError) else _lost(answer)
        return [seat for seat, _ in answers], [answer for _, answer in answers]

    def _meet(self, seats: list[Seat], devices: list[list[str]]) -> Group:
        """The group of these engines."""
        members = [seat.engine for seat in seats]
        if self._group is not None and self._members == members:
            return self._group
        self._part()
        own = transfer.device_id(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        backend = transfer.choose_backend([own, *(device for ranks in devices for device in ranks)])
        host = ray.util.get_node_ip_address() if any(engine.elsewhere for engine in members if engine) else transfer.LOOPBACK
        store, port = transfer.open_place(host, self.timeout_s)
        place = Place(host, port, 1 + sum(map(len, devices)), 0, backend, self.timeout_s)
        firsts = {id(member): 1 + sum(map(len, devices[:index])) for index, member in enumerate(members)}
        group, answers = self._together(
            seats, lambda engine: engine.join_transfer(asdict(place) | {"rank": firsts[id(engine)]}), lambda: Group(place, store)
        )
        failed = next((answer for _, answer in answers if isinstance(answer, Exception)), None)
        if failed is not None:
            group.close()
            raise _lost(failed)
        self._group, self._members = group, members
        return group

    def _together(
        self, seats: list[Seat], call: Callable[[base.RolloutEngine], Any], own: Callable[[], Any]
    ) -> tuple[Any, list[tuple[Seat, Any]]]:
        """What `own` gives while the engines are in `call`, and their answers. Its error leaves the group, which ends their waiting."""
        found: list[Any] = []
        errors: list[BaseException] = []

        def meanwhile() -> None:
            try:
                found.append(own())
            except BaseException as error:
                errors.append(error)
                self._part()

        # Ranks give up after the timeout by themselves; who is silent for twice as long is lost.
        answers = self._ask_all(seats, call, meanwhile, 2 * self.timeout_s)
        if errors:
            raise errors[0]
        return found[0], answers

    def _part(self) -> None:
        """Leave the group; the next actor needs a new one."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.close()


def _lost(error: Exception) -> SwapError:
    return SwapError("An engine was lost before the actor was sent.", given=error, expected="all engines", do="Sync a file.")
