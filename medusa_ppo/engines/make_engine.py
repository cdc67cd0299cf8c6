"""The choice between the forms of the rollout engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_ppo.config import EngineConfig
from medusa_ppo.engines.actor_sync import BroadcastPool
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.engines.ray_engine import RayEngine, gpus_asked
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.processes import bundle, in_bundle, release, reserve


def make_engine(
    model_path: str | Path, heads_path: str | Path | None, config: EngineConfig, seed: int = 0, *, supervised: bool = False
) -> RolloutEngine:
    """The engine that `config.backend` asks for.

    `colocated`: vLLM in a Ray actor of this cluster (`ray.init` is the caller's); `server`: over HTTP, started here or at `config.url`.
    With `config.replicas` above 1, or an actor that is broadcast: a pool of them.

    Args:
        supervised: start one engine again too when it is lost, with the heads and the actor that it had; a pool always does.
    """
    kind = ServerEngine if config.backend == "server" else RayEngine
    if config.replicas == 1 and not supervised and config.transfer == "file":
        return kind(model_path, heads_path, config, seed)
    group = _room(config) if config.placement else None

    def start(index: int) -> RolloutEngine:
        section, own_seed = replica(config, index), seed + index  # Engines of one seed would answer the same prompt in two pieces alike.
        if group is None:
            return kind(model_path, heads_path, section, own_seed)
        return RayEngine(model_path, heads_path, section, own_seed, where=in_bundle(group, index))

    pool = BroadcastPool if config.transfer == "broadcast" else EnginePool
    return pool(start, config.replicas, smallest_piece=max(1, config.max_num_seqs // 2), on_close=lambda: release(group))


def _room(config: EngineConfig) -> Any:
    """Room for all engines at once."""
    asked = bundle(gpus_asked(config, int(config.extra.get("tensor_parallel_size", 1))), config.resource)
    return reserve([asked] * config.replicas, config.placement, "engines")


def replica(config: EngineConfig, index: int) -> EngineConfig:
    """The section as one engine of several reads it: its own address and port."""
    port = config.port + index if config.port else 0
    url = config.url.split(",")[index].strip() if config.url else ""
    return config.model_copy(update={"replicas": 1, "port": port, "url": url})
