"""verl loads this in each of its processes (entry point `verl.plugins`): it imports our trainer
when verl's own is imported, hands the driver's MEDUSA_PPO_* variables on to all of verl's Ray
processes, and with MEDUSA_PPO_COMPANION in the environment it lets verl's actor workers be tapped.

verl's trainer takes long to import, and most of verl's processes never do. So nothing of verl is
imported here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from heads.errors import UnsupportedVersionError
from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.worker_tap import COMPANION, own_variables

logger = logging.getLogger(__name__)

AFTER = "verl.trainer.ppo.v1.trainer_sync"
OURS = "medusa_ppo.loops.verl.verl_trainer"
WORKERS = "verl.workers.engine_workers"
ENVIRONMENT = "verl.trainer.constants_ppo"


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs something right after a module is imported, instead of importing it now."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        # Removed now: once is enough, and the search below would find this finder again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.modules[name] = module
                self._then()

            loader.exec_module = exec_module
        return spec


def _bring_ours() -> None:
    try:
        importlib.import_module(OURS)
    except ImportError as error:
        # Not a warning: most users don't ask for our trainer. For those who do, verl reports it as
        # unknown, and this line says why.
        logger.error(
            "medusa-ppo's trainer `medusa_sync` is not available: a name in verl that it relies on"
            " has moved (made for verl 0.9, docs/hooks.md): %s",
            error,
        )


def _tap_workers() -> None:
    from medusa_ppo.loops.verl.verl_tap import tap_worker

    tap_worker(sys.modules[WORKERS].ActorRolloutRefWorker)


def _hand_variables_on() -> None:
    """Let verl start its Ray processes with our variables. A Ray that runs already gives them only
    what verl names there. Set in the driver alone, a variable would change nothing; set on some
    nodes, their ranks would wait in a tap for the others.
    """
    try:
        require_loop("verl.environment")
    except UnsupportedVersionError as error:
        logger.error("MEDUSA_PPO_* variables stay in this process. %s", error)
        return
    module: Any = sys.modules[ENVIRONMENT]
    theirs = module.get_ppo_ray_runtime_env

    @functools.wraps(theirs)
    def get_ppo_ray_runtime_env(*args: Any, **kwargs: Any) -> dict[str, Any]:
        environment: dict[str, Any] = theirs(*args, **kwargs)
        # Without secrets: verl prints what it gives to Ray, and Ray logs it.
        environment["env_vars"] = {**environment.get("env_vars", {}), **own_variables()}
        return environment

    module.get_ppo_ray_runtime_env = get_ppo_ray_runtime_env


sys.meta_path.insert(0, AfterImport(AFTER, _bring_ours))
sys.meta_path.insert(0, AfterImport(ENVIRONMENT, _hand_variables_on))
if os.environ.get(COMPANION):
    sys.meta_path.insert(0, AfterImport(WORKERS, _tap_workers))
