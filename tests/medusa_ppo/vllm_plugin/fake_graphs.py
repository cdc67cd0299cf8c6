"""CUDA graphs for machines without CUDA: what `torch.cuda.CUDAGraph` and `torch.cuda.graph` do, as
far as it can be done with operations of torch.

A capture notes every operation with the memory that it read and wrote, and refuses what a capture
of CUDA refuses: values that the host reads, shapes that depend on values, copies from the host,
generators. A replay runs these operations again, on that memory, and no line of Python: what
Python would have done differently (a tensor that is made anew, a branch, a number) is not seen.
Memory that was made in the call belongs to the graph, and holds anything between two replays;
memory from outside must still be there.

What it cannot show: streams, kernels that a GPU has and a CPU has not, collectives, real pools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from vllm.v1.worker.gpu import cudagraph_utils

GARBAGE = 1 << 40
READS = ("_local_scalar_dense", "is_nonzero", "equal", "lift_fresh", "pin_memory")
"""Operations by which the host reads a value, or tells the device one."""


class CaptureError(Exception):
    """What a capture of CUDA would not have taken, or a replay not survived."""


class _Outside:
    """A tensor in memory that the graph does not own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        if self.storage.expired():
            raise CaptureError("A replay reads memory that was given back.")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.form)


class FakeGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.forget()
        with torch.inference_mode():
            for func, args, kwargs, made in self.operations:
                given = tree_map(_there, (args, kwargs))
                results = tree_leaves(func(*given[0], **given[1]))
                for place, tensor in made:
                    tensor.copy_(results[place])

    def forget(self) -> None:
        """Others have used its memory since the last replay."""
        with torch.inference_mode():
            for _, _, _, made in self.operations:
                for _, tensor in made:
                    if tensor.is_floating_point():
                        tensor.fill_(torch.nan)
                    else:
                        tensor.fill_(GARBAGE if tensor.dtype == torch.int64 else 1)


def _there(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


class Capture(TorchDispatchMode):
    """What happens inside of `torch.cuda.graph(graph)`."""

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse(func, args, kwargs)
        own = self._graph.own
        noted_args, noted_kwargs = tree_map(self._noted, (args, kwargs))
        before = {
            value.untyped_storage()._cdata
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        }
        results = func(*args, **kwargs)
        made = []
        for place, value in enumerate(tree_leaves(results)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in before and storage._cdata not in own:
                    own[storage._cdata] = storage
                    made.append((place, value))
        self._graph.operations.append((func, noted_args, noted_kwargs, made))
        return results

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        mine = value.untyped_storage()._cdata in self._graph.own
        return value if mine else _Outside(value)


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """CaptureError for operations that no capture takes, or that draw from a generator."""
    name = func.name().split("::")[1].split(".")[0]
    tags = func.tags
    if name in READS or torch.Tag.data_dependent_output in tags:
        raise CaptureError(f"{name}: the host reads a value, or tells the device one")
    if torch.Tag.dynamic_output_shape in tags and not (name == "index" and _by_numbers(args[1])):
        raise CaptureError(f"{name}: its shape depends on values")
    if torch.Tag.nondeterministic_seeded in tags and not _drops_nothing(func, args, kwargs):
        raise CaptureError(f"{name}: it draws from a generator")


def _by_numbers(indices: Any) -> bool:
    """Rows that are asked for by number are as many as numbers; by a mask, as many as it has."""
    masks = (torch.bool, torch.uint8)
    return all(index is None or index.dtype not in masks for index in indices)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention draws from a generator for its dropout alone."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given) == 0)
    return False


class Outliving(TorchDispatchMode):
    """Memory that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            value.untyped_storage()._cdata
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for value in tree_leaves(results):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in before:
                    self._made.append(StorageWeakRef(storage))
        return results

    @property
    def alive(self) -> int:
        """How much of it is still held."""
        return sum(not ref.expired() for ref in self._made)


def installed(patch: pytest.MonkeyPatch) -> None:
    """vLLM's own `CudaGraphManager` captures with them."""

    @contextlib.contextmanager
    def capturing(graph: FakeGraph, *_: Any, **__: Any) -> Iterator[None]:
        with Capture(graph):
            yield
        graph.forget()

    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", capturing)
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    patch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    patch.setattr(cudagraph_utils, "current_stream", lambda: None)
    patch.setattr(cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext())
    patch.setattr(
        cudagraph_utils, "capture_pool", lambda pool, config: contextlib.nullcontext(pool)
    )
    platform = SimpleNamespace(get_global_graph_pool=lambda: (0, 0))
    patch.setattr(cudagraph_utils, "current_platform", platform)
