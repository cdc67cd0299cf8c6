"""Replaces parts of vLLM with ours, once per process, after checking the names that we rely on
(hook_table.py). A vLLM with other names is refused and left unchanged.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import ModelRegistry
from vllm.platforms import current_platform

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin import v1_runner
from medusa_ppo.vllm_plugin.hook_table import CORE, HOOKS, V2, Hook, compare
from medusa_ppo.vllm_plugin.patches import CPU_PATCHES, Patch, patches_of_older
from medusa_ppo.vllm_plugin.speculation import feeds_itself
from medusa_ppo.vllm_plugin.vllm_versions import (
    TESTED,
    can_transfer,
    has_medusa,
    has_v2,
    release,
    require_vllm,
    v2_asked,
    vllm_version,
)
from medusa_ppo.vllm_plugin.worker_calls import TRANSFER

FEED_PLACES = {"EngineCore.post_step"}
V2_PLACES = {"vllm.v1.worker.gpu.model_runner.init_speculator"}
"""What our speculator's module replaces (keys of `Installed.places`)."""


@dataclass
class Installed:
    """What `install` did in this process. `patches` are names for reports; `active` means that V1
    is ready for our heads.
    """

    patches: list[str] = field(default_factory=list)
    places: dict[str, tuple[Any, str, Callable[..., Any]]] = field(default_factory=dict)
    """What was replaced: holder, attribute, original."""
    active: bool = False


INSTALLED = Installed()


def check_hooks(hooks: tuple[Hook, ...] = HOOKS) -> list[str]:
    """Names that are missing or have another signature in the installed vLLM; empty if everything
    is as checked.
    """
    originals = {
        place: original for place, (_, _, original) in INSTALLED.places.items()
    }  # Ours may have replaced them by now.
    return [f"{found.where} {found.fault}" for found in compare(originals, hooks) if found.fault]


def install() -> Installed:
    """Patch vLLM on the CPU and let our proposer draft for heads that we wrote. Does nothing if
    called again.

    Raises:
        UnsupportedVersionError: an unsupported version of vLLM, or a name that is not as checked.
    """
    if not INSTALLED.active:
        _install_for_v1()
    if v2_asked() and has_v2(vllm_version()) and INSTALLED.places.keys().isdisjoint(V2_PLACES):
        _refuse_faults(tuple(hook for hook in HOOKS if hook.runner == V2))
        # Imported here: releases before V2 lack its base class, and V1 does not need it.
        from medusa_ppo.vllm_plugin import speculator

        for holder, name, wrapper in speculator.PLACES:
            _wrap(holder, name, wrapper)
    if feeds_itself() and INSTALLED.places.keys().isdisjoint(FEED_PLACES):
        _refuse_faults(tuple(hook for hook in HOOKS if hook.runner == CORE))
        # Imported here: it imports vLLM's core, which engines without a feed never need.
        from medusa_ppo.vllm_plugin import self_feeding

        for holder, name, wrapper in self_feeding.PLACES:
            _wrap(holder, name, wrapper)
    return INSTALLED


def _refuse_faults(hooks: tuple[Hook, ...]) -> None:
    faults = check_hooks(hooks)
    if faults:
        raise UnsupportedVersionError(
            "vLLM's inner names are not those that medusa-ppo was checked with.",
            given=f"vLLM {vllm_version()}: {'; '.join(faults)}",
            expected="the names in medusa_ppo/vllm_plugin/hook_table.py",
            do=f"Install a released vLLM that was tested: {', '.join(TESTED)}.",
        )


def _install_for_v1() -> None:
    version = require_vllm()
    _refuse_faults(tuple(hook for hook in HOOKS if hook.runner not in (V2, CORE)))
    if current_platform.is_cpu():
        _apply(CPU_PATCHES)
    for holder, name, wrapper in v1_runner.PLACES:
        _wrap(holder, name, wrapper)
    _apply(patches_of_older(release(version)))
    if has_medusa(version) and "MedusaPPOModel" not in ModelRegistry.get_supported_archs():
        # The name of conditioned kinds in config.json. vLLM only looks it up; our proposer builds
        # the heads itself.
        ModelRegistry.register_model("MedusaPPOModel", "vllm.model_executor.models.medusa:Medusa")
    if can_transfer(version):
        with contextlib.suppress(ValueError):  # Already registered.
            importlib.import_module(
                "vllm.distributed.weight_transfer"
            ).WeightTransferEngineFactory.register_engine(
                TRANSFER, "medusa_ppo.vllm_plugin.transfer_engine", "BroadcastEngine"
            )
    INSTALLED.active = True


def _apply(patches: tuple[Patch, ...]) -> None:
    for patch in patches:
        _wrap(patch.holder, patch.attribute, patch.replace)
        INSTALLED.patches += [patch.name] if patch.name else []


def uninstall() -> None:
    """Undo all replacements; for tests that show what happens without the patches."""
    for holder, name, original in INSTALLED.places.values():
        setattr(holder, name, original)
    INSTALLED.patches.clear()
    INSTALLED.places.clear()
    INSTALLED.active = False


def _wrap(
    holder: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(holder, name)
    INSTALLED.places.setdefault(
        f"{holder.__name__}.{name}", (holder, name, original)
    )  # A name may be wrapped twice.
    setattr(holder, name, wrapper(original))
