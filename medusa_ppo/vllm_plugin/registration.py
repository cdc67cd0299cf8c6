"""The entry point that vLLM loads in each of its processes (group `vllm.general_plugins`).

vLLM imports this before it is configured, and also in processes that draft nothing. So everything
that imports vLLM or torch is imported by `activate`, not here.
"""

from __future__ import annotations

import logging

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin.vllm_versions import is_allowed, require_vllm, vllm_version

logger = logging.getLogger(__name__)


def register() -> None:
    """Patch vLLM's CPU sampler and add our proposer. Safe to call again.

    With an unsupported version of vLLM nothing is changed, so that other users of vLLM are not
    affected; our own engines and worker extension refuse to start there (`require_active`).
    """
    version = vllm_version()
    if not is_allowed(version):
        logger.error(
            "medusa-ppo does not work with vLLM %s; its vLLM plugin stays out.",
            version or "(unknown version)",
        )
        return
    activate()


def activate() -> None:
    """Install, or log why not. Raises UnsupportedVersionError."""
    # Imported here because it imports vLLM, which loads this module first.
    from medusa_ppo.actors.vision import spare_torchvision
    from medusa_ppo.vllm_plugin.installation import install

    spare_torchvision()
    install()


def require_active() -> list[str]:
    """Names of the patches that are active in this process.

    Raises:
        UnsupportedVersionError: our plugin isn't active here; vLLM only logs a plugin that fails
            to load.
    """
    from medusa_ppo.vllm_plugin.installation import INSTALLED

    if not INSTALLED.active:
        version = require_vllm()  # An active plugin checked this at install.
        raise UnsupportedVersionError(
            "The medusa-ppo plugin is not active in this vLLM process.",
            given=f"vLLM {version}, plugin not loaded",
            expected="the entry point medusa_ppo of vllm.general_plugins",
            do=(
                "Install medusa-ppo into vLLM's environment, and leave VLLM_PLUGINS unset or add"
                " medusa_ppo to it."
            ),
        )
    return list(INSTALLED.patches)
