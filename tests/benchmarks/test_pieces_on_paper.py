"""The long tail on paper: a call by hand, and no preset whose engines stand idle."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("pieces_on_paper")


def test_a_call_by_hand(paper: ModuleType) -> None:
    """Two slots; a step takes 1.5 with one in use and 2 with both."""
    engines = paper.Engines(2, 2, 2.0)
    assert engines.call([3, 1, 2]) == 1 * 2.0 + 2 * 2.0
    assert engines.call([3, 1]) == 1 * 2.0 + 2 * 1.5
    assert engines.one_by_one([[3, 1], [1]]) == (5.0, 1 - 6.5 / 10)
    assert engines.by_slots([3, 1, 1, 1, 1]) == (2 * 2.0 + 1 * 1.5, 1 - (5.5 + 2) / 11)


def test_no_preset_leaves_engines_idle(
    paper: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pieces_on_paper.py"])
    paper.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[0].strip() for row in rows} >= {"one-node", "two-nodes", "two-nodes-colocated"}
    for row in rows:
        idle = [int(cell.split(" %")[0].split()[-1]) for cell in row[4:]]
        steps = [int(cell.split()[-1].replace(",", "")) for cell in row[4:]]
        assert idle[2] <= 15 and steps[2] <= min(steps[:2]), row[0]
        assert steps[2] <= 1.05 * steps[3], row[0]
