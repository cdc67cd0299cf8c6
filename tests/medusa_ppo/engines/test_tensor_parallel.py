"""Tensor-parallel ranks: lm_head and embedding are cut up, and the drafts, their
choice and a swap are those of one rank.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heads.checkpoint import save_heads, save_state
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from tests.medusa_ppo.conftest import CPU, EAGER
from tests.medusa_ppo.engines.conftest import TIED, Actor, assert_greedy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each rank"),
]


def tokens(rollouts: Rollouts) -> list[tuple[int, ...]]:
    return [response.token_ids for response in rollouts.responses]


@pytest.mark.parametrize(
    ("serving", "size"),
    [
        (CPU, 2),
        pytest.param(EAGER, 2, marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
        pytest.param(EAGER, 4, marks=[pytest.mark.gpu, pytest.mark.gpus(4)]),
    ],
    indirect=["serving"],
)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_ranks_draft_and_sample_as_one(
    actor: Actor,
    serving: str,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    save_heads(tmp_path / "heads", actor.random_heads(1, kind=kind), lm_head_VD=actor.lm_head_VD)
    save_state(tmp_path / "new", actor.random_heads(2, kind=kind).trainable_state())
    hidden = [[0.1 * (row + 1)] * actor.model.config.hidden_size for row in range(3)]
    seen = {}
    for ranks, cores in ((1, "nobind"), (size, "0|1")):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        sizes = {
            "dtype": "float32",
            "max_num_seqs": 16,
            "max_model_len": 512,
            "threads": 1,
            "memory_fraction": 0.05 if serving == CPU else 0.3,
            "enforce_eager": True,
        }
        config = EngineConfig(**sizes, extra={"tensor_parallel_size": ranks})
        with ColocatedEngine(actor.path, tmp_path / "heads", config) as engine:
            greedy = engine.generate(
                actor.prompts[:16], Sampling(temperature=0.0, max_new_tokens=32, ignore_eos=True)
            )
            engine.configure(choose=False, sampled=True)
            sampled = engine.generate(actor.prompts[:16], Sampling(max_new_tokens=32))
            before = engine.probe(hidden, [5, 6, 7])
            engine.swap_heads(tmp_path / "new", 1)
            seen[ranks] = (tokens(greedy), before, engine.probe(hidden, [5, 6, 7]))
            assert greedy.counters.drafts > 0 and sampled.counters.drafts > 0
    assert_greedy(actor.model, actor.prompts, seen[size][0], seen[1][0], TIED[serving])
    assert seen[1][1:] == seen[size][1:]
    assert seen[1][1] != seen[1][2]
