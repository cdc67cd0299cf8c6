"""What all sections of the settings are made of: their base class and the types of their keys."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from heads.errors import ConfigError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


def unknown(problem: str, given: str, known: Sequence[str]) -> ConfigError:
    """An error that names the nearest of the names that exist."""
    near = difflib.get_close_matches(given, known, n=1)
    return ConfigError(
        problem,
        given=given,
        expected=near[0] if near else ", ".join(known),
        do=f"Did you mean {near[0]}?" if near else "Name one of these.",
    )
