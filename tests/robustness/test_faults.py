"""What the fault table says of made-up runs, and a few faults in a real one."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("faults")


def lines(*numbers: int, versions: tuple[int, ...] = ()) -> list[dict[str, float]]:
    found = versions or (0,) * len(numbers)
    return [
        {"step": n, "policy_version": n, "heads_version": v}
        for n, v in zip(numbers, found, strict=True)
    ]


def test_missing_and_repeated_steps_and_older_heads_are_wrong(faults: ModuleType) -> None:
    assert faults.faults_of_steps(lines(0, 1, 2, versions=(0, 0, 3))) == []
    assert "missing" in faults.faults_of_steps(lines(0, 2))[0]
    assert "missing" in faults.faults_of_steps(lines(0, 1, 1))[0]
    assert "fell" in faults.faults_of_steps(lines(0, 1, versions=(2, 1)))[0]
    assert (
        "policy"
        in faults.faults_of_steps([{"step": 0, "policy_version": 1, "heads_version": 0}])[0]
    )


def test_the_table_counts_by_kind(faults: ModuleType) -> None:
    records = [
        faults.Record("engine killed", 3, True, 2.0, 1),
        faults.Record("engine killed", 9, False, 6.0, 0),
    ]
    assert "| engine killed | 2 | 1 | 4.0 (6.0) | 0 to 1 |" in faults.table(records)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_run_survives_a_few_of_each(faults: ModuleType) -> None:
    with tempfile.TemporaryDirectory(prefix="mf-") as name:  # Short: Ray's sockets are in it.
        counts = {"companion killed": 2, "companion stopped": 1, "engine killed": 1}
        said: list[str] = []
        records, wrong, steps = faults.run_faults("tiny", counts, 0, Path(name), said.append)
    assert wrong == [] and len(records) == len(said) == 4 and steps > 8
    assert all(record.recovered for record in records)
    companion = [record for record in records if record.kind.startswith("companion")]
    assert all(record.steps_meanwhile >= 1 for record in companion), (
        "PPO goes on without its companion"
    )
