"""What a loop calls."""

from medusa_ppo.plugin.medusa_plugin import MedusaPlugin

__all__ = ["MedusaPlugin"]
