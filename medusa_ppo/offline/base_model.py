"""The base model of heads as plain files: its lm_head, and a copy of the whole model with heads inside. No model is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.errors import ModelError
from heads.foreign import read_config
from heads.shards import is_output_table, lm_head_name, model_files, open_files
from heads.tensorfile import file_inside, read_header, sync_file, write_tensors

INDEX_NAME = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass(frozen=True)
class BaseModel:
    """A transformers model folder, of which only files are read.

    Attributes:
        name: as the user gave it; it goes into the configurations that name a base model.
        lm_head_VD: in the model's own dtype; the embedding table where the two are tied.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    lm_head_VD: torch.Tensor


def open_base_model(name: str) -> BaseModel:
    """ModelError when there is no such folder or no lm_head in it; CheckpointError for damaged files."""
    folder = Path(name).absolute()
    if not folder.is_dir():
        raise ModelError(
            "There is no such model folder.", given=name, expected="a folder with config.json and weights", do="Correct --model."
        )
    config = read_config(folder)
    if not config:
        raise ModelError("The model folder has no config.json.", given=name, expected="a transformers model folder", do="Correct --model.")
    tables = open_files(model_files(folder), is_output_table)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    key = lm_head_name(tables.header, tied)
    if key is None:
        raise ModelError(
            "The model's lm_head was not found.",
            given=f"{name}: no lm_head.weight" + (" and no embedding table" if tied else ""),
            expected="a causal LM written by save_pretrained",
            do="Load the model with transformers and save it again.",
        )
    return BaseModel(folder, name, config, tables.read([key])[key])


def write_full_model(
    base: BaseModel, out: Path, tensors: Mapping[str, torch.Tensor], changes: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Copy the model into `out` with the heads as one more weight file and `changes` in its config.json; `say` is told of each file.

    Raises:
        ModelError: weights that are no safetensors, or that hold heads already.
    """
    shards = model_files(base.folder)
    if any(path.suffix != ".safetensors" for path in shards):
        raise ModelError(
            "The model's weights are no safetensors.", given=shards[0].name, expected="*.safetensors", do="Save the model again."
        )
    for path in sorted(base.folder.iterdir()):
        if path.is_file() and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            shutil.copyfile(file_inside(base.folder, path.name), out / path.name)
    # transformers takes a lone model.safetensors for the whole model, so the shards are numbered anew with the heads as the last.
    total = len(shards) + 1
    weight_map: dict[str, str] = {}
    for number, path in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{total:05d}.safetensors"
        say(f"Copying the model: file {number} of {len(shards)}, {path.stat().st_size / 2**20:.0f} MiB ...")
        shutil.copyfile(path, out / name)
        weight_map.update(dict.fromkeys(read_header(path), name))
    if set(weight_map) & set(tensors):
        raise ModelError(
            "The model has heads already.", given=base.name, expected="the base model alone", do="Give the model without heads."
        )
    name = f"model-{total:05d}-of-{total:05d}.safetensors"
    write_tensors(out / name, tensors)
    weight_map.update(dict.fromkeys(tensors, name))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(out / "config.json", {**base.config, **changes})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    sync_file(path)
