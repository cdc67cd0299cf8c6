"""Step times that an earlier start kept: given back as they were, or not used and said so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.engines.kept_tables import LARGEST_BYTES, keep_table, read_table, table_file

KEY = {"machine": "a CPU, 2 cores", "vllm": "0.32.0", "model": {"hidden_size": 64}, "eager": True}
ROWS = [
    {"running": 1, "drafts": 0, "seconds": 0.004, "steps": 8},
    {"running": 1, "drafts": 2, "seconds": 0.006, "steps": 8},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_kept_comes_back(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_table(KEY, 2) == [] and not caplog.records, "the usual case of a first start"
    keep_table(KEY, ROWS)
    assert table_file(KEY).is_relative_to(cache / "medusa-ppo")
    assert read_table(KEY, 2) == ROWS
    assert json.loads(table_file(KEY).read_text())["key"] == KEY, "in clear"


@pytest.mark.parametrize(
    "other", [{"machine": "a CPU, 4 cores"}, {"vllm": "0.33.0"}, {"eager": False}, {"more": 1}]
)
def test_another_machine_or_version_has_its_own(other: dict[str, Any]) -> None:
    keep_table(KEY, ROWS)
    assert read_table(KEY | other, 2) == []


def test_a_file_of_another_machine_under_this_ones_name_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep_table(KEY | {"machine": "another"}, ROWS)
    table_file(KEY | {"machine": "another"}).rename(table_file(KEY))
    assert read_table(KEY, 2) == []
    assert "from another machine, model or version" in caplog.text


def whole(rows: Any) -> str:
    return json.dumps({"format": 1, "key": KEY, "rows": rows})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "\x00\xff",
        "[" * 100_000,
        json.dumps({"format": 2, "key": KEY, "rows": ROWS}),
        json.dumps({"format": 1, "key": None, "rows": ROWS}),
        whole(None),
        whole({"running": 1}),
        whole([1]),
        whole([{}]),
        *(
            whole([ROWS[0] | {name: value}])
            for name, values in {
                "running": (0, -1, 1.5, "1", True, None, 10**400),
                "drafts": (-1, 3, 0.5, "0", None),
                "steps": (0, -8, 2.5, None),
                "seconds": (0, -1.0, float("nan"), float("inf"), 1e9, "0.1", None, True, []),
            }.items()
            for value in values
        ),
        " " * (LARGEST_BYTES + 1),
        whole(ROWS).ljust(LARGEST_BYTES + 1),
    ],
)
def test_a_damaged_file_is_said_and_not_used(
    content: str, caplog: pytest.LogCaptureFixture
) -> None:
    table_file(KEY).parent.mkdir(parents=True)
    table_file(KEY).write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert read_table(KEY, 2) == []
    assert len(caplog.records) == 1 and "measured again" in caplog.text
    keep_table(KEY, ROWS)
    assert read_table(KEY, 2) == ROWS


def test_a_cache_that_can_not_be_written_or_read_is_said(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    (cache / "medusa-ppo").write_text("a file where the folder should be")
    keep_table(KEY, ROWS)
    assert "can't be saved" in caplog.text
    assert read_table(KEY, 2) == []
    table = table_file(KEY)
    (cache / "medusa-ppo").unlink()
    table.mkdir(parents=True)
    assert read_table(KEY, 2) == [] and "measured again" in caplog.text
