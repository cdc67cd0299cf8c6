"""The pictures of the documents are what their command draws from the kept run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from heads.errors import RunError
from medusa_ppo.contract import metrics as m

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("document_pictures")


def test_the_pictures_are_as_they_would_be_drawn(pictures: ModuleType) -> None:
    for file, svg in pictures.pictures().items():
        assert file.read_text(encoding="utf-8") == svg, (
            f"{file.name}: run python benchmarks/document_pictures.py draw"
        )


def test_a_run_is_kept_with_what_the_pictures_need(pictures: ModuleType, tmp_path: Path) -> None:
    steps = [
        {"step": 0, m.REPLAY_SERVING: 2.00001, m.REPLAY_FROZEN: 2.0},
        {"step": 1, m.REPLAY_SERVING: None},
        {"step": 2, m.REPLAY_SERVING: 3.0, m.REPLAY_FROZEN: 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    side = {"step_s": 10.00041, "generate_s": 5.0, "score_s": 1.0, "update_s": 2.0, "sync_s": 1.0}
    meta = {"command": "medusa-ppo demo", "commit": "abc", "hardware": {"cpu": "a CPU"}}
    (tmp_path / "run.json").write_text(
        json.dumps(meta | {"comparison": {"steps": [{"with": side, "without": side}]}})
    )
    kept = pictures.kept(tmp_path)
    assert kept["acceptance"] == [[0, 2.0, 2.0], [2, 3.0, 2.5]]
    assert kept["pairs"][0]["with"]["step_s"] == 10.0 and kept["cpu"] == "a CPU"
    # What is left of the step's seconds is a part of its own.
    assert ">10.0 s</text>" in pictures.seconds_picture(kept["pairs"])
    (tmp_path / "run.json").write_text(json.dumps(meta))
    with pytest.raises(RunError, match="compare_pairs"):
        pictures.kept(tmp_path)


def test_the_pair_in_the_middle_is_drawn(pictures: ModuleType) -> None:
    def side(seconds: float) -> dict[str, float]:
        return {"step_s": seconds} | dict.fromkeys(pictures.PHASES.values(), 1.0)

    pairs = [{"with": side(seconds), "without": side(10.0)} for seconds in (9.0, 5.0, 7.0)]
    picture = pictures.seconds_picture(pairs)
    assert ">7.0 s</text>" in picture and ">9.0 s</text>" not in picture
