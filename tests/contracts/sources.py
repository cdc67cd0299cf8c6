"""How contract tests read a loop's own classes and functions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    return textwrap.dedent(inspect.getsource(thing))


def position(text: str, *parts: str) -> list[int]:
    found = [text.index(part) for part in parts]
    assert found == sorted(found), parts
    return found
