"""medusa-ppo: Medusa draft heads for the actor of a PPO loop, trained while it runs, served by
vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"
__all__ = ["MedusaPlugin", "__version__"]

if TYPE_CHECKING:
    from medusa_ppo.plugin.medusa_plugin import MedusaPlugin


def __getattr__(name: str) -> Any:
    # Lazy, so that `import medusa_ppo` (and the CLI) stays free of torch.
    if name == "MedusaPlugin":
        from medusa_ppo.plugin.medusa_plugin import MedusaPlugin

        return MedusaPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
