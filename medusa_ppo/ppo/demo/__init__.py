"""The embedded default: a generated task, and a tiny actor that is trained on it on first use."""

from medusa_ppo.ppo.demo.cache import ensure_demo_actor
from medusa_ppo.ppo.demo.pretrain import PretrainProgress, PretrainStatus
from medusa_ppo.ppo.demo.task import demo_rows

__all__ = ["PretrainProgress", "PretrainStatus", "demo_rows", "ensure_demo_actor"]
