"""Settings from outside: YAML files that extend one another, and `key=value` pairs (no torch)."""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from heads.errors import ConfigError

EXTENDS = "extends"
NO_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError)
"""The errors that PyYAML raises: its own, and Python's for an invalid date, a number of 5,000
digits or a wrong tag.
"""
DEEPEST, LARGEST = 32, 1 << 20
NONE = "null"
STOOD_FOR_NONE = ("0", "-1", "")
"""Words that earlier releases accepted for "none" or "automatic" where `null` is written today."""


def preset(name: str) -> Path:
    """Path of a preset in `configs/`: beside the packages in a checkout, under `share/` in an
    installed wheel.
    """
    for folder in (
        Path(__file__).resolve().parents[2] / "configs",
        Path(sys.prefix) / "share" / "medusa-ppo" / "configs",
    ):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ConfigError(
        "The preset does not exist.",
        given=name,
        expected="a file in configs/",
        do="Run from a checkout, or pass --config FILE.",
    )


def located(name: str, folder: Path) -> Path:
    """A file by its path from a folder, or a preset by its name, which is found wherever a command
    starts.
    """
    is_path = "/" in name or name.endswith((".yaml", ".yml")) or (folder / name).is_file()
    return folder / name if is_path else preset(name)


def read_file(path: Path, before: Sequence[Path] = ()) -> dict[str, Any]:
    """The values of a YAML file on top of those that it extends: a preset by its name, or a file by
    its path from this one.

    Args:
        before: the files that extend this one.

    Raises:
        ConfigError: a file is missing, no mapping, or extends itself.
    """
    path = path.expanduser().resolve()
    if path in before:
        chain = " -> ".join(file.name for file in (*before, path))
        raise ConfigError(
            "The configuration extends itself.",
            given=chain,
            expected="an end",
            do=f"Correct `extends` in {before[-1]}.",
        )
    values = _read_yaml(path)
    base = values.pop(EXTENDS, None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(
            "`extends` must name one preset or file.",
            given=repr(base),
            expected="a text",
            do=f"Correct {path}.",
        )
    return merged(read_file(located(base, path.parent), (*before, path)), values)


def _parsed(text: str) -> Any:
    """YAML within limits, without aliases: nine lines of them can expand to a billion values, and
    PyYAML takes minutes for deeply nested lists.
    """
    depth = 0
    for event in yaml.parse(text[: LARGEST + 1], yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if isinstance(event, yaml.AliasEvent) or depth > DEEPEST or len(text) > LARGEST:
            raise ValueError(
                f"an alias (*name), more than {DEEPEST} levels, or more than {LARGEST} characters"
            )
    return yaml.safe_load(text)


def merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` wins, key by key in every mapping."""
    whole = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        whole[key] = merged(below[key], value) if both else value
    return whole


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(
            "The configuration file does not exist.",
            given=path,
            expected=", ".join(near) or "a YAML file",
            do=(
                "Check --config: the name of a preset, or a path (an absolute one in a Ray job, "
                "which starts elsewhere)."
            ),
        )
    try:
        values = _parsed(path.read_text(encoding="utf-8"))
    except (*NO_YAML, OSError) as error:
        raise ConfigError(
            "The configuration file is not YAML.",
            given=f"{path}: {error}",
            expected="a mapping of sections",
            do="Correct the file.",
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "The configuration file must be a mapping.",
            given=type(values).__name__,
            expected="section: {key: value}",
            do=f"Correct {path}.",
        )
    return values


def apply_override(values: dict[str, Any], pair: str, root: type[BaseModel]) -> None:
    """Put `key=value` into a nested mapping, read by the type that the key has in `root`. Raises
    ConfigError.
    """
    key, sign, text = pair.partition("=")
    if not sign or not key:
        raise ConfigError(
            "An override must be key=value.",
            given=pair,
            expected="e.g. ppo.steps=20",
            do="Write key=value, without spaces around the equals sign.",
        )
    *parents, leaf = key.split(".")
    node = values
    section: type[BaseModel] | None = root
    for parent in parents:
        child = node.setdefault(parent, {})
        field = section.model_fields.get(parent) if section else None
        if not isinstance(child, dict) or (
            field and not _is_section(field.annotation) and not _holds(field.annotation, dict)
        ):
            raise ConfigError(
                "An override goes through a key that is not a section.",
                given=pair,
                expected="section.key=value",
                do="Check the key.",
            )
        node = child
        section = _section_of(field)
    field = section.model_fields.get(leaf) if section else None
    try:
        node[leaf] = _value(key, text, field)
    except ValidationError as error:
        raise as_config_error(error, root, key, text) from None


def _value(key: str, text: str, field: FieldInfo | None) -> Any:
    """Parse a text by the field's type: plain text stays as it is, `null` means None, lists and
    mappings are YAML.
    """
    kind = None if field is None else field.annotation
    if field is None or _is_section(kind) or _holds(kind, dict):
        return _yaml(key, text)
    if text == NONE and _holds(kind, types.NoneType):
        return None
    if _holds(kind, tuple):
        return _yaml(key, text if text.lstrip().startswith("[") else f"[{text}]")
    if _holds(kind, str):
        return (
            _yaml(key, text) if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
        )
    whole: Any = Annotated[kind, *field.metadata] if field.metadata else kind
    if _holds(kind, int) and typing.Literal in (
        typing.get_origin(part) for part in (kind, *typing.get_args(kind))
    ):
        return TypeAdapter(whole).validate_python(
            _yaml(key, text)
        )  # A choice among numbers accepts no text.
    return TypeAdapter(whole).validate_python(text)


def _yaml(key: str, text: str) -> Any:
    try:
        return _parsed(text) if text else ""
    except NO_YAML:
        raise ConfigError(
            "The value of an override is not YAML.",
            given=f"{key}={text}",
            expected="a list or a mapping",
            do="Quote the value.",
        ) from None


def _section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section that a key opens; None for a value, a free mapping and an unknown key."""
    kind: Any = None if field is None else field.annotation
    return kind if _is_section(kind) else None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _holds(kind: Any, wanted: type) -> bool:
    """Whether a type is `wanted`, or is a union, a generic or a choice that contains it."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is Annotated:
        return _holds(parts[0], wanted)
    if origin is typing.Literal:
        return any(type(part) is wanted for part in parts)
    if origin in (typing.Union, types.UnionType):
        return any(_holds(part, wanted) for part in parts)
    return (origin or kind) is wanted


def keys_of(section: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a section and its subsections, in order."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        keys += keys_of(kind, f"{prefix}{name}.") if _is_section(kind) else [prefix + name]
    return keys


def as_config_error(
    error: ValidationError, root: type[BaseModel], key: str = "", text: str = ""
) -> ConfigError:
    """pydantic's first complaint as one clear sentence of ours, about an override (whose key and
    text are given) or a whole mapping.
    """
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    parts = [".".join(loc[:length]) for length in range(1, len(loc) + 1)]
    # After a key comes pydantic's name for one of the types that its value may have.
    dotted = key or next((part for part in parts if part in keys_of(root)), ".".join(loc))
    given = text if key else first.get("input")
    if first["type"] == "extra_forbidden":
        keys = keys_of(root)
        near = (
            difflib.get_close_matches(dotted, keys, n=1)
            or [k for k in keys if k.split(".")[-1] == dotted.split(".")[-1]][:1]
        )
        return ConfigError(
            "Unknown configuration key.",
            given=f"{dotted} = {given!r}",
            expected=near[0] if near else "one of the documented keys",
            do=f"Did you mean {near[0]}?" if near else "Remove the key.",
        )
    do = f"Correct {dotted}."
    if str(given) in STOOD_FOR_NONE and _takes_none(root, dotted):
        do = f"Write {dotted}=null for none."
    return ConfigError(
        f"{dotted} has a wrong value.", given=repr(given), expected=first["msg"], do=do
    )


def _takes_none(root: type[BaseModel], dotted: str) -> bool:
    kind: Any = root
    for part in dotted.split("."):
        kind = (
            kind.model_fields[part].annotation
            if _is_section(kind) and part in kind.model_fields
            else None
        )
    return _holds(kind, types.NoneType)
