"""TensorBoard with real event files; Weights & Biases and trackio with stand-ins, because the real
ones want an account or a server.

The stand-ins have the signatures of wandb 0.31 and trackio 0.43; what was called is compared.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.reports.trackers import TensorBoardTracker, TrackioTracker, WandbTracker


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="the package tensorboard is not installed",
)
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(tag: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(tag)]

    tracker = TensorBoardTracker(tmp_path)
    for step in range(3):
        tracker.log(step, {"mal_serving": 1.0 + step, "acceptance_per_position/2": 0.5})
    assert read("mal_serving") == [(0, 1.0), (1, 2.0), (2, 3.0)], "flushed while the run goes on"
    tracker.close()
    tracker.close()
    assert read("acceptance_per_position/2") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    resumed = TensorBoardTracker(tmp_path, first_step=2)
    resumed.log(2, {"mal_serving": 9.0})
    resumed.close()
    assert read("mal_serving") == [(0, 1.0), (1, 2.0), (2, 9.0)], (
        "a step that is done again is there once"
    )


class ServiceRun:
    """A run of wandb or trackio."""

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, float], int | None]] = []
        self.finished = False

    def finish(self) -> None:
        self.finished = True


class WandbRun(ServiceRun):
    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        self.lines.append((data, step))


class TrackioRun(ServiceRun):
    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.lines.append((metrics, step))


def installed(monkeypatch: pytest.MonkeyPatch, name: str, run: ServiceRun) -> dict[str, Any]:
    """Put a module of that name in place; returns what its `init` was called with."""
    given: dict[str, Any] = {}
    module = types.ModuleType(name)

    def init(**settings: Any) -> ServiceRun:
        given.update(settings)
        return run

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return given


def test_wandb_is_called_as_its_package_wants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = WandbRun()
    given = installed(monkeypatch, "wandb", run)
    tracker = WandbTracker("project", "name", tmp_path / "run", {"seed": 1})
    tracker.log(7, {"mal_serving": 2.0})
    tracker.close()
    assert given == {
        "project": "project",
        "name": "name",
        "group": "name",
        "dir": str(tmp_path / "run"),
        "config": {"seed": 1},
    }
    assert (tmp_path / "run").is_dir(), (
        "wandb falls back to another folder when this one is missing"
    )
    assert run.lines == [({"mal_serving": 2.0}, 7)] and run.finished


@pytest.mark.parametrize(("resumed", "word"), [(False, "never"), (True, "allow")])
def test_trackio_is_called_as_its_package_wants(
    monkeypatch: pytest.MonkeyPatch, resumed: bool, word: str
) -> None:
    run = TrackioRun()
    given = installed(monkeypatch, "trackio", run)
    tracker = TrackioTracker("project", "name", {"seed": 1}, resumed=resumed)
    tracker.log(7, {"mal_serving": 2.0})
    tracker.close()
    assert given == {
        "project": "project",
        "name": "name",
        "config": {"seed": 1},
        "resume": word,
        "embed": False,
    }
    assert run.lines == [({"mal_serving": 2.0}, 7)] and run.finished
