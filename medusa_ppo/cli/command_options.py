"""Options that several commands share, and options made from a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from heads.errors import ConfigError, UsageError

Config = Annotated[
    Path, typer.Option(help="YAML file of the run, or the name of a preset in configs/.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys that override the file."),
]


def options_from(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the fields of a dataclass into options of a command, which gets a `kind` as its first
    argument.

    A field becomes an option if its `Annotated` describes one; users type tuples with commas. The
    command's other parameters stay its own options.
    """
    hints = get_type_hints(kind, include_extras=True)
    typed = [
        field for field in dataclasses.fields(kind) if hasattr(hints[field.name], "__metadata__")
    ]

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            values = {}
            for field in typed:
                value = given.pop(field.name)
                if isinstance(field.default, tuple):
                    value = _parse_tuple(field, value, hints[field.name])
                values[field.name] = value
            function(kind(**values), **given)

        # typer reads a command's options from its signature, and the documentation's pages read
        # them from its annotations.
        parameters = [_option_parameter(field, hints[field.name]) for field in typed]
        # Annotations are text in these files (`from __future__ import annotations`); typer needs
        # the objects.
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        # `run` takes only keywords.
        parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap


def check_outputs(**files: Path | None) -> None:
    """Check that these options' files can be written, before the work whose figures they are for.

    Raises:
        UsageError: one is a folder, or is in one that can't be written to.
    """
    for option, path in files.items():
        if path is None:
            continue
        problem = "This is a folder." if path.is_dir() else _why_not_written(path.absolute().parent)
        if problem:
            raise UsageError(
                f"The file of --{option} can't be written. {problem}",
                given=str(path),
                expected="a file, in a folder that can be written to",
                do=f"Correct --{option}.",
            )


def check_folder(option: str, folder: Path) -> None:
    """Check that files can be written into this folder, which need not exist yet.

    Args:
        option: what named it, for the message.

    Raises:
        UsageError: they can't.
    """
    if problem := _why_not_written(folder.absolute()):
        raise UsageError(
            f"The folder can't be written to. {problem}",
            given=f"{option} {folder}",
            expected="a folder that can be written to, or one that can be created",
            do=f"Correct {option}.",
        )


def _why_not_written(folder: Path) -> str:
    """Why no file can be written into a folder; empty if it can."""
    # Missing folders are created in the last one that exists.
    last = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not last.is_dir():
        return f"{last} is no folder."
    if not os.access(last, os.W_OK | os.X_OK):
        return f"{last} can't be written to by this user."
    return ""


def _option_parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """The parameter that typer turns into an option; its type is text if the field is a tuple."""
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    # typer's tuples have a fixed length. Ours don't, so typer gets them as text.
    if isinstance(default, tuple):
        hint = Annotated[(str, *hint.__metadata__)]
        default = ",".join(map(str, default))
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )


def _parse_tuple(field: dataclasses.Field[Any], text: str, hint: Any) -> tuple[Any, ...]:
    """Parse comma-separated words or numbers. Numbers must be above 0; 0 itself is allowed if the
    option has min=0.

    Raises:
        ConfigError: a part is not such a number, or there are none although the default has some.
    """
    default: tuple[Any, ...] = field.default  # type: ignore[assignment]
    kind = get_args(get_args(hint)[0])[0]
    zero_allowed = hint.__metadata__[0].min == 0
    words = [word.strip() for word in text.split(",") if word.strip()]

    def fits(part: Any) -> bool:
        return isinstance(part, str) or part > 0 or (zero_allowed and part == 0)

    try:
        parts = tuple(kind(word) for word in words)
        sound = all(fits(part) for part in parts) and bool(parts or not default)
    except ValueError:
        sound = False
    if not sound:
        option = f"--{field.name.replace('_', '-')}"
        example = ",".join(map(str, default)) or ("0,1,4" if zero_allowed else "0.3,0.7,1.0")
        raise ConfigError(
            f"{option} takes numbers {'from 0 on' if zero_allowed else 'above 0'}.",
            given=text,
            expected=f"like {example}",
            do=f"Correct {option}.",
        )
    return parts
