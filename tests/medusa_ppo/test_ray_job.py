"""A run that Ray starts as a job (`ray job submit`): it joins that cluster, ends well, and a
stopped one closes what it started.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml

pytest.importorskip(
    "aiohttp_cors", reason="the job server is part of ray[default], the extra `cluster`"
)
from ray.job_submission import JobStatus, JobSubmissionClient

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
ENGINE = "ray::EngineHost"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSubmissionClient]:
    """The job server of a Ray of the test's own."""
    assert not ray.is_initialized()
    folder = tempfile.mkdtemp(prefix="mppo-")  # Short: a socket's path has 107 characters.
    monkeypatch.setenv("RAY_TMPDIR", folder)
    try:
        context = ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=True,
            dashboard_port=0,
            _temp_dir=folder,
            log_to_driver=False,
        )
        # As `ray start` writes it: a job finds its cluster by it, and takes any other Ray of the
        # machine without it.
        (Path(folder) / "ray_current_cluster").write_text(ray.get_runtime_context().gcs_address)
        yield JobSubmissionClient(f"http://{context.dashboard_url}")
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def command(chain_actor: Path, tmp_path: Path) -> Callable[[int], str]:
    """The entry point of a run of so many steps."""

    def make(steps: int) -> str:
        config: dict[str, Any] = {
            "name": "job",
            "out": str(tmp_path),
            "model": {"path": str(chain_actor)},
            "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:32]"},
            "sampling": {"max_new_tokens": 16},
            "engine": {"max_num_seqs": 8, "max_model_len": 128, "threads": 1, "num_drafts": 2},
            "heads": {"num_heads": 2},
            "companion": {"batch_positions": 256},
            "ppo": {
                "steps": steps,
                "prompts_per_step": 4,
                "minibatch_size": 8,
                "micro_batch_size": 8,
                "threads": 1,
            },
        }
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(config))
        return f"{sys.executable} -c 'from medusa_ppo.cli import main; main()' ppo --config {file}"

    return make


def until(condition: Callable[[], bool], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)


def steps_in(folder: Path) -> list[dict[str, Any]]:
    file = folder / "job" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def engines() -> list[psutil.Process]:
    """Engines of the processes below this one: Ray's nodes are its children."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += (
                [process]
                if process.cmdline()[:1] and process.cmdline()[0].startswith(ENGINE)
                else []
            )
        except psutil.Error:
            continue
    return found


def test_a_submitted_run_ends_well(
    jobs: JobSubmissionClient, command: Callable[[int], str], tmp_path: Path
) -> None:
    job = jobs.submit_job(entrypoint=command(3), entrypoint_num_cpus=0)
    seen: list[psutil.Process] = []

    def ended() -> bool:
        seen.extend(engines())
        return jobs.get_job_status(job) in ENDED

    until(ended)
    assert jobs.get_job_status(job) is JobStatus.SUCCEEDED, jobs.get_job_logs(job)
    assert [line["step"] for line in steps_in(tmp_path)] == [0, 1, 2] and (
        tmp_path / "job" / "report.html"
    ).is_file()
    assert "acceptance length" in jobs.get_job_logs(job)
    assert seen, "the engine ran on the cluster that the job was submitted to"
    until(lambda: not engines(), 60)


def test_a_stopped_job_closes_what_it_started(
    jobs: JobSubmissionClient, command: Callable[[int], str], tmp_path: Path
) -> None:
    job = jobs.submit_job(entrypoint=command(10_000))
    until(lambda: len(steps_in(tmp_path)) >= 2 or jobs.get_job_status(job) in ENDED)
    assert jobs.get_job_status(job) is JobStatus.RUNNING, jobs.get_job_logs(job)
    jobs.stop_job(job)
    until(lambda: jobs.get_job_status(job) in ENDED, 120)
    until(lambda: not engines(), 60)
    assert (tmp_path / "job" / "report.html").is_file(), "a partial report"


@pytest.mark.usefixtures("jobs")
def test_a_job_finds_a_preset_by_its_name_and_a_file_that_is_sent_along(tmp_path: Path) -> None:
    """As docs/cluster.md writes it, by the real command: a job starts where Ray was started, not
    where it is submitted.
    """
    (tmp_path / "mine.yaml").write_text("extends: demo\nname: mine\n")
    submit = [
        "ray",
        "job",
        "submit",
        f"--address=http://{ray.get_runtime_context().worker.node.address_info['webui_url']}",
    ]
    plan = [sys.executable, "-c", "from medusa_ppo.cli import main; main()", "plan", "--config"]
    for sent, config, code, words in (
        ([], "demo", 0, "succeeded"),
        ([], "mine.yaml", 1, "an absolute one"),
        (["--working-dir", "."], "mine.yaml", 0, "succeeded"),
    ):
        done = subprocess.run(
            [*submit, *sent, "--", *plan, config],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == code and words in done.stdout + done.stderr, (
            done.stdout + done.stderr
        )
