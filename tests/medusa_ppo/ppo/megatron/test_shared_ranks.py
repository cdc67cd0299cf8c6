"""ppo.placement=shared with a Megatron actor: real ranks on gloo and real vLLM engines in their
places learn what they learn apart, and take turns in order.

No machine here has a GPU, and vLLM's CPU build keeps its memory while it sleeps. So the tests look
at the order of the calls, and at what each rank has in its ledger, where an engine counts as it
would on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.reports.store import read_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]
SHIM = os.pathsep.join((str(Path(__file__).parents[2] / "actors"), str(Path(__file__).parent)))
LEARNED = (
    names.REWARD_MEAN,
    names.KL_REFERENCE,
    names.ENTROPY,
    names.POLICY_LOSS,
    names.VALUE_LOSS,
    names.ACTOR_GRAD_NORM,
    names.EVAL_REWARD,
)
COME = {
    "load",
    "tables",
    "give_out",
    "score",
    "values",
    "judge",
    "update",
    "update_critic",
}
"""Calls that bring a role onto the ranks' devices."""
ENGINE = ("__init__", "generate", "sync_actor", "swap_heads", "sleep", "wake")


class Order:
    """What the ranks and the engines were asked, in the order in which the loop asked it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from medusa_ppo.ppo.megatron.megatron_learner import RankTeam

        self.events: list[str] = []
        begin, stream = RankTeam.begin, RankTeam.stream

        def begun(team: RankTeam, method: str, *arguments: Any) -> list[Any]:
            self.events.append(method)
            return begin(team, method, *arguments)

        def streamed(team: RankTeam, *arguments: Any) -> Iterator[Any]:
            self.events.append("give_out")
            return stream(team, *arguments)

        patch.setattr(RankTeam, "begin", begun)
        patch.setattr(RankTeam, "stream", streamed)
        for method in ENGINE:
            patch.setattr(EnginePool, method, self._noted(getattr(EnginePool, method), method))

    def _noted(self, call: Any, method: str) -> Any:
        def noted(pool: EnginePool, *given: Any, **more: Any) -> Any:
            self.events.append(f"engine {method}")
            return call(pool, *given, **more)

        return noted

    def check(self) -> None:
        """A role comes only while the engines sleep, and engines wake only when all have left."""
        awake = there = False
        for place, event in enumerate(self.events):
            before = self.events[max(0, place - 8) : place + 1]
            if event in COME:
                assert not awake, before
                there = True
            elif event == "clear":
                there = False
            elif event.startswith("engine "):
                assert not there or not awake, before
                if event in ("engine __init__", "engine wake"):
                    assert not there, before
                    awake = True
                elif event == "engine sleep":
                    assert awake, before
                    awake = False
                else:
                    assert awake, before


def judge_of(folder: Path, actor: Path) -> Path:
    """A reward model that reads the actor's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(actor)
    tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(1)})
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(actor, num_labels=1, pad_token_id=1)
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(folder)
    return folder


def config_of(actor: Path, out: Path, placement: str, **more: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": placement,
        "out": str(out),
        "model": {"path": str(actor)},
        "actor": {
            "backend": "megatron",
            "tensor_parallel": 2,
            "imports": "ranks_on_cpu",
            "roles": "all",
        },
        "data": {
            "path": "demo",
            "max_prompt_tokens": 100,
            "split": "train[:64]",
            "eval_split": "eval[:4]",
        },
        "sampling": {"max_new_tokens": 12, "responses_per_prompt": 2, "seeded": True},
        "engine": {
            "replicas": 2,
            "sleep_level": 1,
            "max_num_seqs": 8,
            "max_model_len": 128,
            "threads": 1,
            "num_drafts": 0,
        },
        "heads": {"num_heads": 2, "warm_up_tokens": 0},
        "companion": {"enabled": False},
        "ppo": {
            "steps": 2,
            "prompts_per_step": 4,
            "minibatch_size": 4,
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "reward": str(out / "judge"),
            "placement": placement,
            "eval_every": 2,
            "checkpoint_every": 1,
            "threads": 1,
        },
    }
    for section, changes in more.items():
        values[section] |= changes
    return build_config(values)


@pytest.fixture
def in_reach(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ray's workers have the environment that Ray was started in."""
    monkeypatch.setenv("PYTHONPATH", SHIM, prepend=os.pathsep)
    return monkeypatch


def check_ledger(step: dict[str, Any]) -> None:
    """A rank and the engine's rank on its device never had memory at once."""
    roles = step[names.LEDGER_ROLES]
    assert set(roles) == {"engine", "actor", "reference", "critic", "reward"}
    assert step[names.LEDGER_PEAK] == max(roles.values())
    assert step[names.OFFLOAD_BYTES] > 0 and step[names.ENGINE_WAKE_S] > 0


def test_ranks_and_engines_that_share_devices_learn_what_they_learn_apart(
    chain_actor: Path, tmp_path: Path, in_reach: pytest.MonkeyPatch
) -> None:
    """Two ranks, two engines; a reward model, an evaluation and checkpoints in between."""
    judge_of(tmp_path / "judge", chain_actor)
    found = {}
    for placement in ("separate", "shared"):
        with pytest.MonkeyPatch.context() as patch:
            order = Order(patch)
            config = config_of(chain_actor, tmp_path, placement)
            run_ppo(config)
        found[placement] = list(read_run(config.run_dir).steps)
        if placement == "shared":
            order.check()
            assert order.events.count("engine wake") == 2 + 1 + 2, "steps, evaluation, saves"
    assert not ray.is_initialized()
    for ours, theirs in zip(found["shared"], found["separate"], strict=True):
        for name in LEARNED:
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-6), name
        check_ledger(ours)
    for file in ("actor", "actor_optimizer", "critic", "critic_optimizer"):
        ours, theirs = (
            load_file(tmp_path / placement / "checkpoint" / f"{file}.safetensors")
            for placement in ("shared", "separate")
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_one_engine_of_two_ranks_in_deep_sleep_drafts_with_heads_that_learn(
    chain_actor: Path, tmp_path: Path, in_reach: pytest.MonkeyPatch
) -> None:
    """A warm-up, a companion, saves in between, and a run that goes on: what a deep sleep discards
    is there again whenever the engine writes.
    """
    judge_of(tmp_path / "judge", chain_actor)
    in_reach.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    changes: dict[str, Any] = {
        "engine": {
            "replicas": 1,
            "extra": {"tensor_parallel_size": 2},
            "sleep_level": 2,
            "num_drafts": 2,
        },
        "heads": {"warm_up_tokens": 200},
        "companion": {"enabled": True, "wait": True, "epochs": 8, "learning_rate": 1e-2},
    }
    steps = []
    for count, resume in ((2, False), (3, True)):
        with pytest.MonkeyPatch.context() as patch:
            order = Order(patch)
            ppo = {"steps": count, "eval_every": None, "actor_learning_rate": 1e-4}
            config = config_of(chain_actor, tmp_path, "shared", **changes, ppo=ppo)
            run_ppo(config, resume=resume, allow=["ppo.steps"] if resume else [])
        order.check()
        steps = list(read_run(config.run_dir).steps)
    assert [step[names.STEP] for step in steps] == [0, 1, 2]
    assert max(step[names.LOGPROB_GAP] for step in steps) < 1e-3, "each sync reached the engine"
    assert steps[-1][names.HEADS_VERSION] >= 1 and steps[-1][names.DRAFTS] > 0
    check_ledger(steps[-1])
