"""The kernel's counts of seconds in which somebody waited for a core, and of idle ones."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from medusa_ppo.runtime import hardware


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("some avg10=9.96 avg60=7.66 avg300=6.47 total=2535076\nfull total=0\n", 2.535076),
        ("", math.nan),
        ("some total=many\n", math.nan),
        (None, math.nan),
    ],
)
def test_seconds_are_read_where_the_kernel_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    file = tmp_path / "cpu"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(hardware, "PRESSURE", file)
    assert hardware.cores_wanted_s() == pytest.approx(seconds, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (
            "cpu  100 0 50 400 200 0 3 0 0 0\ncpu0 50 0 25 200 100 0 3 0 0 0\n"
            "cpu1 50 0 25 100 50 0 3 0 0 0\ncpu2 0 0 0 900 0 0 0 0 0 0\nintr 1 2 3\n",
            4.5,
        ),
        ("", math.nan),
        ("cpu  some\n", math.nan),
        ("cpu0 some\n", math.nan),
        (None, math.nan),
    ],
)
def test_idle_seconds_are_those_without_work_and_those_that_wait_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    file = tmp_path / "stat"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(hardware, "CORE_TIMES", file)
    monkeypatch.setattr(hardware, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert hardware.cores_idle_s() == pytest.approx(seconds, nan_ok=True)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert math.isnan(hardware.cores_idle_s()), "others' idle seconds, where the time is limited"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "odd"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_a_container_may_use_as_many_cores_as_it_gets_the_time_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert hardware.usable_cores() == cores
