"""The GPU benchmark's arithmetic, and that it runs as a whole on a CPU at a small size."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu_heads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_heads")


def test_it_runs_small_on_a_cpu(
    gpu_heads: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    words = (
        "gpu_heads --device cpu --small --dtype float32 --forms chunks,liger --hidden 8 --vocab 96"
        " --heads 3 --rows 10 --json"
    )
    monkeypatch.setattr(sys, "argv", [*words.split(), str(file)])
    gpu_heads.main()
    record = json.loads(file.read_text())
    assert record["versions"]["torch"] and record["hardware"] and record["options"]["hidden"] == 8
    assert [(line["form"], line["loss"]) for line in record["results"]] == [
        ("chunks", "ce"),
        ("chunks", "ce_tv"),
    ], "liger needs CUDA"
    for line in record["results"]:
        low, high = line["share_range"]
        assert 0 < low <= line["share_of_matrix_rate"] <= high
        by_hand = 10 * 3 * (4 * 8 * 96 + 4 * 8 * 8)
        assert abs(line["tflops"] * 1e12 * line["step_s"] / by_hand - 1) < 1e-6


def test_without_a_gpu_it_says_what_to_do(
    gpu_heads: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_heads"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_heads.main()
    assert "--device cpu --small" in capsys.readouterr().err
