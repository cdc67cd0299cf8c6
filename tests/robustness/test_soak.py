"""The soak's statistics on made-up figures, and a short soak of a real run."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("soak")


def series(per_hour: float, noise: float, seed: int = 0) -> tuple[list[float], list[float]]:
    generator = random.Random(seed)
    times = [5.0 * i for i in range(400)]
    return times, [100 + per_hour * at / 3600 + generator.gauss(0, noise) for at in times]


def test_a_slope_is_found_with_its_interval(soak: ModuleType) -> None:
    times, values = series(60, 3)
    found = soak.trend("loop: private MiB", times, values)
    assert found.low < 60 < found.high and found.per_hour == pytest.approx(60, abs=5)
    assert found.grows and found.rise == pytest.approx(60 * times[-1] / 3600, rel=0.1)


def test_noise_alone_hardly_ever_grows(soak: ModuleType) -> None:
    verdicts = [soak.trend("loop: private MiB", *series(0, 20, seed)).grows for seed in range(60)]
    assert sum(verdicts) <= 6


def test_what_is_sure_but_tiny_is_no_growth_and_a_fall_neither(soak: ModuleType) -> None:
    assert not soak.trend("loop: private MiB", *series(2, 0.01)).grows
    assert not soak.trend("loop: private MiB", *series(-60, 1)).grows
    assert soak.trend("loop: files", *series(20, 0.1)).grows
    with pytest.raises(ValueError, match="too few"):
        soak.trend("loop: files", [0.0] * 5, [1.0] * 5)


def test_the_warm_up_is_left_out_and_roles_may_come_late(soak: ModuleType) -> None:
    samples = [
        (
            float(i),
            {"loop: files": 50.0 if i > 20 else i} | ({"other: files": 3.0} if i > 40 else {}),
        )
        for i in range(90)
    ]
    trends = {t.name: t for t in soak.judge(samples)}
    assert trends["loop: files"].mean == 50 and not trends["loop: files"].grows
    assert 0 < trends["other: files"].mean < 3
    assert "| loop: files | 50.0 |" in soak.table(list(trends.values()))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    """Whether a minute's figures grow says nothing; that everything is watched and gone afterwards
    does.
    """
    command = [
        sys.executable,
        str(FOLDER / "soak.py"),
        "--steps",
        "25",
        "--every",
        "0.5",
        "--json",
        str(tmp_path / "soak.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "soak.json").is_file(), done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["steps"] == 25 and figures["left"] == [] and "exit code" not in done.stdout
    names = {t["name"] for t in figures["trends"]}
    assert {
        f"{role}: {what}"
        for role in ("loop", "engine", "companion", "raylet", "gcs")
        for what in ("private MiB", "files")
    } <= names
    assert done.returncode == any(t["grows"] for t in figures["trends"])
