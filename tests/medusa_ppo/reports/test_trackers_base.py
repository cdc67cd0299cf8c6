"""Flat figures, and trackers that fail without stopping anything."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from medusa_ppo import metrics as names
from medusa_ppo.reports.trackers import TrackerGroup, flatten


def test_lists_become_places_and_only_numbers_stay() -> None:
    values = {
        names.STEP: 3,
        names.ACCEPTANCE_PER_POSITION: [0.5, np.float32(0.25), None],
        names.MAL_PER_ENGINE: (),
        names.REWARD_MEAN: math.nan,
        names.ENTROPY: math.inf,
        names.KL_UPDATE: np.array([1.0, 2.0]),
        "name": "text",
        "ok": True,
    }
    assert flatten(values) == {
        names.STEP: 3.0,
        f"{names.ACCEPTANCE_PER_POSITION}/1": 0.5,
        f"{names.ACCEPTANCE_PER_POSITION}/2": 0.25,
        f"{names.KL_UPDATE}/1": 1.0,
        f"{names.KL_UPDATE}/2": 2.0,
        "ok": 1.0,
    }


class Recorder:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken(Recorder):
    def log(self, step: int, values: dict[str, float]) -> None:
        super().log(step, values)
        raise OSError("no network")

    def close(self) -> None:
        raise OSError("no network at the end either")


def test_a_tracker_that_fails_is_told_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Broken(), Recorder()
    group = TrackerGroup({"wandb": broken, "ray": good})
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            group.log({names.STEP: step, names.REWARD_MEAN: 0.5})
        group.close()
        group.close()
    assert [step for step, _ in good.lines] == [step for step, _ in broken.lines] == [0, 1, 2], "tried again at every step"
    assert good.lines[1] == (1, {names.STEP: 1.0, names.REWARD_MEAN: 0.5}) and good.closed == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "wandb" in warnings[0] and "no network" in warnings[0]
