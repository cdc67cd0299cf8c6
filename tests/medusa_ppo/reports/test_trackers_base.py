"""Flat figures, and trackers that fail without stopping anything."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from medusa_ppo.contract import metrics as names
from medusa_ppo.reports import trackers
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


class TrackerRecorder:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken(TrackerRecorder):
    def log(self, step: int, values: dict[str, float]) -> None:
        super().log(step, values)
        raise OSError("no network")

    def close(self) -> None:
        raise OSError("no network at the end either")


def test_a_tracker_that_fails_is_told_once_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken()
    good = TrackerRecorder()
    group = TrackerGroup({"wandb": broken, "ray": good})
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            group.log({names.STEP: step, names.REWARD_MEAN: 0.5})
        group.close()
        group.close()
    assert [step for step, _ in good.lines] == [step for step, _ in broken.lines] == [0, 1, 2], (
        "tried again at every step"
    )
    assert good.lines[1] == (1, {names.STEP: 1.0, names.REWARD_MEAN: 0.5}) and good.closed == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "wandb" in warnings[0] and "no network" in warnings[0]


class Hanging(TrackerRecorder):
    """Never comes back from its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.end.wait()


def test_a_tracker_that_hangs_holds_nobody_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.3)
    hanging = Hanging()
    good = TrackerRecorder()
    group = TrackerGroup({"wandb": hanging, "ray": good})
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            group.log({names.STEP: step})
            time.sleep(0.02)
        group.close()
    hanging.end.set()
    assert time.monotonic() - began < 30.0
    assert [step for step, _ in good.lines] == list(range(10)) and good.closed == 1
    assert [
        record.getMessage()
        for record in caplog.records
        if "wandb failed" in record.getMessage() and "does not answer" in record.getMessage()
    ]


def test_a_clock_that_jumps_changes_no_duration() -> None:
    """Wall time is asked for stamps and names alone: nothing of ours measures or waits by it."""
    users = {}
    for path in (Path(trackers.__file__).parents[1]).rglob("*.py"):
        found = re.findall(
            r"\btime\.time\(|\bdatetime\.(?:now|utcnow)\(|time_ns\(", path.read_text()
        )
        if found:
            users[path.name] = found
    assert users == {
        "feed_manifest.py": ["time.time("],
        "store.py": ["datetime.now("],
        "service.py": ["time_ns("],
        "team.py": ["time_ns("],
    }
