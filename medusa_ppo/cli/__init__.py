"""The commands."""

from medusa_ppo.cli.app import main

__all__ = ["main"]
