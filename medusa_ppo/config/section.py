"""The base class of all configuration sections and the types of their keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from heads.errors import ConfigError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Contradiction(NamedTuple):
    """Keys whose values exclude each other.

    Attributes:
        problem: why they do, in one sentence.
        keys: dotted, as a user writes them.
        expected: what would be right.
        do: what the user should change.
    """

    problem: str
    keys: tuple[str, ...]
    expected: str
    do: str


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, field docstrings become descriptions.

    A section checks its own rules when it is made, so they also hold where a program builds one
    section by itself.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Contradicting keys; the first one found is raised when loading, not at step 300."""
        yield from ()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for problem, keys, expected, do in self.contradictions():
            given = ", ".join(f"{key}={self.value_of(key)}" for key in keys)
            raise ConfigError(problem, given=given, expected=expected, do=do)
        return self

    def value_of(self, key: str) -> object:
        """The value of a dotted key; a section does not know its own name in the run."""
        path = key.split(".")
        known = path[0] in type(self).model_fields
        return reduce(getattr, path if known else path[1:], self)


def unknown(problem: str, given: str, known: Sequence[str]) -> ConfigError:
    """An error that names the closest existing name."""
    near = difflib.get_close_matches(given, known, n=1)
    return ConfigError(
        problem,
        given=given,
        expected=near[0] if near else ", ".join(known),
        do=f"Did you mean {near[0]}?" if near else "Name one of these.",
    )
