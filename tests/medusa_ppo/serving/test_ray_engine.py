"""The engine inside a Ray actor: same answers, our own errors, and a clear one when the process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray

from heads.checkpoint import checksum, save_state
from heads.errors import CheckpointError, ConfigError, EngineError, SwapError
from medusa_ppo.config import EngineConfig
from medusa_ppo.serving.make import make_engine
from medusa_ppo.serving.ray_engine import RayEngine
from medusa_ppo.types import Sampling

if TYPE_CHECKING:
    from tests.medusa_ppo.serving.conftest import Actor

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, num_cpus=2, object_store_memory=128 * 1024**2, log_to_driver=False)
    yield
    if started:
        ray.shutdown()


def test_start_up_errors_come_before_a_process(actor: Actor, engine_config: EngineConfig, ray_session: None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        RayEngine(actor.path, tmp_path / "nothing", engine_config)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text((actor.heads_path / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(CheckpointError):
        RayEngine(actor.path, tmp_path / "broken", engine_config)


def test_rollouts_swaps_errors_and_death(actor: Actor, engine_config: EngineConfig, ray_session: None, tmp_path: Path) -> None:
    with make_engine(actor.path, actor.heads_path, engine_config, seed=0) as engine:
        assert isinstance(engine, RayEngine)
        report = engine.plugin_report()
        assert report["pid"] != os.getpid()
        assert report["threads"] == engine_config.threads
        assert (engine.max_drafts, engine.num_drafts) == (4, 4)
        sampling = Sampling(1.0, max_new_tokens=16, responses_per_prompt=2, seed=4)
        first = engine.generate(actor.prompts[:8], sampling)
        assert len(first.responses) == 16
        assert first.counters.drafts > 0
        assert first.responses == engine.generate(actor.prompts[:8], sampling).responses
        state = actor.random_heads(seed=2).trainable_state()
        save_state(tmp_path / "heads.safetensors", state)
        assert engine.swap_heads(tmp_path / "heads.safetensors", 3).checksum == checksum(state)
        assert engine.heads_version == 3
        assert engine.generate(actor.prompts[:2], sampling).heads_version == 3
        (tmp_path / "bad.safetensors").write_text("nothing")
        with pytest.raises(SwapError) as caught:
            engine.swap_heads(tmp_path / "bad.safetensors", 4)
        assert type(caught.value) is SwapError
        with pytest.raises(ConfigError):
            engine.set_num_drafts(9)
        engine.set_num_drafts(0)
        assert engine.generate(actor.prompts[:2], sampling).counters.drafts == 0
        save_state(tmp_path / "actor.safetensors", actor.model.state_dict())
        engine.sync_actor(tmp_path / "actor.safetensors", 2)
        assert engine.policy_version == 2
        os.kill(int(str(report["pid"])), signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            engine.generate(actor.prompts[:2], sampling)
    with pytest.raises(EngineError, match="closed"):
        engine.counters()


def test_without_ray(actor: Actor, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"ray\.init"):
        RayEngine(actor.path, actor.heads_path, engine_config)
