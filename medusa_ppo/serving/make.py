"""The choice between the forms of the rollout engine."""

from __future__ import annotations

from pathlib import Path

from medusa_ppo.config import EngineConfig
from medusa_ppo.serving.engine import RolloutEngine
from medusa_ppo.serving.ray_engine import RayEngine
from medusa_ppo.serving.server import ServerEngine


def make_engine(model_path: str | Path, heads_path: str | Path | None, config: EngineConfig, seed: int = 0) -> RolloutEngine:
    """The engine that `config.backend` asks for.

    `colocated`: vLLM in a Ray actor on this node (`ray.init` is the caller's); `server`: over HTTP, started here or at `config.url`.
    """
    kind = ServerEngine if config.backend == "server" else RayEngine
    return kind(model_path, heads_path, config, seed)
