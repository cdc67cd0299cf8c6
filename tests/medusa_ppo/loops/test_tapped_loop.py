"""The example of a tapped loop, as it stands on the page: a companion that runs by itself, a feed,
and a vLLM started with its own `speculative_config`. Acceptance rises while the loop runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medusa_ppo.companion.companion_link import COMPANION_TOKEN
from medusa_ppo.engines.http_server import free_port
from medusa_ppo.feeds.folder_feed import FolderFeed
from medusa_ppo.feeds.http_feed import FEED_TOKEN
from medusa_ppo.vllm_plugin.speculation import FEED

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "tapped_loop.py"
STEPS = 30
LONGEST_S = 500
CORE = "VLLM_ENABLE_V1_MULTIPROCESSING"
SETTINGS = ["companion.learning_rate=0.01", "companion.batch_positions=256"]
"""Quick heads for a tiny actor."""
Start = Callable[..., "tuple[subprocess.Popen[bytes], Path]"]


def test_lines_of_ours_are_few() -> None:
    marked = [line for line in EXAMPLE.read_text().splitlines() if "# ours" in line]
    assert 0 < len(marked) <= 5


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """start(*words, **environment): a Python process and its output, ended with the test."""
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    monkeypatch.setenv(FEED_TOKEN, "another secret of this test")
    started: list[subprocess.Popen[bytes]] = []

    def run(*words: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        ours = {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        output = tmp_path / f"{len(started)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **ours, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process, output

    yield run
    for process in started:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        # A loop that is ended leaves its engine behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def until_it_listens(process: subprocess.Popen[bytes], output: Path, port: int) -> None:
    """The test's own time limit ends it."""
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise AssertionError(output.read_text()[-4000:])


def check(loop: subprocess.Popen[bytes], output: Path) -> None:
    """The loop ends well; it drafts nothing at first, and later acceptance is high."""
    code = loop.wait(LONGEST_S)
    text = output.read_text()
    assert code == 0, text[-6000:]
    found = [float(value) for value in re.findall(r"([\d.]+) tokens a step", text)]
    assert len(found) == STEPS, text[-4000:]
    assert found[0] == 1.0, "untrained heads draft nothing"
    assert sum(found[-3:]) / 3 > 1.5, found


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(LONGEST_S + 90)
@pytest.mark.parametrize("kind", ["folder", "http"])
def test_a_companion_by_itself_feeds_an_engine_that_knows_nothing_of_it(
    start: Start, chain_actor: Path, tmp_path: Path, kind: str
) -> None:
    heads, folder = tmp_path / "heads", tmp_path / "feed"
    feed = str(folder)
    if kind == "http":
        port = free_port()
        feed = f"http://127.0.0.1:{port}"
        server = start("-m", "medusa_ppo", "feed", "serve", str(folder), "--port", str(port))
        until_it_listens(*server, port)
    port = free_port()
    places = ["--model", str(chain_actor), "--heads", str(heads), "--feed", feed]
    settings = ["heads.num_heads=3", *SETTINGS, "companion.num_gpus=0"]
    command = ["companion", "serve", *places, "--port", str(port), *settings]
    until_it_listens(*start("-m", "medusa_ppo", *command), port)
    # vLLM's core in the loop's process, and in one of its own.
    environment = {FEED: feed, CORE: "0" if kind == "folder" else "1"}
    tap = f"http://127.0.0.1:{port}"
    check(*start(str(EXAMPLE), str(chain_actor), str(heads), tap, str(STEPS), **environment))
    manifest = FolderFeed(folder).manifest()
    assert manifest is not None and manifest.newest >= 1


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(LONGEST_S + 90)
@pytest.mark.parametrize("core", ["in the actor", "in a process of its own"])
def test_companion_feed_and_engine_in_a_ray(
    start: Start, chain_actor: Path, tmp_path: Path, core: str
) -> None:
    """vLLM's core in the Ray actor's process, and in a process below it, which has to find the Ray
    by itself.
    """
    code = (
        "import runpy, sys, ray\n"
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=300 << 20)\n"
        "main = runpy.run_path(sys.argv[1])['main_in_ray']\n"
        "main(sys.argv[2], sys.argv[3], int(sys.argv[4]), companion={'learning_rate': 0.01,"
        " 'batch_positions': 256, 'num_gpus': 0})\n"
    )
    words = ["-c", code, str(EXAMPLE), str(chain_actor), str(tmp_path / "heads"), str(STEPS)]
    check(*start(*words, **{CORE: "0" if core == "in the actor" else "1"}))
