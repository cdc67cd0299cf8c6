"""One page for each command, read from the typer app itself: what it does, its arguments, its
options with their defaults.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import typer

from medusa_ppo.cli.app import app

PROGRAM = "medusa-ppo"
EXAMPLE = re.compile(r"Example:\s*\[bold\](.*?)\[/bold\]", re.DOTALL)
KINDS = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}


@cache
def leaves() -> dict[str, Callable[..., None]]:
    """Every command that can be run, by its words without the program's name ("bench rollout")."""

    def walk(
        group: typer.Typer, words: tuple[str, ...]
    ) -> Iterator[tuple[str, Callable[..., None]]]:
        for command in group.registered_commands:
            if command.callback is not None and not command.hidden:
                yield (
                    " ".join((*words, command.name or command.callback.__name__.replace("_", "-"))),
                    command.callback,
                )
        for child in group.registered_groups:
            if child.typer_instance is not None:
                yield from walk(child.typer_instance, (*words, str(child.name)))

    return dict(walk(app, ()))


def command_names() -> list[str]:
    return list(leaves())


def help_text(name: str) -> tuple[str, str]:
    """What a command does, and its example ("" for none): its docstring, without the marks for the
    terminal.
    """
    text = inspect.getdoc(leaves()[name]) or ""
    example = EXAMPLE.search(text)
    words = EXAMPLE.sub("", text).strip()
    return words, re.sub(r"\s*\n\s*", " \\\\\n    ", example.group(1).strip()) if example else ""


def parameters(name: str) -> list[dict[str, str]]:
    """Arguments first, then options: kind, name, default, help."""
    function = leaves()[name]
    hints = typing.get_type_hints(function, include_extras=True)
    rows = []
    for key, parameter in inspect.signature(function).parameters.items():
        if hints[key] is typer.Context:
            continue
        kind, info = typing.get_args(hints[key])[:2]
        argument = isinstance(info, typer.models.ArgumentInfo)
        rows.append(
            {
                "kind": "argument" if argument else "option",
                "name": str(info.metavar or key.upper()) if argument else _option(key, kind, info),
                "default": _default(parameter.default, kind),
                "help": (info.help or "").strip(),
            }
        )
    return sorted(rows, key=lambda row: row["kind"])


def command_page(name: str) -> str:
    """The page of one command."""
    words, example = help_text(name)
    rows = parameters(name)
    usage = " ".join(
        [PROGRAM, name, *(row["name"] for row in rows if row["kind"] == "argument"), "[OPTIONS]"]
    )
    lines = [f"# {PROGRAM} {name}", "", escape(words), "", "```", usage, "```", ""]
    if example:
        lines += ["For example:", "", "```", example, "```", ""]
    for kind, title in (("argument", "Arguments"), ("option", "Options")):
        part = [row for row in rows if row["kind"] == kind]
        if part:
            lines += [f"## {title}", "", f"| {kind} | default | what it is |", "|---|---|---|"]
            lines += [
                f"| `{row['name']}` | {default_cell(row['default'])} |"
                f" {cell(escape(row['help']))} |"
                for row in part
            ]
            lines.append("")
    return "\n".join(lines)


def commands_page(pages: Mapping[str, str]) -> str:
    """The list of commands. `pages`: page of each."""
    lines = ["# Commands", "", "| command | what it does |", "|---|---|"]
    for name, page in pages.items():
        first = help_text(name)[0].split("\n\n")[0].replace("\n", " ")
        lines.append(f"| [`{PROGRAM} {name}`]({page}) | {cell(escape(first))} |")
    return "\n".join(
        [
            *lines,
            "",
            (
                "`--help` after any of them prints its options. `--debug` anywhere shows the whole"
                " traceback of an error. Exit codes: 0 done,"
            ),
            "1 failed, 2 wrong usage, 130 interrupted (what was finished is on disk).",
            "",
        ]
    )


def _option(key: str, kind: Any, info: Any) -> str:
    """An option as one types it, with what goes behind it."""
    plain = _without_none(kind)
    words = key.replace("_", "-")
    # Inside Annotated the first name stands where a default would (typer puts it right when it
    # builds the parser).
    names = " ".join(
        str(name)
        for name in (info.default, *(info.param_decls or ()))
        if isinstance(name, str) and name.startswith("-")
    )
    if plain is bool:
        return (names or f"--{words}/--no-{words}").replace("/", " / ")
    if info.metavar:
        value = info.metavar
    elif typing.get_origin(plain) is Literal:
        value = "|".join(map(str, typing.get_args(plain)))
    elif typing.get_origin(plain) is list:
        value = KINDS[typing.get_args(plain)[0].__name__]
    else:
        value = KINDS[plain.__name__]
    return f"{names or '--' + words} {value}"


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return kind


def _default(value: Any, kind: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or value == "":
        return ""
    if _without_none(kind) is bool:
        return "on" if value else "off"
    return str(value)


def default_cell(value: str) -> str:
    return value if value in ("", "required", "on", "off") else f"`{value}`"


def cell(text: str) -> str:
    """Text in a cell of a table; inside of code a bar does no harm, and a backslash would show."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    return "".join(
        part if index % 2 else part.replace("|", "&#124;") for index, part in enumerate(parts)
    )


def escape(text: str) -> str:
    """Plain text in Markdown: what would be read as HTML or a mark is not."""
    return (
        text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
        if "`" not in text
        else text.replace("<", "&lt;")
    )
