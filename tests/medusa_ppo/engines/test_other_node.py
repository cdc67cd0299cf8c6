"""An engine on another node of a Ray cluster (two nodes on this machine): it is placed there, and
takes weights through Ray's store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray
from ray.cluster_utils import Cluster

from heads.checkpoint import checksum, save_state
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.ray_engine import RayEngine
from tests.medusa_ppo.conftest import cpu_alone

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor

MEMORY = 200 * 1024**2


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    """A head node for the caller, and one with the resource `engines`."""
    assert not ray.is_initialized()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=1, resources={"engines": 1}, object_store_memory=MEMORY)
        ray.init(
            address=cluster.address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@cpu_alone
@pytest.mark.slow
@pytest.mark.engine
def test_an_engine_on_another_node(
    actor: Actor, engine_config: EngineConfig, two_nodes: Cluster, tmp_path: Path
) -> None:
    config = engine_config.model_copy(update={"resource": "engines"})
    with RayEngine(actor.path, actor.heads_path, config) as engine:
        assert engine.elsewhere
        state = actor.random_heads(seed=2).trainable_state()
        save_state(tmp_path / "heads.safetensors", state)
        assert engine.swap_heads(tmp_path / "heads.safetensors", 3).checksum == checksum(state)
        save_state(tmp_path / "actor.safetensors", actor.model.state_dict())
        engine.sync_actor(tmp_path / "actor.safetensors", 2)
        assert (engine.heads_version, engine.policy_version) == (3, 2)
        rollouts = engine.generate(actor.prompts[:4], Sampling(1.0, max_new_tokens=8, seed=1))
        assert len(rollouts.responses) == 4 and rollouts.counters.drafts > 0
