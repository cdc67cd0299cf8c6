"""Writing a run folder: flushed lines, numbers that JSON lacks, resume, earlier runs, second
writers, reports at any moment.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heads.errors import RunError, UsageError
from medusa_ppo import __version__
from medusa_ppo.reports.store import (
    RunWriter,
    commit,
    cpu_model,
    hardware,
    package_versions,
    read_run,
    without_secrets,
)


def write_steps(writer: RunWriter, *steps: int) -> None:
    for step in steps:
        writer.step({"step": step, "entropy": float(step)})


def test_each_step_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", {"seed": 1})
    write_steps(writer, 0)
    assert read_run(tmp_path / "run").column("entropy") == [0.0]
    assert read_run(tmp_path / "run").status == "running"
    write_steps(writer, 1)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") == 2
    writer.close()


def test_numbers_that_json_lacks_become_null_and_are_named(tmp_path: Path) -> None:
    with_bad = {
        "step": 0,
        "a": float("nan"),
        "b": [1.0, float("inf")],
        "c": np.float32(0.5),
        "d": np.array([1, 2]),
        "e": Path("x"),
        "f": (1, 2),
    }
    writer = RunWriter(tmp_path, {"path": Path("y")})
    writer.step(with_bad)
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    record = json.loads(line)
    assert record == {
        "step": 0,
        "a": None,
        "b": [1.0, None],
        "c": 0.5,
        "d": [1, 2],
        "e": "x",
        "f": [1, 2],
        "nonfinite": ["a", "b"],
    }


def test_steps_must_grow_and_be_plain_data(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    write_steps(writer, 3)
    for bad in (
        {"step": 3},
        {"step": 2},
        {"entropy": 1.0},
        {"step": True},
        {"step": 4, "model": object()},
    ):
        with pytest.raises(UsageError):
            writer.step(bad)
    writer.close()
    assert read_run(tmp_path).step_numbers() == [3]


def test_finish_writes_all_reports_for_a_run_that_was_stopped(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {"seed": 1})
    write_steps(writer, 0, 1)
    summary = writer.finish("interrupted", {"error": "Ctrl-C", "share": float("nan")})
    assert summary["steps"] == 2 and summary["status"] == "interrupted"
    assert summary["extras"] == {"error": "Ctrl-C", "share": None}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert "interrupted" in (tmp_path / "report.md").read_text()
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "report.md",
        "run.json",
        "summary.json",
    ]
    with pytest.raises(UsageError):
        writer.finish("done")


def test_a_run_without_a_single_step_leaves_a_readable_report_too(tmp_path: Path) -> None:
    summary = RunWriter(tmp_path, {}).finish("failed", {"error": "no memory"})
    assert summary["steps"] == 0
    assert "no memory" in (tmp_path / "report.html").read_text()


def test_resume_cuts_the_steps_that_are_done_again(tmp_path: Path) -> None:
    first = RunWriter(tmp_path, {"seed": 1})
    started = first.meta["started_at"]
    write_steps(first, 0, 1, 2, 3)
    first.finish("failed", {"error": "no memory", "note": 1})
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 4, "ent')
    second = RunWriter(tmp_path, {"seed": 1}, resume_step=2)
    write_steps(second, 2, 3, 4)
    assert second.finish()["extras"] == {"note": 1}
    run = read_run(tmp_path)
    assert run.step_numbers() == [0, 1, 2, 3, 4]
    assert run.status == "finished" and run.unreadable_lines == 0
    assert run.meta["started_at"] == started and [item["step"] for item in run.meta["resumed"]] == [
        2
    ]
    with pytest.raises(UsageError):
        write_steps(RunWriter(tmp_path, {}, resume_step=2), 1)


def test_a_run_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "/bin/medusa-ppo",
        "ppo",
        "--config",
        "my file",
        "model.path=hf_abcdef123",
        "engine.backend=http://me:pw@host",
        "x.api_key=pw",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--token", "pw", "data.max_prompt_tokens=5"])
    write_steps(RunWriter(tmp_path, {"seed": 7, "ppo": {"steps": 4}, "hub": {"token": "pw"}}), 0)
    meta = json.loads((tmp_path / "run.json").read_text())
    said = "medusa-ppo ppo --config 'my file' 'model.path=***' "
    said += (
        "'engine.backend=http://***@host' 'x.api_key=***' --token '***' data.max_prompt_tokens=5"
    )
    assert meta["command"] == said and meta["config"]["hub"]["token"] == "***"
    assert (
        meta["versions"]["medusa-ppo"] == __version__
        and {"torch", "transformers", "ray"} <= meta["versions"].keys()
    )
    again = RunWriter(tmp_path, {"seed": 7, "ppo": {"steps": 9}}, resume_step=1)
    again.finish()
    assert again.meta["resumed"][0]["was"] == {"config.ppo.steps": 4, "config.hub.token": "***"}
    page = (tmp_path / "report.html").read_text()
    assert (
        "<td>at step 1, before it config.ppo.steps was 4" in page
        and "medusa-ppo ppo --config" in page
    )
    assert '<th scope="row">seed</th><td>7</td>' in page


def test_the_commit_of_a_checkout_and_of_none(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    clean = commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{clean} with changes"


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to continue"):
        RunWriter(tmp_path, {}, resume_step=1)


def test_a_new_run_moves_what_an_earlier_one_left(tmp_path: Path) -> None:
    for seed in range(3):
        writer = RunWriter(tmp_path, {"seed": seed})
        write_steps(writer, *range(seed + 1))
        writer.finish()
    assert read_run(tmp_path).step_numbers() == [0, 1, 2]
    earlier = sorted((tmp_path / "earlier").iterdir())
    assert [len(read_run(path).steps) for path in earlier] == [1, 2]
    assert all((path / "report.html").is_file() for path in earlier)


SAVED = ("checkpoint", ".checkpoint.old", "checkpoints", "best", "actor", "heads-final")


def test_a_new_run_moves_what_an_earlier_one_saved(tmp_path: Path) -> None:
    for name in (*SAVED, "companion", "warm-up"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of.txt").write_text(name)
    RunWriter(tmp_path, {"seed": 1}, moves=("companion", "heads")).close()
    (earlier,) = (tmp_path / "earlier").iterdir()
    assert {path.name for path in earlier.iterdir()} == {*SAVED, "companion"}
    assert all((earlier / name / "of.txt").read_text() == name for name in SAVED)
    assert (tmp_path / "warm-up" / "of.txt").is_file(), "an interrupted warm-up is used again"


def test_a_resumed_run_moves_nothing(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    write_steps(writer, 0)
    writer.close()
    for name in (*SAVED, "companion"):
        (tmp_path / name).mkdir()
    RunWriter(tmp_path, {}, resume_step=1, moves=("companion",)).close()
    assert all((tmp_path / name).is_dir() for name in (*SAVED, "companion"))
    assert not (tmp_path / "earlier").exists()


def test_what_a_new_run_reads_of_an_earlier_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "run"
    for name in SAVED:
        (folder / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"path": "runs/run/actor", "critic_path": None, "dtype": "a\0b"},
        "heads": {"path": str(tmp_path / "link" / "heads-final" / "deeper")},
        "data": {"path": "best", "template": "x" * 5000},
    }
    RunWriter(folder, config).close()
    assert (folder / "actor").is_dir() and (folder / "heads-final").is_dir()
    moved = {path.name for path in folder.glob("earlier/*/*")} | {
        path.name for path in folder.glob("earlier/*/.*")
    }
    assert moved == set(SAVED) - {"actor", "heads-final"}


def test_two_processes_can_not_write_into_one_folder(tmp_path: Path) -> None:
    code = (
        f"from medusa_ppo.reports.store import RunWriter; w = RunWriter({str(tmp_path)!r}, {{}});"
        " print('up', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        with pytest.raises(RunError, match="Another process writes"):
            RunWriter(tmp_path, {})
    finally:
        other.communicate("\n", timeout=30)
    assert read_run(tmp_path).status == "killed"
    RunWriter(tmp_path, {}).close()


def test_what_the_run_ran_on_is_recorded(tmp_path: Path) -> None:
    versions = package_versions(("numpy", "no-such-package"))
    assert versions["numpy"] == np.__version__ and "no-such-package" not in versions
    found = hardware()
    assert (
        found["usable_cores"] >= 1 and found["memory_gib"] > 0 and isinstance(found["gpus"], list)
    )
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    RunWriter(tmp_path / "run", {}).close()
    assert {"versions", "hardware", "config", "started_at"} <= set(read_run(tmp_path / "run").meta)


def test_reports_import_without_torch() -> None:
    code = (
        "import sys, medusa_ppo.reports.store, medusa_ppo.reports.page\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'ray', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, (
        "reports load a heavy library"
    )


def test_a_step_that_finds_the_disk_full_is_written_as_soon_as_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RunWriter(tmp_path, {})
    write_steps(writer, 0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (len(before) + 9, limits[1])
        )  # Room for a part of a line.
        write_steps(writer, 1, 2)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before, "no half line"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Step 1 could not be written" in caplog.text
    write_steps(writer, 3)
    writer.finish()
    assert (
        read_run(tmp_path).step_numbers() == [0, 1, 2, 3]
        and read_run(tmp_path).unreadable_lines == 0
    )


def test_lines_that_never_found_room_are_an_error_at_the_end(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        write_steps(writer, 0)
        with pytest.raises(OSError):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_steps_missing_before_a_checkpoint_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = RunWriter(tmp_path, {})
    write_steps(first, 0, 1, 2)
    first.close()
    data = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(data.replace(b'"step": 1', b'"st\x00p": 1'))
    RunWriter(tmp_path, {}, resume_step=3).close()
    assert "of the 3 steps before the checkpoint" in caplog.text


def test_lines_that_are_lost_come_back_from_the_checkpoints_copy(tmp_path: Path) -> None:
    first = RunWriter(tmp_path, {})
    write_steps(first, 0, 1, 2, 3)
    first.close()
    data = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "copy").write_bytes(b"".join(data.splitlines(keepends=True)[:3]))
    for damaged in (data.replace(b'"step": 1', b'"st\x00p": 1'), b"", b"\x00" * 50 + b"\n", None):
        (tmp_path / "metrics.jsonl").unlink()
        if damaged is not None:
            (tmp_path / "metrics.jsonl").write_bytes(damaged)
        RunWriter(tmp_path, {}, resume_step=3, copy=tmp_path / "copy").close()
        assert read_run(tmp_path).column("entropy") == [0.0, 1.0, 2.0], damaged


def test_warnings_of_our_own_code_are_in_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("medusa_ppo.anything")
    logger.warning("before the run")
    writer = RunWriter(tmp_path, {})
    write_steps(writer, 0)
    for _ in range(3):
        logger.warning("The disk is %s, hf_abcdefgh.", "slow")
    logger.info("no warning")
    logging.getLogger("somebody").warning("not ours")
    write_steps(writer, 1)
    assert read_run(tmp_path).meta["events"] == [
        {"step": 1, "text": "The disk is slow, ***.", "times": 3}
    ], "also if it is killed now"
    writer.finish("failed")
    second = RunWriter(tmp_path, {}, resume_step=1)
    logger.error("<script>alert(1)</script>")
    write_steps(second, 1)
    second.finish()
    logger.warning("after the run")
    report = (tmp_path / "report.md").read_text()
    assert (
        "Step 1 (3 times): The disk is slow, \\*\\*\\*." in report
        or "Step 1 (3 times): The disk is slow, ***." in report
    )
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "the run" not in report.split("## ")[1]
    assert [event["text"] for event in read_run(tmp_path).meta["events"]] == [
        "The disk is slow, ***.",
        "<script>alert(1)</script>",
    ]


def test_a_thousand_warnings_stay_few(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    write_steps(writer, 0)
    for number in range(1000):
        logging.getLogger("heads").warning("%d " + "x" * 9000, number)
    writer.finish()
    run = read_run(tmp_path)
    assert len(run.meta["events"]) == 50 and len((tmp_path / "run.json").read_text()) < 60_000
    assert "40 more warning(s) were logged" in (tmp_path / "report.md").read_text()


def test_who_set_up_no_logging_still_sees_warnings() -> None:
    code = (
        "import logging, tempfile; from medusa_ppo.reports.store import RunWriter; w ="
        " RunWriter(tempfile.mkdtemp(), {});logging.getLogger('medusa_ppo.x').warning('seen');"
        " w.close(); logging.getLogger('medusa_ppo.x').warning('seen')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("seen") == 2


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "data.path=https://bucket/rows.jsonl?X-Amz-Signature=abc&X-Amz-Date=2026",
            "data.path=https://bucket/rows.jsonl?X-Amz-Signature=***&X-Amz-Date=2026",
        ),
        ("can't reach http://me:pw@host/v1: refused", "can't reach http://***@host/v1: refused"),
        ("header Authorization: Bearer abc.def", "header Authorization: Bearer ***"),
        ("ghp_0123456789abcdefghij and sk-0123456789abcdefghij", "*** and ***"),
        (
            "a basic task-list of disk-0123456789abcdefghij?token",
            "a basic task-list of disk-0123456789abcdefghij?token",
        ),
    ],
)
def test_what_is_secret_is_known_wherever_it_stands(text: str, left: str) -> None:
    assert without_secrets(text) == left


def test_the_error_that_ended_a_run_tells_no_secret(tmp_path: Path) -> None:
    RunWriter(tmp_path, {}).finish(
        "failed", {"error": "http://me:pw@host: no answer, hf_abcdef123456"}
    )
    for path in tmp_path.iterdir():
        assert "pw@" not in path.read_text() and "hf_abcdef" not in path.read_text(), path.name


@pytest.mark.parametrize(
    "started", ["../../outside", "/outside", "..", "x" * 5000, 7, "2026-11-22T10:00:00Z"]
)
def test_an_earlier_run_stays_in_the_folder_whatever_it_says_of_itself(
    tmp_path: Path, started: object
) -> None:
    folder = tmp_path / "a" / "b" / "run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"started_at": str(tmp_path / "outside") if started == "/outside" else started})
    )
    RunWriter(folder, {}).close()
    assert [path.relative_to(folder).parts[0] for path in tmp_path.rglob("run.json")].count(
        "earlier"
    ) == 1
    assert len(list(folder.glob("earlier/*/run.json"))) == 1


@pytest.mark.parametrize("resume_step", [None, 1])
def test_links_in_a_run_folder_lead_nothing_out_of_it(
    tmp_path: Path, resume_step: int | None
) -> None:
    folder = tmp_path / "run"
    outside = tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "metrics.jsonl").write_text('{"step": 0}\n')
    for name in ("metrics.jsonl", "run.json", "summary.json", "report.md", "report.html"):
        (folder / name).symlink_to(outside / name)  # All but the first lead nowhere yet.
    writer = RunWriter(folder, {}, resume_step=resume_step)
    write_steps(writer, 1)
    writer.finish()
    assert [path.name for path in outside.iterdir()] == ["metrics.jsonl"]
    assert (outside / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert read_run(folder).step_numbers() == ([1] if resume_step is None else [0, 1])
