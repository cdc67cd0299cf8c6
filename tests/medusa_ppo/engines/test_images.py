"""Prompts with images in the real engine: what it samples is what the trainer says of it, drafts
are accepted, new weights arrive.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads.checkpoint import save_heads
from heads.errors import EngineError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import load_actor, load_tokenizer
from medusa_ppo.actors.vision import FeatureStore, ImageReader
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import ImagePrompt, Rollouts, Sampling
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.learner import Learner

# Slow, because an engine that ends in this process takes the shared engine's process groups with
# it; the loop's own test runs in Ray.
pytestmark = [pytest.mark.engine, pytest.mark.slow]
SAMPLING = Sampling(max_new_tokens=16, responses_per_prompt=2)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_engine_and_trainer_see_the_same_images(
    vision_actor, picture, tmp_path: Path, family: str
) -> None:
    folder = vision_actor(family)
    actor = load_actor(folder)
    reader = ImageReader.load(folder, load_tokenizer(folder))
    store = FeatureStore(actor, reader)
    prompts = reader.prompts(
        ["a?", "b?", "c"], [(picture(0, 60, 90),), (picture(1), picture(2, 90, 60)), ()]
    )
    heads = MedusaHeads(
        HeadsConfig(*reversed(actor.lm_head.weight.shape), 3, kind="hydra", context=8)
    ).requires_grad_(False)
    heads.cell_out.fill_(1e-3)  # Untrained ones do not draft.
    save_heads(tmp_path / "heads", heads, lm_head_VD=actor.lm_head.weight.detach())

    def gap(found: Rollouts) -> float:
        """Largest difference of a token's log-prob from the trainer's."""
        learner = Learner(actor, None, PPOConfig(advantages="rloo"), features=store)
        _, report = learner.score(
            PPOBatch(replace(found, prompts=tuple(prompts))), torch.arange(6.0), SAMPLING
        )
        return report[names.LOGPROB_GAP_MAX]

    config = EngineConfig(
        dtype="float32", max_num_seqs=8, max_model_len=128, threads=1, num_drafts=3
    )
    with ColocatedEngine(folder, tmp_path / "heads", config) as engine, ActorSync(engine) as sync:
        first = engine.generate(prompts, SAMPLING)
        assert gap(first) < 1e-4 and first.counters.drafts > 0
        with torch.no_grad():
            actor.lm_head.weight.mul_(1.5)
        assert gap(first) > 1e-3
        sync(actor, 1)
        assert gap(engine.generate(prompts, SAMPLING)) < 1e-4, (
            "the new actor came, and its tower is where it was"
        )
        assert isinstance(prompts[0], ImagePrompt)
        other = ImagePrompt((*prompts[0], 66), prompts[0].images, prompts[0].short_ids)
        with pytest.raises(EngineError, match="differently from the trainer"):
            engine.generate([other], SAMPLING)
