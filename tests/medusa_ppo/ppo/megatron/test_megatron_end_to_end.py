"""The whole run with a Megatron actor on two processes, a companion in Ray and a pool of two vLLM
engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from heads.tensorfile import checksum
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.engines.actor_sync import actor_state
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.ppo.loop import PPOLoop, run_ppo
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.session import RunSession
from medusa_ppo.reports.store import read_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1500)]
SHIM = os.pathsep.join((str(Path(__file__).parents[2] / "actors"), str(Path(__file__).parent)))
REWARD = """
def even(prompt, response, row):
    return float(len(response) % 2 == 0)
"""


def settings(actor: Path, out: Path, steps: int) -> RunConfig:
    return build_config(
        {
            "name": "run",
            "out": str(out),
            "model": {"path": str(actor)},
            "actor": {"backend": "megatron", "tensor_parallel": 2, "imports": "ranks_on_cpu"},
            "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:64]"},
            "sampling": {"max_new_tokens": 24, "responses_per_prompt": 4},
            "engine": {
                "replicas": 2,
                "max_num_seqs": 8,
                "max_model_len": 128,
                "threads": 1,
                "num_drafts": 3,
            },
            # Without a warm-up heads have all to learn beside the loop.
            "heads": {"num_heads": 3, "kind": "hydra", "warm_up_tokens": 0},
            # Waiting makes the number of published versions certain; that PPO never waits otherwise
            # is the plugin's own test.
            "companion": {"wait": True, "epochs": 8, "learning_rate": 1e-2, "workers": 2},
            "ppo": {
                "steps": steps,
                "prompts_per_step": 8,
                "micro_batch_size": 16,
                "actor_learning_rate": 1e-4,
                "reward": "even_reward:even",
                "checkpoint_every": None,
                "threads": 1,
            },
        }
    )


def test_heads_learn_beside_a_megatron_actor(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", SHIM, prepend=os.pathsep
    )  # Ray's workers have the environment that it was started in.
    config = settings(chain_actor, tmp_path, steps=6)
    with RunSession(config, ProgressSink()) as session:
        parts, position, writer = session.prepare(resume=False)
        loop = PPOLoop(config, parts, ProgressSink(), position)
        loop.run(writer)
        engine = parts.engine
        learner = parts.learner
        assert (
            isinstance(engine, EnginePool)
            and len({report["pid"] for report in engine.plugin_report()["engines"]}) == 2
        )
        sums = engine.checksums()  # An error when the engines differ.
        held = dict(learner.actor.tensors(torch.float32))  # type: ignore[union-attr]
        assert sums["actor"] == checksum(held), "both engines have what the ranks have"
        assert parts.plugin is not None and parts.plugin.installer.installed is not None
        installed = parts.plugin.installer.installed
        assert sums["heads"] == installed.checksum and engine.heads_version == installed.version
        session.save(parts, loop.position)
        session.finish()
    assert not ray.is_initialized()

    steps = read_run(config.run_dir).steps
    assert len(steps) == 6 and [s[names.POLICY_VERSION] for s in steps] == list(range(6))
    assert max(s[names.LOGPROB_GAP] for s in steps) < 1e-3, (
        "engines and ranks compute the same policy after every sync"
    )
    assert steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    assert (
        all(generated > 0 for generated in steps[-1][names.TOKENS_PER_ENGINE])
        and len(steps[-1][names.TOKENS_PER_ENGINE]) == 2
    )
    assert all(0.0 <= s[names.REWARD_MEAN] <= 1.0 for s in steps)
    assert all(0 < s[names.SYNC_COLLECT_S] <= s[names.SYNC_S] for s in steps)
    assert steps[-1][names.SYNC_BYTES] == sum(tensor.numel() * 4 for tensor in held.values())
    assert "New actor weights" in (config.run_dir / "report.md").read_text()

    trained, first = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (config.run_dir / "actor", chain_actor)
    )
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, held[name]), name
    assert not torch.equal(trained.lm_head.weight, first.lm_head.weight)


def test_a_vision_language_actor_on_ranks_runs_the_whole_loop_with_heads(
    vision_actor: Callable[..., Path],
    picture: Callable[..., bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM computes its own features, the ranks those of each image once; their log-probs agree
    after each sync, heads learn, and what is saved is the whole actor.
    """
    (tmp_path / "even_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", SHIM, prepend=os.pathsep)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number, 60, 60 + 30 * number))
    rows = [
        {"prompt": f"{n}?", "answer": "", "image": [f"{n % 4}.png", "0.png"][: n % 3]}
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = vision_actor(groups=2)
    plain = settings(folder, tmp_path, steps=4)
    values = plain.model_dump(mode="json")
    values["data"] |= {"path": "rows.jsonl", "split": "train", "images": "image"}
    values["actor"] |= {"roles": "critic", "sequence_parallel": True}
    values["engine"] |= {"replicas": 1}
    values["companion"] |= {"workers": 1}
    values["report"] |= {"speed_every": None}
    config = build_config(values)

    summary = run_ppo(config)

    steps = read_run(config.run_dir).steps
    assert summary["status"] == "finished" and len(steps) == 4
    assert max(s[names.LOGPROB_GAP] for s in steps) < 1e-3
    assert sum(s[names.TOWER_RUNS] for s in steps) == 4 and max(s[names.IMAGES] for s in steps) == 4
    assert (
        steps[-1][names.HEADS_VERSION] >= 1
        and steps[-1][names.MAL_SERVING] > steps[0][names.MAL_SERVING] + 0.2
    )
    saved, first = (actor_state(load_actor(path)) for path in (config.run_dir / "actor", folder))
    assert saved.keys() == first.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, first[name]) == name.startswith("visual."), name
    assert (config.run_dir / "actor" / "preprocessor_config.json").is_file()
