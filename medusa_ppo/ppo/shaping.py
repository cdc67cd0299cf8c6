"""What happens to rewards before they become advantages, and how the KL coefficient follows the KL.

The state kept from step to step (the coefficient, the scale of the rewards) is saved with the
weights.

Shape letters: S sequences, R response positions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from heads.errors import CheckpointError
from medusa_ppo.config.ppo_section import MASK, PPOConfig
from medusa_ppo.ppo.batch import PPOBatch

STATE_FILE = "shaping.json"
KL_CHANGE = 0.1
"""Largest relative change of the coefficient in a step."""


class Shaping:
    """A step's rewards as used for the advantages.

    Attributes:
        kl_coefficient: the coefficient of this step.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self.kl_coefficient = config.kl_coefficient
        # Of all rewards so far, by Welford's method: one pass, and no difference of large sums.
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def trained(self, batch: PPOBatch) -> Tensor:
        """bool_S: the responses that are learned from."""
        if self._config.cut_responses == MASK:
            return ~batch.cut_S
        return torch.ones(len(batch), dtype=torch.bool)

    def rewards(self, batch: PPOBatch, rewards: Tensor) -> Tensor:
        """The rewards of responses (S) or of their tokens (S, R), minus penalties for length and
        cuts, in units of their own spread.
        """
        config = self._config
        penalties_S = torch.zeros(len(batch))
        if config.length_penalty is not None:
            penalties_S += config.length_penalty * batch.lengths_S
        if config.cut_responses not in (None, MASK):
            penalties_S += float(config.cut_responses) * batch.cut_S
        if rewards.dim() == 2:
            rewards = rewards.clone()
            rewards[torch.arange(len(batch)), batch.lengths_S - 1] -= penalties_S
        else:
            rewards = rewards - penalties_S
        return rewards / self._spread(rewards) if config.scale_rewards else rewards

    def _spread(self, rewards: Tensor) -> float:
        """Standard deviation of all rewards so far, including these; 1 while all are the same."""
        rewards_S = rewards if rewards.dim() == 1 else rewards.sum(dim=1)
        for reward in rewards_S.tolist():
            self._count += 1
            before = reward - self._mean
            self._mean += before / self._count
            self._squares += before * (reward - self._mean)
        return math.sqrt(self._squares / self._count) or 1.0

    def adapt(self, kl: float) -> None:
        """Adapt the coefficient for the next step: up if this step's KL (nats a token) is above the
        goal, down if it is below.
        """
        if self._config.kl_goal is None or not math.isfinite(kl):
            return
        excess = kl / self._config.kl_goal - 1
        self.kl_coefficient *= 1 + KL_CHANGE * max(-1.0, min(1.0, excess))

    def save(self, folder: Path) -> None:
        (folder / STATE_FILE).write_text(
            json.dumps([self.kl_coefficient, self._count, self._mean, self._squares]) + "\n",
            encoding="utf-8",
        )

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; a fixed coefficient stays as configured.

        Without a file nothing changes, since early releases wrote none.
        """
        file = folder / STATE_FILE
        if not file.is_file():
            return
        try:
            coefficient, count, mean, squares = json.loads(file.read_text(encoding="utf-8"))
            self._count = int(count)
            self._mean = float(mean)
            self._squares = float(squares)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(
                "The saved run is damaged.",
                given=f"{file}: {error!r}",
                expected="four numbers",
                do="Start without --resume.",
            ) from None
        if self._config.kl_goal is not None:
            self.kl_coefficient = float(coefficient)
