"""Under pressure (preemption, chunked prefill, aborts, mixed settings, another K in every step)
tokens are what they would be without.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import Uniformity, add_rollouts
from tests.medusa_ppo.conftest import eager_on_a_gpu
from tests.medusa_ppo.engines.conftest import HEADS, TIED, Actor, assert_greedy

# Slow, because it needs an engine of its own, whose cache holds a fifth of its requests.
pytestmark = [pytest.mark.engine, pytest.mark.slow]
CACHE = 20 << 20


def pressed(config: EngineConfig, **extra: int) -> EngineConfig:
    """The same with a cache for few."""
    given = {"kv_cache_memory_bytes": CACHE, **extra}
    return config.model_copy(update={"extra": config.extra | given})


@eager_on_a_gpu
def test_preempted_requests_sample_from_the_model(
    actor: Actor, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pressed(engine_config)
    with ColocatedEngine(actor.path, actor.heads_path, config, seed=0) as engine:
        engine.configure(sampled=True)
        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        original = scheduler._preempt_request
        monkeypatch.setattr(
            scheduler,
            "_preempt_request",
            lambda *args, **kwargs: (preempted.append(1), original(*args, **kwargs))[1],
        )
        test = Uniformity()
        accepted = 0
        for seed in range(7, 11):
            torch.manual_seed(seed)
            rollouts = engine.generate(
                actor.prompts,
                Sampling(1.0, max_new_tokens=96, responses_per_prompt=2, ignore_eos=True),
            )
            add_rollouts(test, actor.model, rollouts)
            accepted += rollouts.counters.accepted
    assert len(preempted) > 200 and accepted > 2000 and test.tokens > 40_000
    assert test.honest, test.figures()


@eager_on_a_gpu
@pytest.mark.parametrize("sampled", [False, True])
def test_under_pressure_greedy_tokens_are_those_of_an_engine_without_speculation(
    actor: Actor,
    engine_config: EngineConfig,
    serving: str,
    monkeypatch: pytest.MonkeyPatch,
    sampled: bool,
) -> None:
    greedy = Sampling(0.0, max_new_tokens=96, ignore_eos=True)
    with ColocatedEngine(actor.path, None, engine_config) as plain:
        expected = [
            response.token_ids for response in plain.generate(actor.prompts, greedy).responses
        ]
    config = pressed(engine_config, max_num_batched_tokens=96)
    generator = random.Random(1)
    seen = {"preempted": 0, "cut": 0, "aborted": 0}
    with ColocatedEngine(actor.path, actor.heads_path, config, seed=0) as engine:
        engine.configure(sampled=sampled, choose=True)
        core = engine._running().llm_engine
        chooser = core.model_executor.driver_worker.worker.model_runner.drafter.chooser
        drafted: list[int] = []
        chooser.choose = lambda batch: drafted.append(generator.randrange(HEADS + 1)) or drafted[-1]
        watch(core.engine_core.engine_core.scheduler, seen, monkeypatch)
        found = answers(core, actor.prompts, generator, seen)
    assert_greedy(actor.model, actor.prompts, found, expected, TIED[serving])
    assert (
        seen["preempted"] > 20
        and seen["cut"] > 20
        and seen["aborted"] > 5
        and set(drafted) == set(range(HEADS + 1))
    ), seen


def watch(scheduler: Any, seen: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count preempted requests, and prompts of which a step reads only a part."""
    preempt = scheduler._preempt_request
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        requests = [scheduler.requests[name] for name in output.num_scheduled_tokens]
        seen["cut"] += sum(
            request.num_computed_tokens < request.num_prompt_tokens for request in requests
        )
        return output

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    monkeypatch.setattr(scheduler, "schedule", scheduled)


def answers(
    core: Any, prompts: list[list[int]], generator: random.Random, seen: dict[str, int]
) -> list[tuple[int, ...]]:
    """What greedy requests get beside others with all kinds of settings, of which some are
    aborted.
    """
    from vllm import SamplingParams

    others = []
    found = {}
    for index, prompt in enumerate(prompts):
        length = {"max_tokens": 96, "ignore_eos": True, "detokenize": False}
        core.add_request(
            f"greedy-{index}",
            {"type": "token", "prompt_token_ids": prompt},
            SamplingParams(temperature=0.0, **length),
        )
        mixed = {
            "temperature": generator.choice([0.5, 1.0, 2.0]),
            "top_k": generator.choice([0, 5]),
            "top_p": generator.choice([0.8, 1.0]),
        }
        mixed["repetition_penalty"] = generator.choice([1.0, 1.0, 1.2])
        others.append(f"other-{index}")
        settings = SamplingParams(seed=generator.choice([None, index]), **mixed, **length)
        core.add_request(others[-1], {"type": "token", "prompt_token_ids": prompt}, settings)
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                found[output.request_id] = tuple(output.outputs[0].token_ids)
        alive = [name for name in others if name not in found]
        if alive and generator.random() < 0.1:
            core.abort_request([others.pop(others.index(generator.choice(alive)))])
            seen["aborted"] += 1
    return [found[f"greedy-{index}"] for index in range(len(prompts))]
