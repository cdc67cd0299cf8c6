"""The replay estimate against vLLM's own counters, on rollouts that the same heads drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from heads.checkpoint import save_heads, save_state
from heads.modules import MedusaHeads
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.offline.collect import samples_of
from medusa_ppo.offline.hidden import HiddenReader, read_all
from tests.medusa_ppo.conftest import CPU
from tests.medusa_ppo.engines.conftest import Actor

FORMS = {
    "medusa": HeadsSection(kind="medusa"),
    "default": HeadsSection(num_heads=8),
}
"""The default form with as many drafts as an engine may have: blocks of eight."""


def packed(model: torch.nn.Module, rollouts: Rollouts) -> RolloutBatch:
    return read_all(
        HiddenReader(model, rollouts.sampling.temperature), samples_of([rollouts]), lambda *_: None
    )


@pytest.fixture(scope="module", params=FORMS)
def heads(request: pytest.FixtureRequest, actor: Actor) -> MedusaHeads:
    """As a run starts: each equals lm_head."""
    torch.manual_seed(0)
    vocab, hidden = actor.lm_head_VD.shape
    return MedusaHeads(FORMS[request.param].sizes(hidden, vocab))


@pytest.fixture(scope="module")
def own_engine(
    actor: Actor,
    heads: MedusaHeads,
    engine_config: EngineConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("replayed") / "heads"
    save_heads(folder, heads, lm_head_VD=actor.lm_head_VD)
    config = engine_config.model_copy(update={"num_drafts": heads.config.num_heads})
    with ColocatedEngine(actor.path, folder, config, seed=0) as engine:
        yield engine


@pytest.mark.engine
def test_replay_reproduces_the_counters_of_the_engine_that_drafted(
    own_engine: ColocatedEngine, actor: Actor, heads: MedusaHeads, serving: str, tmp_path: Path
) -> None:
    """One-hot: draft steps exactly, accepted tokens up to what was accepted behind the ends.
    Sampled: within noise.
    """
    engine = own_engine
    embedding_VD = actor.model.model.embed_tokens.weight.detach()
    # A few seconds, enough that drafts are accepted at every position.
    trainer = HeadsTrainer(
        heads,
        actor.lm_head_VD,
        CompanionConfig(batch_positions=256, epochs=4),
        0,
        embedding_VD=embedding_VD,
    )
    first = engine.generate(actor.prompts, Sampling(max_new_tokens=64, seed=1))
    trainer.train_batch(packed(actor.model, first))
    heads = trainer.heads.requires_grad_(False)
    save_state(tmp_path / "heads.safetensors", heads.trainable_state())
    engine.swap_heads(tmp_path / "heads.safetensors", 1)

    for sampled, temperature in ((False, 1.0), (True, 1.0), (True, 0.7)):
        engine.configure(sampled=sampled, draft_temperature=0.8 if sampled else 1.0, choose=False)
        rollouts = engine.generate(
            actor.prompts,
            Sampling(temperature=temperature, max_new_tokens=64, responses_per_prompt=2, seed=2),
        )
        counted = rollouts.counters
        replayed = replay(
            heads,
            packed(actor.model, rollouts),
            actor.lm_head_VD,
            embedding_VD=embedding_VD,
            served=Served(0.8 if sampled else 0.0),
        )
        if not sampled:
            # On a GPU a draft and its token may be told apart where two logits are as good as one.
            off = 0.0 if serving == CPU else 0.02
            assert counted.drafts == pytest.approx(replayed.drafts, rel=off, abs=0)
            assert replayed.accepted * (1 - off) <= counted.accepted
            assert counted.accepted <= replayed.accepted_upper * (1 + off)
        interval = replayed.confidence_interval(0.99)
        noise = interval.high - interval.low if sampled else 0.0
        assert replayed.mean_acceptance_length > 1.15
        assert min(counted.accepted_per_position[: heads.config.num_heads]) > 0
        assert (
            abs(counted.mean_acceptance_length - replayed.mean_acceptance_length)
            < 0.03 * replayed.mean_acceptance_length + noise
        )
