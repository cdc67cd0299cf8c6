"""Reading a run folder: torn lines, repeated steps, folders that are no run, processes that are
gone.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import psutil
import pytest

from heads.errors import RunError, UsageError
from medusa_ppo.reports.run_files import KILLED, UNKNOWN, number, numbers, read_run
from medusa_ppo.reports.store import RunWriter


def write_lines(path: Path, *lines: str) -> Path:
    (path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_torn_last_line_is_left_out_without_a_word(tmp_path: Path) -> None:
    run = read_run(write_lines(tmp_path, '{"step": 0, "entropy": 1.5}', '{"step": 1, "entr'))
    assert run.step_numbers() == [0]
    assert run.unreadable_lines == 0


def test_lines_damaged_in_the_middle_are_counted(tmp_path: Path) -> None:
    run = read_run(
        write_lines(tmp_path, '{"step": 0}', "\x00\x00", "[1]", '{"step": true}', '{"step": 3}', "")
    )
    assert run.step_numbers() == [0, 3]
    assert run.unreadable_lines == 3


def test_a_step_that_was_done_again_counts_once_and_the_later_line_wins(tmp_path: Path) -> None:
    run = read_run(
        write_lines(
            tmp_path,
            '{"step": 0, "entropy": 1}',
            '{"step": 1, "entropy": 2}',
            '{"step": 0, "entropy": 3}',
            "",
        )
    )
    assert run.column("entropy") == [3.0, 2.0]


def test_missing_null_and_text_are_none_in_a_column(tmp_path: Path) -> None:
    lines = (
        '{"step": 0}',
        '{"step": 1, "x": null}',
        '{"step": 2, "x": "fast"}',
        '{"step": 3, "x": true}',
        '{"step": 4, "x": NaN}',
        '{"step": 5, "x": 2}',
    )
    assert read_run(write_lines(tmp_path, *lines)).column("x") == [None] * 5 + [2.0]


def test_a_folder_that_is_no_run_names_the_runs_inside(tmp_path: Path) -> None:
    (tmp_path / "alpha").mkdir()
    write_lines(tmp_path / "alpha", '{"step": 0}')
    with pytest.raises(UsageError) as caught:
        read_run(tmp_path)
    assert "alpha" in str(caught.value) and "given" in str(caught.value)
    with pytest.raises(UsageError, match="no such run folder"):
        read_run(tmp_path / "beta")


def test_damaged_files_are_an_error_with_the_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"metrics\.jsonl holds no step"):
        read_run(write_lines(tmp_path, "no json", "none either", ""))
    write_lines(tmp_path, '{"step": 0}')
    for text in ("{", "[]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunError, match=r"run\.json is damaged"):
            read_run(tmp_path)


def test_status_tells_a_living_process_from_one_that_is_gone(tmp_path: Path) -> None:
    own = {
        "pid": os.getpid(),
        "create_time": psutil.Process().create_time(),
        "host": platform.node(),
    }
    cases = [
        ({"status": "finished"}, "finished"),
        ({"status": "running", "process": own}, "running"),
        ({"status": "running", "process": {**own, "create_time": 1.0}}, KILLED),
        (
            {"status": "running", "process": {**own, "create_time": 1.0, "host": "elsewhere"}},
            "running",
        ),
        ({"status": "sleeping"}, UNKNOWN),
    ]
    for meta, expected in cases:
        (tmp_path / "run.json").write_text(json.dumps(meta))
        assert read_run(tmp_path).status == expected, meta


def test_a_clock_that_jumps_does_not_kill_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path, {})
    monkeypatch.setattr(
        psutil.Process, "create_time", lambda self: 0.0
    )  # psutil counts from the boot, by the clock.
    assert read_run(tmp_path).status == "running"
    meta = json.loads((tmp_path / "run.json").read_text())
    meta["process"]["start_ticks"] += 1  # Another process of the same number.
    (tmp_path / "run.json").write_text(json.dumps(meta))
    assert read_run(tmp_path).status == "killed"
    writer.close()


def test_number_and_numbers_take_finite_numbers_only() -> None:
    assert [number(value) for value in (1, 2.5, True, None, "1", float("inf"))] == [
        1.0,
        2.5,
        None,
        None,
        None,
        None,
    ]
    assert numbers([1, 2]) == [1.0, 2.0]
    assert numbers([]) is numbers([1, None]) is numbers(3) is None
