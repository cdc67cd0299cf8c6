"""Seconds of operations: the roofline moves as it must, and measured tables are read, and read
between their points, as they stand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from heads.errors import UsageError
from medusa_ppo.predict.gpus import GPUS, find_gpu
from medusa_ppo.predict.measured_tables import TableTimes, operator_times
from medusa_ppo.predict.operator_times import RooflineTimes
from medusa_ppo.predict.step_costs import RANGES, StepCosts
from medusa_ppo.runtime.hardware import ModelSizes

MODEL = ModelSizes(4096, 32, 32, 8, 128, 14336, 128256)


def write(folder: Path, kind: str, name: str, columns: dict[str, list[object]]) -> None:
    where = folder / kind / "vllm" / "0.24.0"
    where.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), where / f"{name}.parquet")


@pytest.fixture
def tables(tmp_path: Path) -> TableTimes:
    """Tables of a GPU whose products take rows x width x width nanoseconds, 1 us at least."""
    rows, widths = [1, 16, 256], [64, 256, 1024]
    points = [(m, n, k) for m in rows for n in widths for k in widths if (m, n, k) != (16, 256, 64)]
    write(
        tmp_path,
        "gemm",
        "gemm_perf",
        {
            "m": [m for m, _, _ in points] + [1],
            "n": [n for _, n, _ in points] + [64],
            "k": [k for _, _, k in points] + [64],
            "latency": [m * n * k * 1e-6 for m, n, k in points] + [1e-9],
            "gemm_dtype": ["bfloat16"] * len(points) + ["fp8"],
        },
    )
    sizes = [(batch, step) for batch in (1, 8) for step in (1, 1023, 8191)]
    write(
        tmp_path,
        "attention",
        "generation_attention_perf",
        {
            "batch_size": [batch for batch, _ in sizes],
            "step": [step for _, step in sizes],
            "latency": [0.01 + 1e-6 * batch * step for batch, step in sizes],
            "num_heads": [32] * 6,
            "num_key_value_heads": [8] * 6,
            "head_dim": [128] * 6,
            "kv_cache_dtype": ["bfloat16"] * 6,
        },
    )
    write(
        tmp_path,
        "comm",
        "custom_allreduce_perf",
        {
            "num_gpus": [2, 2],
            "message_size": [1024, 4096],
            "latency": [0.004, 0.016],
            "backend": ["vllm_graph"] * 2,
        },
    )
    return TableTimes(find_gpu("h100"), StepCosts(), tmp_path)


def test_products_are_those_of_the_table_and_a_power_law_between(tables: TableTimes) -> None:
    assert tables.product(16, 1024, 64) == pytest.approx(16 * 1024 * 64 * 1e-9)
    assert tables.product(64, 512, 512) == pytest.approx(64 * 512 * 512 * 1e-9, rel=1e-6)
    # Beyond the last point it goes on as it went.
    assert tables.product(512, 2048, 256) == pytest.approx(512 * 2048 * 256 * 1e-9, rel=1e-6)


def test_a_missing_point_is_filled_from_its_neighbours(tables: TableTimes) -> None:
    assert tables.product(16, 64, 256) == pytest.approx(16 * 64 * 256 * 1e-9, rel=1e-6)


def test_attention_and_reductions_are_read(tables: TableTimes) -> None:
    assert tables.attention(MODEL, 1, 8, 1, 1023) == pytest.approx((0.01 + 8e-6 * 1023) / 1e3)
    # Five rows of each sequence read what one reads, until their products take longer.
    assert tables.attention(MODEL, 1, 8, 5, 1023) == tables.attention(MODEL, 1, 8, 1, 1023)
    assert tables.attention(MODEL, 1, 8, 4096, 8191) > 10 * tables.attention(MODEL, 1, 8, 1, 8191)
    assert tables.reduce(1, 1024, 2) == pytest.approx(8e-6)
    assert tables.reduce(1, 1024, 1) == 0
    # Of four ranks there is no table: the roofline's.
    assert tables.reduce(1, 1024, 4) == RooflineTimes.reduce(tables, 1, 1024, 4)


def test_heads_that_no_table_has_are_the_rooflines(tables: TableTimes) -> None:
    odd = ModelSizes(4096, 32, 7, 7, 100, 14336, 128256)
    roofline = RooflineTimes(find_gpu("h100"), StepCosts())
    assert tables.attention(odd, 1, 4, 1, 512) == roofline.attention(odd, 1, 4, 1, 512)


def test_without_the_package_the_roofline_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_ppo.predict.measured_tables.PACKAGE", "no_such_package")
    times = operator_times(find_gpu("h200"), StepCosts())
    assert type(times) is RooflineTimes
    assert "roofline" in times.source


def test_a_small_product_waits_for_its_weight_a_large_one_for_arithmetic() -> None:
    times = RooflineTimes(find_gpu("h100"), StepCosts())
    one = times.product(1, 4096, 4096)
    assert one == pytest.approx(2 * 4096**2 / (3.35e12 * StepCosts().memory_share), rel=0.01)
    assert times.product(8, 4096, 4096) < 1.02 * one
    assert times.product(4096, 4096, 4096) > 10 * one


def test_an_h200_reads_faster_and_multiplies_alike() -> None:
    h100, h200 = (RooflineTimes(find_gpu(name), StepCosts()) for name in ("h100", "h200"))
    assert h200.product(1, 4096, 4096) < 0.75 * h100.product(1, 4096, 4096)
    assert h200.product(8192, 4096, 4096) == h100.product(8192, 4096, 4096)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("h999")
    assert "h999" in str(caught.value)
    assert all(name in str(caught.value.expected) for name in [*GPUS, "cpu"])


def test_each_uncertain_cost_lies_in_its_range() -> None:
    costs = StepCosts()
    for name, (low, high) in RANGES.items():
        assert low < getattr(costs, name) < high, name
    assert np.isfinite([getattr(costs, name) for name in RANGES]).all()
