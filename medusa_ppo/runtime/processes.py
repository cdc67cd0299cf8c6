"""Other processes: a local Ray, room on its nodes, the signals that stop a run, and leftovers of
killed processes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import services as ray_services
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from heads.errors import MedusaError, RunError
from medusa_ppo.runtime.files import OwnedFolder, sweep
from medusa_ppo.runtime.hardware import Hardware, find_hardware

logger = logging.getLogger(__name__)

MIB = 1024**2
START_ATTEMPTS = 3
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Older Rays hide all GPUs from a process that asked for none, and warn that newer ones won't.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Unreferenced batches leave shared memory at once, not after a second.
    "RAY_free_objects_period_milliseconds": "100",
}
OWN_RAY_ENVIRONMENT = RAY_ENVIRONMENT | {
    # By default Ray's server keeps the last 100,000 calls, for a dashboard that is never started.
    "RAY_task_events_report_interval_ms": "0",
    # Ray's own 15 and the companion's 5 add up to 19: beside a busy loop it would get almost
    # nothing.
    "RAY_worker_niceness": "0",
}


def quiet_libraries() -> None:
    """Silence transformers' progress bars; for commands, which show their own progress."""
    # transformers takes seconds to load, and starting Ray does not need it.
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def local_ray(
    *, cpus: int = 2, queue_bytes: int = 0, gpus: Sequence[str] | None = None
) -> Iterator[None]:
    """Ray during the block: the caller's if it is initialised, that of RAY_ADDRESS if set, else our
    own local one.

    Only what was started here is shut down. A local Ray's folder is removed with it, unless the
    block failed: then its logs stay.

    Args:
        cpus: CPUs that the processes of the block request; the machine's number if that is larger.
        queue_bytes: maximum bytes in transit to the companion.
        gpus: GPUs that our Ray offers, as CUDA_VISIBLE_DEVICES names them; None: all that this
            process sees. Any other Ray offers what it was started with.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    # Ray's servers inherit them from here and read them at their start; values set by the user are
    # kept.
    for name, value in (RAY_ENVIRONMENT if joins else OWN_RAY_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    # Leftovers of killed runs in shared memory reduce the room for the object store.
    sweep()
    if ray.is_initialized():
        yield
        return
    if joins:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()
        return
    folder = OwnedFolder("mppo-")  # Short on purpose: a socket's path has at most 107 characters.
    keep = False
    try:
        store_bytes = _object_store_bytes(queue_bytes)
        with _offering(gpus) as offered:
            _start(folder.path, max(os.cpu_count() or 1, cpus, 2), store_bytes, offered)
        yield
    # After an interrupt the logs are not kept: a run stopped by hand has no fault to look for.
    except Exception:
        keep = True
        raise
    finally:
        ray.shutdown()
        if keep:
            logger.error("Ray's logs are kept in %s", folder.keep())
        else:
            folder.close()


@contextlib.contextmanager
def _offering(gpus: Sequence[str] | None) -> Iterator[int | None]:
    """For a Ray started in the block: it sees only these GPUs; yields their number."""
    if gpus is None:
        yield None
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Ray offers the GPUs that the variable names at its start. torch has already read it, or does
    # so later.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield len(gpus)
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _start(folder: Path, cpus: int, store_bytes: int, gpus: int | None = None) -> None:
    """Start a local Ray. Ray gives its node 30 s, which a busy machine may miss. Raises RunError.

    Ray runs the code of anyone it listens to: here that is only this machine, and on it only
    holders of this process's token.
    """
    # Without a token Ray makes its own and writes it into the home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for left in reversed(range(START_ATTEMPTS)):
        try:
            with (
                # It listens on 127.0.0.1, as it does by itself on systems without cluster support
                # (Windows, macOS). The environment variable was read when Ray was imported.
                _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
                _replaced(ray_services, POPEN, _OwnSession),
            ):
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=store_bytes,
                    _temp_dir=str(folder),
                )
            return
        # Ray raises a bare Exception here, and ValueError and OSError for bad arguments.
        except Exception as error:
            ray.shutdown()
            if not left:
                given = f"{type(error).__name__}: {error}"
                do = "Free memory or cores and try again; Ray's logs say more."
                raise RunError(
                    "Ray did not start.", given=given, expected="a local Ray within 30 s", do=do
                ) from error
            logger.warning("Ray did not start; trying once more: %s", error)


POPEN = "ConsolePopen"


class _OwnSession(getattr(ray_services, POPEN, subprocess.Popen)):  # type: ignore[misc]
    """A server of Ray that doesn't get the signals of this process's group.

    `timeout` and Slurm send SIGTERM to a whole group. Without its servers Ray ends this process
    before a run has written its report. (They still end with this process: Linux sees to it.)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"start_new_session": True})


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Ray has no setting for this; a Ray without the name goes on without the change."""
    if not hasattr(module, name):
        yield
        return
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _object_store_bytes(queue_bytes: int) -> int:
    """Room for data in transit to the companion, and a little for everything else; never more than
    a quarter of the free memory.
    """
    wanted = queue_bytes + 128 * MIB
    # Ray refuses a store below 75 MiB.
    return max(128 * MIB, min(wanted, psutil.virtual_memory().available // 4))


SWALLOWED_S = 10.0
"""A signal this long after the last one that raised raises again, unless clean-up has begun."""


class StopSignals:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt once in the block; after that they are ignored, so
    that the clean-up is not cut short.

    Other people's code (a reward) may catch everything. So until `ignore` is called, a later signal
    raises again, and `stop_if_told` raises between two pieces of work.

    Does nothing outside the main thread, the only one where Python allows handlers.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[..., object] | int | None] = {}
        self._raised_at: float | None = None
        self._cleaning = False

    def install(self) -> StopSignals:
        """Install the handlers; call it again after a library (Ray) has installed its own."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._handle)
                # At a second call the current handler is Ray's or ours; only at the first one is it
                # the caller's.
                self._before.setdefault(number, before)
        return self

    __enter__ = install

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def ignore(self) -> None:
        """Clean-up has begun: from now on signals are noted but ignored."""
        self._cleaning = True

    def stop_if_told(self) -> None:
        """Raise KeyboardInterrupt if a signal has raised it in this block already, and somebody
        caught it.
        """
        if self._raised_at is not None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: object) -> None:
        now = time.monotonic()
        recent = self._raised_at is not None and now - self._raised_at < SWALLOWED_S
        if self._cleaning or recent:
            logger.warning("Already stopping, please wait: engine and companion are being closed.")
            return
        self._raised_at = now
        raise KeyboardInterrupt


@contextlib.contextmanager
def ray_errors(kind: type[MedusaError], who: str, do: str) -> Iterator[None]:
    """Pass our own errors unchanged; turn Ray's other errors about a process in the block into
    `kind`.
    """
    try:
        yield
    except RayError as error:
        # Its own given, expected and do say more than that a process failed.
        if isinstance(error, RayTaskError) and isinstance(error.cause, MedusaError):
            raise error.cause from None
        what = "failed"
        if isinstance(error, GetTimeoutError):
            what = "did not answer in time"
        elif isinstance(error, RayActorError):
            what = "died"
        if isinstance(error, RayTaskError):
            given = repr(error.cause)
        else:
            # Ray's message begins with paragraphs about the process and where to look; the reason
            # comes last.
            given = (str(error).strip().splitlines() or [repr(error)])[-1]
        raise kind(f"{who} {what}.", given=given, expected="a running process", do=do) from error


TIMEOUT_S = 180.0
HEARD_WITHIN_S = 1.0
"""How long Ctrl-C waits for a call of Ray's in which Python hears no signals."""
TOKEN = 0.001  # Amount of a node's resource: it decides where, not how many.


def on_one_node() -> bool:
    """Whether Ray's cluster has one living node: this one."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


@contextlib.contextmanager
def cluster_without_gpu() -> Iterator[None]:
    """The Ray of RAY_ADDRESS during the block, if this node has no GPU: then the cluster's nodes
    decide about settings that are null (`run_hardware`).
    """
    if not os.environ.get("RAY_ADDRESS") or find_hardware().gpus:
        yield
        return
    with local_ray():
        yield


def run_hardware() -> Hardware:
    """What a run's engines and ranks have: this machine's hardware; if it has no GPU but the Ray
    cluster has some, that of a node with GPUs, and this machine's cores.

    Raises:
        RunError: no node with GPUs says what it has.
    """
    here = find_hardware()
    if here.gpus or not ray.is_initialized():
        return here
    gpus = int(ray.cluster_resources().get("GPU", 0))
    there = _node_with_gpus(str(ray.get_runtime_context().get_job_id())) if gpus else here
    if not there.gpus:  # Ray counts what it was told.
        return here
    found = f"{here.cores} cores here, {gpus} GPUs in the cluster ({there.found})"
    return replace(there, gpus=gpus, cores=here.cores, found=found, elsewhere=True)


@functools.lru_cache(maxsize=1)  # A process on the other node takes seconds, and a place there.
def _node_with_gpus(session: str) -> Hardware:
    """What a node with GPUs says in this session of Ray."""
    with ray_errors(
        RunError,
        "A process that looks at a GPU of the cluster",
        "Free a GPU, or set model.dtype, engine.memory_fraction and engine.enforce_eager, and start"
        " the run on a node with a GPU.",
    ):
        return ray.get(_hardware_there(), timeout=TIMEOUT_S)


def _hardware_there() -> Any:
    """Reference to the hardware of a node with GPUs, of which its process sees one."""
    return ray.remote(num_cpus=0, num_gpus=TOKEN)(_hardware).remote()


def _hardware() -> Hardware:
    return find_hardware()


def bundle(gpus: float, resource: str | None) -> dict[str, float]:
    """What one process requests from its node. CPUs are shared, not reserved, but Ray requires some
    amount in each bundle.
    """
    asked = {name: amount for name, amount in (("GPU", gpus), (resource, TOKEN)) if name and amount}
    return asked or {"CPU": TOKEN}


def reserve(
    bundles: list[dict[str, float]], what: str, timeout_s: float = TIMEOUT_S
) -> PlacementGroup:
    """Reserve room for all bundles. The caller runs `ray.init` first, and `release` later.

    Args:
        what: what the room is for, for the error.

    Raises:
        RunError: the cluster has no such room.
    """
    # As close together as possible: this suits processes that exchange much data, and costs others
    # nothing.
    group = placement_group(bundles, strategy="PACK")
    try:
        found = _is_there(group, timeout_s)
    except BaseException:  # Ctrl-C.
        remove_placement_group(group)
        raise
    if not found:
        # Otherwise Ray would keep waiting, and later reserve room that is not used.
        remove_placement_group(group)
        asked = Counter(map(str, bundles))
        raise RunError(
            f"The Ray cluster has no room for the {what}.",
            given=(
                f"{', '.join(f'{count} x {kind}' for kind, count in asked.items())};"
                f" free: {_free()}"
            ),
            expected=f"room for all of them within {timeout_s:.0f} s",
            do=(
                "Add nodes, start Ray with the resources named, or ask for fewer processes or"
                " another placement."
            ),
        )
    return group


def _is_there(group: PlacementGroup, timeout_s: float) -> bool:
    """Whether Ray finds the room within this time."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if group.wait(min(HEARD_WITHIN_S, left_s)):
            return True
    return False


def release(group: PlacementGroup | None) -> None:
    """Give the room back, and end whatever runs in it."""
    # A group ends with its Ray; asking a Ray that has ended would start a new one.
    if group is not None and ray.is_initialized():
        remove_placement_group(group)


def in_bundle(group: PlacementGroup | None, index: int) -> dict[str, Any]:
    """Options that put a Ray actor into the group; none without a group."""
    return (
        {}
        if group is None
        else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}
    )


@dataclass(frozen=True)
class SharedPlace:
    """A place for a process that uses the GPUs of others. In Ray's books they have them whole, so
    nobody else comes.

    Attributes:
        where: Ray options that put it on their node.
        devices: their GPUs, as CUDA_VISIBLE_DEVICES names them; none on a node without GPUs.
    """

    where: dict[str, Any]
    devices: tuple[str, ...] = ()


def own_gpus() -> tuple[str, ...]:
    """The GPUs that Ray gave to this actor, as CUDA_VISIBLE_DEVICES names them."""
    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def _free() -> str:
    free = {
        name: amount
        for name, amount in ray.available_resources().items()
        if not name.startswith(("node:", "memory", "object_store"))
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(free.items())) or "nothing"


@contextlib.contextmanager
def without_line(words: str) -> Iterator[None]:
    """Suppress a line with these words in this process's stderr during the block, including C++;
    the rest is written at the end.
    """
    # Flush what was written before the block, so that the order is right.
    sys.stderr.flush()
    # C++ writes to the file descriptor and bypasses sys.stderr.
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            kept.seek(0)
            os.write(stderr, b"".join(line for line in kept if words.encode() not in line))
            os.close(stderr)
