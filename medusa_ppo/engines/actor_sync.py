"""Sends the actor to the engines: as one safetensors file in shared memory, or as one broadcast to
all of them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import PreTrainedModel

from heads.errors import MedusaError, SwapError
from heads.tensorfile import write_summed
from medusa_ppo.actors.actor_view import SpreadActor
from medusa_ppo.actors.hf import DTYPES, Actor, embedding_weight, lm_head_weight
from medusa_ppo.actors.vision import tower_of
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.pool import EnginePool, Seat
from medusa_ppo.runtime.files import OwnedFolder
from medusa_ppo.runtime.rendezvous import LOOPBACK, choose_backend, device_id
from medusa_ppo.vllm_plugin import transfer
from medusa_ppo.vllm_plugin.transfer import ActorStream, Group

logger = logging.getLogger(__name__)


class BroadcastPool(EnginePool):
    """An `EnginePool` with `stream_actor`.

    Attributes:
        timeout_s: how long a rank may keep the others waiting.
    """

    timeout_s = transfer.TIMEOUT_S
    streams = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `EnginePool`."""
        self._group: Group | None = None
        self._members: list[base.RolloutEngine | None] = []
        self._stream: ActorStream | None = None
        self._sent = ""
        # Several engines may catch up at once, each in a thread of the pool; one of them writes the
        # file.
        self._writing = threading.Lock()
        super().__init__(*args, **kwargs)

    def stream_actor(self, stream: ActorStream, version: int) -> SwapReceipt:
        """Send an actor to all engines. Late engines get it from `stream.write`; if it has changed
        by then, they get no pieces before the next call.

        Raises:
            SwapError: no engine has it.
            CheckpointError: NaN or infinity; the engines have the earlier buckets.
        """
        started = time.perf_counter()
        header = stream.header()
        # Checked first, so that an engine that refuses does so before others have received a part.
        seats, devices = self._check(header)
        group = self._meet(seats, devices)
        checksum, answers = self._together(
            seats,
            lambda engine: engine.receive_actor(header, version),
            lambda: transfer.send(group, stream),
        )
        took = [
            seat
            for seat, answer in answers
            if isinstance(answer, SwapReceipt) and answer.checksum == checksum
        ]
        if not took:
            self._part()
            raise SwapError(
                "No engine accepted the broadcast actor.",
                given=f"version {version}",
                expected="one engine",
                do="Sync a file.",
            )
        for seat in took:
            # Other engines get a file before their next piece.
            seat.versions["actor"] = version
        self._stream = stream
        self._sent = checksum
        self.policy_version = version
        # The pool's file is now outdated; a new one is written when an engine asks for it.
        self._forget("actor")
        self._none_is_behind("actor")
        if stream.changes and len(took) == 1:
            # Nobody could answer in its place if it was lost while the loop changes the actor, and
            # the next sync comes after its answers.
            self._write()
        return SwapReceipt(version, checksum, time.perf_counter() - started)

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        # The pool keeps this file for late engines, so no stream has to be written for them.
        receipt = super().sync_actor(path, version, checked)
        self._stream = None
        return receipt

    def close(self) -> None:
        self._part()
        super().close()

    def _catch_up(self, seat: Seat) -> bool:
        # Engines that have the actor don't wait for the file.
        if self._sent and seat.versions.get("actor") != self.policy_version:
            with self._writing:
                if "actor" not in self._kept and not self._write():
                    return False
        return super()._catch_up(seat)

    def _write(self) -> bool:
        """Write the actor that was sent last to the file that a pool keeps; returns whether that
        worked. It is tried once: the loop may have stepped the actor since it was sent, and an
        engine with those weights would be one version ahead.
        """
        stream = self._stream
        self._stream = None
        if stream is None:
            return False
        file = self._new_file(f"actor-{self.policy_version}")
        try:
            written = stream.write(file, None)
        # No room on the disk or the device, or ranks of the actor that are lost: the loop will say
        # so where it needs them.
        except (OSError, RuntimeError, MedusaError) as error:
            return self._unwritten(file, str(error))
        if written != self._sent:
            return self._unwritten(file, "It has changed since.")
        # A new mapping, since others may be iterating over the old one.
        self._kept = self._kept | {"actor": (file, self.policy_version, Checked(written))}
        return True

    def _unwritten(self, file: Path, why: str) -> bool:
        file.unlink(missing_ok=True)
        logger.warning(
            "There is no file with actor %d, which was sent to the engines. One that is restarted"
            " before the next sync gets no prompts until then. %s",
            self.policy_version,
            why,
        )
        return False

    def _check(self, header: dict[str, Any]) -> tuple[list[Seat], list[list[str]]]:
        """The engines that can take it, and the devices of their ranks' weights. Raises SwapError
        if one refuses or is lost.
        """
        answers = self._ask_all(
            self._seated(), lambda engine: engine.check_actor(header), patience_s=self.timeout_s
        )
        # Broadcast to all or to none (a file is sent instead): a missing rank would keep the others
        # waiting.
        for _, answer in answers:
            if isinstance(answer, Exception):
                raise answer if isinstance(answer, SwapError) else _lost(answer)
        return [seat for seat, _ in answers], [answer for _, answer in answers]

    def _meet(self, seats: list[Seat], devices: list[list[str]]) -> Group:
        """The group of these engines."""
        members = [seat.engine for seat in seats]
        # The group is only reused for the very same engines: a restarted one has no connections.
        if self._group is not None and self._members == members:
            return self._group
        self._part()
        # NCCL needs a GPU per process; if two share one, or one has none, gloo is used.
        own = device_id(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        backend = choose_backend([own, *(device for ranks in devices for device in ranks)])
        host = (
            ray.util.get_node_ip_address()
            if any(engine.elsewhere for engine in members if engine)
            else LOOPBACK
        )
        group = Group.open(
            host, 1 + sum(map(len, devices)), backend=backend, timeout_s=self.timeout_s
        )
        firsts = {
            id(member): 1 + sum(map(len, devices[:index])) for index, member in enumerate(members)
        }
        _, answers = self._together(
            seats,
            lambda engine: engine.join_transfer(asdict(group.place.seen_by(firsts[id(engine)]))),
            group.join,
        )
        failed = next((answer for _, answer in answers if isinstance(answer, Exception)), None)
        if failed is not None:
            group.leave()
            raise _lost(failed)
        self._group = group
        self._members = members
        return group

    def _together(
        self, seats: list[Seat], call: Callable[[base.RolloutEngine], Any], own: Callable[[], Any]
    ) -> tuple[Any, list[tuple[Seat, Any]]]:
        """The result of `own` while the engines are in `call`, and their answers. If `own` fails,
        leaving the group ends their waiting.
        """
        found: list[Any] = []
        errors: list[BaseException] = []

        def meanwhile() -> None:
            try:
                found.append(own())
            # Raised later: the engines' answers must be awaited first, whatever happened here.
            except BaseException as error:
                errors.append(error)
                self._part()

        # Ranks give up by themselves after the timeout; one that is silent for twice as long is
        # lost.
        answers = self._ask_all(seats, call, meanwhile, 2 * self.timeout_s)
        if errors:
            raise errors[0]
        return found[0], answers

    def _part(self) -> None:
        """Leave the group; the next actor needs a new one."""
        group = self._group
        self._group = None
        self._members = []
        if group is not None:
            group.leave()


def _lost(error: Exception) -> SwapError:
    return SwapError(
        "An engine was lost before the actor was sent.",
        given=error,
        expected="all engines",
        do="Sync a file.",
    )


BUCKET_BYTES = 64 * 1024**2
"""Bytes of weights that a pipeline stage joins, or a broadcast sends, at a time; at least one
tensor. Four times as many took as long, and the memory for them counts for a small actor.
"""


class ActorSync:
    """Writes the actor's weights where the engine reads them, or sends them to a `BroadcastPool`. A
    context manager, or call close().

    Attributes:
        nbytes: bytes of weights that each engine got the last time.
        collect_s: seconds until they were written, or for which the broadcast waited; the engine's
            own seconds are in its receipt.
    """

    def __init__(
        self,
        engine: Any,
        dtype: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        ahead: bool = False,
    ) -> None:
        """
        Args:
            engine: where the weights go: a RolloutEngine, or its replacement (DraftingEngine).
            dtype: dtype of the engine's copy; weights are written or sent in it (`auto`: the
                actor's own).
            bucket_bytes: bytes that a broadcast sends at a time.
            ahead: the engine writes while the loop updates the actor (ppo.staleness).
        """
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._ahead = ahead
        self._dtype = DTYPES.get(dtype)
        self.nbytes = 0
        self.collect_s = 0.0
        self._folder = OwnedFolder("medusa-ppo-actor-", shared_memory=True)
        # Kept, because overwriting one is faster than writing a new one (`StateWriter`).
        self._files: list[Path] = []

    def __call__(
        self, actor: Actor, version: int, wake: Callable[[], None] | None = None
    ) -> SwapReceipt:
        """Put the actor's current weights into the engine, which must be idle.

        Args:
            wake: wakes an engine that sleeps; called as late as possible: a file is complete by
                then, and the actor may have left the engine's device.

        Raises:
            SwapError: the engine did not accept them.
        """
        stream = actor_stream(actor, self._dtype, self._bucket_bytes)
        # Checked by names and shapes alone, because nothing has been gathered yet.
        self.nbytes = sum(
            dtype.itemsize * math.prod(shape) for dtype, shape in stream.entries.values()
        )
        self.collect_s = 0.0
        if self._engine.streams:
            if wake is not None:
                wake()
                wake = None
            try:
                timed = replace(
                    stream,
                    tensors=lambda: self._timed(stream.tensors()),
                    changes=self._ahead,
                )
                return self._engine.stream_actor(timed, version)
            except SwapError as error:
                logger.warning(
                    "Sending actor %d to the engines as a file instead. %s", version, error
                )
        path = self._folder.path / f"actor-{version}-{time.monotonic_ns()}.safetensors"
        began = time.perf_counter()
        written = Checked(stream.write(path, self._unread_file()))
        self.collect_s = time.perf_counter() - began
        try:
            if wake is not None:
                wake()
            receipt = self._engine.sync_actor(str(path), version, written)
        except BaseException:
            # An engine may still read it.
            path.unlink(missing_ok=True)
            raise
        self._files.append(path)
        return receipt

    def _unread_file(self) -> Path | None:
        """A file of an earlier sync, to be overwritten; None if there is none without a reader."""
        self._files = [path for path in self._files if path.exists()]
        for path in self._files:
            # A pool has a name of its own for a file that late engines may read.
            if path.stat().st_nlink == 1:
                self._files.remove(path)
                return path
        return None

    def _timed(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        began = time.perf_counter()
        for pair in tensors:
            self.collect_s += time.perf_counter() - began
            yield pair
            began = time.perf_counter()

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()

    def __enter__(self) -> ActorSync:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def actor_stream(
    actor: Actor, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> ActorStream:
    """The actor's checkpoint as a stream to write or send, in `dtype` (None: its own), never whole
    in memory.
    """
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    if isinstance(actor, SpreadActor):
        kind = dtype or torch.float32
        entries = {name: (kind, tuple(shape)) for name, shape in actor.shapes().items()}
        tensors = partial(actor.tensors, kind)
    else:
        assert isinstance(actor, PreTrainedModel), "an actor is a sharded one or a model"
        state = actor_state(actor)
        entries = {
            name: (dtype if dtype and t.is_floating_point() else t.dtype, tuple(t.shape))
            for name, t in state.items()
        }
        tensors = state.items

    def write(path: Path, over: Path | None) -> str:
        return write_summed(path, entries, tensors(), over)

    return ActorStream(entries, tensors, write, bucket_bytes)


def actor_state(actor: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The actor's live weights by their names in its checkpoint; a tied lm_head is left out, as in
    files of tied models.
    """
    output = actor.get_output_embeddings()
    tied = lm_head_weight(actor) is embedding_weight(actor)
    # A tied lm_head has a name in state_dict, but none in a tied model's files.
    alias = {
        f"{name}.weight" for name, module in actor.named_modules() if tied and module is output
    }
    state = {
        name: tensor.detach() for name, tensor in actor.state_dict().items() if name not in alias
    }
    if tower_of(actor) is None:
        return state
    # Imported here: in practice it is private to save_pretrained, and nothing else needs it.
    from transformers.core_model_loading import revert_weight_conversion

    # The names of these models in files differ from those in memory.
    return revert_weight_conversion(actor, state)
