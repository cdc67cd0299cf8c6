"""Conditioned heads in the real engine: what it drafts is what the heads draft, after every swap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from heads.checkpoint import save_heads, save_state
from medusa_ppo.config import EngineConfig
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.engines.colocated import ColocatedEngine
from tests.medusa_ppo.engines.conftest import HEADS, Actor

# Slow, because an engine that ends in this process takes the shared engine's process groups with it; test_ray_engine.py has a quick one.
pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def hydra_engine(actor: Actor, engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("hydra") / "heads"
    save_heads(folder, actor.random_heads(1, kind="hydra"), lm_head_VD=actor.lm_head_VD)
    with ColocatedEngine(actor.path, folder, engine_config) as engine:
        yield engine


def test_the_engine_drafts_what_the_heads_draft_before_and_after_a_swap(
    hydra_engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    hidden_BD = torch.randn(5, actor.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids_B = torch.arange(5)
    seen = []
    for version, seed in enumerate((1, 2)):
        heads = actor.random_heads(seed, kind="hydra")
        save_state(tmp_path / f"{seed}", heads.trainable_state())
        hydra_engine.swap_heads(tmp_path / f"{seed}", version + 1)
        core = DraftingCore(heads, lambda f: f @ actor.lm_head_VD.T, lambda ids_B: actor.model.model.embed_tokens.weight[ids_B])
        expected_BK = core.draft(hidden_BD, ids_B, HEADS).ids_BK
        assert hydra_engine.probe(hidden_BD.tolist(), ids_B.tolist()) == expected_BK.tolist()
        seen.append(expected_BK.tolist())
    assert seen[0] != seen[1]
