"""Saving and resuming a PPO run: run_dir/checkpoint, replaced atomically; safetensors and JSON, no pickle.

checkpoint/
  state.json                   next step, versions, seconds so far, and the configuration that made it
  actor.safetensors            the actor's weights          critic.safetensors            the critic's
  actor_optimizer.safetensors  AdamW moments, per weight    critic_optimizer.safetensors  the critic's
  companion/                   the companion's own last state, if there is one

There is no random state to save: prompts, sampling seeds and minibatches are functions of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.errors import CheckpointError, ConfigError, MedusaError
from medusa_ppo.config import RunConfig
from medusa_ppo.ppo.learner import PPOLearner

logger = logging.getLogger(__name__)

FOLDER = "checkpoint"
COMPANION_FOLDER = "companion"
STATE_FILE = "state.json"
FORMAT_VERSION = 1
FIXED_KEYS = ("model.path", "model.critic_path", "model.dtype", "data.path", "data.template", "seed", "ppo.prompts_per_step")
"""What a saved state depends on; another value under --resume is an error."""


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands.

    Attributes:
        next_step: the step that comes next.
        policy_version: version of the actor's weights.
        wall_s: seconds of all sessions of the run so far.
    """

    next_step: int = 0
    policy_version: int = 0
    wall_s: float = 0.0


def save_checkpoint(run_dir: Path, learner: PPOLearner, position: RunPosition, config: RunConfig) -> Path:
    """Write run_dir/checkpoint; a crash at any moment leaves either the old or the new one, complete."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.new-", dir=run_dir))
    try:
        learner.save(temporary)
        _take_companion(run_dir / COMPANION_FOLDER, temporary / COMPANION_FOLDER)
        position_json = {"format_version": FORMAT_VERSION, **dataclasses.asdict(position), "config": config.model_dump(mode="json")}
        (temporary / STATE_FILE).write_text(json.dumps(position_json, indent=1) + "\n", encoding="utf-8")
        return replace_folder(temporary, run_dir / FOLDER)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_position(run_dir: Path, config: RunConfig) -> RunPosition:
    """Where the saved run stands; checks that this configuration can go on from there.

    Raises:
        CheckpointError: nothing was saved, or state.json is damaged.
        ConfigError: a key that the saved state depends on has changed.
    """
    raw = _read_json(saved_folder(run_dir) / STATE_FILE)
    try:
        if raw["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {raw['format_version']}, this program reads {FORMAT_VERSION}")
        position = RunPosition(int(raw["next_step"]), int(raw["policy_version"]), float(raw["wall_s"]))
        old = raw["config"]
        changed = [key for key in FIXED_KEYS if _saved(old, key) != _look_up(config.model_dump(mode="json"), key)]
    except (KeyError, TypeError, ValueError) as error:
        given = f"{saved_folder(run_dir) / STATE_FILE}: {error!r}"
        raise CheckpointError(
            "The saved run is damaged.", given=given, expected="a complete state.json", do="Start without --resume."
        ) from None
    if changed:
        given = ", ".join(f"{key} was {_look_up(old, key)!r}" for key in changed)
        raise ConfigError(
            "The configuration is not the one that was saved.", given=given, expected="the same values", do="Restore them, or start anew."
        )
    return position


def load_checkpoint(run_dir: Path, learner: PPOLearner) -> None:
    """Put the saved weights and moments into the learner, in place.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the models.
    """
    learner.load(saved_folder(run_dir))


def saved_folder(run_dir: Path) -> Path:
    """The checkpoint's folder, also right after a crash between the two renames of `save_checkpoint`.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (run_dir / FOLDER, run_dir / f".{FOLDER}.old"):
        if (folder / STATE_FILE).is_file():
            return folder
    raise CheckpointError(
        "There is nothing to resume from.", given=run_dir, expected=f"{FOLDER}/{STATE_FILE} in it", do="Start without --resume."
    )


def companion_state(run_dir: Path) -> str:
    """Folder with the companion's saved state, for MedusaPlugin.start(resume_from=...); empty when there is none."""
    folder = saved_folder(run_dir) / COMPANION_FOLDER
    return str(folder) if folder.is_dir() else ""


def _take_companion(source: Path, target: Path) -> None:
    """Keep the state that the companion wrote last. It replaces its files and never changes them, so a link is a copy."""
    if not source.is_dir():
        return
    target.mkdir()
    for path in source.glob("*.safetensors"):
        try:
            os.link(path, target / path.name)
        except OSError:  # A file system without links.
            shutil.copy2(path, target / path.name)


def replace_folder(new: Path, target: Path) -> Path:
    """Put `new` (from mkdtemp, so ours alone) in the place of `target`, readable as usual.

    Two renames: a reader finds the old folder aside if it comes in between.
    """
    new.chmod(0o755)
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "The saved run is damaged.", given=f"{path}: {error}", expected="JSON", do="Start without --resume."
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError(
            "The saved run is damaged.", given=f"{path}: no object", expected="a JSON object", do="Start without --resume."
        )
    return raw


def _saved(config: dict[str, Any], key: str) -> Any:
    """A saved value; an empty text is how earlier releases wrote what is the default today."""
    value = _look_up(config, key)
    return _look_up(RunConfig().model_dump(mode="json"), key) if value == "" else value


def _look_up(values: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def try_save(run_dir: Path, learner: PPOLearner, position: RunPosition, config: RunConfig) -> None:
    """Save where a full disk must not end a run that trains well: the failure is logged and the last checkpoint stays."""
    try:
        save_checkpoint(run_dir, learner, position, config)
    except (OSError, MedusaError) as error:
        logger.error("The checkpoint of step %d could not be written; the one before stays: %s", position.next_step, error)
