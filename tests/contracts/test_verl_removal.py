"""verl without draft heads: our entry point changes nothing of verl's, and our trainer, not asked
for heads, does verl's own work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")

from omegaconf import OmegaConf, open_dict

ENVIRONMENT = "verl.trainer.constants_ppo"
MODULES = (
    ENVIRONMENT,
    "verl.trainer.ppo.v1",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.trainer.ppo.v1.trainer_sync",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.engine.megatron.transformer_impl",
    "verl.workers.rollout.replica",
    "verl.workers.rollout.vllm_rollout.utils",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)
LOOK = """
import importlib, json, sys, types

def described(value):
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
    name = getattr(value, "__qualname__", type(value).__name__)
    return f"{getattr(value, '__module__', '')}.{name} {place}"

found = {}
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    for key, value in vars(module).items():
        found[f"{name}.{key}"] = described(value)
        if isinstance(value, type) and value.__module__ == name:
            for part, inner in vars(value).items():
                found[f"{name}.{key}.{part}"] = described(inner)
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
print("FOUND" + json.dumps({
    "names": found,
    "trainers": {name: described(kind) for name, kind in TRAINER_REGISTRY.items()},
    "replicas": {name: described(load) for name, load in RolloutReplicaRegistry._registry.items()},
    "finders": [described(finder) for finder in sys.meta_path],
    "ours": sorted(name for name in sys.modules if name.startswith("medusa_ppo")),
}))
"""


def look(plugins: str) -> dict[str, Any]:
    """What stands in verl's modules, in a process that loads these plugins."""
    command = [sys.executable, "-c", LOOK, ",".join(MODULES)]
    done = subprocess.run(
        command,
        env=os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("FOUND")[2])


def test_the_entry_point_adds_one_trainer_and_wraps_one_function_of_verl() -> None:
    """The function that says what verl's Ray processes get of the environment."""
    without = look("none")
    with_ours = look("auto")
    assert not without["ours"] and with_ours["ours"]
    ours = with_ours["trainers"].pop("medusa_sync")
    assert ours.startswith("medusa_ppo.loops.verl.verl_trainer.")
    names = without["names"]
    changed = [name for name in names if with_ours["names"].get(name) != names[name]]
    assert changed == [f"{ENVIRONMENT}.get_ppo_ray_runtime_env"]
    assert with_ours["names"].keys() == names.keys()
    for what in ("trainers", "replicas", "finders"):
        assert with_ours[what] == without[what], what
    assert len(without["names"]) > 300


@pytest.fixture
def config() -> Any:
    """verl's own default configuration with our trainer's name, and neither drafts nor a
    companion.
    """
    import verl

    config = OmegaConf.load(
        Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    )
    with open_dict(config):
        config.actor_rollout_ref.rollout.name = "vllm"
        config.trainer.v1.trainer_mode = "medusa_sync"
        config.medusa = {"companion": {"enabled": False}, "engine": {"num_drafts": 0}}
    return config


def test_our_trainer_switched_off_is_verls(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.trainer.ppo.v1  # noqa: F401
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    ours = sys.modules["medusa_ppo.loops.verl.verl_trainer"]
    before = OmegaConf.to_container(config)
    replicas = dict(RolloutReplicaRegistry._registry)
    monkeypatch.setattr(
        PPOTrainerSync, "__init__", lambda self, config: setattr(self, "config", config)
    )  # It wants data and GPUs.

    trainer = ours.MedusaPPOTrainerSync(config)

    after = OmegaConf.to_container(config)
    before["trainer"]["v1"]["trainer_mode"] = "sync"  # The name under which verl knows this mode.
    # No class of ours, so none of its methods is.
    assert type(trainer) is PPOTrainerSync and after == before
    assert replicas == RolloutReplicaRegistry._registry
    plain = PPOTrainer.__new__(PPOTrainerSync)
    plain.config = config
    for each in (trainer, plain):
        each._init_resource_pool_mgr()
    assert {role: kind_of(kind) for role, kind in trainer.role_worker_mapping.items()} == {
        role: kind_of(kind) for role, kind in plain.role_worker_mapping.items()
    }


def kind_of(remote_class: Any) -> str:
    """The class under Ray's wrapper."""
    inner = remote_class.__ray_metadata__.modified_class.__mro__[1]
    return f"{inner.__module__}.{inner.__qualname__}"
