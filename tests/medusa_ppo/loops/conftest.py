"""A vLLM server as docs/hooks.md starts it, for trainers that don't start their own; and a plugin
on a full disk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from medusa_ppo.engines.http_server import free_port
from medusa_ppo.plugin import NoPlugin

ROOT = Path(__file__).resolve().parents[3]
START_S = 400


class FullDisk(NoPlugin):
    """A plugin whose heads can't be saved."""

    closed = False

    def save_heads(self, folder: str | Path) -> Path:
        raise OSError("No space left on device")

    def close(self) -> None:
        self.closed = True


class ServedLoop:
    """It can be killed and started again, at the same address.

    Attributes:
        heads: the folder that it drafts with.
        settings: arguments of TRL's configurations.
    """

    def __init__(self, actor: Path, folder: Path) -> None:
        self.heads = folder / "heads"
        self._folder = folder
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        (folder / "heads.yaml").write_text("heads: {num_heads: 2}\n")
        self._command = [
            sys.executable,
            "-c",
            "from medusa_ppo.cli import main; main()",
            "serve",
            "--model",
            str(actor),
        ]
        self._command += [
            "--heads",
            str(self.heads),
            "--medusa",
            str(folder / "heads.yaml"),
            "--port",
            str(port),
        ]
        self._command += [
            "--max-model-len",
            "128",
            "--max-num-seqs",
            "16",
            "--enforce-eager",
            "--max-logprobs",
            "-1",
        ]
        self._command += [
            "--distributed-executor-backend",
            "uni",
            "--kv-cache-memory-bytes",
            str(64 * 1024**2),
        ]
        self.settings = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": self._address,
            "vllm_server_timeout": START_S,
        }
        self.start()

    def start(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PYTHONPATH": str(ROOT),
        }
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if (
                    httpx.get(f"{self._address}/health", trust_env=False).status_code
                    == httpx.codes.OK
                ):
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError((self._folder / "server.log").read_text()[-4000:])

    def end(self, *signals: signal.Signals) -> None:
        """All its processes."""
        for sign in signals:
            os.killpg(self._process.pid, sign)
            try:
                self._process.wait(30)
                return
            except subprocess.TimeoutExpired:
                continue


@pytest.fixture
def served(chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that has been started; the trainer's own patience waits for it."""
    monkeypatch.setenv("MEDUSA_PPO_TOKEN", "the-trainer-has-it-too")
    server = ServedLoop(chain_actor, tmp_path)
    yield server
    if server._process.poll() is None:
        server.end(signal.SIGTERM, signal.SIGKILL)
