"""What chaos.py holds against a run, on made-up ones; and, slow, a few kinds on real ones."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from heads.checkpoint import save_state

FOLDER = Path(__file__).resolve().parent


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("chaos")


def test_there_are_at_least_fifteen_kinds_with_names_of_their_own(chaos: ModuleType) -> None:
    names = [kind.name for kind in chaos.KINDS]
    assert len(set(names)) == len(names) >= 15


def test_what_differs_from_the_undisturbed_run_is_wrong(
    chaos: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chaos, "unreadable", lambda run_dir: [])
    figures = [{"step": step, "entropy": 0.1 * step} for step in range(chaos.STEPS)]
    same = chaos.RunOutcome(figures, {"actor": "a"}, "h", "An engine was lost and started again")
    kind = chaos.Kind("a kind", lambda scene: None, "engine was lost")

    def wrong(**changes: Any) -> list[str]:
        monkeypatch.setattr(
            chaos, "outcome_of", lambda run_dir: dataclasses.replace(same, **changes)
        )
        return chaos.faults_of(kind, tmp_path, same)

    assert wrong() == []
    assert "steps [0, 1" in wrong(figures=figures[:-1])[0] and wrong(
        figures=[*figures, figures[-1]]
    )
    assert wrong(figures=[*figures[:3], {"step": 3, "entropy": 9.0}, *figures[4:]]) == [
        "step 3: other entropy"
    ]
    assert wrong(sums={"actor": "b"}) == ["other bytes in actor"] and wrong(heads="i") == [
        "other heads"
    ]
    assert wrong(report="All is well") == ["the report does not say: engine was lost"]


def test_files_that_are_not_whole_are_found(chaos: ModuleType, tmp_path: Path) -> None:
    scene = importlib.import_module("chaos_scene")
    run_dir = tmp_path / "run"
    save_state(run_dir / "checkpoint" / "actor.safetensors", {"a": torch.ones(100)})
    (run_dir / "checkpoint" / "state.json").write_text("{}")
    (run_dir / "heads-final").mkdir()
    assert [fault.split(":")[0] for fault in scene.unreadable(run_dir)] == ["heads-final"]
    (run_dir / ".actor.safetensors.new-x").touch()
    scene.cut(run_dir / "checkpoint" / "actor.safetensors")
    (run_dir / "summary.json").write_text("{")
    found = [fault.split(":")[0] for fault in scene.unreadable(run_dir)]
    assert sorted(found) == [
        "checkpoint/actor.safetensors",
        "heads-final",
        "left behind",
        "summary.json",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_kinds_leave_nothing_wrong(tmp_path: Path) -> None:
    kinds = [
        "companion killed, its state cut in half",
        "engine answers other tokens",
        "checkpoint with a flipped bit",
        "metrics damaged",
    ]
    command = [
        sys.executable,
        str(FOLDER / "chaos.py"),
        "--json",
        str(tmp_path / "found.json"),
        "--only",
        *kinds,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {
        name: tally["wrong"]
        for name, tally in json.loads((tmp_path / "found.json").read_text()).items()
    } == {k: [] for k in kinds}
