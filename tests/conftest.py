"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Must stand before anything imports vLLM or Ray: engines in this process, no token file, no calls home.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Models here are tiny: threads that wait for each other took three times the processor time, and many times that beside another program.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the real text and the small real actor that stands beside the checkout."""
    folder = ROOT.parent / "shared"
    if not (folder / "actors" / "gsm8k-4m").is_dir():
        pytest.skip("needs the shared actors and data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., str]:
    """run_ranks(script, ranks, *arguments): `python SCRIPT RANK RANKS ARGUMENTS...` for each rank; all are ended, whatever happens."""
    return _run_ranks


def _run_ranks(script: Path, ranks: int, *arguments: str, timeout_s: float = 120.0) -> str:
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(ranks), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        # One rank that fails leaves the others waiting for it: the first failure ends all.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        codes = [p.poll() for p in processes]
        for process in processes:
            process.kill()
        words = "\n".join(f"rank {i} ({code}):\n{p.communicate()[0]}" for i, (p, code) in enumerate(zip(processes, codes, strict=True)))
    assert not any(code is None or code for code in codes), words
    return words
