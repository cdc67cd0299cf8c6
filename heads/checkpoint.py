"""The native heads directory and single-file states: written atomically, and validated before
anything is allocated.

heads/FORMAT.md is the specification. Everything that comes from disk is treated as hostile: sizes
are bounded, names, shapes and dtypes are compared with what the configuration implies, values must
be finite, and the checksum must match. No pickle anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from heads.errors import CheckpointError, ConfigError
from heads.heads_config import GONE_KINDS, KINDS, TEMPERATURES, HeadsConfig
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
    save_state,
    sha256_of,
)

__all__ = [
    "FORMAT_VERSION",
    "HeadsMetadata",
    "checksum",
    "load_heads",
    "load_lm_head",
    "load_state",
    "new_directory",
    "refuse_foreign_folder",
    "save_heads",
    "save_state",
]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
WITH_TEMPERATURES = 2
"""Heads with their own draft temperatures, which releases before 0.2 can't serve."""
WITH_COPYING = 3
"""Heads with copying, with a feed-forward layer or with several layers, with or without draft
temperatures. Releases before 0.4 can't serve them.
"""
FORMAT_VERSIONS = (FORMAT_VERSION, WITH_TEMPERATURES, WITH_COPYING)
CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
LM_HEAD_KEY = "lm_head.weight"
OWN_SECTION = "medusa_ppo"
DAMAGED = "The heads' configuration is damaged."
MAX_CONFIG_BYTES = 1 << 20
# Limits far beyond any real heads, because sizes in a file decide how much memory is allocated.
# HeadsConfig itself limits the others.
MAX_LAYERS, MAX_WIDTH, MAX_VOCAB = 64, 1 << 17, 1 << 24
MORE_BOUNDS = {
    "mlp_ratio": 64,
    "context": 1 << 12,
    "context_layers": 16,
    "feed_forward": 64,
    "copy_parts": 64,
}


@dataclass(frozen=True)
class HeadsMetadata:
    """The description in a heads directory.

    Attributes:
        version: heads version (grows with every publish).
        checksum: checksum of the trainable tensors, as `sha256_of(heads.trainable_state())`.
        dtype: dtype of the trainable tensors.
        lm_head_checksum: checksum of the copy of the actor's lm_head; empty if there is none.
        metadata: the writer's notes; JSON values.
    """

    version: int
    checksum: str
    dtype: str
    lm_head_checksum: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_lm_head(self) -> bool:
        """Whether a copy of the actor's lm_head is included. Stock vLLM needs it for heads of kind
        `medusa` that share it.
        """
        return bool(self.lm_head_checksum)


# ---- writing


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
        path: the directory; replaced if it is empty or holds heads.
        heads: the heads.
        lm_head_VD: the actor's lm_head. It is written, in the heads' dtype, for stock vLLM alone:
            with heads of kind `medusa` that share it. With others nothing would read it, and for a
            large vocabulary it is half of the folder.
        metadata: JSON values to keep with the heads.
        version: heads version.

    Raises:
        CheckpointError: as `refuse_foreign_folder`.
    """
    refuse_foreign_folder(path)
    state = heads.trainable_state()
    tensors = dict(state)
    lm_head_checksum = ""
    if lm_head_VD is not None and heads.config.lm_head == "shared":
        heads.check_table(lm_head_VD, "lm_head")
        if heads.config.kind == "medusa":
            tensors[LM_HEAD_KEY] = lm_head_VD.detach().to(heads.dtype)
            lm_head_checksum = sha256_of({LM_HEAD_KEY: tensors[LM_HEAD_KEY]})
    own = HeadsMetadata(
        version,
        sha256_of(state),
        str(heads.dtype).removeprefix("torch."),
        lm_head_checksum,
        dict(metadata or {}),
    )
    section = {
        "format_version": _format_version(heads.config, TEMPERATURES in state),
        "heads": heads.config.to_dict(),
        **dataclasses.asdict(own),
    }
    config = {**stock_config(heads.config), OWN_SECTION: section}
    with new_directory(path) as temporary:
        write_json(temporary / CONFIG_NAME, config)
        save_state(temporary / WEIGHTS_NAME, tensors)


def refuse_foreign_folder(path: str | Path) -> None:
    """Check that saving heads to `path` replaces nothing but heads: a whole folder is replaced, and
    a user may have named one with other files by mistake.

    Raises:
        CheckpointError: something other than heads is there.
    """
    path = Path(path)
    if not path.exists() or holds_heads(path) or (path.is_dir() and not any(path.iterdir())):
        return
    raise _damaged(
        "The folder holds no heads." if path.is_dir() else "This is no folder.",
        path,
        "a native heads folder, an empty one, or one that does not exist yet",
        "Name another: heads are saved only where they replace nothing else.",
    )


def holds_heads(path: Path) -> bool:
    """Whether a folder has the configuration of native heads, valid or not."""
    file = path / CONFIG_NAME
    if not file.is_file():
        return False
    try:
        return OWN_SECTION in parse_json(read_regular(file, MAX_CONFIG_BYTES), file)
    except CheckpointError:
        return False


def _format_version(config: HeadsConfig, with_temperatures: bool) -> int:
    """The lowest version that suffices, so that earlier releases can read what they can serve."""
    if config.has_new_parts:
        return WITH_COPYING
    return WITH_TEMPERATURES if with_temperatures else FORMAT_VERSION


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON and flush it to the disk. NaN and infinity are errors."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
        sync(file)


def sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which replaces `path` if the block succeeds, and is removed otherwise."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Next to its final place, because a rename can't cross file systems.
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.new-", dir=path.parent))
    try:
        yield temporary
        # mkdtemp makes a private folder, but other users read heads.
        temporary.chmod(0o755)
        _replace_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def stock_config(config: HeadsConfig, *, biased: bool = False) -> dict[str, Any]:
    """The keys that stock vLLM's Medusa reads. For kinds that it can't run they have names that it
    rejects.

    No other key contains `num`: vLLM would mistake it for one of these.
    """
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
        "medusa_fc_bias": biased,
    }


def _replace_directory(new: Path, path: Path) -> None:
    """Replace `path` with `new`. Between the two renames the old one is at `previous_of(path)`,
    where readers also look.
    """
    previous = previous_of(path)
    if os.path.lexists(path):
        remove_directory(previous)
        os.rename(path, previous)
    os.rename(new, path)
    remove_directory(previous)


def remove_directory(path: Path) -> None:
    """Remove a folder with its content. Of a link, only the link is removed; `shutil.rmtree` would
    refuse it.
    """
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def previous_of(path: Path) -> Path:
    """Where the old directory is while a new one replaces it."""
    return path.with_name(f".{path.name}.previous")


# ---- reading


def load_heads(
    path: str | Path, *, hidden_size: int | None = None, vocab_size: int | None = None
) -> tuple[MedusaHeads, HeadsMetadata]:
    """Read and validate a heads directory.

    Args:
        path: the directory.
        hidden_size, vocab_size: sizes of the actor that the heads must fit, when known.

    Raises:
        CheckpointError: the directory is missing, damaged, of an unknown format, or has other
            sizes.
    """
    weights, config, metadata, shapes = _open(path)
    for name, actor in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if actor is not None and getattr(config, name) != actor:
            raise _damaged(
                "The heads were made for another actor.",
                f"{name} {getattr(config, name)} in {path}",
                f"{name} {actor}, the actor's",
                "Use heads that were trained for this actor, or train new ones.",
            )
    # The caller's random numbers don't change: the parameters that are drawn here are replaced.
    with torch.random.fork_rng(devices=[]):
        heads = MedusaHeads(config).to(getattr(torch, metadata.dtype))
    heads.load_trainable_state(
        _read_checked(weights, [name for name in shapes if name != LM_HEAD_KEY], metadata.checksum)
    )
    return heads, metadata


def load_lm_head(path: str | Path) -> torch.Tensor | None:
    """The copy of the actor's lm_head that a heads directory includes, or None. Checked like the
    heads.
    """
    weights, _, metadata, _ = _open(path)
    return (
        _read_checked(weights, [LM_HEAD_KEY], metadata.lm_head_checksum)[LM_HEAD_KEY]
        if metadata.has_lm_head
        else None
    )


def _open(path: str | Path) -> tuple[Path, HeadsConfig, HeadsMetadata, dict[str, tuple[int, ...]]]:
    """Where the weights actually are, the configuration that matches their header, and the shapes
    of all tensors.
    """
    path = Path(path).absolute()
    if not path.is_dir() and previous_of(path).is_dir():
        logger.warning(
            "The writer of %s was interrupted; reading the directory that it was to replace.", path
        )
        path = previous_of(path)
    if not path.is_dir():
        raise _damaged(
            "There is no heads directory.",
            path,
            f"a folder with {CONFIG_NAME} and {WEIGHTS_NAME}",
            "Check the path.",
        )
    # The small file comes first, because it limits what the large one may hold.
    config, metadata, version = _read_config(file_inside(path, CONFIG_NAME))
    weights = file_inside(path, WEIGHTS_NAME)
    names: Container[str] = (TEMPERATURES,) if version == WITH_TEMPERATURES else ()
    if version == WITH_COPYING:  # May have temperatures, and has them if they are not all 1.
        names = read_header(weights, MAX_HEADS_HEADER_BYTES)
    shapes = config.shapes_among(names)
    if metadata.has_lm_head:
        shapes[LM_HEAD_KEY] = (config.vocab_size, config.hidden_size)
    check_names_and_shapes(weights, shapes, metadata.dtype)
    return weights, config, metadata, shapes


def _read_checked(path: Path, names: list[str], expected: str) -> dict[str, torch.Tensor]:
    tensors = read_tensors(path, names)
    given = sha256_of(tensors)
    if given != expected:
        raise _damaged(
            f"The bytes of {path} do not match their checksum.",
            given,
            expected,
            "Copy the directory again.",
        )
    return tensors


def _read_config(path: Path) -> tuple[HeadsConfig, HeadsMetadata, int]:
    """The contents of config.json, and its format version."""
    raw = parse_json(read_regular(path, MAX_CONFIG_BYTES), path)
    section = raw.get(OWN_SECTION)
    if not isinstance(section, dict):
        raise _damaged(
            "This is not a native heads directory.",
            f"{path} without the key {OWN_SECTION}",
            "heads/FORMAT.md",
            "Convert it with `medusa-ppo convert`.",
        )
    version = section.get("format_version")
    if version not in FORMAT_VERSIONS:
        expected = " or ".join(map(str, FORMAT_VERSIONS))
        do = "Update medusa-ppo, or save the heads again."
        raise _damaged("The heads directory has an unknown format version.", version, expected, do)
    _refuse_gone_kind(path, section.get("heads"))
    try:
        config = HeadsConfig.from_dict(section["heads"])
        metadata = HeadsMetadata(
            *(section[field.name] for field in dataclasses.fields(HeadsMetadata))
        )
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise _damaged(DAMAGED, f"{path}: {error}", "heads/FORMAT.md") from error
    _check_config(path, raw, config, metadata)
    return config, metadata, version


def _refuse_gone_kind(path: Path, heads: object) -> None:
    """Raise an error that says what to do with heads of a removed kind; they are not damaged."""
    kind = heads.get("kind") if isinstance(heads, dict) else None
    if isinstance(kind, str) and kind in GONE_KINDS:
        raise _damaged(
            f"Heads of kind {kind} were removed in 0.4.0.",
            f"{path}: kind {kind}",
            " | ".join(KINDS),
            GONE_KINDS[kind],
        )


def beyond_bounds(config: HeadsConfig) -> list[str]:
    """The sizes that no real heads have, each with its limit. Of sizes that a stranger names, how
    many tensors there are and how large is asked only if this is empty.
    """
    sizes = {"num_layers": MAX_LAYERS, "hidden_size": MAX_WIDTH, "vocab_size": MAX_VOCAB}
    return [
        f"{name} {getattr(config, name)} > {bound}"
        for name, bound in {**sizes, **MORE_BOUNDS}.items()
        if getattr(config, name) > bound
    ]


def _check_config(
    path: Path, raw: dict[str, Any], config: HeadsConfig, metadata: HeadsMetadata
) -> None:
    """Check limits, types, and that the keys for vLLM agree with our own."""
    faults = beyond_bounds(config)
    # isinstance would take `true` for an int.
    if type(metadata.version) is not int or metadata.version < 0:
        faults.append(f"version {metadata.version!r}")
    for name, digest, lengths in (
        ("checksum", metadata.checksum, (64,)),
        ("lm_head_checksum", metadata.lm_head_checksum, (0, 64)),
    ):
        if not isinstance(digest, str) or len(digest) not in lengths:
            faults.append(f"{name} {digest!r}")
    if metadata.dtype not in [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES.values()]:
        faults.append(f"dtype {metadata.dtype!r}")
    if not isinstance(metadata.metadata, dict):
        faults.append(f"metadata {metadata.metadata!r}")
    for key, value in stock_config(config).items():
        if raw.get(key) != value and key not in ("architectures", "truncated_vocab_size"):
            faults.append(f"{key} {raw.get(key)!r} (own section: {value!r})")
    if faults:
        raise _damaged(DAMAGED, f"{path}: {'; '.join(faults)}", "heads/FORMAT.md")


def _damaged(
    problem: str, given: object, expected: object, do: str = "Save the heads again."
) -> CheckpointError:
    return CheckpointError(problem, given=given, expected=expected, do=do)


def check_names_and_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Compare the file's header with the configuration, before any tensor is read."""
    header = read_header(path, MAX_HEADS_HEADER_BYTES)
    missing = sorted(set(shapes) - set(header))
    unknown = sorted(set(header) - set(shapes))
    if missing or unknown:
        given = f"{path}: missing {missing[:3]}, unknown {unknown[:3]}"
        expected = f"{len(shapes)} tensors"
        raise _damaged(
            "The tensors in the file are not those of its configuration.", given, expected
        )
    for name, shape in shapes.items():
        code, found = header[name]
        if found != shape or str(FLOAT_DTYPES.get(code)).removeprefix("torch.") != dtype:
            problem = "A tensor in the file has the wrong shape or dtype."
            raise _damaged(problem, f"{name} {found} {code}", f"{shape} {dtype}")
