"""The colocated engine inside a Ray actor: its own process, its own threads and environment, ended with the run.

An engine on this node reads new weights from the file in shared memory. One on another node gets the file's bytes through Ray's object
store: they are put there once, and nodes that have them pass them on, so that many engines don't queue at one.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from heads.errors import EngineError, MedusaError
from heads.tensorfile import Header
from medusa_ppo.config import EngineConfig
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.engines.colocated import ENVIRONMENT, ColocatedEngine
from medusa_ppo.engines.launch import LaunchPlan, plan_launch
from medusa_ppo.files import OwnedFolder, forget_registration
from medusa_ppo.processes import TOKEN
from medusa_ppo.types import Checked, Counters, Rollouts, Sampling, SwapReceipt

START_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 20.0
STATE = ("max_drafts", "num_drafts", "policy_version", "heads_version")


class EngineHost:
    """Runs in the Ray actor. Our own errors are returned, not raised, so that they arrive as they are."""

    def __init__(self, model_path: str, heads_path: str | None, config: dict[str, Any], seed: int, plan: LaunchPlan | None) -> None:
        self._start = (model_path, heads_path, EngineConfig(**config), seed)
        self._plan = plan
        self._engine: ColocatedEngine | None = None

    def start(self) -> tuple[str, object, dict[str, int]]:
        try:
            self._engine = ColocatedEngine(*self._start, plan=self._plan)
        except MedusaError as error:
            return "error", error, {}
        finally:
            forget_registration()  # Workers of its own (tensor parallelism) do so themselves.
        return "result", None, self._state()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, object, dict[str, int]]:
        """Call a method of the engine: (`result` or `error`, value, the engine's public numbers)."""
        try:
            return "result", getattr(self._engine, method)(*args, **kwargs), self._state()
        except MedusaError as error:
            return "error", error, self._state()

    def call_with_bytes(
        self, method: str, content: np.ndarray, version: int, checked: Checked | None
    ) -> tuple[str, object, dict[str, int]]:
        """Call a method that reads a file, with the file's bytes, which come from another node."""
        folder = OwnedFolder("medusa-ppo-received-", shared_memory=True)
        try:
            content.tofile(folder.path / "state.safetensors")
            return self.call(method, (str(folder.path / "state.safetensors"), version, checked), {})
        finally:
            folder.close()

    def node(self) -> str:
        """Id of the Ray node that this runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def _state(self) -> dict[str, int]:
        return {name: getattr(self._engine, name) for name in STATE}


def actor_environment(config: EngineConfig, *, has_gpu: bool) -> dict[str, str]:
    """Environment variables of the engine's process; they must stand before Python starts there."""
    env = {**ENVIRONMENT, "PYTHONWARNINGS": "ignore::FutureWarning", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if has_gpu:
        return env
    env |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():
        # Intel's OpenMP, as vLLM's CPU build asks for; it only works when it is loaded before torch.
        env["LD_PRELOAD"] = ":".join(part for part in (os.environ.get("LD_PRELOAD", ""), str(openmp)) if part)
    return env


def gpus_asked(config: EngineConfig, ranks: int) -> float:
    """GPUs that Ray gives to an engine of so many ranks: a share of one, or one for each rank; none in a cluster without."""
    if not ray.cluster_resources().get("GPU"):
        return 0.0
    return config.memory_fraction if ranks == 1 else float(ranks)


_store_lock = threading.Lock()


def _file_in_store(path: str, inode: int, modified_ns: int, session: str) -> Any:
    """Reference to a file's bytes in Ray's object store; put there once, whoever of a pool's engines asks first."""
    with _store_lock:
        return _put_file(path, inode, modified_ns, session)


@functools.lru_cache(maxsize=2)  # Heads and actor; what is no longer asked for is freed.
def _put_file(path: str, inode: int, modified_ns: int, session: str) -> Any:
    return ray.put(np.fromfile(path, dtype=np.uint8))


class RayEngine(base.RolloutEngine):
    """`ColocatedEngine` in a Ray actor. `ray.init` is the caller's."""

    def __init__(
        self,
        model_path: str | Path,
        heads_path: str | Path | None,
        config: EngineConfig,
        seed: int = 0,
        *,
        plan: LaunchPlan | None = None,
        where: dict[str, Any] | None = None,
    ) -> None:
        """Start the actor and vLLM in it. Raises as `plan_launch` before anything starts, EngineError afterwards.

        Args:
            plan: as for `ColocatedEngine`.
            where: options of Ray that give the actor its place (`medusa_ppo.processes.place`); None: Ray finds one.
        """
        given, plan = plan, plan or plan_launch(model_path, heads_path, config, seed)
        if not ray.is_initialized():
            raise EngineError(
                "Ray is not running.", given="no ray.init() in this process", expected="a Ray session", do="Call ray.init() first."
            )
        gpus = gpus_asked(config, int(plan.engine_args.get("tensor_parallel_size", 1)))
        # No CPU is reserved: the engine and the companion share the node's cores, by design of the colocated mode.
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": actor_environment(config, has_gpu=gpus > 0)},
            "max_restarts": 0,
            "resources": {config.resource: TOKEN} if config.resource else None,
            **(where or {}),
        }
        heads = str(Path(heads_path).resolve()) if heads_path else None
        model = str(Path(model_path).resolve()) if Path(model_path).is_dir() else str(model_path)
        actor: Any = ray.remote(**options)(EngineHost)
        self._host: Any = actor.remote(model, heads, config.model_dump(), seed, given)
        self.elsewhere = False
        try:
            self._unpack(self._get(self._host.start.remote(), "starting", START_TIMEOUT_S))
            self.elsewhere = self._get(self._host.node.remote(), "starting") != ray.get_runtime_context().get_node_id()
        except MedusaError:
            self.close()
            raise

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        return self._call("generate", [list(p) for p in prompts], sampling)

    def swap_heads(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        return self._send("swap_heads", base.check_file(path, "new heads"), version, checked)

    def sync_actor(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        return self._send("sync_actor", base.check_file(path, "the actor's weights"), version, checked)

    def check_actor(self, entries: Header) -> list[str]:
        return self._call("check_actor", entries)

    def join_transfer(self, place: dict[str, Any]) -> None:
        self._call("join_transfer", place)

    def receive_actor(self, entries: Header, version: int) -> SwapReceipt:
        return self._call("receive_actor", entries, version)

    def set_num_drafts(self, count: int) -> None:
        self._call("set_num_drafts", count)

    def set_drafting(
        self,
        *,
        sampled: bool | None = None,
        draft_temperature: float | None = None,
        choose: bool | None = None,
        draft_vocab: int | None = None,
    ) -> None:
        self._call("set_drafting", sampled=sampled, draft_temperature=draft_temperature, choose=choose, draft_vocab=draft_vocab)

    def checksums(self) -> dict[str, str]:
        return self._call("checksums")

    def counters(self) -> Counters:
        return self._call("counters")

    def plugin_report(self) -> dict[str, Any]:
        return self._call("plugin_report")

    def choices(self) -> list[dict[str, Any]]:
        return self._call("choices")

    def probe(self, hidden: list[list[float]], last_ids: list[int]) -> list[list[int]]:
        """As `WorkerEngine.probe`."""
        return self._call("probe", hidden, last_ids)

    def sleep(self, level: int) -> None:
        self._call("sleep", level)

    def wake(self) -> None:
        self._call("wake")

    def close(self) -> None:
        host, self._host = self._host, None
        if host is None or not ray.is_initialized():
            return
        try:
            ray.get(host.call.remote("close", (), {}), timeout=CLOSE_TIMEOUT_S)
        except (RayError, GetTimeoutError, AttributeError):
            base.logger.debug("the engine's actor was gone or busy at close", exc_info=True)
        ray.kill(host, no_restart=True)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._unpack(self._get(self._running(method).call.remote(method, args, kwargs), f"calling {method}"))

    def _send(self, method: str, path: str, version: int, checked: Checked | None) -> Any:
        """Call a method that reads a file, wherever the engine is."""
        if not self.elsewhere:
            return self._call(method, path, version, checked)
        status, session = os.stat(path), ray.get_runtime_context().get_job_id()
        content = _file_in_store(path, status.st_ino, status.st_mtime_ns, str(session))
        return self._unpack(self._get(self._running(method).call_with_bytes.remote(method, content, version, checked), f"calling {method}"))

    def _running(self, method: str) -> Any:
        if self._host is None:
            raise EngineError("The engine is closed.", given=f"{method} after close()", expected="a running engine", do="Start a new one.")
        return self._host

    def _unpack(self, answer: tuple[str, Any, dict[str, int]]) -> Any:
        status, value, state = answer
        for name, number in state.items():
            setattr(self, name, number)
        if status == "error":
            raise value
        return value

    @staticmethod
    def _get(reference: Any, doing: str, timeout: float | None = None) -> Any:
        try:
            return ray.get(reference, timeout=timeout)
        except GetTimeoutError:
            problem, given = f"The engine's process did not answer while {doing}.", f"no answer in {timeout:.0f} s"
        except RayActorError as error:
            problem, given = f"The engine's process died while {doing}.", str(error).strip().splitlines()[-1]
        except RayTaskError as error:
            problem, given = f"The engine's process failed while {doing}.", repr(error.cause)
        raise EngineError(problem, given=given, expected="a running engine", do="Read the log of Ray's worker, and mind the memory.")
