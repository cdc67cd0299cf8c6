"""Measured times of vLLM's operators on real GPUs: aiconfigurator-core's tables (Apache-2.0), read
from the installed package's Parquet files.

The package measures matrix products by rows, inputs and outputs, attention by sequences and
context, and all-reduces by bytes, each on a grid of sizes. Between grid points times are
interpolated as a power law. That is exact where an operation is bound by memory or by arithmetic
alone, and an approximation where the two meet.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from medusa_ppo.predict.gpus import GpuFigures
from medusa_ppo.predict.operator_times import RooflineTimes, attention_flops
from medusa_ppo.predict.step_costs import StepCosts
from medusa_ppo.runtime.hardware import BFLOAT16, ModelSizes

PACKAGE = "aiconfigurator_core"


def tables_folder(gpu: GpuFigures) -> Path | None:
    """Folder of this GPU's tables in the installed package; None if it has none or is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "systems" / "data" / gpu.tables
    return folder if folder.is_dir() else None


def operator_times(gpu: GpuFigures, costs: StepCosts, *, tables: bool = True) -> RooflineTimes:
    """Measured times if the package is installed, otherwise the roofline."""
    folder = tables_folder(gpu) if tables else None
    return RooflineTimes(gpu, costs) if folder is None else TableTimes(gpu, costs, folder)


class TableTimes(RooflineTimes):
    """Measured times; the roofline fills in what the tables lack."""

    def __init__(self, gpu: GpuFigures, costs: StepCosts, folder: Path) -> None:
        super().__init__(gpu, costs)
        version, self._products = _products(folder)
        self._folder = folder
        self.source = f"operators of vLLM {version} measured on {gpu.tables} (aiconfigurator)"

    def product(self, rows: float, inputs: int, outputs: int) -> float:
        return self._products.seconds(rows, outputs, inputs)

    def attention(
        self, model: ModelSizes, ranks: int, sequences: float, queries: int, context: float
    ) -> float:
        found = _attention(
            self._folder,
            max(1, model.heads // ranks),
            max(1, model.kv_heads // ranks),
            model.head_dim,
        )
        if found is None:
            return super().attention(model, ranks, sequences, queries, context)
        # The tables have one new row per sequence. Further rows read the same keys and values, so
        # they cost time only where arithmetic is the limit.
        flops = attention_flops(model, sequences, queries, context) / ranks
        return max(found.seconds(sequences, context), self.bounded(0.0, flops))

    def reduce(self, rows: float, width: int, ranks: int) -> float:
        found = _reductions(self._folder, ranks) if ranks > 1 else None
        if found is None:
            return super().reduce(rows, width, ranks)
        return found.seconds(BFLOAT16 * rows * width)


class _Grid:
    """Times on a grid of sizes, with a power law between its points and beyond the largest."""

    def __init__(self, axes: list[list[float]], values: np.ndarray) -> None:
        self._axes = [np.log(axis) for axis in axes]
        self._values = np.log(values)
        # Cached: a prediction asks for the same sizes again for every cost that it varies.
        self._known: dict[tuple[float, ...], float] = {}

    def seconds(self, *sizes: float) -> float:
        if sizes not in self._known:
            self._known[sizes] = self._between(sizes)
        return self._known[sizes]

    def _between(self, sizes: tuple[float, ...]) -> float:
        found = self._values
        for axis, size in zip(self._axes, sizes, strict=True):
            if len(axis) == 1:
                found = found[0]
                continue
            at = np.log(max(size, 1e-9))
            above = min(max(bisect_left(axis, at), 1), len(axis) - 1)
            share = (at - axis[above - 1]) / (axis[above] - axis[above - 1])
            # Below the smallest size the launch dominates, so the time stays the same.
            share = max(share, 0.0)
            found = found[above - 1] + share * (found[above] - found[above - 1])
        return float(np.exp(found)) / 1e3


def _newest(folder: Path, kind: str, name: str) -> Path | None:
    """The file of this name for the newest vLLM."""
    found = sorted(
        folder.glob(f"{kind}/vllm/*/{name}.parquet"),
        key=lambda path: [int(part) for part in path.parent.name.split(".") if part.isdigit()],
    )
    return found[-1] if found else None


def _columns(path: Path, names: list[str], wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The named columns, of the rows with the wanted values. Wanted values of columns that an older
    table lacks are ignored.
    """
    # Slow to load, and only needed with tables.
    from pyarrow import parquet

    there = set(parquet.read_schema(path).names)
    filters = [(name, "=", value) for name, value in wanted.items() if name in there]
    table = parquet.read_table(path, columns=names, filters=filters)
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in names}


def _filled(values: np.ndarray) -> np.ndarray:
    """Fill a grid's missing points: interpolate their logarithms along each axis in turn."""
    logs = np.log(values)
    for axis in range(logs.ndim):
        moved = np.moveaxis(logs, axis, -1)
        for index in np.ndindex(moved.shape[:-1]):
            line = moved[index]
            there = ~np.isnan(line)
            if there.sum() >= 2 and not there.all():
                places = np.arange(len(line))
                line[~there] = np.interp(places[~there], places[there], line[there])
    return np.exp(logs)


def _gridded(columns: dict[str, np.ndarray], names: list[str]) -> _Grid:
    """Rows of a table as a grid. Of several measurements of one point the fastest counts, because
    vLLM picks the fastest kernel.
    """
    axes = [np.unique(columns[name]) for name in names]
    values = np.full([len(axis) for axis in axes], np.nan)
    places = tuple(
        np.searchsorted(axis, columns[name]) for axis, name in zip(axes, names, strict=True)
    )
    np.fmin.at(values, places, columns["latency"])
    return _Grid([list(axis) for axis in axes], _filled(values))


@cache
def _products(folder: Path) -> tuple[str, _Grid]:
    path = _newest(folder, "gemm", "gemm_perf")
    assert path is not None, f"no matrix products in {folder}"
    columns = _columns(path, ["m", "n", "k", "latency"], {"gemm_dtype": "bfloat16"})
    return path.parent.name, _gridded(columns, ["m", "n", "k"])


@cache
def _attention(folder: Path, heads: int, kv_heads: int, head_dim: int) -> _Grid | None:
    path = _newest(folder, "attention", "generation_attention_perf")
    if path is None:
        return None
    wanted = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
    }
    columns = _columns(path, ["batch_size", "step", "latency"], wanted)
    if len(columns["step"]) < 4:
        return None
    return _gridded(columns, ["batch_size", "step"])


@cache
def _reductions(folder: Path, ranks: int) -> _Grid | None:
    path = _newest(folder, "comm", "custom_allreduce_perf")
    if path is None:
        return None
    wanted = {"num_gpus": ranks, "backend": "vllm_graph"}
    columns = _columns(path, ["message_size", "latency"], wanted)
    return _gridded(columns, ["message_size"]) if len(columns["latency"]) else None
