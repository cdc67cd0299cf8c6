"""The kernel's count of seconds in which somebody waited for a core."""

from __future__ import annotations

import math
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
