"""Converts a distributed checkpoint of megatron-core (`torch_dist`) to a transformers folder; this
needs neither Megatron nor its ranks.

FOLDER/latest_checkpointed_iteration.txt     which iteration: FOLDER/iter_0000100 (an iteration's
                                             own folder may be named as well)
FOLDER/iter_0000100/.metadata                which tensors there are, and which file holds each of
                                             their parts
FOLDER/iter_0000100/*.distcp                 the parts, whatever ranks wrote them
config.json, tokenizer                       in either folder, as transformers has them: Megatron's
                                             own settings are not read

`.metadata` is a pickle: only the records that describe tensors are loaded from it, and everything
else is left blank. Parts are read by torch's weights loader.
"""

from __future__ import annotations

import io
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout

from heads.errors import ModelError
from heads.tensorfile import StateWriter, file_inside
from medusa_ppo.actors.megatron_layout import (
    Cutter,
    Entry,
    LlamaSizes,
    checkpoint_shapes,
    key_table,
)
from medusa_ppo.config.model_section import MEGATRON_FILES
from medusa_ppo.runtime.files import write_atomic

TRACKER, INDEX = MEGATRON_FILES
CONFIG, SOURCE = "config.json", "megatron_source.txt"
# Unpickling takes several times the file's size in memory.
MAX_INDEX_BYTES = 256 << 20
OF_TRANSFORMERS = ("*.json", "*.txt", "*.model", "*.jinja")
NOT_OF_TRANSFORMERS = (TRACKER, "metadata.json")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""The file has norms under these names, whether or not the model had them inside the following
layers.
"""
_RECORDS: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )
} | {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): _get_layout}


def folder_of(path: str) -> Path | None:
    """The iteration's folder for a path that is a distributed checkpoint. Raises ModelError if the
    named iteration is missing.
    """
    folder = Path(path)
    if (folder / INDEX).is_file():
        return folder
    if not (folder / TRACKER).is_file():
        return None
    # Megatron writes the iteration's number, or `release` for converted weights.
    word = (folder / TRACKER).read_text(encoding="utf-8").strip()[:40]
    inside = folder / (f"iter_{int(word):07d}" if word.isdigit() else "release")
    if not (inside / INDEX).is_file():
        raise _unusable(
            f"{folder / TRACKER} says {word!r}",
            f"{inside / INDEX}",
            "Save it again with --ckpt-format torch_dist.",
        )
    return inside


def described_by(path: str) -> str:
    """The folder with a model's config.json and tokenizer: for a distributed checkpoint its own
    folder or the one above; any other path unchanged.
    """
    folder = folder_of(path)
    if folder is None:
        return path
    for home in (folder, folder.parent):
        if (home / CONFIG).is_file():
            return str(home)
    do = (
        "Copy config.json and the tokenizer's files of the model that it was trained from into the"
        " folder."
    )
    raise _unusable(
        f"{folder} without {CONFIG}", "config.json and a tokenizer, as transformers has them", do
    )


def as_transformers(path: str, out: Path) -> str:
    """The path itself, or for a distributed checkpoint `out`, to which it is converted once.

    Raises:
        ModelError: something is missing, or the tensors do not fit config.json.
    """
    folder = folder_of(path)
    if folder is None:
        return path
    home = Path(described_by(path))
    # A checkpoint may be rewritten in its folder under the same name.
    source = f"{folder.resolve()} {(folder / INDEX).stat().st_mtime_ns}\n"
    note = out / SOURCE
    if note.is_file() and note.read_text(encoding="utf-8") == source:
        return str(out)
    sizes = LlamaSizes.read(home)
    if sizes.mrope_section:
        raise _unusable(
            f"{home}: a vision-language model",
            "a language model, because the tower's tensors have other names in each trainer",
            "Save it as a transformers folder.",
        )
    stored = Stored(folder)
    out.mkdir(parents=True, exist_ok=True)
    # Until everything is written, the files there belong to no checkpoint.
    note.unlink(missing_ok=True)
    dtype = stored.dtype("embedding.word_embeddings.weight")
    entries = {name: (dtype, shape) for name, shape in checkpoint_shapes(sizes).items()}
    cutter = Cutter(sizes, 0, 1)
    with StateWriter(out / "model.safetensors", entries) as writer:
        for name, entry in key_table(sizes).items():
            if sizes.tied and name == "output_layer.weight":
                continue  # The embedding again.
            for target, tensor in cutter.join(
                entry, [_fitting(name, entry, stored.whole(name))]
            ).items():
                writer.put(target, tensor)
    for pattern in OF_TRANSFORMERS:
        for file in home.glob(pattern):
            if file.name not in NOT_OF_TRANSFORMERS:
                shutil.copyfile(file, out / file.name)
    # Written last, so that whoever finds it finds a complete folder.
    write_atomic(note, source)
    return str(out)


class Stored:
    """The tensors of a distributed checkpoint, by their names in Megatron's model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / INDEX
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise _unusable(
                f"{index} of {index.stat().st_size} bytes",
                f"at most {MAX_INDEX_BYTES}",
                "Check the path.",
            )
        try:
            with index.open("rb") as file:
                found: Any = _Records(file).load()
            # A hostile index may contain anything here; `dict` and the code below refuse it.
            self._tensors = dict(found.state_dict_metadata)
            self._places = dict(found.storage_data)
        except (
            pickle.UnpicklingError,
            AttributeError,
            TypeError,
            ValueError,
            EOFError,
            IndexError,
            KeyError,
        ) as error:
            raise _unusable(
                f"{index}: {error!s:.100}",
                "an index as torch.distributed.checkpoint writes it",
                "Copy it again.",
            ) from error

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = self._find(name)[0].properties.dtype
        return found

    def whole(self, name: str) -> torch.Tensor:
        """One tensor, assembled from its parts. Raises ModelError if one is missing."""
        about, key, layer = self._find(name)
        # Similar layers are stacked in one tensor.
        skipped = 0 if layer is None else 1
        whole = torch.empty(tuple(about.size)[skipped:], dtype=about.properties.dtype)
        filled = 0
        for chunk in about.chunks:
            offsets = tuple(chunk.offsets)
            sizes = tuple(chunk.sizes)
            if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
                continue
            part = self._read(key, chunk, about.properties.dtype)
            if layer is not None:
                part = part[layer - offsets[0]]
            whole[
                tuple(
                    slice(start, start + size)
                    for start, size in zip(offsets[skipped:], sizes[skipped:], strict=True)
                )
            ] = part
            # `torch.empty` holds old memory, so a missing part must not go unnoticed.
            filled += part.numel()
        if filled != whole.numel():
            raise _unusable(
                f"{self._folder}: {key} with {filled} of {whole.numel()} numbers",
                "all of them",
                "Copy it again.",
            )
        return whole

    def _find(self, name: str) -> tuple[Any, str, int | None]:
        """A tensor's entry, its name in the file, and which of the layers in it is meant."""
        for key, layer in _names_in_file(name):
            about = self._tensors.get(key)
            if isinstance(about, metadata.TensorStorageMetadata) and (
                layer is None or layer < about.size[0]
            ):
                return about, key, layer
        raise _unusable(
            f"{self._folder} without {name}",
            "a GPTModel as config.json says",
            "Give the config.json that belongs to it.",
        )

    def _read(self, key: str, chunk: Any, dtype: torch.dtype) -> torch.Tensor:
        place = self._places[metadata.MetadataIndex(key, chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise _unusable(
                f"{key} compressed by {place.transform_descriptors}",
                "parts as they are",
                "Save it without extensions.",
            )
        # The name comes from the file, which is untrusted.
        with file_inside(self._folder, str(place.relative_path)).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # torch raises RuntimeError, UnpicklingError, ... for what it can't read.
        except Exception as error:
            raise _unusable(
                f"{place.relative_path}: {type(error).__name__} at {key}",
                "a part of a tensor",
                "Copy it again.",
            ) from error
        if (
            not isinstance(part, torch.Tensor)
            or part.dtype != dtype
            or tuple(part.shape) != tuple(chunk.sizes)
        ):
            raise _unusable(
                f"{place.relative_path}: {key} {getattr(part, 'shape', None)}",
                f"{tuple(chunk.sizes)} {dtype}",
                "Copy it again.",
            )
        return part


class _Blank:
    """Replaces everything else that an index names, e.g. Megatron's save plans: accepts anything
    and does nothing.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Records(pickle.Unpickler):
    """Loads nothing but the records of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _RECORDS.get((module, name), _Blank)


def _names_in_file(name: str) -> Iterator[tuple[str, int | None]]:
    layer = LAYER.match(name)
    if layer is None:
        yield name, None
        return
    # Similar layers in one tensor, or each by itself, depending on how the checkpoint was saved.
    for rest in (NORMS.get(layer[2], layer[2]), layer[2]):
        yield f"decoder.layers.{rest}", int(layer[1])
        yield f"decoder.layers.{layer[1]}.{rest}", None


def _fitting(name: str, entry: Entry, whole: torch.Tensor) -> torch.Tensor:
    """A tensor in the shape of the table; a vocabulary may have padding."""
    dim = int(entry.how == "columns")
    rows = sum(shape[dim] for shape in entry.shapes)
    expected = list(entry.shapes[0])
    expected[dim] = (
        whole.shape[dim] if entry.how == "vocabulary" and whole.shape[dim] >= rows else rows
    )
    if list(whole.shape) != expected:
        raise _unusable(
            f"{name} {tuple(whole.shape)}",
            f"{tuple(expected)}, as config.json says",
            "Give the config.json that belongs to it.",
        )
    return whole


def _unusable(given: str, expected: str, do: str) -> ModelError:
    return ModelError(
        "The Megatron checkpoint can't be read.", given=given, expected=expected, do=do
    )
