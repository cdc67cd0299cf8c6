"""The page of configuration keys: key, type, default and meaning, from the fields of
medusa_ppo/config and their docstrings.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

import yaml
from commands import cell, escape
from pydantic.fields import FieldInfo

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.config.section import Section

OR_NULL = ", or null"
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
TITLES = {
    "": "The run",
    "model": "The actor",
    "actor": "How the actor is trained",
    "data": "Prompts",
    "sampling": "How rollouts are sampled",
    "engine": "vLLM and drafting",
    "heads": "The heads",
    "companion": "Training the heads beside PPO",
    "ppo": "The reference PPO loop",
    "report": "What is measured",
}

HEAD = """# Configuration keys

A run reads a YAML file with the keys that differ from these defaults. `key=value` pairs on the
command line override it (`medusa-ppo ppo --config FILE ppo.steps=20`). An unknown key is an error
that names the nearest valid one; keys that contradict each other are refused before anything
starts. `null` means none, or automatic if the value follows from the hardware or from other keys;
`medusa-ppo plan` prints such values and why. A file may begin with `extends: NAME` (a preset) or
`extends: ./FILE.yaml` and then hold only what differs. The key's type decides how `key=value` is
read: `name=on` is a text, lists are `a,b` or `[a, b]`.

The loops of TRL, verl and OpenRLHF read the sections `heads`, `companion` and `engine`.
"""


def sections() -> dict[str, list[tuple[str, FieldInfo]]]:
    """Section ("" for the top level) -> its fields."""
    found: dict[str, list[tuple[str, FieldInfo]]] = {"": []}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = list(field.annotation.model_fields.items())
        else:
            found[""].append((name, field))
    return found


def configuration_page() -> str:
    """The whole page."""
    lines = [HEAD]
    for section, fields in sections().items():
        name = f": `{section}`" if section else ""
        lines += [
            f"## {TITLES.get(section, section)}{name}",
            "",
            "| key | type | default | what it is |",
            "|---|---|---|---|",
        ]
        for key, field in fields:
            dotted = f"{section}.{key}" if section else key
            lines.append(
                f"| `{dotted}` | {cell(type_words(field))} | `{default_words(field)}` |"
                f" {cell(escape(field.description or ''))} |"
            )
        lines.append("")
    return "\n".join(lines)


def type_words(field: FieldInfo) -> str:
    """The type as words: the choices of a Literal, or a name with its bounds; `or null` where there
    may be none.
    """
    name, optional, _ = _name(field.annotation).partition(OR_NULL)
    return f"{name} {_bounds(field.metadata)}".strip() + optional


def default_words(field: FieldInfo) -> str:
    """The default as YAML would write it."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=1000))
        .removesuffix("...\n")
        .strip()
    )


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is typing.Annotated:
        bounds = _bounds(parts[1].metadata if isinstance(parts[1], FieldInfo) else parts[1:])
        return f"{_name(parts[0])} {bounds}".strip()
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_name(part) for part in parts)
    if isinstance(kind, types.GenericAlias):
        return "list of " + _name(parts[0]) if origin is tuple else "mapping"
    return {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "NoneType": "null",
    }[kind.__name__]


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = [
        f"{sign} {getattr(part, name)}"
        for part in metadata
        for name, sign in BOUNDS.items()
        if hasattr(part, name)
    ]
    return ", ".join(bounds).replace("<", "&lt;")
