"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Must stand before anything imports vLLM or Ray: engines in this process, no token file, no calls home.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the real text and the small real actor that stands beside the checkout."""
    folder = ROOT.parent / "shared"
    if not (folder / "actors" / "gsm8k-4m").is_dir():
        pytest.skip("needs the shared actors and data beside the checkout")
    return folder
