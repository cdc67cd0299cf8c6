"""Reads heads and models of other formats from a folder or file: finds out which format it is, and
which tensor is in which file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import CONFIG_NAME, MAX_CONFIG_BYTES, HeadsMetadata
from heads.errors import CheckpointError
from heads.tensorfile import (
    FLOAT_DTYPES,
    MAX_HEADS_HEADER_BYTES,
    Header,
    file_inside,
    parse_json,
    read_header,
    read_regular,
    read_tensors,
)
from medusa_ppo.offline.formats import (
    OWN,
    SHARED,
    TABLES,
    Claims,
    PlainHeads,
    plain_heads,
    read_layout,
)
from medusa_ppo.offline.picklefile import read_pickle_header, read_pickle_tensors
from medusa_ppo.runtime.hardware import TIED_BY_DEFAULT

# Every file is opened, and a hostile folder could have millions.
MAX_FILES = 1000
PATTERNS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
"""Patterns of weight files; the first that matches any file counts. Index files are not read: the
headers of the files say more.
"""
EMBEDDINGS = (".embed_tokens.weight", ".wte.weight", ".embed_in.weight")
HEADS_FILE = "medusa_lm_head.pt"
TGI_FILE = "medusa_lm_head.safetensors"
FULL_MODELS = {"medusa_head.": "medusa-1.0", "medusa_heads.": "modelopt"}
"""Prefix of the heads' tensors -> the format that keeps them inside the whole model."""
CLAIMS = {
    "vllm": ("num_heads", "num_hidden_layers"),
    "modelopt": ("num_medusa_heads", "num_medusa_layers"),
}
NUMBERED_CLAIMS = ("medusa_num_heads", "medusa_num_layers")
"""The keys for K and L in the configurations of all other formats."""


@dataclass(frozen=True)
class TensorFiles:
    """Some tensors of one or more files: name -> (dtype code, shape), and name -> (file, name in
    the file).
    """

    header: Header
    places: dict[str, tuple[Path, str]]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies of these tensors, checked to be finite."""
        # One file after the other, so that each is opened and checked only once.
        by_file: dict[Path, dict[str, str]] = {}
        for name in names:
            path, inside = self.places[name]
            by_file.setdefault(path, {})[inside] = name
        state: dict[str, torch.Tensor] = {}
        for path, wanted in by_file.items():
            read = read_tensors if path.suffix == ".safetensors" else read_pickle_tensors
            state |= {wanted[inside]: tensor for inside, tensor in read(path, list(wanted)).items()}
        return state


def open_files(
    paths: Iterable[Path], wanted: Callable[[str], bool] = lambda name: True
) -> TensorFiles:
    """The tensors in these files whose names are wanted. Raises CheckpointError if a file is
    damaged, or a name occurs in two files.
    """
    header: Header = {}
    places: dict[str, tuple[Path, str]] = {}
    for path in paths:
        entries = (
            read_header(path, MAX_HEADS_HEADER_BYTES)
            if path.suffix == ".safetensors"
            else read_pickle_header(path)
        )
        for name, entry in entries.items():
            if not wanted(name):
                continue
            if name in header:
                given = f"{name[:80]} in {places[name][0].name} and {path.name}"
                raise CheckpointError(
                    "A tensor is in two files.", given=given, expected="one", do="Remove one."
                )
            header[name] = entry
            places[name] = (path, name)
    return TensorFiles(header, places)


def model_files(folder: Path) -> list[Path]:
    """The files with a model's weights; they must be plain files inside the folder."""
    for pattern in PATTERNS:
        found = sorted(folder.glob(pattern))
        if len(found) > MAX_FILES:
            given = f"{len(found)} in {folder}"
            raise CheckpointError(
                "The folder has too many files.",
                given=given,
                expected=MAX_FILES,
                do="Check the path.",
            )
        if found:
            return [file_inside(folder, path.name) for path in found]
    expected = "*.safetensors, pytorch_model*.bin or medusa_lm_head.pt"
    raise CheckpointError(
        "The folder has no weights.", given=str(folder), expected=expected, do="Check the path."
    )


def is_output_table(name: str) -> bool:
    """Whether the name may be a causal LM's lm_head or embedding table."""
    return name.endswith(("lm_head.weight", *EMBEDDINGS))


def base_lm_head(files: TensorFiles, config: Mapping[str, Any]) -> torch.Tensor | None:
    """A causal LM's lm_head: its own, or the embedding table if the configuration says that they
    are tied; None if not found.
    """
    names = [
        name
        for name in files.header
        # Heads may have their own tables under such names.
        if name.endswith("lm_head.weight") and not name.startswith("medusa_head")
    ]
    text = {**config, **_text_config(config)}
    by_default = text.get("model_type") in TIED_BY_DEFAULT
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", by_default))
    if not names and tied:
        names = [name for name in files.header if name.endswith(EMBEDDINGS)]
    if not names:
        return None
    # A model with several parts may have a table in each. The outermost has the shortest name.
    name = min(sorted(names), key=len)
    dtype, shape = files.header[name]
    if dtype not in FLOAT_DTYPES or len(shape) != 2:
        given = f"{name} {shape} {dtype}"
        raise CheckpointError(
            "The lm_head is not a matrix of floats.",
            given=given,
            expected="[V, D]",
            do="Check the model.",
        )
    return files.read([name])[name]


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # A model with several parts keeps the sizes of its language model in this section.
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


@dataclass(frozen=True)
class FoundHeads:
    """Heads as found.

    Attributes:
        format: one of `formats.FORMATS`.
        base_model: name or path of the heads' model, from the configuration; may be empty.
        notes: sentences on what differed from the configuration or was left out.
        native: metadata of a native directory; None for other formats.
    """

    format: str
    heads: PlainHeads
    base_model: str
    notes: tuple[str, ...]
    native: HeadsMetadata | None = None


def base_model_of(metadata: HeadsMetadata) -> str:
    """The model that native heads were trained for, according to their metadata, or empty."""
    notes = metadata.metadata
    options = notes.get("options")
    if isinstance(options, Mapping):
        found = options.get("model")
    else:
        found = notes.get("base_model", notes.get("model"))
    return found if isinstance(found, str) else ""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, or nothing if there is none."""
    path = file_inside(folder, CONFIG_NAME)
    return parse_json(read_regular(path, MAX_CONFIG_BYTES), path) if path.exists() else {}


def read_foreign(path: Path, lm_head_VD: torch.Tensor | None = None) -> FoundHeads:
    """Read heads of any format but the native one.

    Args:
        path: a folder, or a file `medusa_lm_head.pt`.
        lm_head_VD: the lm_head of the heads' model, if available.

    Raises:
        CheckpointError: the format is unknown, the file is damaged, or the format's own reader
            would misread it.
    """
    if not path.exists():
        raise CheckpointError(
            "There are no heads.",
            given=str(path),
            expected="a folder or a file",
            do="Check the path.",
        )
    folder = path if path.is_dir() else path.parent
    config = read_config(folder)
    if path.is_file():
        heads_file = path
    elif (folder / HEADS_FILE).exists():
        heads_file = folder / HEADS_FILE
    elif (folder / TGI_FILE).exists():
        heads_file = folder / TGI_FILE
    else:
        return _read_model(folder, config, lm_head_VD)
    if heads_file.suffix == ".safetensors":
        raise _tgi(f"{path}: heads in {heads_file.name}, where FasterDecoding has {HEADS_FILE}")
    files = open_files([file_inside(folder, heads_file.name)])
    # In this format all tensors other than residual layers are lm_heads; TGI's second format has
    # none of them.
    own = any(name.endswith(".weight") and ".linear." not in name for name in files.header)
    if not own:
        raise _tgi(f"{path}: {heads_file.name} without an lm_head for each head")
    return _read("fasterdecoding", files, config, lm_head_VD, str(path))


def _tgi(given: str) -> CheckpointError:
    return CheckpointError(
        "The heads are in one of TGI's formats, which are no longer read.",
        given=given,
        expected="a format that docs/formats.md lists",
        do=(
            "Convert them once with medusa-ppo 0.3.0: medusa-ppo convert SRC DST --to vllm --model"
            " BASE_MODEL."
        ),
    )


def _read_model(
    folder: Path, config: Mapping[str, Any], lm_head_VD: torch.Tensor | None
) -> FoundHeads:
    """Heads inside a whole model, or in a folder for stock vLLM."""
    prefixes = tuple(FULL_MODELS)

    def wanted(name: str) -> bool:
        return _stock(config) or name.startswith(prefixes) or is_output_table(name)

    # Tensors are chosen by their names in the headers, so that of a model of many gigabytes only
    # heads and tables are read.
    files = open_files(model_files(folder), wanted)
    name = _full_format(files, config, folder)
    if name == "vllm":
        return _read_stock(files, config, lm_head_VD, str(folder))
    lm_head_VD = base_lm_head(files, config) if lm_head_VD is None else lm_head_VD
    heads = TensorFiles(
        {key: entry for key, entry in files.header.items() if key.startswith(prefixes)},
        files.places,
    )
    return _read(name, heads, config, lm_head_VD, str(folder))


def _read(
    name: str,
    files: TensorFiles,
    config: Mapping[str, Any],
    lm_head_VD: torch.Tensor | None,
    where: str,
    notes: Sequence[str] = (),
) -> FoundHeads:
    """Read heads whose format is `name`; `notes` are the caller's, and come first."""
    claims = _claims(name, config)
    layout = read_layout(files.header, TABLES[name], claims, where)
    rows = lm_head_VD.shape[0] if lm_head_VD is not None else None
    # Sizes come from the tensors: uploaded configurations are often wrong (docs/formats.md).
    vocab_size = layout.vocab_size or rows or claims.vocab_size
    if lm_head_VD is not None and (rows, lm_head_VD.shape[1]) != (vocab_size, layout.hidden_size):
        raise CheckpointError(
            "The heads were made for another model.",
            given=f"vocabulary {vocab_size}, hidden size {layout.hidden_size} in {where}",
            expected=f"{rows} and {lm_head_VD.shape[1]}, the model's lm_head",
            do="Give the model that the heads were trained for.",
        )
    if vocab_size is None:
        given = f"{where}: no lm_head, and no vocab_size in {CONFIG_NAME}"
        do = "Give the model's folder with --model."
        raise CheckpointError(
            "The size of the vocabulary is unknown.", given=given, expected="the model", do=do
        )
    heads, more = plain_heads(layout, files.read(layout.names), lm_head_VD, vocab_size, where)
    base = config.get("base_model_name_or_path")
    return FoundHeads(name, heads, base if isinstance(base, str) else "", (*notes, *more))


def _full_format(files: TensorFiles, config: Mapping[str, Any], folder: Path) -> str:
    """The format of a folder with a whole model or with stock vLLM's heads."""
    stock_names = ("blocks.", "medusa_heads.", "0.")
    if _stock(config) and any(name.startswith(stock_names) for name in files.header):
        return "vllm"
    for prefix, name in FULL_MODELS.items():
        if any(key.startswith(prefix) for key in files.header):
            return name
    raise CheckpointError(
        "The folder has no Medusa heads.",
        given=f"{folder}: model_type {str(config.get('model_type'))[:40]!r}",
        expected=f"{HEADS_FILE}, tensors medusa_head(s).*, or model_type medusa",
        do="See docs/formats.md for what is read.",
    )


def _stock(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "medusa"


def _claims(name: str, config: Mapping[str, Any]) -> Claims:
    """What the configuration says; its sections override its top level."""
    section = config.get("medusa") if name == "modelopt" else None
    if not isinstance(section, dict):
        section = {}
    values = {**config, **section, **_text_config(config)}
    keys = (*CLAIMS.get(name, NUMBERED_CLAIMS), "vocab_size", "hidden_size")
    for key in keys:
        value = values.get(key)
        # `isinstance` would take True for 1.
        if value is not None and (type(value) is not int or not 0 < value <= 1 << 24):
            given = f"{key} {str(value)[:40]!r}"
            expected = "a positive whole number"
            raise CheckpointError(
                "The configuration of the heads is damaged.",
                given=given,
                expected=expected,
                do=f"Correct {CONFIG_NAME}.",
            )
    heads, layers, vocabulary, width = (values.get(key) for key in keys)
    return Claims(num_heads=heads, num_layers=layers, vocab_size=vocabulary, hidden_size=width)


# ---- stock vLLM


def _read_stock(
    files: TensorFiles, config: Mapping[str, Any], lm_head_VD: torch.Tensor | None, where: str
) -> FoundHeads:
    """vLLM's own directory. docs/formats.md lists its traps. Where vLLM would fall into one
    silently, this adds a note or refuses the heads.
    """
    shared = config.get("original_lm_head") is True
    names = _vllm_names(files, shared, where)
    notes: list[str] = []
    if config.get("logit_scale", 1) not in (1, 1.0):
        raise _refused(
            where,
            f"logit_scale {str(config['logit_scale'])[:20]}",
            "no logit_scale: our heads have none, and sampled drafts would differ",
        )
    # vLLM takes any key with such a name for its own, and the last one wins.
    clobbers = [key for key in config if "num" in key and "heads" in key and key != "num_heads"]
    if clobbers:
        notes.append(
            f"vLLM would take {clobbers[0][:40]} for the number of heads; we count the tensors."
        )
    if "token_map" in names:
        if not shared:
            raise _refused(
                where,
                "token_map with one lm_head per head",
                "a shared lm_head: vLLM itself can't load these (shape mismatch)",
            )
        del names["token_map"]
        names.pop(SHARED, None)
        notes.append(
            "The truncated vocabulary (token_map) is left out: with our plugin, "
            "engine.draft_vocab does that while serving."
        )
    if not shared and SHARED in names:
        del names[SHARED]
        notes.append(
            "lm_head.weight is left out: original_lm_head is not true, and vLLM ignores it."
        )
    if shared and any(OWN.format(k=k) in names for k in range(1, 64)):
        raise _refused(
            where,
            "one lm_head per head and original_lm_head true",
            "one of the two: vLLM would drop all but the first lm_head",
        )
    if any(name.endswith(".bias") for name in names) and config.get("medusa_fc_bias") is not True:
        notes.append(
            "The file has biases but medusa_fc_bias is not true: vLLM drops them silently. Here"
            " they count."
        )
    header = {name: files.header[source] for name, source in names.items()}
    if not shared and header and OWN.format(k=0) not in header:
        raise _refused(
            where,
            "no lm_heads, and original_lm_head is not true",
            "one of the two: vLLM would not start, because weights are missing",
        )
    view = TensorFiles(header, {name: files.places[source] for name, source in names.items()})
    return _read("vllm", view, config, lm_head_VD, where, notes)


def _vllm_names(files: TensorFiles, shared: bool, where: str) -> dict[str, str]:
    """Name as vLLM understands it -> name in the file."""
    names: dict[str, str] = {}
    for source in files.header:
        # Replaced anywhere in the name, as vLLM's own loader does.
        name = source.replace("medusa_heads.", "")
        parts = name.split(".")
        if len(parts) >= 3 and parts[0].isdigit() and parts[1].isdigit():
            head, layer, *rest = parts
            if rest[0] == "linear":
                name = f"blocks.{head}.layers.{layer}.{rest[-1]}"
            else:
                name = f"lm_heads.{head}.{'.'.join(rest)}"
        if shared and name == OWN.format(k=0):
            name = SHARED
        if name in names:
            raise _refused(
                where,
                f"{source[:60]} and {names[name][:60]}, which are the same to vLLM",
                "each tensor once",
            )
        names[name] = source
    return names


def _refused(where: str, given: str, expected: str) -> CheckpointError:
    problem = "These heads are written for stock vLLM in a way that can't be converted."
    return CheckpointError(
        problem, given=f"{where}: {given}", expected=expected, do="See docs/formats.md."
    )
