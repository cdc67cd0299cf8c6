"""Fixtures of several modules: a small local Ray for each module of tests that needs one, and an actor that heads can learn from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_ppo.meeting import LOOPBACK, Meeting

CHAIN_WIDTH = 64


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A local Ray with two CPUs and 300 MB of shared memory, without dashboard; ended with the module, since others start their own."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=300 * 1024**2,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            _system_config={"free_objects_period_milliseconds": 10},  # What nobody holds is gone at once.
        )
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="session")
def chain_actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor whose next token mostly follows from the last one by a fixed permutation: heads have something to learn at once."""
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


@pytest.fixture
def in_a_team() -> Callable[..., list[Any]]:
    """in_a_team(work, size=2): `work(team, rank)` of so many workers, in threads, over real sockets."""
    return _in_a_team


def _in_a_team(work: Callable[[Meeting, int], Any], size: int = 2) -> list[Any]:
    first = Meeting.open(LOOPBACK, size, timeout_s=30.0)

    def run(rank: int) -> Any:
        team = (Meeting(first.place.seen_by(rank)) if rank else first).join()
        try:
            return work(team, rank)
        finally:
            team.leave()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
