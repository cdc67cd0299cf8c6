"""Where ranks are and whose devices engines use: what Ray is asked for, and which GPUs it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.ppo.megatron.rank_places import (
    bundle_of,
    rank_bundles,
    ranks_of_engines,
    ranks_together,
)


def config_of(actor: dict[str, int], replicas: int, each: int, placement: str) -> RunConfig:
    extra = {"tensor_parallel_size": each} if each > 1 else {}
    return build_config(
        {
            "actor": {"backend": "megatron", "roles": "critic", **actor},
            "engine": {"replicas": replicas, "extra": extra, "sleep_level": 1},
            "ppo": {"placement": placement},
        }
    )


@pytest.mark.parametrize(
    ("actor", "replicas", "each", "bundles", "engines"),
    [
        ({"tensor_parallel": 2}, 2, 1, [{"GPU": 2}], [[0], [1]]),
        ({"tensor_parallel": 2}, 1, 2, [{"GPU": 2}], [[0, 1]]),
        ({"data_parallel": 4}, 2, 2, [{"GPU": 2}] * 2, [[0, 1], [2, 3]]),
        ({"data_parallel": 4}, 4, 1, [{"GPU": 1}] * 4, [[0], [1], [2], [3]]),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 3},
            4,
            3,
            [{"GPU": 6}] * 2,
            [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        ),
    ],
)
def test_what_shared_ranks_ask_for(
    actor: dict[str, int],
    replicas: int,
    each: int,
    bundles: list[dict[str, float]],
    engines: list[list[int]],
) -> None:
    """A whole GPU for each rank, none for an engine, and an engine's ranks in one bundle."""
    config = config_of(actor, replicas, each, "shared")
    assert rank_bundles(config, {"GPU": 1.0}) == bundles
    shares = ranks_of_engines(config)
    assert [list(share) for share in shares] == engines
    for share in shares:
        assert len({bundle_of(config, rank) for rank in share}) == 1, "on one node"
    tensor = config.actor.tensor_parallel
    groups = [range(first, first + tensor) for first in range(0, config.actor.ranks, tensor)]
    for group in groups:
        assert len({bundle_of(config, rank) for rank in group}) == 1, "as ever"


def test_ranks_apart_from_engines_ask_for_what_they_did() -> None:
    config = config_of({"tensor_parallel": 2, "data_parallel": 2}, 4, 1, "in_turn")
    assert ranks_together(config) == 2 and ranks_of_engines(config) == []
    each = {"GPU": 1.0, "near": 0.001}
    assert rank_bundles(config, each) == [{"GPU": 2.0, "near": 0.002}] * 2


PLACED = """
import os, sys
import ray
from medusa_ppo.config.run_config import build_config
from medusa_ppo.engines import ray_engine
from medusa_ppo.ppo.megatron import megatron_learner
from medusa_ppo.runtime.processes import local_ray, own_gpus

class Rank:
    def __init__(self, *given): pass
    def meet_here(self): return None
    def start(self, place): return None
    def gpus(self): return own_gpus()

class Host(ray_engine.EngineHost):
    def start(self, *given):
        ray_engine.ColocatedEngine = lambda *started, **how: None
        super().start(*given)
        state = dict.fromkeys(ray_engine.STATE, 0) | {"note": os.environ["CUDA_VISIBLE_DEVICES"]}
        return ray.get_runtime_context().get_node_id(), state
    def _state(self): return {}
    def call(self, *given): return None, {}

megatron_learner.ActorRank = Rank
ray_engine.EngineHost = Host
# The first one names the meeting place.
megatron_learner.RankTeam.wait = lambda team, asked: ray.get(asked)
path, replicas, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = build_config({
    "model": {"path": path, "dtype": "float32"},
    "actor": {"backend": "megatron", "roles": "critic", "tensor_parallel": 2, "data_parallel": 2},
    "engine": {"replicas": replicas, "sleep_level": 1, "dtype": "float32", "memory_fraction": 0.8,
               "extra": {"tensor_parallel_size": each} if each > 1 else {}},
    "ppo": {"placement": "shared"},
})
with local_ray(gpus=("4", "5", "6", "7")):
    team = megatron_learner.RankTeam(path, config, with_embedding=False)
    ranks = [gpu for (gpu,) in team.call("gpus")]
    pool = ray_engine.make_engine(
        path, None, config.engine, supervised=True, places=team.engine_places()
    )
    engines = [engine.note.split(",") for engine in pool._engines()]
    free = ray.available_resources().get("GPU", 0.0)
    print(sorted(ranks), sum(engines, []) == ranks, [len(found) for found in engines], free)
    pool.close()
    team.close()
"""


@pytest.mark.parametrize(
    ("replicas", "each"),
    [
        pytest.param(4, 1, marks=pytest.mark.slow),
        (2, 2),
        pytest.param(1, 4, marks=pytest.mark.slow),
    ],
)
def test_engines_see_the_gpus_of_their_ranks(tmp_path: Path, replicas: int, each: int) -> None:
    """Ray's own books of four GPUs that do not exist: it does not look whether they are there.
    Ranks and vLLM are stand-ins, because both would look for the GPU; who places them is real.
    """
    pytest.importorskip("megatron.core")
    from tests.medusa_ppo.ppo.megatron.test_megatron_learner import actor_of

    path = actor_of(tmp_path / "actor", "llama")
    environment: dict[str, Any] = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    ran = subprocess.run(
        [sys.executable, "-c", PLACED, str(path), str(replicas), str(each)],
        env=environment | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"['4', '5', '6', '7'] True {[each] * replicas} 0.0"
    assert ran.stdout.strip().endswith(said), ran.stdout + ran.stderr[-3000:]
