"""The engine of loops that generate with transformers: nothing drafts there, heads are only trained, to serve later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads.checkpoint import checksum, load_state
from heads.errors import EngineError
from medusa_ppo.serving import engine as base
from medusa_ppo.types import Checked, Counters, Rollouts, Sampling, SwapReceipt


class NoEngine(base.RolloutEngine):
    """Takes heads and remembers which; everything else it has not."""

    def __init__(self) -> None:
        self._heads = ""

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        raise self._absent("generate")

    def swap_heads(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        self._heads = checksum(load_state(base.check_file(path, "new heads")))
        self.heads_version = version
        return SwapReceipt(version, self._heads, 0.0)

    def sync_actor(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        raise self._absent("sync_actor")

    def set_num_drafts(self, count: int) -> None:
        base.check_num_drafts(count, self.max_drafts)

    def set_drafting(self, **settings: Any) -> None:
        raise self._absent("set_drafting")

    def checksums(self) -> dict[str, str]:
        return {"heads": self._heads, "actor": ""}

    def counters(self) -> Counters:
        return Counters()

    def plugin_report(self) -> dict[str, Any]:
        return {"kind": "", "drafter": "", "max_drafts": 0}

    def close(self) -> None:
        """Nothing to end."""

    @staticmethod
    def _absent(method: str) -> EngineError:
        return EngineError("There is no engine here.", given=method, expected="heads to train", do="Generate with vLLM to draft.")
