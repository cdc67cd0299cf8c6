"""A CUDA device for tests on a machine without one: it refuses what CUDA would refuse, and computes
on the CPU. `pytest -m gpu --pretended-gpu` rehearses the tests of a GPU with it.

A stand-in for what no test machine of ours has, and no more than that. It shows that a test and the
code under it never mix tensors of two devices, read a device's memory as the host's, pin what is on
a device or draw there with a generator of the host. It shows nothing of rounding, of the order of
sums, of streams, of memory or of vLLM's engines, which need a GPU that is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

CPU = torch.device("cpu")
ANYWHERE = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy"}
"""Operations that may see tensors of two devices."""
BY_INDEX = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
"""A device's tensor may be indexed by the host's."""


class PretendedTensor(torch.Tensor):
    """Says that it is on a CUDA device; its numbers are in a tensor of the host."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("cuda", 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"pretended on a GPU: {self.held!r}"


class PretendedGenerator(torch.Generator):
    """A generator of the device."""

    def __new__(cls, device: Any = "cpu") -> PretendedGenerator:
        made = super().__new__(cls)
        made.on_device = torch.device(device).type == "cuda"
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0) if self.on_device else CPU


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation, on the host's numbers; RuntimeError where CUDA has one."""
    tensors = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, torch.Tensor)]
    ours = [part for part in tensors if isinstance(part, PretendedTensor)]
    name = _name(func)
    if name == "_pin_memory":
        if ours:
            raise RuntimeError("only dense CPU tensors can be pinned")
        return tensors[0].clone()
    if name == "is_pinned":
        return False
    wanted = kwargs.get("device")
    _refuse(func, name, args, tensors, bool(ours))
    if wanted is not None:
        on_device = torch.device(wanted).type == "cuda"
    else:
        on_device = bool(ours) and name != "_local_scalar_dense"
    if name in ("copy_", "_copy_from"):
        on_device = isinstance(args[0], PretendedTensor)
    if (generator := kwargs.get("generator")) is not None:
        where = generator.device.type
        if where != ("cuda" if on_device else "cpu"):
            raise RuntimeError(
                f"Expected a '{'cuda' if on_device else 'cpu'}' device type for generator but found"
                f" '{where}'"
            )
    host = {
        key: CPU if key == "device" and value is not None else value
        for key, value in kwargs.items()
    }
    host.pop("pin_memory", None)
    back = {id(part.held): part for part in ours}
    plain_args, plain_kwargs = tree_map_only(PretendedTensor, lambda part: part.held, (args, host))
    found = func(*plain_args, **plain_kwargs)

    def told(result: torch.Tensor) -> torch.Tensor:
        # What is changed in place is the tensor that was given.
        if id(result) in back:
            return back[id(result)]
        if not on_device or any(result is part for part in tensors):
            return result
        return PretendedTensor(result)

    return tree_map_only(torch.Tensor, told, found)


def _refuse(func: Any, name: str, args: Any, tensors: list[torch.Tensor], mixed: bool) -> None:
    """RuntimeError for an operation on tensors of two devices. Numbers of the host (no dimension)
    may come along, as in CUDA.
    """
    if not mixed or name in ANYWHERE:
        return
    host = [part for part in tensors if not isinstance(part, PretendedTensor) and part.dim() > 0]
    if name in BY_INDEX and isinstance(args[0], PretendedTensor):
        indices = [part for part in args[1] if part is not None]
        host = [part for part in host if not any(part is index for index in indices)]
    # Steps of an optimizer stand on the host, and their lists go by themselves.
    if host and len(host) < len(tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} was given some on cuda:0"
            " and some on cpu"
        )


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Event:
    """Everything has happened when it is asked for."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """In this block there is a CUDA device, number 0."""
    # torch's own name for what lets autograd visit a device that is not there.
    torch._C._ensureCUDADeviceGuardSet()
    before = torch.__future__.get_swap_module_params_on_conversion()
    # A module's parameters change their kind when it moves, which `.data = ` can't do.
    torch.__future__.set_swap_module_params_on_conversion(True)
    stands = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_: "a pretended GPU",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Event": _Event,
    }
    with contextlib.ExitStack() as stack:
        for name, stand in stands.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand))
        stack.enter_context(mock.patch.object(torch, "Generator", PretendedGenerator))
        stack.enter_context(_Mode())
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
