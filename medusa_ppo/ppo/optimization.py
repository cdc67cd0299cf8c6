"""The optimizer's side of an update: AdamW, learning-rate schedule, non-finite gradients."""

from __future__ import annotations

import math

import torch
from torch import nn

from heads.errors import RunError
from medusa_ppo.config.ppo_section import PPOConfig

ADAM_BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-8


def adamw(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """The optimizer of actor and critic."""
    # No weight decay: it would pull the policy towards zero and away from the reference.
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPSILON,
        weight_decay=0.0,
        fused=True,
    )


def learning_rate_share(config: PPOConfig, step: int) -> float:
    """Share of the configured learning rates at a PPO step: warmup, then the schedule.

    A function of the step alone, so a resumed run needs no state.
    """
    warmup = config.warmup_steps or 0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.learning_rate_schedule is None:
        return 1.0
    done = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    if config.learning_rate_schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all the optimizer's parameters, from its next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class GradientNorms:
    """The gradient norms of an update's optimizer steps; a step whose gradient is not finite is
    skipped and counted.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.skipped = 0

    def sound(self, norm: float) -> bool:
        """Whether the step may be taken; records its norm, or counts it as skipped."""
        if math.isfinite(norm):
            self.norms.append(norm)
            return True
        self.skipped += 1
        return False

    def mean(self, who: str) -> float:
        """Mean norm of the steps taken; 0 if there was nothing to learn from.

        Raises:
            RunError: every step was skipped.
        """
        if self.skipped and not self.norms:
            raise RunError(
                f"The gradient of the {who} is not finite.",
                given=f"in all {self.skipped} optimizer step(s) of an update",
                expected="a finite norm",
                do=(
                    f"Lower ppo.{who}_learning_rate, check the rewards for huge values, and "
                    "continue with --resume."
                ),
            )
        return sum(self.norms) / max(1, len(self.norms))
