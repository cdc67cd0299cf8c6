"""What tests/robustness/fuzz.py once found stays fixed; needs no hypothesis."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

FOUND = [
    json.loads(line)
    for line in Path(__file__).with_name("fuzz_found.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def fuzz() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).with_name("fuzz.py")))


@pytest.fixture(scope="module")
def bench(fuzz: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fuzz["Bench"](tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize(
    "entry", FOUND, ids=[f"{entry['target']}: {entry['what']}" for entry in FOUND]
)
def test_what_was_found_stays_fixed(
    fuzz: dict[str, Any], bench: Any, entry: dict[str, Any]
) -> None:
    fuzz["attempt"](bench, entry["target"], entry["case"])


def test_the_corpus_breaks_nothing(fuzz: dict[str, Any], bench: Any) -> None:
    file = Path(__file__).with_name("fuzz_corpus.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert {entry["target"] for entry in entries} == set(
        fuzz["TARGETS"]
    ) and file.stat().st_size < 300_000
    for entry in entries:
        fuzz["attempt"](bench, entry["target"], entry["case"])


def test_a_case_that_reaches_more_is_known(fuzz: dict[str, Any], bench: Any) -> None:
    reached = fuzz["Reached"]()

    def render(template: str) -> bool:
        return reached.more_by(
            lambda: fuzz["try_one"](
                bench, "rows", {"rows": [{"prompt": "x"}], "template": template, "column": ""}, []
            )
        )

    assert render("{prompt}") and not render("{prompt} again")
    assert render("{prompt:>9}") and render("{nothing}") and not render("{prompt}")
    found: list[dict[str, Any]] = []
    seed = {"rows": [{"prompt": "x"}], "template": "{prompt}", "column": "prompt"}
    steps, kept = fuzz["explore"](bench, "rows", 300, 0, [seed], found)
    assert found == [] and kept[0] == seed and len(kept) > 3 and steps > 20


def test_the_replay_would_see_a_breach(
    fuzz: dict[str, Any], bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    bench.report(
        {"lines": [{"step": 0, "entropy": 1.0}], "meta": {"name": "<script>alert(1)</script>"}}
    )
    bench.rows({"rows": [{"prompt": "x"}], "template": "{prompt}", "column": "prompt"})


def test_found_inputs_stay_small() -> None:
    assert Path(__file__).with_name("fuzz_found.jsonl").stat().st_size < 100_000
