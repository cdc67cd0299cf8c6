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
        ("cpu  100 0 50 400 200 0 3 0 0 0\ncpu0 50 0 25 200 100 0 3 0 0 0\n", 6.0),
        ("", math.nan),
        ("cpu  some\n", math.nan),
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
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    assert hardware.cores_idle_s() == pytest.approx(seconds, nan_ok=True)
