"""What `medusa-ppo train` can be told, with every default in this one place (no torch).

Where a setting is one of a run's too, its default is read from there. What differs says why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from medusa_ppo.config import CompanionConfig, HeadsSection, SamplingConfig

Kind = Literal["medusa", "markov", "hydra"]
Loss = Literal["ce", "tv", "ce_tv", "kl", "kl_tv"]
Dtype = Literal["float32", "bfloat16"]
MEANS_NOTHING_TO_HEADS = ("out", "max_minutes", "target_mal", "cache_bytes", "fresh")
"""Options that change when a training stops or how fast it is, not what the heads are after so many tokens."""


HEADS, COMPANION, SAMPLING = HeadsSection(), CompanionConfig(), SamplingConfig()
"""A run's settings, at their defaults."""


@dataclass(frozen=True)
class TrainOptions:
    """The command's options; see `medusa-ppo train --help`. Pass by keyword."""

    model: str
    data: str
    out: Path
    kind: Kind = HEADS.kind
    num_heads: int = HEADS.num_heads
    loss: Loss = "ce_tv"
    """Not the companion's: that one reads the actor's whole distribution, which gains where tokens are few; here they are many."""
    template: str = ""
    column: str = ""
    respond: bool = False
    streaming: bool = False
    max_train_tokens: int = 100_000
    max_minutes: float = 0.0
    target_mal: float = 0.0
    epochs: int = 4
    """More than the companion's: these tokens are all there are, the companion gets new ones with every step."""
    learning_rate: float = COMPANION.learning_rate
    batch_positions: int = 512
    """Fewer than the companion's: a cosine calms small steps down in the end, and the companion has none, but a policy that moves."""
    accumulate: int = 1
    workers: int = 1
    dtype: Dtype = "float32"
    cache_bytes: int = 4 * 1024**3
    temperature: float = SAMPLING.temperature
    max_new_tokens: int = 128
    """More than a run's, which is sized for an engine of short contexts: here the engine is made to fit."""
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
