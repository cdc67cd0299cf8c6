"""Temperature 0 in the real engine: token for token what an engine without speculation gives, while
K changes all the time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from heads.checkpoint import save_heads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from tests.medusa_ppo.engines.conftest import HEADS, TIED, Actor, assert_greedy, tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]
GREEDY = Sampling(temperature=0.0, max_new_tokens=128, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(actor: Actor) -> list[list[int]]:
    return [
        *actor.prompts,
        *(p[:-7] for p in actor.prompts),
        *(p[:-19] for p in actor.prompts),
        *(p[:-31] for p in actor.prompts),
    ]


@pytest.fixture(scope="module")
def expected(
    actor: Actor, engine_config: EngineConfig, prompts: list[list[int]]
) -> list[tuple[int, ...]]:
    with ColocatedEngine(actor.path, None, engine_config) as plain:
        return tokens(plain.generate(prompts, GREEDY))


@pytest.mark.parametrize("form", ["hydra", "default"])
def test_greedy_tokens_are_those_of_an_engine_without_speculation(
    actor: Actor,
    engine_config: EngineConfig,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    serving: str,
    tmp_path: Path,
    form: str,
) -> None:
    """256 responses of 128 tokens in float32: K chosen at every step by measured costs or at
    random, one-hot and sampled drafts.
    """
    assert len(expected) == 256 and {len(ids) for ids in expected} == {128}
    # Random heads that sometimes are right: lm_head alone guesses a token twice now and then.
    heads = actor.random_heads(1, kind="hydra")
    if form == "default":
        heads = actor.default_heads(1, size=0.1)
    save_heads(tmp_path / "heads", heads, lm_head_VD=actor.lm_head_VD)
    given: list[tuple[int, ...]] = []
    rng = random.Random(0)
    with ColocatedEngine(actor.path, tmp_path / "heads", engine_config) as engine:
        executor = engine._running().llm_engine.model_executor
        chooser = executor.driver_worker.worker.model_runner.drafter.chooser
        for part, (sampled, at_random) in enumerate(
            ((False, False), (True, False), (False, True), (True, True))
        ):
            if at_random:
                # The measured choice soon settles; a random one makes every change from step to
                # step happen.
                chooser.choose = lambda batch: rng.randrange(HEADS + 1)
            engine.configure(choose=True, sampled=sampled)
            rollouts = engine.generate(prompts[part * 64 : (part + 1) * 64], GREEDY)
            assert (
                rollouts.counters.drafts >= 100 * at_random
            )  # The measured choice may be not to draft at all.
            given += tokens(rollouts)
    assert_greedy(actor.model, prompts, given, expected, TIED[serving])
