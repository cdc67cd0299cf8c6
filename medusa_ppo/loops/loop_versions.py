"""The versions of TRL, verl and OpenRLHF that were checked; all others are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from heads.errors import UnsupportedVersionError

CHECKED: dict[str, tuple[str, ...]] = {
    "trl": ("1.16",),
    "trl.experimental.ppo": ("1.12",),
    "verl": ("0.9",),
    "openrlhf": ("0.11",),
}
"""Distribution (and which part of it) -> the minor versions whose classes and signatures
tests/contracts/ compares with what we rely on.
"""


def require_loop(name: str) -> str:
    """The installed version of a loop.

    Raises:
        UnsupportedVersionError: it is missing, or of a version that was never checked.
    """
    # A part of a distribution has a list of its own: TRL's PPO is there up to 1.12 only.
    package = name.split(".")[0]
    install = f"pip install '{package}=={CHECKED[name][-1]}.*'"
    expected = " or ".join(f"{package} {version}.x" for version in CHECKED[name])
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UnsupportedVersionError(
            f"{name} is not installed.",
            given=f"no package named {package}",
            expected=expected,
            do=f"{install}.",
        ) from None
    if ".".join(version.split(".")[:2]) not in CHECKED[name]:
        raise UnsupportedVersionError(
            f"This version of {name} was never checked with medusa-ppo.",
            given=version,
            expected=expected,
            do=f"{install}, or run tests/contracts/ against yours and report what is red.",
        )
    return version


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a module's attribute during the block: some loops have no extension point where they
    build their engine.
    """
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
