"""A saved run goes on as if it had never stopped; a damaged or foreign one is refused in one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from heads.errors import CheckpointError, ConfigError
from medusa_ppo.config import PPOConfig, RunConfig, build_config
from medusa_ppo.ppo import learner as learner_module
from medusa_ppo.ppo import run_state as checkpoint
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.models import Critic
from medusa_ppo.ppo.run_state import RunPosition, companion_state, load_checkpoint, read_position, save_checkpoint
from medusa_ppo.types import Sampling


def learner(actor) -> Learner:
    actor = copy.deepcopy(actor)
    return Learner(actor, Critic(actor), PPOConfig(actor_learning_rate=1e-2, critic_learning_rate=1e-2, minibatch_size=4))


def train(one: Learner, batch: PPOBatch, steps: range) -> None:
    for step in steps:
        scores, _ = one.score(batch, torch.arange(float(len(batch))), Sampling())
        one.update(batch, scores, Sampling(), step)


def weights(one: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in (one.actor, one.critic) for p in m.parameters()])


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return build_config({"name": "run", "out": str(tmp_path)})


@pytest.mark.parametrize("tied", [False, True])
def test_resumed_is_bit_identical_to_never_stopped(tiny_actor, make_rollouts, config: RunConfig, tied: bool):
    actor, batch = tiny_actor(tied=tied), PPOBatch(make_rollouts(8))
    whole = learner(actor)
    train(whole, batch, range(4))
    first = learner(actor)
    train(first, batch, range(2))
    save_checkpoint(config.run_dir, first, RunPosition(2, 2, 1.5), config)
    second = learner(actor)
    assert read_position(config.run_dir, config) == RunPosition(2, 2, 1.5)
    load_checkpoint(config.run_dir, second)
    train(second, batch, range(2, 4))
    assert torch.equal(weights(second), weights(whole))
    assert torch.equal(second.reference.lm_head.weight, actor.lm_head.weight), "the reference is the first actor, not the saved one"


def test_saving_again_replaces_and_leaves_nothing_else(tiny_actor, config: RunConfig):
    one = learner(tiny_actor())
    for step in (1, 2):
        save_checkpoint(config.run_dir, one, RunPosition(step, step, 0.0), config)
    assert read_position(config.run_dir, config).next_step == 2
    assert [p.name for p in config.run_dir.iterdir()] == ["checkpoint"]


def test_a_crash_between_the_renames_loses_nothing(tiny_actor, config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    one = learner(tiny_actor())
    save_checkpoint(config.run_dir, one, RunPosition(1, 1, 0.0), config)
    rename = checkpoint.os.rename

    def crash(source, target):
        if Path(target).name == "checkpoint":
            raise OSError("power cut")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", crash)
    with pytest.raises(OSError, match="power cut"):
        save_checkpoint(config.run_dir, one, RunPosition(2, 2, 0.0), config)
    assert read_position(config.run_dir, config).next_step == 1
    load_checkpoint(config.run_dir, one)


def test_the_companions_state_goes_along(tiny_actor, config: RunConfig):
    one = learner(tiny_actor())
    save_checkpoint(config.run_dir, one, RunPosition(1, 1, 0.0), config)
    assert companion_state(config.run_dir) == ""
    state = config.run_dir / "companion" / "companion.safetensors"
    state.parent.mkdir()
    state.write_bytes(b"first")
    save_checkpoint(config.run_dir, one, RunPosition(2, 2, 0.0), config)
    (new := state.with_name("new")).write_bytes(b"second")
    new.replace(state)  # how the companion writes
    assert (Path(companion_state(config.run_dir)) / state.name).read_bytes() == b"first"


def test_nothing_saved_is_said(config: RunConfig):
    with pytest.raises(CheckpointError, match="nothing to resume"):
        read_position(config.run_dir, config)


def test_another_configuration_is_refused_by_name(tiny_actor, config: RunConfig):
    save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    with pytest.raises(ConfigError, match="seed was 0"):
        read_position(config.run_dir, config.model_copy(update={"seed": 1}))
    longer = config.model_copy(update={"ppo": config.ppo.model_copy(update={"steps": 99})})
    assert read_position(config.run_dir, longer).next_step == 1, "more steps than planned are welcome"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 9}', '{"format_version": 1, "next_step": "x"}'])
def test_damaged_state_is_refused(tiny_actor, config: RunConfig, content: str):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    (folder / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        read_position(config.run_dir, config)


def test_another_models_weights_are_refused(tiny_actor, config: RunConfig):
    save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    before = learner(tiny_actor(hidden=16))
    with pytest.raises(CheckpointError, match="do not fit"):
        load_checkpoint(config.run_dir, before)


def test_torn_file_is_refused(tiny_actor, config: RunConfig):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    data = (folder / "actor.safetensors").read_bytes()
    (folder / "actor.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        load_checkpoint(config.run_dir, learner(tiny_actor()))


def test_a_full_disk_does_not_end_the_run(tiny_actor, config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learner_module, "save_state", full)
    checkpoint.try_save(config.run_dir, learner(tiny_actor()), RunPosition(3, 3, 0.0), config)
    assert "step 3" in caplog.text and "No space" in caplog.text
    assert not list(config.run_dir.iterdir())


def test_state_names_its_configuration(tiny_actor, config: RunConfig):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    assert json.loads((folder / "state.json").read_text())["config"]["name"] == "run"
