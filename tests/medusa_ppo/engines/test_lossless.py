"""Temperature 0 in the real engine: token for token what an engine without speculation gives, while
K changes all the time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from heads.checkpoint import save_heads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from tests.medusa_ppo.engines.conftest import HEADS, TIED, Actor, assert_greedy


def tokens(rollouts: Rollouts) -> list[tuple[int, ...]]:
    return [response.token_ids for response in rollouts.responses]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_greedy_tokens_are_those_of_an_engine_without_speculation(
    actor: Actor, engine_config: EngineConfig, serving: str, tmp_path: Path
) -> None:
    """256 responses of 128 tokens in float32: K chosen at every step by measured costs or at
    random, one-hot and sampled drafts.
    """
    prompts = [
        *actor.prompts,
        *(p[:-7] for p in actor.prompts),
        *(p[:-19] for p in actor.prompts),
        *(p[:-31] for p in actor.prompts),
    ]
    greedy = Sampling(temperature=0.0, max_new_tokens=128, ignore_eos=True)
    with ColocatedEngine(actor.path, None, engine_config) as plain:
        expected = tokens(plain.generate(prompts, greedy))
    assert len(expected) == 256 and {len(ids) for ids in expected} == {128}
    # Random heads that sometimes are right: lm_head alone guesses a token twice now and then.
    save_heads(tmp_path / "heads", actor.random_heads(1, kind="hydra"), lm_head_VD=actor.lm_head_VD)
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
            rollouts = engine.generate(prompts[part * 64 : (part + 1) * 64], greedy)
            assert (
                rollouts.counters.drafts >= 100 * at_random
            )  # The measured choice may be not to draft at all.
            given += tokens(rollouts)
    assert_greedy(actor.model, prompts, given, expected, TIED[serving])
