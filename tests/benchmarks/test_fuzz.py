"""What benchmarks/fuzz.py once found stays mended; needs no hypothesis."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOUND = [json.loads(line) for line in Path(__file__).with_name("fuzz_found.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def fuzz() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "fuzz.py"))


@pytest.fixture(scope="module")
def bench(fuzz: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fuzz["Bench"](tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("entry", FOUND, ids=[f"{entry['target']}: {entry['what']}" for entry in FOUND])
def test_what_was_found_stays_mended(fuzz: dict[str, Any], bench: Any, entry: dict[str, Any]) -> None:
    fuzz["attempt"](bench, entry["target"], entry["case"])


def test_the_replay_would_see_a_breach(fuzz: dict[str, Any], bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(case: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(bench, "rows", forever)
    monkeypatch.setitem(fuzz["attempt"].__globals__, "LIMIT_S", 0.05)
    with pytest.raises(fuzz["Hang"]):
        fuzz["attempt"](bench, "rows", None)
    monkeypatch.setattr(bench, "rows", lambda case: case["missing"])
    with pytest.raises(KeyError):
        fuzz["attempt"](bench, "rows", {})


def test_a_whole_case_of_each_file_is_read(bench: Any) -> None:
    """Else everything above would be refused for a reason of its own."""
    bench.heads({"set": [], "damage": {}})
    bench.state({"set": [], "damage": []})
    bench.pt({"pickle": [], "damage": []})
    bench.resume({"set": [], "text": None})
    bench.config({"text": None, "values": {"seed": 1}, "overrides": ["ppo.steps=2"]})
    bench.report({"lines": [{"step": 0, "entropy": 1.0}], "meta": {"name": "<script>alert(1)</script>"}})
    bench.rows({"rows": [{"prompt": "x"}], "template": "{prompt}", "column": "prompt"})


def test_found_inputs_stay_small() -> None:
    assert Path(__file__).with_name("fuzz_found.jsonl").stat().st_size < 100_000
