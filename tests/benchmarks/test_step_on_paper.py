"""The engine step on paper: what is counted is what the drafting call does, and the roofline moves
as it must.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("step_on_paper")


def test_the_call_is_counted_in_bytes_products_and_launches(paper: ModuleType) -> None:
    model = dataclasses.replace(paper.ACTORS["8B"].sizes, hidden=64, vocab=1000)
    few, many = (paper.counted(model, "hydra", 4, sequences, None) for sequences in (1, 64))
    assert few.launches == many.launches, "no work for each request by itself"
    # Each head reads lm_head once, whatever the number of sequences, and multiplies every row with
    # it.
    lm_head = 4 * 2 * 1000 * 64
    assert sum(nbytes for nbytes, _ in few.work) > lm_head
    assert (
        sum(flops for _, flops in many.work)
        == 64 * sum(flops for _, flops in few.work)
        > 64 * lm_head
    )
    part = paper.counted(model, "hydra", 4, 1, 100)
    assert sum(nbytes for nbytes, _ in part.work) < sum(nbytes for nbytes, _ in few.work)


def test_the_roofline_moves_as_it_must(paper: ModuleType) -> None:
    gpu = paper.Gpu()
    model = paper.ACTORS["8B"].sizes
    one = paper.target_seconds(model, gpu, 1, 1, 1)
    assert one == pytest.approx(2 * model.product_parameters / (3.35e12 * 0.7), rel=0.05), (
        "weights are nearly all that is read"
    )
    assert paper.target_seconds(model, gpu, 1, 1, 5) < 1.1 * one, (
        "more rows of one sequence are nearly free"
    )
    assert paper.target_seconds(model, gpu, 1, 256, 5) > 1.3 * paper.target_seconds(
        model, gpu, 1, 256, 1
    ), "with many they are not"
    count = paper.counted(dataclasses.replace(model, hidden=64, vocab=1000), "hydra", 2, 1, None)
    assert paper.draft_seconds(count, gpu, 1, graph=False) - paper.draft_seconds(
        count, gpu, 1
    ) == pytest.approx(count.launches * 4.5e-6)
