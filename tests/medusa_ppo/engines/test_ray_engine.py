"""The engine inside a Ray actor: same answers, our own errors, and a clear one when the process
dies.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch

from heads.checkpoint import checksum, save_heads, save_state
from heads.errors import CheckpointError, ConfigError, DataError, EngineError, SwapError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Response, Sampling
from medusa_ppo.engines import http_server, ray_engine
from medusa_ppo.engines.ray_engine import RayEngine, make_engine
from tests.medusa_ppo.conftest import CPU, cpu_alone, eager_on_a_gpu
from tests.medusa_ppo.engines.conftest import (
    NEAR,
    TIED,
    assert_greedy,
    honesty_z,
    logprob_gap,
    sampled_rows,
    tiny_llama,
)

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor

pytestmark = pytest.mark.engine


@cpu_alone
def test_start_up_errors_come_before_a_process(
    actor: Actor, engine_config: EngineConfig, ray_session: None, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError):
        RayEngine(actor.path, tmp_path / "nothing", engine_config)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(
        (actor.heads_path / "config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    with pytest.raises(CheckpointError):
        RayEngine(actor.path, tmp_path / "broken", engine_config)


@eager_on_a_gpu
def test_rollouts_swaps_errors_and_death(
    actor: Actor, engine_config: EngineConfig, serving: str, ray_session: None, tmp_path: Path
) -> None:
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
        again = engine.generate(actor.prompts[:8], sampling)
        told = dict[int, Response]()
        told_of = engine.generate_as_finished(actor.prompts[:8], sampling, told.__setitem__)
        # On a GPU the prompts, cached by now, are another matrix, and rounded otherwise.
        assert serving != CPU or first.responses == again.responses == told_of.responses
        assert told == dict(enumerate(told_of.responses)) and told_of.counters.drafts > 0
        with pytest.raises(DataError):
            engine.generate_as_finished([[]], sampling, told.__setitem__)
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
            engine.configure(num_drafts=9)
        engine.configure(num_drafts=0)
        assert engine.generate(actor.prompts[:2], sampling).counters.drafts == 0
        save_state(tmp_path / "actor.safetensors", actor.model.state_dict())
        engine.sync_actor(tmp_path / "actor.safetensors", 2)
        assert engine.policy_version == 2
        os.kill(int(str(report["pid"])), signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            engine.generate(actor.prompts[:2], sampling)
    with pytest.raises(EngineError, match="closed"):
        engine.counters()


@eager_on_a_gpu
@pytest.mark.parametrize("kind", ["hydra"])
def test_conditioned_heads_draft_step_by_step(
    actor: Actor,
    engine_config: EngineConfig,
    serving: str,
    ray_session: None,
    tmp_path: Path,
    kind: str,
) -> None:
    torch.manual_seed(1)
    heads = MedusaHeads(
        HeadsConfig(actor.lm_head_VD.shape[1], actor.lm_head_VD.shape[0], 3, kind=kind)
    ).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.05)
    save_heads(tmp_path / "heads", heads, lm_head_VD=actor.lm_head_VD)
    config = engine_config.model_copy(update={"draft_temperature": 0.8, "num_drafts": "auto"})
    with RayEngine(actor.path, tmp_path / "heads", config) as engine:
        assert engine.plugin_report()["kind"] == kind
        assert engine.note, "its steps were timed, now or by an earlier start"
        hidden_BD = torch.randn(5, actor.lm_head_VD.shape[1])
        last_B = torch.tensor([5, 900, 17, 3, 1999]) % len(actor.lm_head_VD)
        table_VD = actor.model.get_input_embeddings().weight.detach()
        drafts_BK = torch.tensor(engine.probe(hidden_BD.tolist(), last_B.tolist()))
        condition_BK = torch.cat([last_B[:, None], drafts_BK[:, :-1]], dim=1)
        expected = heads(
            hidden_BD, actor.lm_head_VD, condition=condition_BK, embedding_VD=table_VD
        ).argmax(-1)
        assert torch.equal(drafts_BK, expected)
        # The engine's embedding and lm_head are used where they are: a synced actor changes what
        # the same heads draft.
        moved = copy.deepcopy(actor.model)
        for parameter in moved.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
        save_state(tmp_path / "moved.safetensors", moved.state_dict())
        engine.sync_actor(tmp_path / "moved.safetensors", 1)
        drafts_BK = torch.tensor(engine.probe(hidden_BD.tolist(), last_B.tolist()))
        condition_BK = torch.cat([last_B[:, None], drafts_BK[:, :-1]], dim=1)
        new_table_VD = moved.get_input_embeddings().weight
        logits_BKV = heads(
            hidden_BD, moved.lm_head.weight, condition=condition_BK, embedding_VD=new_table_VD
        )
        assert torch.equal(drafts_BK, logits_BKV.argmax(-1))
        assert not torch.equal(
            drafts_BK,
            heads(
                hidden_BD, moved.lm_head.weight, condition=condition_BK, embedding_VD=table_VD
            ).argmax(-1),
        )
        save_state(tmp_path / "actor.safetensors", actor.model.state_dict())
        engine.sync_actor(tmp_path / "actor.safetensors", 2)
        sampling = Sampling(0.8, max_new_tokens=40, ignore_eos=True, seed=6)
        # Where the engine chooses, its clock decides whether it drafts at all.
        engine.configure(num_drafts=3, choose=False)
        rollouts = engine.generate(actor.prompts[:40], sampling)
        assert rollouts.counters.drafts > 0
        assert abs(honesty_z(*sampled_rows(actor.model, rollouts), sampling)) < 3
        engine.configure(num_drafts=3, choose=True)
        greedy = Sampling(0.0, max_new_tokens=40, ignore_eos=True)
        chosen = engine.generate(actor.prompts[:16], greedy)
        engine.configure(num_drafts=0)
        plain = engine.generate(actor.prompts[:16], greedy)
        answers = ([r.token_ids for r in found.responses] for found in (plain, chosen))
        assert_greedy(actor.model, actor.prompts, *answers, TIED[serving])


@eager_on_a_gpu
def test_a_tied_lm_head_follows_a_file(
    engine_config: EngineConfig, serving: str, ray_session: None, tmp_path: Path
) -> None:
    model = tiny_llama(tied=True)
    prompts = [[5, 6, 7, 8], [100, 200, 300]]
    sampling = Sampling(max_new_tokens=12)
    model.save_pretrained(tmp_path)
    with RayEngine(tmp_path, None, engine_config) as engine:
        assert logprob_gap(model, engine.generate(prompts, sampling)) < NEAR[serving] / 10
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_(std=0.1)
        save_state(tmp_path / "new", dict(model.named_parameters()))
        assert logprob_gap(model, engine.generate(prompts, sampling)) > 0.1
        engine.sync_actor(tmp_path / "new", 1)
        assert logprob_gap(model, engine.generate(prompts, sampling)) < NEAR[serving] / 10


@cpu_alone
def test_without_ray(
    actor: Actor, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"ray\.init"):
        RayEngine(actor.path, actor.heads_path, engine_config)


class Mute:
    """In the place of EngineHost: a process that is there and says nothing."""

    def call(self, *args: object) -> None:
        time.sleep(60)


def test_an_engine_that_says_nothing_is_an_error_in_time(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_server, "TOKEN_S", 0.01)
    monkeypatch.setattr(ray_engine, "CLOSE_TIMEOUT_S", 0.2)
    engine = RayEngine.__new__(RayEngine)
    engine._host = ray.remote(num_cpus=0)(Mute).remote()
    engine._slots = 4
    for ask in (engine.counters, lambda: engine.generate([[1]] * 8, Sampling(max_new_tokens=10))):
        with pytest.raises(EngineError, match="did not answer in time"):
            ask()
    engine.close()


def test_an_engine_that_reads_long_prompts_gets_time_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the first response comes minutes later, and so does that of each new turn."""
    waits = list[float]()
    ended = object()
    parts = [({place: ended}, {}) for place in range(2)]

    def wait(asked: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        return (asked, []) if parts else ([], asked)

    call = SimpleNamespace(remote=lambda *_: iter(range(2)))
    monkeypatch.setattr(ray_engine.ray, "wait", wait)
    monkeypatch.setattr(ray_engine.ray, "get", lambda number: parts.pop(0))
    engine = RayEngine.__new__(RayEngine)
    engine._host = SimpleNamespace(generate_in_steps=SimpleNamespace(options=lambda **_: call))
    engine._slots = 32
    with pytest.raises(EngineError, match="did not answer in time"):
        engine.generate_as_finished(
            [[1] * 500] * 40, Sampling(max_new_tokens=256), lambda place, response: None
        )
    assert waits == [600 + 500 + 256] * 3
    assert (
        http_server.patience_s([[1] * 500] * 40, Sampling(max_new_tokens=256), 32) == 600 + 2 * 756
    )
