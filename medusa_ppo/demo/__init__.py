"""The embedded default: a generated task, and a tiny actor that is trained on it on first use."""

from medusa_ppo.demo.demo_actor import PretrainProgress, PretrainStatus, ensure_demo_actor
from medusa_ppo.demo.task import demo_rows

__all__ = ["PretrainProgress", "PretrainStatus", "demo_rows", "ensure_demo_actor"]
