"""What a loop calls."""

from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.plugin.no_plugin import AnyPlugin, NoPlugin

__all__ = ["AnyPlugin", "MedusaPlugin", "NoPlugin"]
