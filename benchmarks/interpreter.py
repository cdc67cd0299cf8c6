"""vLLM's V2 model runner on a CPU, with its kernels on Triton's interpreter. To be imported before
vLLM, if Triton is installed; for tests.

vLLM's own CPU version of V2 expects a Triton that compiles for CPUs, which no registry has. The
stock Triton interprets kernels with numpy: correctly, but some hundred times slower.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

# Everything below reads TRITON_INTERPRET when it is imported.
import dataclasses
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.language.extra.libdevice as libdevice
import triton.runtime.interpreter as runtime
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import TensorHandle


class CPUDriver:
    """What vLLM and Triton need of a device's driver."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "multiprocessor_count": 1,
            "max_shared_mem": 1 << 20,
            "warpSize": 1,
            "max_num_regs": 1,
        }
    )

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is only one."""

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu


def log1p(x: Any, _semantic: Any = None) -> Any:
    """The interpreter has no device library; vLLM's verification of sampled drafts uses this
    function from it.
    """
    with np.errstate(all="ignore"):
        return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


# Kept before it is replaced, or `argmax` would call itself.
nanargmax = np.nanargmax


def argmax(values: Any, *args: Any, **kwargs: Any) -> Any:
    """The interpreter's argmax raises if all values are NaN (which a profile run causes); a GPU
    returns some index.
    """
    return nanargmax(np.where(np.isnan(values), -np.inf, values), *args, **kwargs)


def patched_once(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter replaces Triton's language by its own before each call of a kernel and of
    each function in it, and puts it back after a kernel. That took a quarter of all time. Nothing
    is compiled here, so its own language may stay.
    """
    stays = SimpleNamespace(restore=lambda: None)
    known: set[frozenset[int]] = set()

    def patch(kernel: Any) -> Any:
        modules = [one for one in kernel.__globals__.values() if isinstance(one, ModuleType)]
        languages = frozenset(id(one) for one in modules if one in (tl, tl.core))
        if languages not in known:
            original(kernel)
            known.add(languages)
        return stays

    return patch


def looked_up(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter makes a dictionary of all dtypes each time it asks for one."""
    known: dict[str, Any] = {}

    def dtype_of(asked: Any) -> Any:
        if type(asked) is not tl.dtype:
            return original(asked)
        if asked.name not in known:
            known[asked.name] = original(asked)
        return known[asked.name]

    return dtype_of


# Each sum's check for an overflow says nothing without Triton's debug mode, but computes it.
runtime.interpreter_builder.options = dataclasses.replace(
    runtime.interpreter_builder.options, sanitize_overflow=False
)
runtime._patch_lang = patched_once(runtime._patch_lang)
runtime._get_np_dtype = looked_up(runtime._get_np_dtype)

# Any backend's record has the right shape; its compiler is never called, since nothing is compiled.
backends["cpu"] = type(next(iter(backends.values())))(compiler=None, driver=CPUDriver)
triton.runtime.driver.set_active(CPUDriver())
libdevice.log1p = log1p
np.nanargmax = argmax

# vLLM's kernel for top-k and top-p calls methods that the interpreter's numbers lack; without
# Triton it does both in torch.
topk_topp = import_module("vllm.v1.sample.ops.topk_topp_sampler")
topk_topp.HAS_TRITON = False
