"""A `medusa-ppo ppo` in a process of its own that is watched from outside: its step lines, its
processes, what it leaves behind.

faults.py and soak.py run it. The actor is tiny, and made here: next tokens mostly follow from the
last one by a fixed permutation, so that heads have something to learn at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_ppo.demo.task import build_tokenizer
from medusa_ppo.runtime.files import LOCK, PREFIXES

TINY = "tiny"
WIDTH = 64
STOP_S = 120.0
GONE_S = 30.0
OPENMP = "/dev/shm/__KMP_REGISTERED_LIB_{pid}_{uid}"
ROLES = {
    "ray::EngineHost": "engine",
    "ray::_HostedService": "companion",
    "raylet": "raylet",
    "gcs_server": "gcs",
}


def make_tiny_actor(folder: Path) -> Path:
    """A Llama of some hundred kilobytes with the tokenizer of the embedded example."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    rows_VD = torch.nn.functional.normalize(torch.randn(len(tokenizer), WIDTH), dim=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rows_VD)
        model.lm_head.weight.copy_(1.5 * rows_VD[torch.randperm(len(tokenizer))])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_run(model: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """A run of short steps. Nobody waits for the companion."""
    path = str(make_tiny_actor(folder / "actor")) if model == TINY else model
    return {
        "name": "run",
        "out": str(folder),
        "seed": seed,
        "model": {"path": path},
        "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
        "sampling": {"max_new_tokens": 24},
        # Little memory for keys and values: it is touched bit by bit, and looks like a leak until
        # all of it was used once.
        "engine": {
            "max_num_seqs": 16,
            "max_model_len": 128,
            "threads": 1,
            "memory_fraction": 0.01,
            "num_drafts": 3,
        },
        "heads": {"num_heads": 3},
        "companion": {"epochs": 4, "learning_rate": 1e-2, "batch_positions": 256},
        # The tiny actor solves nothing: it is the entropy that moves it.
        "ppo": {
            "steps": steps,
            "prompts_per_step": 8,
            "threads": 1,
            "checkpoint_every": 10,
            "entropy_coefficient": 0.01,
        },
    }


class WatchedRun:
    """Use as a context manager: whatever the run started is ended with it."""

    def __init__(self, config: dict[str, Any], folder: Path, before: str = "") -> None:
        """`before`: Python that the process runs before anything else."""
        self.run_dir = Path(config["out"]) / config["name"]
        self.log = folder / "run.log"
        self._temporary = folder / "t"  # Short, as is the folder's name: Ray's sockets are in it.
        self._temporary.mkdir()
        self._seen: dict[int, psutil.Process] = {}
        self._folders: set[Path] = set()
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        with self.log.open("ab") as log:
            # A name of its own for the group: a stop key at the terminal is this script's, which
            # then stops the run.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"{before}\nfrom medusa_ppo.cli import main; main()",
                    "ppo",
                    "--config",
                    str(file),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self._temporary)},
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def steps(self) -> list[dict[str, Any]]:
        """The step lines that are complete."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The run's processes by role, the living ones."""
        found: dict[str, list[psutil.Process]] = {}
        try:
            everyone = [
                psutil.Process(self.pid),
                *psutil.Process(self.pid).children(recursive=True),
            ]
        except psutil.NoSuchProcess:
            return found
        for process in everyone:
            try:
                role = "loop" if process.pid == self.pid else role_of(process.cmdline())
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            self._seen[process.pid] = process
            if role == "loop":
                self._folders |= owned_folders(process)
            found.setdefault(role, []).append(process)
        return found

    def pid_of(self, role: str) -> int | None:
        """The newest process of a role."""
        processes = self.processes().get(role, [])
        return max(processes, key=lambda process: process.create_time()).pid if processes else None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Look twice a second; False when the time is up or the run has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or self.code is not None:
                return condition()
            time.sleep(0.5)
        return True

    def stop(self) -> int:
        """Ask the run to stop (unless it has ended) and give its exit code."""
        self.processes()
        if self.code is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._end()
            return self._process.wait()

    def files(self) -> list[Path]:
        """What the run has made outside of its run folder, and what is still there."""
        openmp = [Path(OPENMP.format(pid=pid, uid=os.getuid())) for pid in self._seen]
        own = [path for path in self._temporary.iterdir() if path.name.startswith(PREFIXES)]
        return [path for path in [*sorted(self._folders.union(own)), *openmp] if path.exists()]

    def left_behind(self) -> list[str]:
        """Processes and files that are still there some time after the end."""
        _, alive = psutil.wait_procs(
            [process for pid, process in self._seen.items() if pid != self.pid], timeout=GONE_S
        )
        return [
            f"process {process.pid}: {' '.join(process.cmdline()[:2])}" for process in alive
        ] + [str(path) for path in self.files()]

    def tail(self, lines: int = 15) -> str:
        return "\n".join(
            self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        )

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        self.processes()
        for process in (
            self._seen.values()
        ):  # psutil compares start times: a number that was given anew is left alone.
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()


def role_of(command: list[str]) -> str:
    name = (
        Path(command[0]).name
        if command and not command[0].startswith("ray::")
        else (command[0] if command else "")
    )
    return next((role for start, role in ROLES.items() if name.startswith(start)), "other")


def owned_folders(process: psutil.Process) -> set[Path]:
    """Folders that a process has a lock in (medusa_ppo/runtime/files.py)."""
    try:
        return {
            Path(file.path).parent for file in process.open_files() if Path(file.path).name == LOCK
        }
    except psutil.NoSuchProcess:
        return set()
