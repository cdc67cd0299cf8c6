"""The engine over HTTP, end to end: a real server, its swaps, its counters, its end."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from heads.checkpoint import checksum, save_state
from heads.errors import EngineError, SwapError
from heads.tensorfile import tensorwise_checksum
from medusa_ppo.config import EngineConfig
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.probe import honesty_z, sampled_rows
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.types import Sampling

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.engine
@pytest.mark.slow
def test_server_end_to_end(actor: Actor, engine_config: EngineConfig, tmp_path: Path) -> None:
    config = engine_config.model_copy(update={"backend": "server"})
    with make_engine(actor.path, actor.heads_path, config, seed=0) as engine:
        assert isinstance(engine, ServerEngine)
        pid = engine._process.pid
        report = engine.plugin_report()
        assert report["drafter"] == "MedusaProposer"
        greedy = Sampling(0.0, max_new_tokens=32, ignore_eos=True)
        first = engine.generate(actor.prompts[:16], greedy)
        assert first.counters.drafts > 0
        engine.configure(num_drafts=0)
        plain = engine.generate(actor.prompts[:16], greedy)
        assert [r.token_ids for r in plain.responses] == [r.token_ids for r in first.responses]
        assert plain.counters.drafts == 0
        engine.configure(num_drafts=4)
        sampling = Sampling(0.7, max_new_tokens=32, ignore_eos=True, seed=3, responses_per_prompt=2)
        rollouts = engine.generate(actor.prompts[:32], sampling)
        logits_MV, ids_M = sampled_rows(actor.model, rollouts)
        assert abs(honesty_z(logits_MV, ids_M, sampling)) < 3
        expected_M = (logits_MV / 0.7).log_softmax(-1).gather(1, ids_M[:, None])[:, 0]
        seen_M = torch.tensor([v for r in rollouts.responses for v in r.logprobs])
        assert float((expected_M - seen_M).abs().max()) < 1e-3
        heads = actor.random_heads(seed=2)
        save_state(tmp_path / "heads.safetensors", heads.trainable_state())
        assert engine.swap_heads(tmp_path / "heads.safetensors", 1).checksum == checksum(heads.trainable_state())
        hidden_BD = torch.randn(3, actor.lm_head_VD.shape[1])
        features_BKD = heads.features(hidden_BD)
        assert engine.probe(hidden_BD.tolist(), [0] * 3) == (features_BKD @ actor.lm_head_VD.T).argmax(-1).tolist()
        moved = {name: value * 1.05 for name, value in actor.model.state_dict().items()}
        save_state(tmp_path / "actor.safetensors", moved)
        assert engine.sync_actor(tmp_path / "actor.safetensors", 1).checksum == engine.checksums()["actor"] == tensorwise_checksum(moved)
        assert engine.generate(actor.prompts[:16], greedy).responses != first.responses
        (tmp_path / "bad.safetensors").write_text("nothing")
        with pytest.raises(SwapError):
            engine.swap_heads(tmp_path / "bad.safetensors", 2)
        attached = ServerEngine(actor.path, actor.heads_path, config.model_copy(update={"backend": str(engine._client.base_url)}))
        assert attached.generate(actor.prompts[:2], greedy).counters.drafts > 0
        long = Sampling(0.0, max_new_tokens=300, ignore_eos=True)
        undisturbed = attached.generate(actor.prompts[:16], long)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(attached.generate, actor.prompts[:16], long)
            version = 1
            while not running.done():
                version += 1
                engine.swap_heads(tmp_path / "heads.safetensors", version)
                engine.sync_actor(tmp_path / "actor.safetensors", version)
            assert version > 3, "swaps and syncs happened in flight"
            assert [r.token_ids for r in running.result().responses] == [r.token_ids for r in undisturbed.responses]
            assert running.result().counters.accepted > 0
        attached.close()
        assert not gone(pid)
    assert gone(pid)


@pytest.mark.engine
def test_a_server_that_cannot_start_shows_its_log(actor: Actor, engine_config: EngineConfig) -> None:
    config = engine_config.model_copy(update={"backend": "server", "extra": {"no_such_engine_option": 1}})
    with pytest.raises(EngineError, match="no-such-engine-option"):
        make_engine(actor.path, None, config)


def test_nobody_at_the_url(actor: Actor, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_ppo.engines import http_server as server

    monkeypatch.setattr(server, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server, "ATTACH_TIMEOUT_S", 0.6)
    config = engine_config.model_copy(update={"backend": f"http://127.0.0.1:{server.free_port()}"})
    with pytest.raises(EngineError, match="No vLLM server answers"):
        make_engine(actor.path, None, config)
