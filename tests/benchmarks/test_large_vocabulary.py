"""What training for a large vocabulary is timed on."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.companion.trainer import HeadsTrainer, TrainReport

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_pass_is_one_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ten steps of little text the optimizer would be most of what is timed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module("large_vocabulary")
    monkeypatch.setattr(bench, "D", 16)
    taken: list[int] = []
    train = HeadsTrainer.train_batch

    def counted(trainer: HeadsTrainer, *given: Any, **how: Any) -> TrainReport:
        report = train(trainer, *given, **how)
        taken.append(report.optimizer_steps)
        return report

    monkeypatch.setattr(HeadsTrainer, "train_batch", counted)
    bench.time_training(
        argparse.Namespace(vocab=64, rows=320, width=16, dtypes=["float32"], rounds=1)
    )
    assert set(taken) == {1}
    assert capsys.readouterr().out.count("positions/s") == 2
