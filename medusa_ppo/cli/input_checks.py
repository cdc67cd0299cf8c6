"""Checks of the models, heads and data that a command is given, before it loads torch, vLLM or
`datasets` and starts anything: only names and small files are looked at.

A name that the hub may have is judged later, when the hub is asked.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from heads.errors import CheckpointError, ModelError
from medusa_ppo.config.data_section import EMBEDDED_DATA
from medusa_ppo.config.model_section import EMBEDDED_ACTORS, MEGATRON_FILES
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.engines.launch import read_heads_config
from medusa_ppo.offline.options import HUB_PREFIX
from medusa_ppo.runtime.data_files import data_file, refuse_split

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
"""Models of the hub are `name` or `owner/name`; heads of the hub begin with HUB_PREFIX."""

ModelFile = dict[str, Any]
"""The content of a model's config.json; empty if only the hub knows it."""


def check_model(option: str, name: str, *, weights: bool = True) -> ModelFile:
    """Check that a model's folder is there and whole.

    Args:
        option: what named it, for the message.
        weights: its weights are read as well.

    Raises:
        ModelError: there is no such folder, or it lacks a file.
    """
    folder = Path(name)
    given = f"{option} {name}"
    if not folder.is_dir():
        if HUB_NAME.fullmatch(name) and not os.path.lexists(folder):
            return {}
        raise ModelError(
            "There is no such model folder.",
            given=given,
            expected="an existing folder, or a hub name (owner/name)",
            do=f"Correct {option}.",
        )
    if any((folder / file).is_file() for file in MEGATRON_FILES):
        # Commands that don't take such a checkpoint say so themselves, and one that does finds the
        # model's configuration.
        return {}
    if not (folder / CONFIG).is_file():
        raise ModelError(
            "The folder does not contain a transformers model.",
            given=given,
            expected=f"{CONFIG} and *.safetensors in it",
            do=f"Point {option} at a folder written by save_pretrained.",
        )
    if weights and not any(any(folder.glob(kind)) for kind in WEIGHTS):
        raise ModelError(
            "The model folder holds no weights.",
            given=given,
            expected="model.safetensors (or pytorch_model.bin)",
            do="Save the model with save_pretrained, or fetch its large files as well.",
        )
    return _read(folder / CONFIG)


def check_heads(
    folder: str | Path, model: ModelFile, *, may_be_new: bool = False, hub: bool = False
) -> None:
    """Check that a folder has native heads, and that they are of this model's sizes.

    Args:
        may_be_new: the command makes heads there if there are none.
        hub: the command also takes heads of the hub, which are judged when they are pulled.

    Raises:
        CheckpointError: no such heads, or another model's.
    """
    path = Path(folder)
    if hub and str(folder).startswith(HUB_PREFIX):
        return
    if may_be_new and not (path / CONFIG).is_file():
        if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(
                "The heads can't be created where something else is.",
                given=folder,
                expected="a folder of native heads, an empty one, or one that does not exist yet",
                do="Name another folder for the heads.",
            )
        return
    # Their writer was interrupted between two renames: readers then take the older ones.
    if not path.is_dir() and path.with_name(f".{path.name}.previous").is_dir():
        return
    text = model.get("text_config")
    sizes = {**model, **(text if isinstance(text, dict) else {})}
    hidden = sizes.get("hidden_size", sizes.get("n_embd"))
    vocabulary = sizes.get("vocab_size")
    # A family's defaults need not be in the file: then the sizes are compared later.
    read_heads_config(
        path,
        hidden if isinstance(hidden, int) else 0,
        vocabulary if isinstance(vocabulary, int) else 0,
    )


def check_data(name: str) -> None:
    """Check that a file of data is there. Raises DataError."""
    data_file(name)


def check_run(config: RunConfig, *, data: bool = True) -> None:
    """Check what the configuration of a run names.

    Args:
        data: its data are read as well.

    Raises:
        ModelError, CheckpointError, DataError: as the checks above.
    """
    section = config.model
    model: ModelFile = {}
    if section.path not in EMBEDDED_ACTORS:
        model = check_model("model.path", section.path)
    if section.critic_path is not None and section.critic_path not in EMBEDDED_ACTORS:
        check_model("model.critic_path", section.critic_path)
    if config.ppo.judged_by_model:
        check_model("ppo.reward", config.ppo.reward)
    if config.heads.path:
        check_heads(config.heads.path, model)
    if data:
        for path in (config.data.path, config.data.eval_path):
            if path is not None and path != EMBEDDED_DATA:
                refuse_split(path)
        if config.data.ptx_path is not None:
            check_data(config.data.ptx_path)


def _read(path: Path) -> ModelFile:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            "The model's configuration can't be read.",
            given=f"{path}: {error}",
            expected="JSON",
            do="Copy it again.",
        ) from None
    if not isinstance(found, dict):
        raise ModelError(
            "The model's configuration can't be read.",
            given=f"{path}: {type(found).__name__}",
            expected="a JSON object",
            do="Copy it again.",
        )
    return found
