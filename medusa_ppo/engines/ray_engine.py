"""The colocated engine inside a Ray actor (with its own process, threads and environment, ended
with the run), and `make_engine`, which chooses.

An engine on this node reads new weights from the file in shared memory. One on another node gets
the file's bytes through Ray's object store: they are stored once, and nodes that have them pass
them on, so that many engines don't queue at one node.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from heads.errors import EngineError, MedusaError, NoRoomError
from medusa_ppo.config.engine_section import COLOCATED, EngineConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines import http_server
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.actor_sync import BroadcastPool
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.launch import LaunchPlan, plan_launch, process_environment, reading_s
from medusa_ppo.engines.pieces import Ended, Finished, Partly, SharedMemory, tell
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.runtime.files import OwnedFolder, forget_registration, sweep
from medusa_ppo.runtime.hardware import gpu_places, settled_engine, visible_gpus
from medusa_ppo.runtime.processes import (
    TOKEN,
    SharedPlace,
    bundle,
    in_bundle,
    on_one_node,
    ray_errors,
    release,
    reserve,
    run_hardware,
)

START_TIMEOUT_S = 600.0
"""Without the time to read the weights (`LaunchPlan.load_s`)."""
CLOSE_TIMEOUT_S = 20.0
LOOK_EVERY_S = 1.0
STATE = ("max_drafts", "num_drafts", "policy_version", "heads_version", "note")
Answer = tuple[Any, dict[str, Any]]
SentFiles = dict[str, list[Any]]
"""Names of files, and a reference to each one's bytes; in a list, so that Ray fetches the bytes
only where they are read.
"""


class EngineHost:
    """Runs in the Ray actor. Each answer has a value or one of our errors (returned instead of
    raised, so that it arrives unchanged), and the engine's numbers.
    """

    def __init__(self, *start: Any) -> None:
        """As `ColocatedEngine`, with the plan last."""
        self._start = start
        self._engine: ColocatedEngine | None = None

    def lacks_heads(self) -> Answer:
        """Whether this node does not have the heads' folder."""
        _, heads, *_ = self._start
        return not Path(heads).is_dir(), {}

    def start(self, sent: SentFiles, devices: tuple[str, ...] = ()) -> Answer:
        """Start vLLM; returns the id of the Ray node that this runs on.

        Args:
            sent: the files of the heads' folder; empty: this node has it, or there are no heads.
            devices: the GPUs to use; none: those that Ray gave to this process.
        """
        if devices:
            # Early enough: nothing here has used a GPU yet.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        # No command of ours runs on a node that has only engines, and an engine that was killed
        # there while it received a file has left it in memory.
        sweep(shared_memory_alone=True)
        model, heads, *more, plan = self._start
        with contextlib.ExitStack() as stack:
            if sent:
                # Removed as soon as vLLM has read them: `close` ends this process with SIGKILL.
                heads = stack.enter_context(_received(sent))
            try:
                self._engine = ColocatedEngine(model, heads, *more, plan=plan)
            except MedusaError as error:
                return error, {}
            finally:
                forget_registration()  # Its own workers (tensor parallelism) do so themselves.
        return ray.get_runtime_context().get_node_id(), self._state()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Answer:
        """Call a method of the engine."""
        try:
            return getattr(self._engine, method)(*args, **kwargs), self._state()
        except MedusaError as error:
            return error, self._state()

    def generate_in_steps(self, prompts: base.Prompts, sampling: Sampling) -> Iterator[Answer]:
        """As for the engine; the final result comes without its responses, which the caller already
        has.
        """
        assert self._engine is not None, "start() was called"
        try:
            for part in self._engine.generate_in_steps(prompts, sampling):
                yield (
                    (replace(part, responses=()) if isinstance(part, Rollouts) else part),
                    self._state(),
                )
        except MedusaError as error:
            yield error, self._state()

    def call_with_bytes(
        self, method: str, content: np.ndarray, version: int, checked: Checked | None
    ) -> Answer:
        """Call a method that reads a file, with the file's bytes from another node."""
        try:
            with received_file(content) as path:
                return self.call(method, path, version, checked)
        except NoRoomError as error:
            return error, self._state()

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in STATE}


@contextlib.contextmanager
def _received(sent: SentFiles) -> Iterator[str]:
    """A folder in this node's memory that has these files during the block."""
    with contextlib.closing(OwnedFolder("medusa-ppo-received-", shared_memory=True)) as owned:
        folder = owned.path / "heads"
        folder.mkdir()
        for name, (reference,) in sent.items():
            content: Any = ray.get(reference)
            content.tofile(folder / name)
        yield str(folder)


@contextlib.contextmanager
def received_file(content: np.ndarray) -> Iterator[str]:
    """The name of a file in this node's memory that has these bytes, from another node, during the
    block. Raises NoRoomError if it can't be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = OwnedFolder("medusa-ppo-received-", shared_memory=True)
            stack.callback(folder.close)
            path = folder.path / "state.safetensors"
            content.tofile(path)
        except OSError as error:
            raise NoRoomError(
                "The engine's node has no room for a file that was sent to it.",
                given=f"{content.nbytes} bytes on {os.uname().nodename}: {error}",
                expected="room in /dev/shm",
                do="Enlarge /dev/shm of that node, or free memory there.",
            ) from error
        yield str(path)


def gpus_asked(config: EngineConfig) -> float:
    """GPUs that Ray gives to an engine: a share of one, or one for each of its ranks; none in a
    cluster without GPUs.
    """
    if not ray.cluster_resources().get("GPU"):
        return 0.0
    ranks = config.ranks
    return (settled_engine(config).memory_fraction or 0.0) if ranks == 1 else float(ranks)


@dataclass
class Stored:
    """A file's bytes in Ray's object store, and the number of engines that they are being sent
    to.
    """

    reference: Any
    engines: int = 0


_stored: dict[tuple[str, int, int], Stored] = {}
_storing = threading.Lock()


def put_file(path: str) -> Any:
    """Put a file's bytes into Ray's object store; returns the reference. Raises NoRoomError if the
    store does not take them.
    """
    try:
        return ray.put(np.fromfile(path, dtype=np.uint8))
    except RayError as error:
        raise NoRoomError(
            "Ray's object store did not take a file for engines on other nodes.",
            given=f"{path}, {os.path.getsize(path)} bytes: {str(error).strip()}",
            expected="room for it on the loop's node",
            do="Start Ray with a larger --object-store-memory, or free disk for it.",
        ) from error


@contextlib.contextmanager
def _in_store(path: str) -> Iterator[Any]:
    """As `put_file`. The bytes are stored once for all engines that are sent them at the same time,
    and no longer: an actor takes as much memory there as the file.
    """
    status = os.stat(path)
    # A file with the same name may be newer.
    key = (path, status.st_ino, status.st_mtime_ns)
    with _storing:
        if key not in _stored:
            _stored[key] = Stored(put_file(path))
        stored = _stored[key]
        stored.engines += 1
    try:
        yield stored.reference
    finally:
        with _storing:
            stored.engines -= 1
            if not stored.engines:
                del _stored[key]


@contextlib.contextmanager
def _folder_in_store(folder: str | None) -> Iterator[SentFiles]:
    """As `_in_store`, for a folder's files; None: there are none to send."""
    with contextlib.ExitStack() as stack:
        paths = Path(folder).iterdir() if folder is not None else ()
        yield {
            path.name: [stack.enter_context(_in_store(str(path)))]
            for path in paths
            if path.is_file()
        }


def _forwarded(method: str) -> Any:
    """The method of the engine in the actor."""

    @functools.wraps(getattr(ColocatedEngine, method))
    def forward(self: RayEngine, *args: Any, **kwargs: Any) -> Any:
        return self._call(method, *args, **kwargs)

    return forward


class RayEngine(base.RolloutEngine):
    """`ColocatedEngine` in a Ray actor. The caller runs `ray.init` first."""

    _load_s = 0.0
    """Seconds that reading its model's weights may take."""

    def __init__(
        self,
        model_path: str | Path,
        heads_path: str | Path | None,
        config: EngineConfig,
        seed: int = 0,
        *,
        plan: LaunchPlan | None = None,
        where: dict[str, Any] | None = None,
        place: SharedPlace | None = None,
        closing: threading.Event | None = None,
        load_s: float | None = None,
    ) -> None:
        """Start the actor and vLLM in it. Raises like `plan_launch` before anything starts, and
        EngineError afterwards.

        Args:
            plan: as for `ColocatedEngine`.
            where: Ray options that place the actor (`runtime.processes.in_bundle`); None: Ray
                finds a place.
            place: other processes' place, to share with them; it asks Ray for no GPU then.
            closing: set when nobody wants the engine any more, which ends its start.
            load_s: as in the plan, of an engine that was planned before; None: it was not.
        """
        # Planned here only to refuse before anything starts, and to know how long that may take;
        # the actor plans by its own node's hardware.
        if load_s is None:
            load_s = (plan or plan_launch(model_path, heads_path, config, seed)).load_s
        self._load_s = load_s
        if not ray.is_initialized():
            raise EngineError(
                "Ray is not running.",
                given="no ray.init() in this process",
                expected="a Ray session",
                do="Call ray.init() first.",
            )
        devices = () if place is None else place.devices
        gpus = gpus_asked(config) if place is None else 0.0
        # No CPU is reserved: in colocated mode the engine and the companion share the node's cores
        # by design.
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "runtime_env": {
                "env_vars": process_environment(config, has_gpu=gpus > 0 or bool(devices))
            },
            # Ray would restart it without heads and actor; the pool restarts it with both.
            "max_restarts": 0,
            "resources": {config.resource: TOKEN} if config.resource else None,
            **(where or {}),
            **({} if place is None else place.where),
        }
        heads = str(Path(heads_path).resolve()) if heads_path else None
        # The actor has a different working directory.
        model = str(Path(model_path).resolve()) if Path(model_path).is_dir() else str(model_path)
        actor: Any = ray.remote(**options)(EngineHost)
        self._host: Any = actor.remote(model, heads, config, seed, plan)
        self._slots = config.max_num_seqs or 1
        closing = closing or threading.Event()
        try:
            lacks = (
                heads is not None
                and not on_one_node()
                and self._ask_at_start(closing, "lacks_heads")
            )
            with _folder_in_store(heads if lacks else None) as sent:
                node = self._ask_at_start(closing, "start", sent, devices)
            self.elsewhere = node != ray.get_runtime_context().get_node_id()
        except MedusaError:
            self.close()
            raise

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        longest_s = http_server.patience_s(prompts, sampling, self._slots)
        return self._ask(
            "calling generate", "call", "generate", prompts, sampling, timeout=longest_s
        )

    def generate_partly(
        self, prompts: base.Prompts, sampling: Sampling, partly: Partly
    ) -> Rollouts:
        longest_s = http_server.patience_s(prompts, sampling, self._slots)
        return self._ask(
            "calling generate_partly",
            "call",
            "generate_partly",
            prompts,
            sampling,
            partly,
            timeout=longest_s,
        )

    check_actor = _forwarded("check_actor")
    join_transfer = _forwarded("join_transfer")
    receive_actor = _forwarded("receive_actor")
    configure = _forwarded("configure")
    checksums = _forwarded("checksums")
    counters = _forwarded("counters")
    plugin_report = _forwarded("plugin_report")
    choices = _forwarded("choices")
    forget_prompts = _forwarded("forget_prompts")
    remember = _forwarded("remember")
    probe = _forwarded("probe")
    sleep = _forwarded("sleep")
    wake = _forwarded("wake")

    def generate_as_finished(
        self, prompts: base.Prompts, sampling: Sampling, finished: Finished
    ) -> Rollouts:
        return tell(self._parts(prompts, sampling), finished)

    def _parts(self, prompts: base.Prompts, sampling: Sampling) -> Iterator[Ended | Rollouts]:
        """One call, whose parts arrive through Ray's object store as the engine produces them."""
        # Between two parts: some response runs all the time, whatever else waits for a slot.
        longest_s = http_server.patience_s(prompts, sampling)
        with self._errors("generating"):
            stream = (
                self._running("generating")
                .generate_in_steps.options(num_returns="streaming")
                .remote(prompts, sampling)
            )
            while ray.wait([stream], timeout=longest_s)[0]:
                yield self._understood(ray.get(next(stream)))
            raise GetTimeoutError(f"no response in {longest_s:.0f} s")

    def swap_heads(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        return self._send("swap_heads", base.check_file(path, "new heads"), version, checked)

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        return self._send(
            "sync_actor", base.check_file(path, "the actor's weights"), version, checked
        )

    def close(self) -> None:
        host = self._host
        self._host = None
        if host is None or not ray.is_initialized():
            return
        try:
            ray.get(host.call.remote("close"), timeout=CLOSE_TIMEOUT_S)
        # AttributeError: vLLM never came up, so there is no engine to close.
        except (RayError, AttributeError):
            base.logger.debug("the engine's actor was gone or busy at close", exc_info=True)
        # It may hang in a call, and the GPU is free only once the process is gone.
        ray.kill(host, no_restart=True)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._ask(
            f"calling {method}", "call", method, *args, timeout=http_server.CALL_TIMEOUT_S, **kwargs
        )

    def _send(self, method: str, path: str, version: int, checked: Checked | None) -> Any:
        """Call a method that reads a file, wherever the engine is."""
        if not self.elsewhere:
            return self._call(method, path, version, checked)
        with _in_store(path) as content:
            return self._ask(
                f"calling {method}",
                "call_with_bytes",
                method,
                content,
                version,
                checked,
                timeout=http_server.CALL_TIMEOUT_S,
            )

    def _ask(
        self, doing: str, entry: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """The answer of an `EngineHost` method; Ray's failures, and silence for `timeout` seconds,
        become EngineError.
        """
        with self._errors(doing):
            return self._understood(
                ray.get(
                    getattr(self._running(doing), entry).remote(*args, **kwargs), timeout=timeout
                )
            )

    def _ask_at_start(self, closing: threading.Event, entry: str, *args: Any) -> Any:
        """As `_ask`, until nobody wants the engine any more."""
        with self._errors("starting"):
            answer = getattr(self._running("starting"), entry).remote(*args)
            within_s = START_TIMEOUT_S + self._load_s
            deadline = time.monotonic() + within_s
            while not ray.wait([answer], timeout=LOOK_EVERY_S)[0]:
                if closing.is_set():
                    raise base.not_wanted()
                if time.monotonic() > deadline:
                    raise GetTimeoutError(f"no answer in {within_s:.0f} s")
            return self._understood(ray.get(answer))

    def _running(self, doing: str) -> Any:
        if self._host is None:
            raise EngineError(
                "The engine is closed.",
                given=f"{doing} after close()",
                expected="a running engine",
                do="Start a new one.",
            )
        return self._host

    @staticmethod
    def _errors(doing: str) -> contextlib.AbstractContextManager[None]:
        return ray_errors(
            EngineError,
            f"The engine's process, {doing},",
            "Read the log of Ray's worker, and check the memory.",
        )

    def _understood(self, given: Answer) -> Any:
        """The value of an answer, or its error raised; the engine's numbers are stored."""
        answer, state = given
        # As attributes that need no call; STATE names them.
        vars(self).update(state)
        if isinstance(answer, MedusaError):
            raise answer
        return answer


# ---- the choice between the forms


def make_engine(
    model_path: str | Path,
    heads_path: str | Path | None,
    config: EngineConfig,
    seed: int = 0,
    *,
    supervised: bool = False,
    places: Sequence[SharedPlace] = (),
    step: int = 0,
) -> base.RolloutEngine:
    """The engine that `config.backend` selects.

    `colocated`: vLLM in a Ray actor of this cluster (the caller runs `ray.init`); `server`: over
    HTTP, started here or running at the given addresses. With `config.replicas` above 1, or a
    broadcast actor: a pool of them. Raises ConfigError if servers started here don't have a GPU
    each.

    Args:
        supervised: also restart a single engine when it is lost, with its heads and actor; a pool
            always does.
        places: other processes' places, one for each engine to share (backend `colocated`); none:
            Ray finds places for them.
        step: the step that a resumed loop goes on with; its engines draw other random numbers than
            those that began with step 0.
    """
    config = settled_engine(config, run_hardware if config.backend == COLOCATED else None)
    # Decided before any of them starts, so that the first does not take another's place.
    servers = gpu_places(config, visible_gpus()).servers
    closing = threading.Event()
    load_s: float | None = None

    def unplaced(index: int, section: EngineConfig, own_seed: int) -> base.RolloutEngine:
        """An engine placed by Ray, or a server with its own GPUs."""
        if config.backend == COLOCATED:
            place = places[index] if places else None
            return RayEngine(
                model_path,
                heads_path,
                section,
                own_seed,
                place=place,
                closing=closing,
                load_s=load_s,
            )
        devices = servers[index] if servers else ()
        return ServerEngine(
            model_path, heads_path, section, own_seed, devices=devices, closing=closing
        )

    if config.replicas == 1 and not supervised and config.transfer == "file":
        return unplaced(0, config, engine_seed(seed, 0, step))
    if config.backend == COLOCATED:
        # Once for all engines and restarts, so that warnings come once, and before the wait for
        # the room.
        load_s = plan_launch(model_path, heads_path, replica(config, 0), seed).load_s
    group = None
    # Room for all engines at once, which is kept while a lost one is started again.
    if config.backend == COLOCATED and not places:
        room = [bundle(gpus_asked(config), config.resource)] * config.replicas
        what = "engines" if config.replicas > 1 else "engine"
        # As long as an engine waits whose place Ray finds: nodes may still be on their way.
        group = reserve(room, what, timeout_s=START_TIMEOUT_S)

    starts = Counter[int]()

    def start(index: int) -> base.RolloutEngine:
        section = replica(config, index)
        own_seed = engine_seed(seed, index, step, starts[index])
        starts[index] += 1
        if group is None:
            return unplaced(index, section, own_seed)
        place = in_bundle(group, index)
        return RayEngine(
            model_path,
            heads_path,
            section,
            own_seed,
            where=place,
            closing=closing,
            load_s=load_s,
        )

    pool = BroadcastPool if config.transfer == "broadcast" else EnginePool
    engines = pool(
        start,
        config.replicas,
        on_close=lambda: release(group),
        # As long as a server that we start.
        back_within_s=START_TIMEOUT_S + reading_s(model_path) if config.addresses else 0.0,
        closing=closing,
    )
    engines.memory = SharedMemory(config.memory_bytes or 0 if heads_path else 0)
    return engines


def engine_seed(seed: int, index: int, step: int, starts_before: int = 0) -> int:
    """The seed of an engine, which requests without one draw from. Engines with the same seed would
    give the same answer to a prompt that is in two pieces; and one that starts again, or in a
    resumed loop, would draw the same numbers as before.
    """
    if not step and not starts_before:
        return seed + index
    return (seed + index + 1_000_003 * step + 715_827_883 * starts_before) % 2**31


def replica(config: EngineConfig, index: int) -> EngineConfig:
    """The section for one of several engines, with its own address."""
    backend = config.addresses[index] if config.addresses else config.backend
    return config.model_copy(update={"replicas": 1, "backend": backend})
