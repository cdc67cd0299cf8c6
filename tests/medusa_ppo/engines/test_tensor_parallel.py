"""Tensor-parallel ranks: lm_head and embedding are cut up, and the drafts, their choice and a swap
are those of one rank; and of all ranks, though one of them rounds differently.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from heads.checkpoint import save_heads, save_state
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from tests.medusa_ppo.conftest import CPU, EAGER
from tests.medusa_ppo.engines import noisy_ranks
from tests.medusa_ppo.engines.conftest import HEADS, TIED, Actor, assert_greedy, tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each rank"),
]


on_ranks = pytest.mark.parametrize(
    ("serving", "size"),
    [
        (CPU, 2),
        pytest.param(EAGER, 2, marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
        pytest.param(EAGER, 4, marks=[pytest.mark.gpu, pytest.mark.gpus(4)]),
    ],
    indirect=["serving"],
)


def sizes_of(serving: str) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "threads": 1,
        "memory_fraction": 0.05 if serving == CPU else 0.3,
        "enforce_eager": True,
    }


@on_ranks
@pytest.mark.parametrize("kind", ["medusa", "hydra", "default"])
def test_ranks_draft_and_sample_as_one(
    actor: Actor,
    serving: str,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    first, second = (
        actor.default_heads(seed) if kind == "default" else actor.random_heads(seed, kind=kind)
        for seed in (1, 2)
    )
    save_heads(tmp_path / "heads", first, lm_head_VD=actor.lm_head_VD)
    save_state(tmp_path / "new", second.trainable_state())
    hidden = [[0.1 * (row + 1)] * actor.model.config.hidden_size for row in range(3)]
    seen = {}
    for ranks, cores in ((1, "nobind"), (size, "0|1")):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        sizes = sizes_of(serving)
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


OFF = {"choose": False, "draft_vocab": 0, "memory_bytes": 0, "stop_below": 0.0}
EVERYTHING = {"draft_vocab": 300, "memory_bytes": 1 << 20, "stop_below": 0.1}
"""What draws from another q, or fewer drafts, beside the heads."""


@on_ranks
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_ranks_draw_and_accept_the_same_though_one_rounds_differently(
    actor: Actor,
    serving: str,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lm_head: str,
) -> None:
    """Ranks multiply on their own until the logits are gathered, and kernels that were tuned on
    each may round in the last place. Drafts are the first rank's, and each rank verifies them
    against its own q: one that drew otherwise would go on with other tokens than the others.
    """
    heads = actor.default_heads(1, lm_head=lm_head, size=0.1)
    save_heads(tmp_path / "heads", heads, lm_head_VD=actor.lm_head_VD)
    save_state(
        tmp_path / "new", actor.default_heads(2, lm_head=lm_head, size=0.1).trainable_state()
    )
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(size))))
    everything = dict(EVERYTHING) if lm_head == "shared" else EVERYTHING | {"draft_vocab": 0}
    extra = {"tensor_parallel_size": size, "skip_tokenizer_init": False}
    config = EngineConfig(**sizes_of(serving), runner="v1", extra=extra)
    with ColocatedEngine(actor.path, tmp_path / "heads", config) as engine:
        core = engine._running().llm_engine.engine_core.engine_core
        core.collective_rpc(noisy_ranks.begin)
        for name, settings in {
            "plain": OFF,
            "everything": OFF | everything,
            "K chosen": OFF | everything | {"choose": True},
            "after a swap": OFF | everything,
        }.items():
            engine.configure(sampled=True, **settings)
            if name == "after a swap":
                engine.swap_heads(tmp_path / "new", 1)
                core.collective_rpc(noisy_ranks.take)
            before = engine.counters()
            said = mixed_requests(engine, actor.prompts[:24])
            after = engine.counters()
            first, *others = core.collective_rpc(noisy_ranks.take)
            assert len(others) == size - 1
            states = [note[1] for note in first if note[0] == "drafted"]
            for other in others:
                rounded = [note[1] for note in other if note[0] == "drafted"]
                assert all(a != b for a, b in zip(states, rounded, strict=True)), name
                for ours, theirs in zip(first, other, strict=True):
                    assert ours[0] == theirs[0] and ours[2:] == theirs[2:], name
            # What the engine said is what every rank has accepted.
            accepted = sum(len(ids) for note in first if note[0] == "sampled" for ids in note[3])
            assert accepted >= sum(map(len, said)), name
            ended_early = [n for note in first for n in note[4] or ()]
            assert (min(ended_early, default=HEADS) < HEADS) == (
                "stop_below" in settings and settings["stop_below"] > 0
            ), name
            if name != "K chosen":
                assert after.accepted - before.accepted > 30, name
        # The agreement taken away.
        engine.configure(sampled=True, **OFF)
        core.collective_rpc(noisy_ranks.multiply_alone)
        mixed_requests(engine, actor.prompts[:4])
        first, *others = core.collective_rpc(noisy_ranks.take)
        assert [note[2] for note in first] != [note[2] for note in others[0]]


def mixed_requests(engine: ColocatedEngine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What requests with all kinds of settings are answered: temperatures, cuts, seeds, siblings,
    a grammar.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    core = engine._running().llm_engine
    generator = random.Random(0)
    for number, prompt in enumerate(prompts):
        grammar = StructuredOutputsParams(regex="[a-z ]{200}") if number % 6 == 5 else None
        temperature = generator.choice([0.0, 0.7, 1.0, 1.0])
        params = SamplingParams(
            temperature=temperature,
            top_p=generator.choice([1.0, 1.0, 0.9]),
            top_k=generator.choice([0, 0, 20]),
            seed=generator.choice([None, None, number]),
            n=2 if number % 4 == 1 and temperature else 1,
            structured_outputs=grammar,
            max_tokens=40,
            ignore_eos=grammar is None,
            detokenize=False,
        )
        core.add_request(f"mixed-{number}", {"prompt_token_ids": prompt}, params)
    said: dict[tuple[str, int], tuple[int, ...]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            for one in output.outputs:
                said[output.request_id, one.index] = tuple(one.token_ids)
    return list(said.values())
