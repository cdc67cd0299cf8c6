"""What stands in for CUDA in a training with the real OpenRLHF on a CPU. docs/hooks.md, "What
stands in for CUDA", names each.

    python openrlhf_on_cpu.py --medusa heads.yaml ...

OpenRLHF's own arguments stand behind it, as in tests/contracts/test_openrlhf_training.py.

Ray calls `prepare` in each of its processes; vLLM's worker, which is none of them, comes by the
name of its extension.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from medusa_ppo.loops.verl.verl_plugin import AfterImport

FLASH_ATTN = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


class Cpu(str):
    """Goes wherever OpenRLHF puts `torch.cuda.current_device()`: into `.to()`, and behind "cuda:"
    in a device that nothing is moved to.
    """

    def __format__(self, spec: str) -> str:
        return "0"


class StoreBroadcast:
    """In the place of PyNcclCommunicator."""

    def __init__(self, group: Any, device: Any = None) -> None:
        self._group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        came = self._group.broadcast_obj(tensor.detach() if self._group.rank == src else None, src)
        if self._group.rank != src:
            tensor.copy_(came)


class CpuWorker:
    """Joined with the worker extension in vLLM, before OpenRLHF's: no buffer on cuda, and loaded by
    `reload_weights`, because vLLM's CPU build packs its weights.
    """

    def update_weight(
        self: Any, name: str, dtype: torch.dtype, shape: Any, empty_cache: bool = False
    ) -> None:
        assert dtype == self.model_config.dtype, (
            f"mismatch dtype: src {dtype}, dst {self.model_config.dtype}"
        )
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        came = self.__dict__.setdefault("_came", {})
        came[name] = weight
        if empty_cache:  # The last one: OpenRLHF says so.
            with torch.inference_mode():
                self.reload_weights(weights_iterator=iter(self.__dict__.pop("_came").items()))


def __getattr__(name: str) -> type[Any]:
    """`CpuOpenRLHFWorker`, when vLLM's worker looks for it by name, and `CpuPlainWorker`, the same
    without our calls.
    """
    if name not in ("CpuOpenRLHFWorker", "CpuPlainWorker"):
        raise AttributeError(name)
    prepare()
    if name == "CpuPlainWorker":
        from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap as base
    else:
        from medusa_ppo.loops.openrlhf import MedusaOpenRLHFWorker as base

    return type(name, (CpuWorker, base), {"__module__": __name__})


def without_flash_attn() -> None:
    """OpenRLHF's modules can be imported; flash-attn can't be built without CUDA."""
    if importlib.util.find_spec("flash_attn") is None:
        for module_name, names in FLASH_ATTN.items():
            stand_in = types.ModuleType(module_name)
            stand_in.__spec__ = importlib.util.spec_from_loader(module_name, None)
            for attribute in names:
                setattr(stand_in, attribute, None)
            sys.modules[module_name] = stand_in


def prepare() -> None:
    """Put what this process needs of it in its place."""
    without_flash_attn()
    torch.cuda.current_device = lambda: Cpu("cpu")  # type: ignore[assignment, return-value]
    for name in ("set_device", "synchronize", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    _once_imported("vllm.distributed.device_communicators.pynccl", _broadcast_over_store)
    _once_imported("openrlhf.utils.deepspeed.deepspeed", _strategy_on_cpu)


def _once_imported(module: str, then: Callable[[], None]) -> None:
    """Most of Ray's processes never import these, which take long."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, AfterImport(module, then))


def _broadcast_over_store() -> None:
    sys.modules["vllm.distributed.device_communicators.pynccl"].PyNcclCommunicator = StoreBroadcast


def _strategy_on_cpu() -> None:
    import deepspeed
    from torch.distributed.device_mesh import init_device_mesh

    strategy = sys.modules["openrlhf.utils.deepspeed.deepspeed"]
    strategy.init_device_mesh = lambda _, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)
    deepspeed.initialize = functools.partial(_initialize, deepspeed.initialize)


def _initialize(
    initialize: Callable[..., Any], *args: Any, config: dict[str, Any], **kwargs: Any
) -> Any:
    if "optimizer" in config:
        config["optimizer"]["params"]["torch_adam"] = True
    return initialize(*args, config=config, **kwargs)


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **_: Any
) -> dict[str, Any]:
    """OpenRLHF's own form of a reward: how many different words an answer has."""
    rewards = torch.tensor(
        [
            len(set(query[len(prompt) :].split())) / 8
            for query, prompt in zip(queries, prompts, strict=True)
        ]
    )
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def main() -> None:
    import openrlhf_on_cpu  # By its name, which Ray's other processes can import.
    import ray

    from medusa_ppo.loops import openrlhf

    prepare()
    prepared = {"worker_process_setup_hook": openrlhf_on_cpu.prepare}
    if os.environ.get("RAY_ADDRESS"):
        # Nodes that a test has joined, with their own numbers of GPUs.
        ray.init(runtime_env=prepared)
    else:
        ray.init(
            address="local",
            num_cpus=8,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=256 * 1024**2,
            runtime_env=prepared,
        )
    openrlhf.WORKER_EXTENSION = "openrlhf_on_cpu.CpuOpenRLHFWorker"
    served = openrlhf.served_arguments
    openrlhf.served_arguments = lambda config: (
        lambda pretrain: {
            **served(config)(pretrain),
            "worker_extension_cls": "openrlhf_on_cpu.CpuPlainWorker",
        }
    )
    openrlhf.main(sys.argv[1:])


if __name__ == "__main__":
    main()
