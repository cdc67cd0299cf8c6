"""Hooks for other people's loops: the releases they were run with, and the messages about others.
The names that a hook relies on are looked up when it starts (`loop_seams`), so a newer release
works as long as it has them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from heads.errors import UnsupportedVersionError
from medusa_ppo.loops.loop_seams import SEAMS, broken_seam

logger = logging.getLogger(__name__)

CHECKED: dict[str, tuple[str, ...]] = {
    "trl": ("1.16",),
    "trl.experimental.ppo": ("1.12",),
    "verl": ("0.9",),
    "verl.environment": ("0.9",),
    "verl.worker": ("0.9",),
    "verl.server": ("0.9",),
    "openrlhf": ("0.11",),
    "skyrl": ("0.4",),
    "nemo_rl": (),
    "nemo_rl.driver": (),
}
"""Distribution (and its part) -> the minor versions for which tests/contracts/ compares classes and
signatures with what we rely on; empty: it could never be run.
"""
INSTALLED_OTHERWISE: dict[str, str] = {
    # TRL's own extra brings vLLM 0.31, with which drafts gain less on a GPU (docs/hooks.md).
    "trl": "'medusa-ppo[trl,vllm]' 'trl=={version}.*'",
    # The extra that brings SkyRL's engine pins a package that PyPI lacks (docs/hooks.md).
    "skyrl": "'medusa-ppo[skyrl]' 'skyrl[skyrl-train]=={version}.*'",
}
"""Distribution -> what pip is asked for, where that isn't the loop with its `[vllm]` beside us."""
_told: set[str] = set()


def install_command(name: str) -> str:
    """The command that installs the last release of a loop that was run, beside us and with a vLLM
    and a transformers that both take; `make installs` resolves these.
    """
    package = name.split(".")[0]
    if not CHECKED[name]:
        return "see docs/hooks.md"
    usual = f"'medusa-ppo[{package}]' '{package}[vllm]=={{version}}.*'"
    what = INSTALLED_OTHERWISE.get(package, usual).format(version=CHECKED[name][-1])
    return f"pip install {what}"


def require_loop(name: str) -> str:
    """The installed version of a loop. If it was never run with our hooks, the log says so once.

    Raises:
        UnsupportedVersionError: the loop is not installed, or a name that our hooks rely on is
            missing or has a different signature; the message says which.
    """
    package = name.split(".")[0]
    checked = CHECKED[name]
    expected = " or ".join(f"{package} {version}.x" for version in checked)
    install = install_command(name)
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UnsupportedVersionError(
            f"{name} is not installed.",
            given=f"no package named {package}",
            expected=expected or "an installation of it",
            do=f"{install}.",
        ) from None
    if fault := broken_seam(name):
        raise UnsupportedVersionError(
            f"medusa-ppo can't hook into this version of {name}.",
            given=f"{package} {version}: {fault}",
            expected=f"as in {expected}" if expected else "as in docs/other-loops.md",
            do=f"{install}; or report this, with the version.",
        )
    if ".".join(version.split(".")[:2]) not in checked and name not in _told:
        _told.add(name)
        logger.warning(
            "%s %s was never run with medusa-ppo (%s). All %d names that it hooks are there, with"
            " the known signatures.",
            name,
            version,
            f"tested: {expected}" if expected else "no version was",
            len(SEAMS[name]),
        )
    return version


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a module's attribute during the block, because some loops have no extension point
    where they build their engine.
    """
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
