"""A run folder of 0.2.0 (commit 7856bb5f, by make_old_run.py): `report` opens it, `--resume` goes
on from its checkpoint.
"""

from __future__ import annotations

import json
import runpy
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from heads.checkpoint import load_state
from heads.errors import ConfigError
from medusa_ppo.actors.hf import lm_head_weight, load_actor
from medusa_ppo.cli.app import app
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.config.run_config import RunConfig, build_config, load_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.demo.task import build_tokenizer
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.ppo.run_state import read_position, saved_folder
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.hardware import settled

ALLOWED = ("ppo.steps", "engine.num_drafts")
"""More steps, and a number of drafts that no setting names any more (null: one for each head)."""
PACKED = Path(__file__).with_name("old_run.tar.gz")
tiny_actor = runpy.run_path(str(Path(__file__).with_name("make_old_run.py")))["tiny_actor"]


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """The folder as it was left, with the actor and the paths of this machine."""
    actor = tiny_actor(tmp_path / "actor", build_tokenizer(checked=False))
    run_dir = tmp_path / "run"
    with tarfile.open(PACKED) as archive:
        archive.extractall(run_dir, filter="data")
    for path in run_dir.rglob("*.*"):
        if path.suffix in (".json", ".yaml", ".jsonl"):
            path.write_text(
                path.read_text().replace("ACTOR", str(actor)).replace("OUT", str(tmp_path))
            )
    return run_dir


@pytest.fixture
def config(old_run: Path) -> RunConfig:
    """The same run, two steps longer, as this release's configuration says it; where a default has
    changed, with what it was.
    """
    settings = {
        "name": "run",
        "out": str(old_run.parent),
        "model": {"path": str(old_run.parent / "actor")},
        "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:32]"},
        "sampling": {"max_new_tokens": 16, "responses_per_prompt": 2},
        "engine": {
            "runner": "v1",
            "max_num_seqs": 8,
            "max_model_len": 128,
            "threads": 1,
        },
        "heads": {"num_heads": 2, "kind": "medusa"},
        "companion": {
            "wait": True,
            "replay_versions": 1,
            "learning_rate": 1e-2,
            "gate_confidence": 0.9,
        },
        "ppo": {
            "steps": 6,
            "prompts_per_step": 8,
            "actor_learning_rate": 1e-4,
            "checkpoint_every": 1,
            "threads": 1,
        },
    }
    (old_run.parent / "run.yaml").write_text(yaml.safe_dump(settings))
    return load_config(old_run.parent / "run.yaml")


def test_report_opens_it(old_run: Path, tmp_path: Path) -> None:
    assert [step[names.STEP] for step in read_run(old_run).steps] == [0, 1, 2, 3]
    shown = CliRunner().invoke(app, ["report", str(old_run)])
    assert shown.exit_code == 0, shown.output
    page = (old_run / "report.html").read_text()
    assert "<svg" in page and "Acceptance" in page


def test_its_checkpoint_is_read(old_run: Path, config: RunConfig) -> None:
    with pytest.raises(ConfigError) as error:
        read_position(old_run, settled(config))
    assert error.value.given == "engine.num_drafts was None and is 'auto', ppo.steps was 4 and is 6"
    position = read_position(old_run, settled(config), ALLOWED)
    assert (position.next_step, position.policy_version) == (4, 4) and position.wall_s > 0
    actor = load_actor(config.model.path)
    learner = Learner(actor, Critic(actor), PPOConfig())
    saved = load_state(saved_folder(old_run) / "actor.safetensors")
    with torch.no_grad():
        actor.lm_head.weight.zero_()
    learner.load(saved_folder(old_run))
    found = learner.actor.state_dict()
    assert saved and all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_its_companions_state_is_taken_over(old_run: Path, config: RunConfig) -> None:
    state = load_state(saved_folder(old_run) / "companion" / "companion.safetensors")
    lm_head_VD = lm_head_weight(load_actor(config.model.path)).detach()
    cycle = Cycle(
        config.heads.sizes(*reversed(lm_head_VD.shape)), config.companion, lm_head_VD, seed=0
    )
    cycle.load_state_dict(state)
    assert (cycle.version, cycle.batches_seen, cycle.judged, cycle.trainer.rate) == (1, 4, 4, 1.0)
    assert torch.equal(
        cycle.serving.trainable_state()["blocks.0.layers.0.weight"],
        state["serving.blocks.0.layers.0.weight"],
    )


def test_its_own_configuration_is_refused_with_what_says_it_now(old_run: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(json.loads((old_run / "run.json").read_text())["config"])
    assert error.value.given and error.value.expected and error.value.do


@pytest.mark.engine
@pytest.mark.slow
def test_it_is_gone_on_with(old_run: Path, config: RunConfig) -> None:
    assert run_ppo(config, resume=True, allow=ALLOWED)["status"] == "finished"
    steps = read_run(old_run).steps
    assert [step[names.STEP] for step in steps] == [0, 1, 2, 3, 4, 5]
    assert (
        steps[5][names.HEADS_VERSION] >= steps[3][names.HEADS_VERSION]
        and steps[5][names.POLICY_VERSION] == 5
    )
