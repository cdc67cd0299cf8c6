"""The example of a tapped loop as it stands on the page: a companion that runs by itself, a feed,
and a vLLM that was started with its own `speculative_config`. Versions come while requests run, and
acceptance rises.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
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
LONGEST_S = 1500
CORE = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Quick heads for a tiny actor.
SETTINGS = ["heads.num_heads=3", "companion.learning_rate=0.01", "companion.batch_positions=256"]
Start = Callable[..., "subprocess.Popen[str]"]


def test_lines_of_ours_are_few() -> None:
    marked = [line for line in EXAMPLE.read_text().splitlines() if "# ours" in line]
    assert len(marked) <= 5


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(*words, **environment): a Python process, ended with the test."""
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    monkeypatch.setenv(FEED_TOKEN, "another secret of this test")
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, **environment: str) -> subprocess.Popen[str]:
        ours = {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **ours, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.terminate()
        try:
            process.wait(30)
        finally:
            # With what it has started: a loop that is ended leaves its engine.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def rose(said: str) -> list[float]:
    """Tokens a step of the example's steps, of which the last ones are more."""
    found = [float(value) for value in re.findall(r"([\d.]+) tokens a step", said)]
    assert len(found) == STEPS, said[-4000:]
    assert found[0] == 1.0, "heads of the start draft nothing"
    assert sum(found[-3:]) / 3 > 1.5, found
    return found


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(LONGEST_S + 200)
@pytest.mark.parametrize("kind", ["folder", "http"])
def test_a_companion_by_itself_feeds_an_engine_that_knows_nothing_of_it(
    start: Start, chain_actor: Path, tmp_path: Path, kind: str
) -> None:
    heads, folder = tmp_path / "heads", tmp_path / "feed"
    address = str(folder)
    if kind == "http":
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        start("-m", "medusa_ppo", "feed", "serve", str(folder), "--port", str(port))
    port = free_port()
    command = ["--model", str(chain_actor), "--heads", str(heads), "--feed", address]
    deadline = time.monotonic() + 120
    while True:
        companion = start(
            "-m", "medusa_ppo", "companion", "serve", *command, "--port", str(port),
            *SETTINGS, "companion.num_gpus=0",
        )  # fmt: skip
        assert companion.stdout is not None
        said = companion.stdout.readline()
        while said and "Companion of" not in said:
            said = companion.stdout.readline()
        if said:
            break
        # The feed's server was not there yet, and it has said so.
        assert time.monotonic() < deadline
    tap = f"http://127.0.0.1:{port}"
    # vLLM's core in the loop's process, and in one of its own.
    more = {FEED: address, CORE: "0" if kind == "folder" else "1"}
    loop = start(str(EXAMPLE), str(chain_actor), str(heads), tap, str(STEPS), **more)
    said, _ = loop.communicate(timeout=LONGEST_S)
    assert loop.returncode == 0, said[-6000:]
    rose(said)
    manifest = FolderFeed(folder).manifest()
    assert manifest is not None and manifest.newest >= 1


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(LONGEST_S + 200)
@pytest.mark.parametrize("core", ["in the actor", "in a process of its own"])
def test_companion_feed_and_engine_in_a_ray(
    start: Start, chain_actor: Path, tmp_path: Path, core: str
) -> None:
    """vLLM's core in the Ray actor's process, as SkyRL has it; and in another one below it, which
    has to find the Ray by itself.
    """
    code = (
        "import runpy, sys, ray\n"
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=300 << 20)\n"
        "main = runpy.run_path(sys.argv[1])['main_in_ray']\n"
        "main(sys.argv[2], sys.argv[3], int(sys.argv[4]), companion={'learning_rate': 0.01,"
        " 'batch_positions': 256, 'num_gpus': 0})\n"
    )
    mode = "0" if core == "in the actor" else "1"
    loop = start(
        "-c", code, str(EXAMPLE), str(chain_actor), str(tmp_path / "heads"), str(STEPS),
        **{CORE: mode},
    )  # fmt: skip
    said, _ = loop.communicate(timeout=LONGEST_S)
    assert loop.returncode == 0, said[-6000:]
    rose(said)
