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
CHAIN_WIDTH = 64

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
def chain_actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor whose next token mostly follows from the last one by a fixed permutation: heads have something to learn at once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from medusa_ppo.demo.task import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": CHAIN_WIDTH,
        "intermediate_size": 2 * CHAIN_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    end = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=None, eos_token_id=end, pad_token_id=end, tie_word_embeddings=False)
    )
    embedding = torch.nn.functional.normalize(torch.randn(len(tokenizer), CHAIN_WIDTH), dim=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(1.5 * embedding[torch.randperm(len(tokenizer))])
    folder = tmp_path_factory.mktemp("actor")
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
