"""Fixtures of the scripts' tests."""

from __future__ import annotations

from typing import Any

import pytest

from medusa_ppo.companion.trainer import HeadsTrainer, TrainReport


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The optimizer steps of each call of `train_batch` in the test."""
    taken: list[int] = []
    train = HeadsTrainer.train_batch

    def counted(trainer: HeadsTrainer, *given: Any, **how: Any) -> TrainReport:
        report = train(trainer, *given, **how)
        taken.append(report.optimizer_steps)
        return report

    monkeypatch.setattr(HeadsTrainer, "train_batch", counted)
    return taken
