"""A run that was killed with all it had started, and goes on: the same numbers, and the same heads
to the bit, as one that was not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from heads.checkpoint import load_state
from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.store import read_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 9
COMPANIONS = ("companion_", "replay_", "versions_")
"""How far the companion is when a step's line is written is the clock's to say; its state at the
end is compared instead.
"""
CLOCKED = ("_s", "idle_frac", "_gib")


def settings(actor: Path, out: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "out": str(out),
        "model": {"path": str(actor)},
        "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
        "sampling": {"max_new_tokens": 24, "responses_per_prompt": 4},
        "engine": {
            "max_num_seqs": 16,
            "max_model_len": 128,
            "threads": 1,
            "draft_temperature": 1.0,
            "num_drafts": 3,
        },
        "heads": {"num_heads": 3},
        # Every second batch: the checkpoint must hold the step's own batch all the same.
        "companion": {"wait": True, "epochs": 6, "learning_rate": 1e-2, "replay_versions": 1},
        "ppo": {
            "steps": STEPS,
            "prompts_per_step": 8,
            "actor_learning_rate": 1e-4,
            "entropy_coefficient": 0.02,
            "checkpoint_every": 3,
            "threads": 1,
        },
    }


def start(file: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "from medusa_ppo.cli import main; main()",
        "ppo",
        "--config",
        str(file),
        *more,
    ]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def steps_of(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def kill_after(process: subprocess.Popen[bytes], run_dir: Path, steps: int) -> None:
    """SIGKILL to the loop alone: what it has started has to notice by itself."""
    while steps_of(run_dir) < steps:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(
        children, timeout=240
    )  # Ray's agents look for their dead node for a minute.
    assert len(children) > 3 and not alive, [child.cmdline()[:2] for child in alive]


def figures(run_dir: Path) -> list[dict[str, Any]]:
    steps = read_run(run_dir).steps
    return [
        {
            name: v
            for name, v in step.items()
            if not name.endswith(CLOCKED) and not name.startswith(COMPANIONS)
        }
        for step in steps
    ]


def test_killed_twice_and_resumed_is_the_run_that_never_stopped(
    chain_actor: Path, tmp_path: Path
) -> None:
    runs = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        runs[name] = tmp_path / name / "run"
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump(settings(chain_actor, tmp_path / name))
        )
    assert start(tmp_path / "whole.yaml").wait() == 0
    kill_after(start(tmp_path / "killed.yaml"), runs["killed"], 5)
    kill_after(
        start(tmp_path / "killed.yaml", "--resume"), runs["killed"], 8
    )  # Cut back to the checkpoint first.
    assert start(tmp_path / "killed.yaml", "--resume").wait() == 0

    expected = figures(runs["whole"])
    found = figures(runs["killed"])
    assert [step[names.STEP] for step in found] == list(range(STEPS)) and found == expected
    assert found[-1][names.HEADS_VERSION] >= 2
    for file in (
        "heads-final/model.safetensors",
        "actor/model.safetensors",
        "checkpoint/companion/companion.safetensors",
    ):
        left, right = (load_state(run / file) for run in runs.values())
        assert left.keys() == right.keys()
        for name, value in left.items():
            same = (
                torch.equal(value[:2], right[name][:2])
                if name == "service"
                else torch.equal(value, right[name])
            )
            assert same, f"{file}: {name}"  # The third number of `service` is seconds.
