"""What `medusa-ppo train` can be told, with every default in this one place (no torch)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CACHE_BYTES = 4 * 1024**3
MEANS_NOTHING_TO_HEADS = ("out", "max_minutes", "target_mal", "cache_bytes", "fresh")
"""Options that change when a training stops or how fast it is, not what the heads are after so many tokens."""


@dataclass(frozen=True)
class TrainOptions:
    """The command's options; see `medusa-ppo train --help`. Pass by keyword."""

    model: str
    data: str
    out: Path
    kind: str = "hydra"
    num_heads: int = 4
    loss: str = "ce_tv"
    template: str = ""
    column: str = ""
    respond: bool = False
    streaming: bool = False
    max_train_tokens: int = 100_000
    max_minutes: float = 0.0
    target_mal: float = 0.0
    epochs: int = 4
    learning_rate: float = 2e-3
    batch_positions: int = 512
    accumulate: int = 1
    workers: int = 1
    dtype: str = "float32"
    cache_bytes: int = CACHE_BYTES
    temperature: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0
    fresh: bool = False

    @property
    def step_positions(self) -> int:
        """Positions of one optimizer step, of all workers together."""
        return self.batch_positions * self.accumulate * self.workers

    @property
    def draft_temperature(self) -> float:
        """Drafts that the heads are judged by: those that their loss aims at. 0: one-hot."""
        return 0.0 if self.loss == "ce" else 1.0

    def settings(self) -> dict[str, Any]:
        """What the heads depend on, as JSON values."""
        return {key: value for key, value in asdict(self).items() if key not in MEANS_NOTHING_TO_HEADS}
