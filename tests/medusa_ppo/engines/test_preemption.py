"""Requests that are preempted while their drafts wait: their tokens are samples of the model's distribution all the same."""

from __future__ import annotations

import pytest
import torch

from medusa_ppo.config import EngineConfig
from medusa_ppo.drafting.uniformity import Uniformity, add_rollouts
from medusa_ppo.engines import launch
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.types import Sampling
from tests.medusa_ppo.engines.conftest import Actor

# Slow, because it needs an engine of its own, whose cache holds a fifth of its requests.
pytestmark = [pytest.mark.engine, pytest.mark.slow]
CACHE = 20 << 20


def test_preempted_requests_sample_from_the_model(actor: Actor, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cache_bytes", lambda *_: CACHE)
    with ColocatedEngine(actor.path, actor.heads_path, engine_config, seed=0) as engine:
        engine.configure(sampled=True)
        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        original = scheduler._preempt_request
        monkeypatch.setattr(scheduler, "_preempt_request", lambda *args, **kwargs: (preempted.append(1), original(*args, **kwargs))[1])
        torch.manual_seed(7)
        rollouts = engine.generate(actor.prompts, Sampling(1.0, max_new_tokens=96, responses_per_prompt=2, ignore_eos=True))
    test = Uniformity()
    add_rollouts(test, actor.model, rollouts)
    assert len(preempted) > 20 and rollouts.counters.accepted > 200 and test.tokens > 10_000
    assert test.honest, test.figures()
