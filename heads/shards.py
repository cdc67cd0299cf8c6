"""Which file of a model folder holds which tensor, and reading a few of them; safetensors or .pt, one file or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from heads.errors import CheckpointError
from heads.picklefile import read_pickle_header, read_pickle_tensors
from heads.tensorfile import MAX_HEADS_HEADER_BYTES, Header, file_inside, read_header, read_tensors

MAX_FILES = 1000
PATTERNS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
"""Where a model's weights are, the first pattern with any file. Index files are not read: the files' own headers say more."""


@dataclass(frozen=True)
class TensorFiles:
    """Some tensors of one or more files: name -> (dtype code, shape), and name -> file."""

    header: Header
    files: dict[str, Path]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies of these tensors, checked to be finite."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        state: dict[str, torch.Tensor] = {}
        for path, wanted in by_file.items():
            state.update(read_tensors(path, wanted) if path.suffix == ".safetensors" else read_pickle_tensors(path, wanted))
        return state


def open_files(paths: Iterable[Path], wanted: Callable[[str], bool] = lambda name: True) -> TensorFiles:
    """The tensors of these files whose names are wanted. CheckpointError for a damaged file, and for a name that stands in two."""
    header: Header = {}
    files: dict[str, Path] = {}
    for path in paths:
        entries = read_header(path, MAX_HEADS_HEADER_BYTES) if path.suffix == ".safetensors" else read_pickle_header(path)
        for name, entry in entries.items():
            if not wanted(name):
                continue
            if name in header:
                raise CheckpointError(
                    "A tensor stands in two files.",
                    given=f"{name[:80]} in {files[name].name} and {path.name}",
                    expected="one",
                    do="Remove one.",
                )
            header[name], files[name] = entry, path
    return TensorFiles(header, files)


def model_files(folder: Path) -> list[Path]:
    """The files with a model's weights, as plain files inside the folder."""
    for pattern in PATTERNS:
        found = sorted(folder.glob(pattern))
        if len(found) > MAX_FILES:
            raise CheckpointError(
                "The folder has too many files.", given=f"{len(found)} in {folder}", expected=MAX_FILES, do="Check the path."
            )
        if found:
            return [file_inside(folder, path.name) for path in found]
    raise CheckpointError(
        "The folder holds no weights.",
        given=str(folder),
        expected="*.safetensors, pytorch_model*.bin or medusa_lm_head.pt",
        do="Check the path.",
    )


def lm_head_name(header: Header, tied: bool) -> str | None:
    """The tensor that a causal LM's lm_head is read from: its own, or the embedding table where they are one; None when not found."""
    names = sorted(name for name in header if name.endswith("lm_head.weight") and not name.startswith("medusa_head"))
    if not names and tied:
        names = sorted(name for name in header if name.endswith((".embed_tokens.weight", ".wte.weight", ".embed_in.weight")))
    return min(names, key=len) if names else None


def is_output_table(name: str) -> bool:
    """The name may be that of a causal LM's lm_head or embedding table."""
    return name.endswith(("lm_head.weight", ".embed_tokens.weight", ".wte.weight", ".embed_in.weight"))
