"""`medusa-ppo convert`: heads from any Medusa format to any other that can hold them.

`foreign` detects the source's format and reads it, `formats` knows what each format can hold, and
this file writes the target. Where the tensors contradict the source's configuration, the user gets
a note; what the target can't hold is refused. Nothing is dropped silently.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import (
    OWN_SECTION,
    load_heads,
    load_lm_head,
    new_directory,
    save_heads,
    stock_config,
    sync,
    write_json,
)
from heads.errors import ConfigError, ModelError
from heads.heads_config import TEMPERATURES, HeadsConfig
from heads.modules import MedusaHeads
from heads.tensorfile import file_inside, read_header, save_state
from medusa_ppo.offline.foreign import (
    CLAIMS,
    FULL_MODELS,
    HEADS_FILE,
    NUMBERED_CLAIMS,
    FoundHeads,
    base_lm_head,
    base_model_of,
    is_output_table,
    model_files,
    open_files,
    read_config,
    read_foreign,
)
from medusa_ppo.offline.formats import (
    FORMATS,
    TABLES,
    TGI_FORMATS,
    PlainHeads,
    refuse_unrepresentable,
    to_keys,
)

INDEX_NAME = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass(frozen=True)
class BaseModel:
    """A transformers model folder; only its files are read.

    Attributes:
        name: as the user gave it; configurations that name a base model get this name.
        lm_head_VD: in the model's own dtype; the embedding table if the two are tied.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    lm_head_VD: torch.Tensor


def open_base_model(name: str) -> BaseModel:
    """Read a base model's configuration and lm_head, and none of its other weights.

    Raises:
        ModelError: there is no such folder, or no lm_head in it.
        CheckpointError: its files are damaged.
    """
    folder = Path(name).absolute()
    if not folder.is_dir():
        expected = "a folder with config.json and weights"
        raise ModelError(
            "There is no such model folder.", given=name, expected=expected, do="Correct --model."
        )
    config = read_config(folder)
    if not config:
        raise ModelError(
            "The model folder has no config.json.",
            given=name,
            expected="a transformers model folder",
            do="Correct --model.",
        )
    lm_head_VD = base_lm_head(open_files(model_files(folder), is_output_table), config)
    # Checked now: a model whose table is elsewhere would fail much later, with torch's own message.
    if lm_head_VD is None:
        given = f"{name}: no lm_head.weight, and no embedding table that is tied to it"
        do = "Load the model with transformers and save it again with save_pretrained."
        raise ModelError(
            "The model's lm_head was not found.",
            given=given,
            expected="a causal LM written by save_pretrained",
            do=do,
        )
    return BaseModel(folder, name, config, lm_head_VD)


def write_full_model(
    base: BaseModel,
    out: Path,
    tensors: Mapping[str, torch.Tensor],
    changes: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Copy the model into `out`, with the heads as one more weight file and with `changes` in its
    config.json; `say` receives a line per file.

    Raises:
        ModelError: the weights are not safetensors, or already contain heads.
    """
    shards = model_files(base.folder)
    if any(path.suffix != ".safetensors" for path in shards):
        raise ModelError(
            "The model's weights are not safetensors.",
            given=shards[0].name,
            expected="*.safetensors",
            do="Save the model again with save_pretrained.",
        )
    # Weights and their index are left out here: the weights get new names below.
    for path in sorted(base.folder.iterdir()):
        if path.is_file() and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            # A link must not bring in a file from outside the folder.
            shutil.copyfile(file_inside(base.folder, path.name), out / path.name)
    # transformers would take a file model.safetensors for the whole model, so the shards are
    # renumbered, with the heads last.
    names = [
        f"model-{number:05d}-of-{len(shards) + 1:05d}.safetensors"
        for number in range(1, len(shards) + 2)
    ]
    weight_map: dict[str, str] = {}
    for number, (path, name) in enumerate(zip(shards, names[:-1], strict=True), start=1):
        say(
            f"Copying the model: file {number} of {len(shards)}, {path.stat().st_size / 2**20:.0f}"
            " MiB ..."
        )
        shutil.copyfile(path, out / name)
        weight_map.update(dict.fromkeys(read_header(path), name))
    if set(weight_map) & set(tensors):
        do = "Give the model without heads."
        raise ModelError(
            "The model already has heads.", given=base.name, expected="the base model alone", do=do
        )
    save_state(out / names[-1], tensors)
    weight_map.update(dict.fromkeys(tensors, names[-1]))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    write_json(out / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(out / "config.json", {**base.config, **changes})


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        source, target: names of the formats.
        config: sizes of the heads.
        notes: sentences on what differed from the source's configuration, was left out or added.
    """

    source: str
    target: str
    config: HeadsConfig
    notes: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    to: str,
    model: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Read heads of any format and write them in another.

    Args:
        source: a folder, or a file medusa_lm_head.pt.
        target: a new folder.
        to: one of `formats.FORMATS`.
        model: folder of the model that the heads are for; needed if its lm_head or all its weights
            go into the target.
        say: receives messages about slow steps.

    Raises:
        CheckpointError: the source is damaged, or is one that the format's own reader misreads.
        ConfigError: the target can't hold these heads, or already exists.
        ModelError: the model folder can't be used.
    """
    if to in TGI_FORMATS:
        raise ConfigError(
            "TGI's formats are no longer written.",
            given=to,
            expected=" | ".join(FORMATS),
            do=(
                "Set --to fasterdecoding: the same tensor names, in medusa_lm_head.pt; save its"
                " tensors as medusa_lm_head.safetensors for TGI. Or use medusa-ppo 0.3.0."
            ),
        )
    if to not in FORMATS:
        raise ConfigError(
            "Unknown format.",
            given=to,
            expected=" | ".join(FORMATS),
            do="Set --to to one of these.",
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        do = "Choose another name, or remove it."
        raise ConfigError(
            "The target already exists.", given=str(target), expected="a new folder", do=do
        )
    base = open_base_model(model) if model else None
    read = _read(source, to, base)
    if to in FULL_MODELS.values() and base is None:
        do = "Give its folder with --model."
        raise ConfigError(
            f"The format {to} holds the whole model with the heads.",
            given="no --model",
            expected="the base model",
            do=do,
        )
    refuse_unrepresentable(read.heads, to)
    # The folder has a temporary name until it is complete, so that an error leaves no partial one.
    with new_directory(target) as folder:
        notes = _write(read, folder, to, base, say)
    return Conversion(read.format, to, read.heads.config, (*read.notes, *notes))


def _read(source: Path, to: str, base: BaseModel | None) -> FoundHeads:
    """Read the source in any format. If a base model is given, the target names it."""
    if source.is_dir() and OWN_SECTION in read_config(source):
        found = _read_native(source, to, base)
    else:
        found = read_foreign(source, base.lm_head_VD if base else None)
    return replace(found, base_model=base.name) if base else found


def _read_native(source: Path, to: str, base: BaseModel | None) -> FoundHeads:
    if base is None:
        heads, metadata = load_heads(source)
    else:
        V, D = base.lm_head_VD.shape
        heads, metadata = load_heads(source, hidden_size=D, vocab_size=V)
    if heads.config.kind != "medusa":
        raise ConfigError(
            f"Heads of kind {heads.config.kind} exist in no other format: they read the tokens"
            " drafted before, and need our vLLM plugin.",
            given=f"--to {to}",
            expected="heads of kind medusa",
            do=(
                "Serve the folder as it is with medusa-ppo, or train heads with --kind medusa"
                " --loss ce."
            ),
        )
    lm_head_VD = load_lm_head(source)
    notes: tuple[str, ...] = ()
    if base is not None:
        model_VD = base.lm_head_VD
        # Compared in the copy's dtype, so that rounding does not count as a difference.
        if lm_head_VD is not None and not torch.equal(lm_head_VD, model_VD.to(lm_head_VD.dtype)):
            notes = (
                "The lm_head in the source is not the model's (has the policy moved on?): the "
                "model's is written.",
            )
        lm_head_VD = model_VD
    plain = PlainHeads(heads.config, heads.trainable_state(), lm_head_VD)
    return FoundHeads("native", plain, base_model_of(metadata), notes, metadata)


def _write(
    read: FoundHeads, folder: Path, to: str, base: BaseModel | None, say: Callable[[str], None]
) -> list[str]:
    """Write the heads into an empty folder. Returns sentences on what was left out or added."""
    if to == "native":
        return _write_native(read, folder)
    heads = read.heads
    config = heads.config
    tensors = to_keys(heads, to)
    notes = []
    if TEMPERATURES in heads.tensors:
        notes.append(
            "The heads' draft temperatures are left out: the format has none, and greedy drafts"
            " need none."
        )
    if to in FULL_MODELS.values() and base is not None:
        write_full_model(base, folder, tensors, _counts(config, to), say)
    elif to == "vllm":
        save_state(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", stock_config(config, biased=heads.biased))
    else:
        with (folder / HEADS_FILE).open("wb") as file:
            torch.save(tensors, file)
            # The data must be on disk before the folder gets its name; `save_state` syncs, too.
            sync(file)
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        # FasterDecoding's loader finds the model only by this key.
        known = {"base_model_name_or_path": read.base_model} if read.base_model else {}
        write_json(folder / "config.json", {**_counts(config, to), **sizes, **known})
        if not known:
            notes.append(
                "Write base_model_name_or_path into config.json: the format's loader needs it, and"
                " the source doesn't have it."
            )
    if not heads.biased and to != "vllm":
        notes.append("The format requires biases, so zeros are written.")
    if config.lm_head == "shared" and TABLES[to].lm_heads == "own":
        notes.append(
            "The format requires an lm_head for each head, so the model's is written"
            f" {config.num_heads} times."
        )
    return notes


def _write_native(read: FoundHeads, folder: Path) -> list[str]:
    heads = MedusaHeads(read.heads.config).to(read.heads.dtype)
    heads.load_trainable_state(read.heads.tensors)
    # Heads that were already native keep their version, by which a run identifies them.
    if read.native:
        metadata = read.native.metadata
        version = read.native.version
    else:
        metadata = {"converted_from": read.format}
        if read.base_model:
            metadata["base_model"] = read.base_model
        version = 0
    save_heads(folder, heads, lm_head_VD=read.heads.lm_head_VD, metadata=metadata, version=version)
    if read.heads.config.lm_head == "shared" and read.heads.lm_head_VD is None:
        return [
            "The folder has no lm_head. Our engine needs none; for stock vLLM, convert again with"
            " --model."
        ]
    return []


def _counts(config: HeadsConfig, to: str) -> dict[str, Any]:
    """K and L under the keys of the format's configuration."""
    heads_key, layers_key = CLAIMS.get(to, NUMBERED_CLAIMS)
    counts = {heads_key: config.num_heads, layers_key: config.num_layers}
    return {"medusa": counts} if to == "modelopt" else counts
