"""The native heads directory and single-file states: atomic to write, validated before anything is allocated.

heads/FORMAT.md is the specification. Everything that comes from disk is treated as hostile: sizes are bounded, names, shapes and
dtypes are compared with what the configuration implies, values must be finite, and the checksum must match. No pickle anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from heads.errors import CheckpointError, ConfigError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.tensorfile import (
    FLOAT_DTYPES,
    MAX_HEADS_HEADER_BYTES,
    checksum,
    file_inside,
    load_state,
    parse_json,
    read_header,
    read_regular,
    read_tensors,
    require_finite,
    save_state,
    sync_file,
    write_tensors,
)

__all__ = [
    "FORMAT_VERSION",
    "HeadsMetadata",
    "checksum",
    "load_heads",
    "load_lm_head",
    "load_state",
    "new_directory",
    "save_heads",
    "save_state",
]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
LM_HEAD_KEY = "lm_head.weight"
OWN_SECTION = "medusa_ppo"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADS, MAX_LAYERS, MAX_WIDTH, MAX_VOCAB = 64, 64, 1 << 17, 1 << 24


@dataclass(frozen=True)
class HeadsMetadata:
    """What a heads directory says about itself.

    Attributes:
        version: heads version (grows with every publish).
        checksum: of the trainable tensors, as `checksum(heads.trainable_state())`.
        dtype: of the trainable tensors.
        lm_head_checksum: of the copy of the actor's lm_head, or empty when there is none.
        metadata: whatever the writer noted; JSON values.
    """

    version: int
    checksum: str
    dtype: str
    lm_head_checksum: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_lm_head(self) -> bool:
        """A copy of the actor's lm_head is included (stock vLLM needs it when the heads share one)."""
        return bool(self.lm_head_checksum)


# ---- writing ----------------------------------------------------------------------------------------------------------------


def save_heads(
    path: str | Path,
    heads: MedusaHeads,
    *,
    lm_head_VD: torch.Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    version: int = 0,
) -> None:
    """Write a heads directory; a reader sees the old one or the new one, never a mixture.

    Args:
        path: the directory; replaced when it is there.
        heads: the heads.
        lm_head_VD: the actor's lm_head, written in the heads' dtype. Stock vLLM needs it when the heads share it.
        metadata: JSON values to keep with the heads.
        version: heads version.
    """
    state = heads.trainable_state()
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    lm_head_checksum = ""
    if lm_head_VD is not None and heads.config.lm_head == "shared":
        expected = (heads.config.vocab_size, heads.config.hidden_size)
        if tuple(lm_head_VD.shape) != expected:
            raise ConfigError(
                "The lm_head does not fit the heads.", given=tuple(lm_head_VD.shape), expected=expected, do="Pass this actor's lm_head."
            )
        tensors[LM_HEAD_KEY] = lm_head_VD.detach().to("cpu", heads.dtype).contiguous()
        lm_head_checksum = checksum({LM_HEAD_KEY: tensors[LM_HEAD_KEY]})
    own = HeadsMetadata(version, checksum(state), str(heads.dtype).removeprefix("torch."), lm_head_checksum, dict(metadata or {}))
    config = _config_json(heads.config, own)
    require_finite(tensors, "the heads to save")
    with new_directory(path) as temporary:
        (temporary / CONFIG_NAME).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        sync_file(temporary / CONFIG_NAME)
        write_tensors(temporary / WEIGHTS_NAME, tensors)


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when the block ends well, and is gone otherwise."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.new-", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        _replace_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config_json(config: HeadsConfig, own: HeadsMetadata) -> dict[str, Any]:
    """config.json: stock vLLM's Medusa keys for kind medusa, a name that it refuses for the kinds that it can't run."""
    stock = config.kind == "medusa"
    return {
        "model_type": "medusa" if stock else "medusa_ppo",
        "architectures": ["MedusaModel" if stock else "MedusaPPOModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "truncated_vocab_size": config.vocab_size,
        "original_lm_head": config.lm_head == "shared",
        "medusa_fc_bias": False,
        OWN_SECTION: {"format_version": FORMAT_VERSION, "heads": config.to_dict(), **dataclasses.asdict(own)},
    }


def _replace_directory(new: Path, path: Path) -> None:
    """Put `new` in the place of `path`. Between the two renames the old one stands at `previous_of(path)`, where readers look too."""
    previous = previous_of(path)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(path, previous)
    os.rename(new, path)
    shutil.rmtree(previous, ignore_errors=True)


def previous_of(path: Path) -> Path:
    """Where the old directory stands while a new one takes its place."""
    return path.with_name(f".{path.name}.previous")


# ---- reading ----------------------------------------------------------------------------------------------------------------


def load_heads(path: str | Path, *, hidden_size: int | None = None, vocab_size: int | None = None) -> tuple[MedusaHeads, HeadsMetadata]:
    """Read and validate a heads directory.

    Args:
        path: the directory.
        hidden_size, vocab_size: sizes of the actor that the heads must fit, when known.

    Raises:
        CheckpointError: the directory is missing, damaged, of an unknown format, or of other sizes.
    """
    path, config, metadata = _open(path)
    for name, actor in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if actor is not None and getattr(config, name) != actor:
            raise CheckpointError(
                "The heads were made for another actor.",
                given=f"{name} {getattr(config, name)} in {path}",
                expected=f"{name} {actor}, the actor's",
                do="Use heads that were trained for this actor, or train new ones.",
            )
    weights = file_inside(path, WEIGHTS_NAME)
    _check_names_and_shapes(weights, config, metadata)
    state = read_tensors(weights, list(config.tensor_shapes()))
    _check_bytes(state, metadata.checksum, weights)
    heads = MedusaHeads(config).to(getattr(torch, metadata.dtype))
    heads.load_trainable_state(state)
    return heads, metadata


def load_lm_head(path: str | Path) -> torch.Tensor | None:
    """The copy of the actor's lm_head that a heads directory includes, or None. Checked like the heads."""
    path, config, metadata = _open(path)
    weights = file_inside(path, WEIGHTS_NAME)
    _check_names_and_shapes(weights, config, metadata)
    if not metadata.has_lm_head:
        return None
    tensors = read_tensors(weights, [LM_HEAD_KEY])
    _check_bytes(tensors, metadata.lm_head_checksum, weights)
    return tensors[LM_HEAD_KEY]


def _open(path: str | Path) -> tuple[Path, HeadsConfig, HeadsMetadata]:
    """Where the directory really stands, and its configuration."""
    path = Path(path).absolute()
    if not path.is_dir() and previous_of(path).is_dir():
        logger.warning("The writer of %s was cut short; reading the directory it was to replace.", path)
        path = previous_of(path)
    if not path.is_dir():
        raise CheckpointError(
            "There is no heads directory.",
            given=str(path),
            expected=f"a folder with {CONFIG_NAME} and {WEIGHTS_NAME}",
            do="Check the path.",
        )
    return path, *_read_config(file_inside(path, CONFIG_NAME))


def _check_bytes(tensors: dict[str, torch.Tensor], expected: str, path: Path) -> None:
    given = checksum(tensors)
    if given != expected:
        raise CheckpointError(
            f"The bytes of {path} do not match their checksum.", given=given, expected=expected, do="Copy the directory again."
        )


def _read_config(path: Path) -> tuple[HeadsConfig, HeadsMetadata]:
    raw = parse_json(read_regular(path, MAX_CONFIG_BYTES), path)
    section = raw.get(OWN_SECTION)
    if not isinstance(section, dict):
        raise CheckpointError(
            "This is not a native heads directory.",
            given=f"{path} without the key {OWN_SECTION}",
            expected="heads/FORMAT.md",
            do="Convert it with `medusa-ppo convert`.",
        )
    if section.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            "The heads directory has an unknown format version.",
            given=section.get("format_version"),
            expected=FORMAT_VERSION,
            do="Update medusa-ppo, or save the heads again.",
        )
    try:
        config = HeadsConfig.from_dict(section["heads"])
        metadata = HeadsMetadata(
            section["version"], section["checksum"], section["dtype"], section["lm_head_checksum"], section["metadata"]
        )
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            "The heads' configuration is damaged.", given=f"{path}: {error}", expected="heads/FORMAT.md", do="Save the heads again."
        ) from error
    _check_config(path, raw, config, metadata)
    return config, metadata


def _check_config(path: Path, raw: dict[str, Any], config: HeadsConfig, metadata: HeadsMetadata) -> None:
    """Bounds, types, and that the keys for vLLM say the same as our own."""
    bounds = {
        "num_heads": MAX_HEADS,
        "num_layers": MAX_LAYERS,
        "hidden_size": MAX_WIDTH,
        "vocab_size": MAX_VOCAB,
        "rank": MAX_WIDTH,
        "mlp_ratio": 64,
    }
    faults = [f"{name} {getattr(config, name)} > {bound}" for name, bound in bounds.items() if getattr(config, name) > bound]
    if type(metadata.version) is not int or metadata.version < 0:
        faults.append(f"version {metadata.version!r}")
    for name, digest, lengths in (("checksum", metadata.checksum, (64,)), ("lm_head_checksum", metadata.lm_head_checksum, (0, 64))):
        if not isinstance(digest, str) or len(digest) not in lengths:
            faults.append(f"{name} {digest!r}")
    if metadata.dtype not in {str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES.values()}:
        faults.append(f"dtype {metadata.dtype!r}")
    if not isinstance(metadata.metadata, dict):
        faults.append(f"metadata {metadata.metadata!r}")
    outside = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "original_lm_head": config.lm_head == "shared",
        "medusa_fc_bias": False,
        "model_type": "medusa" if config.kind == "medusa" else "medusa_ppo",
    }
    faults += [f"{key} {raw.get(key)!r} (own section: {value!r})" for key, value in outside.items() if raw.get(key) != value]
    if faults:
        raise CheckpointError(
            "The heads' configuration is damaged.",
            given=f"{path}: {'; '.join(faults)}",
            expected="heads/FORMAT.md",
            do="Save the heads again.",
        )


def _check_names_and_shapes(path: Path, config: HeadsConfig, metadata: HeadsMetadata) -> None:
    """Compare the file's header with what the configuration implies, before any tensor is read."""
    header, shapes = read_header(path, MAX_HEADS_HEADER_BYTES), config.tensor_shapes()
    if metadata.has_lm_head:
        shapes[LM_HEAD_KEY] = (config.vocab_size, config.hidden_size)
    missing, unknown = sorted(set(shapes) - set(header)), sorted(set(header) - set(shapes))
    if missing or unknown:
        raise CheckpointError(
            "The tensors in the file are not those of its configuration.",
            given=f"{path}: missing {missing[:3]}, unknown {unknown[:3]}",
            expected=f"{len(shapes)} tensors",
            do="Save the heads again.",
        )
    for name, shape in shapes.items():
        code, given = header[name]
        if given != shape or str(FLOAT_DTYPES.get(code)).removeprefix("torch.") != metadata.dtype:
            raise CheckpointError(
                "A tensor in the file has the wrong shape or dtype.",
                given=f"{name} {given} {code}",
                expected=f"{shape} {metadata.dtype}",
                do="Save the heads again.",
            )
