"""docs/metrics.md says about every number what the code says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from heads.errors import UsageError
from medusa_ppo.contract import metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
sys.path.insert(0, str(PAGE.parent / "site"))
from metric_tables import fill, unit  # noqa: E402  (not a package: what builds the site)


def test_the_page_is_what_the_code_would_write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text) == text, "run: python docs/site/metric_tables.py docs/metrics.md"
    for name, what in metrics.describe().items():
        assert f"| `{name}` |" in text and what in text


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(UsageError):
        fill("nothing here")


def test_units_come_from_the_ending_of_a_name() -> None:
    assert [
        unit(name) for name in ("update_s", "rollout_tokens_per_s", "clip_frac", "entropy")
    ] == [
        "seconds",
        "tokens/s",
        "share, 0 to 1",
        "",
    ]
