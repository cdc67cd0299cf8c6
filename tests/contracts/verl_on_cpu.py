"""What stands in for CUDA in a training with the real verl on a CPU. docs/hooks.md, "What
stands in for CUDA", names each.

verl imports this file in each of its processes: VERL_USE_EXTERNAL_MODULES=verl_on_cpu
VERL_PLATFORM=medusa-test-cpu VERL_ENGINE_DEVICE=cuda (tests/contracts/test_verl_training.py). The
platform is verl's own seam for other accelerators.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

PLATFORM = "medusa-test-cpu"
ENGINE = "vllm.v1.engine.async_llm"
EXTENSION = "verl.workers.rollout.vllm_rollout.utils"


def load_by_vllm(
    self: Any, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
) -> None:
    """In the place of `update_weights_from_ipc`: vLLM's CPU build packs its weights."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    came: dict[str, torch.Tensor] = {}
    receiver = BucketedWeightReceiver(
        zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
    )
    receiver.receive_weights(
        lambda weights, is_last: came.update((name, value.clone()) for name, value in weights)
    )
    with torch.inference_mode():
        self.reload_weights(weights_iterator=iter(came.items()))


def _replace_loading() -> None:
    sys.modules[EXTENSION].vLLMColocateWorkerExtension.update_weights_from_ipc = load_by_vllm


def _replace_pause() -> None:
    engine = sys.modules[ENGINE].AsyncLLM
    pause = engine.pause_generation
    if "wait_for_inflight_requests" in inspect.signature(pause).parameters:
        return

    async def pause_generation(
        self: Any, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        mode = "wait" if wait_for_inflight_requests else "abort"
        await pause(self, mode=mode, clear_cache=clear_cache)

    engine.pause_generation = pause_generation


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The reward: how many different words an answer has. Any reward that tells the answers of a
    group apart will do.
    """
    return float(len(set(solution_str.split()))) / 8


def _cpu_device() -> types.ModuleType:
    """What verl asks of torch.cuda, answered for a machine without it."""
    device = types.ModuleType("torch_cpu_device")
    zero = lambda *_, **__: 0  # noqa: E731
    device.is_available = lambda: False  # type: ignore[attr-defined]
    device.get_device_name = lambda *_: "CPU"  # type: ignore[attr-defined]
    for name in (
        "synchronize",
        "empty_cache",
        "set_device",
        "current_device",
        "device_count",
        "manual_seed",
        "ipc_collect",
    ):
        setattr(device, name, zero)
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(device, name, zero)
    device.mem_get_info = lambda *_: (0, 0)  # type: ignore[attr-defined]
    return device


def _install() -> None:
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.utils import distributed

    from medusa_ppo.loops.verl.verl_plugin import AfterImport

    @PlatformRegistry.register(platform=PLATFORM)
    class PlatformCpu(PlatformCUDA):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = _cpu_device()

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> str:
            # verl only hands it on to tensors.
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def set_allocator_settings(self, settings: str) -> None: ...

        def communication_backend_name(self) -> str:
            return "gloo"

        def is_ipc_supported(self) -> bool:
            return False

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

    distributed.initialize_global_process_group_ray.__defaults__ = (None, "gloo")
    sys.meta_path.insert(
        0, AfterImport(EXTENSION, _replace_loading)
    )  # Later, because vLLM takes long to import.
    sys.meta_path.insert(0, AfterImport(ENGINE, _replace_pause))


_install()
