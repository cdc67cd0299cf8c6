"""The Megatron actor's attention: what Megatron's own computes, in memory that grows with the
tokens. In processes of their own, since Megatron's groups are global.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
SCRIPT = Path(__file__).with_name("attention_memory.py")


def run(*options: str) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "recompute",
    ["", *(pytest.param(how, marks=pytest.mark.slow) for how in ("layers", "attention"))],
)
def test_it_is_megatrons_own_attention(recompute: str) -> None:
    """Two query groups of two heads each; logits, and the gradients of every parameter."""
    found = run("200", "--compare", *(["--recompute", recompute] if recompute else []))
    assert found["logits"] < 1e-5 and found["gradients"] < 1e-5
    assert found["least"] > 1e-4, "there are gradients to compare"


def linear(sizes: list[int]) -> None:
    bytes_T = {tokens: run(str(tokens))["tensor_bytes"] for tokens in sizes}
    first, second, third = (bytes_T[tokens] for tokens in sizes)
    expected = (sizes[2] - sizes[1]) / (sizes[1] - sizes[0])
    assert (third - second) / (second - first) == pytest.approx(expected, rel=0.15), bytes_T


@pytest.mark.slow
def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    linear([256, 1024, 4096])


@pytest.mark.slow
def test_memory_of_long_text() -> None:
    linear([2048, 8192, 32768])
