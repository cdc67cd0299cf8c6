"""Under pressure (preemption, chunked prefill, aborts, mixed settings, another K in every step)
tokens are what they would be without.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import save_heads, save_state
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import Uniformity, add_rollouts
from tests.medusa_ppo.conftest import CPU, eager_on_a_gpu
from tests.medusa_ppo.engines.conftest import (
    HEADS,
    TIED,
    Actor,
    assert_greedy,
    watch_drafts,
)

# Slow, because it needs an engine of its own, whose cache holds a fifth of its requests.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]
CACHE = 20 << 20


def pressed(config: EngineConfig, **extra: int) -> EngineConfig:
    """The same with a cache for few."""
    given = {"kv_cache_memory_bytes": CACHE, **extra}
    return config.model_copy(update={"extra": config.extra | given})


@pytest.fixture
def heads_of(actor: Actor, tmp_path: Path) -> Callable[[str], Path]:
    """heads_of(form) -> folder of heads that draft nearly as lm_head does, and so are accepted."""

    def folder(form: str) -> Path:
        if form == "medusa":
            return actor.heads_path
        heads = actor.default_heads(0, size=0.02)
        save_heads(tmp_path / form, heads, lm_head_VD=actor.lm_head_VD)
        return tmp_path / form

    return folder


def scheduler_of(engine: ColocatedEngine) -> Any:
    return engine._running().llm_engine.engine_core.engine_core.scheduler


@eager_on_a_gpu
@pytest.mark.parametrize("form", ["medusa", "default"])
def test_preempted_requests_sample_from_the_model(
    actor: Actor,
    engine_config: EngineConfig,
    heads_of: Callable[[str], Path],
    serving: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    form: str,
) -> None:
    config = pressed(engine_config)
    sampling = Sampling(1.0, max_new_tokens=96, responses_per_prompt=2, ignore_eos=True)
    with ColocatedEngine(actor.path, heads_of(form), config, seed=0) as engine:
        engine.configure(sampled=True)
        seen = {"preempted": 0, "cut": 0}
        watch(scheduler_of(engine), seen, monkeypatch)
        test = Uniformity()
        accepted = 0
        for seed in range(7, 11):
            torch.manual_seed(seed)
            rollouts = engine.generate(actor.prompts, sampling)
            add_rollouts(test, actor.model, rollouts)
            accepted += rollouts.counters.accepted
        assert seen["preempted"] > 200 and accepted > 2000 and test.tokens > 40_000
        assert test.honest, test.figures()
        if form == "default":
            assert_copied_as_if_never_preempted(
                engine, actor, sampling, serving, monkeypatch, tmp_path / "loud"
            )


def assert_copied_as_if_never_preempted(
    engine: ColocatedEngine,
    actor: Actor,
    sampling: Sampling,
    serving: str,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
) -> None:
    """Heads that are told much of what is copied, and nothing of their context, whose pairs a
    preemption loses, draw from the q that replay sees.
    """
    loud = actor.default_heads(3, size=1.0)
    loud.context_out.zero_()
    save_state(path, loud.trainable_state())
    engine.swap_heads(path, 1)
    returned: dict[str, int] = {}
    scheduler = scheduler_of(engine)
    preempt = scheduler._preempt_request

    def preempted(request: Any, *rest: Any, **named: Any) -> Any:
        returned.setdefault(request.request_id, request.num_output_tokens)
        return preempt(request, *rest, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", preempted)
    drawn = watch_drafts(engine, monkeypatch, every=3)
    engine.generate(actor.prompts, sampling)
    again = [one for one in drawn if len(one.response) > returned.get(one.key, len(one.response))]
    off = []
    uncopied = []
    for one in again[:: max(1, len(again) // 60)]:
        given = loud, one.prompt, one.response, one.ids_K
        off.append(float((actor.replayed_q(*given) - one.q_KV).abs().sum(-1).max()))
        bare_KV = actor.replayed_q(*given, copies=False)
        uncopied.append(float((bare_KV - one.q_KV).abs().sum(-1).max()))
    assert len(off) > 40 and max(off) < (1e-2 if serving == CPU else 5e-2), sorted(off)[-5:]
    assert sorted(uncopied)[len(uncopied) // 2] > 0.1


@eager_on_a_gpu
@pytest.mark.parametrize(
    ("sampled", "form"), [(False, "medusa"), (True, "medusa"), (True, "default")]
)
def test_under_pressure_greedy_tokens_are_those_of_an_engine_without_speculation(
    actor: Actor,
    engine_config: EngineConfig,
    heads_of: Callable[[str], Path],
    serving: str,
    monkeypatch: pytest.MonkeyPatch,
    sampled: bool,
    form: str,
) -> None:
    greedy = Sampling(0.0, max_new_tokens=96, ignore_eos=True)
    with ColocatedEngine(actor.path, None, engine_config) as plain:
        expected = [
            response.token_ids for response in plain.generate(actor.prompts, greedy).responses
        ]
    config = pressed(engine_config, max_num_batched_tokens=96)
    generator = random.Random(1)
    seen = {"preempted": 0, "cut": 0, "aborted": 0}
    with ColocatedEngine(actor.path, heads_of(form), config, seed=0) as engine:
        engine.configure(sampled=sampled, choose=True)
        core = engine._running().llm_engine
        chooser = core.model_executor.driver_worker.worker.model_runner.drafter.chooser
        drafted: list[int] = []
        chooser.choose = lambda batch: drafted.append(generator.randrange(HEADS + 1)) or drafted[-1]
        watch(scheduler_of(engine), seen, monkeypatch)
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
