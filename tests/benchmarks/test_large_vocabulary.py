"""What training for a large vocabulary is timed on."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_pass_is_one_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps_taken: list[int]
) -> None:
    """With ten steps of little text the optimizer would be most of what is timed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module("large_vocabulary")
    monkeypatch.setattr(bench, "D", 16)
    bench.time_training(
        argparse.Namespace(vocab=64, rows=320, width=16, dtypes=["float32"], rounds=1)
    )
    assert set(steps_taken) == {1}
    assert capsys.readouterr().out.count("positions/s") == 2
