"""What happens to rewards before they become advantages, and to step sizes and the KL coefficient
while a run goes on.

Everything that is remembered from step to step (the coefficient, the scale of the rewards) is saved
with the weights.

Shape letters: S sequences, R response positions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from heads.errors import CheckpointError, RunError
from medusa_ppo.config.ppo_config import MASK, PPOConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo import models
from medusa_ppo.ppo.batch import PolicyScores, PPOBatch

STATE_FILE = "shaping.json"
IMPORTANCE_BOUND = 2.0
"""Ratios of actor to engine above this are counted where ppo.importance_bound names none."""
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.95), 1e-8
KL_CHANGE = 0.1
"""Most that the coefficient changes in a step, as a share of it."""


class Shaping:
    """The rewards of a step as the advantages see them.

    Attributes:
        kl_coefficient: of this step.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self.kl_coefficient = config.kl_coefficient
        self._count, self._mean, self._squares = (
            0,
            0.0,
            0.0,
        )  # Of all rewards so far: Welford's sums.

    def trained(self, batch: PPOBatch) -> Tensor:
        """bool_S, the responses that are learned from."""
        if self._config.cut_responses == MASK:
            return ~batch.cut_S
        return torch.ones(len(batch), dtype=torch.bool)

    def rewards(self, batch: PPOBatch, rewards: Tensor) -> Tensor:
        """The rewards of responses (S) or of their tokens (S, R), less what length and cuts cost,
        in units of their own spread.
        """
        config = self._config
        taken_S = torch.zeros(len(batch))
        if config.length_penalty is not None:
            taken_S += config.length_penalty * batch.lengths_S
        if config.cut_responses not in (None, MASK):
            taken_S += float(config.cut_responses) * batch.cut_S
        if rewards.dim() == 2:
            rewards = rewards.clone()
            rewards[torch.arange(len(batch)), batch.lengths_S - 1] -= taken_S
        else:
            rewards = rewards - taken_S
        return rewards / self._spread(rewards) if config.scale_rewards else rewards

    def _spread(self, rewards: Tensor) -> float:
        """Standard deviation of the rewards of whole responses, these included; 1 while they are
        all the same.
        """
        for reward in (rewards if rewards.dim() == 1 else rewards.sum(dim=1)).tolist():
            self._count += 1
            before = reward - self._mean
            self._mean += before / self._count
            self._squares += before * (reward - self._mean)
        return math.sqrt(self._squares / self._count) or 1.0

    def adapt(self, kl: float) -> None:
        """Move the coefficient of the next step: up where the KL of this one (nats a token) is
        above the goal, down where it is below.
        """
        if self._config.kl_goal is not None and math.isfinite(kl):
            self.kl_coefficient *= 1 + KL_CHANGE * max(
                -1.0, min(1.0, kl / self._config.kl_goal - 1)
            )

    def save(self, folder: Path) -> None:
        (folder / STATE_FILE).write_text(
            json.dumps([self.kl_coefficient, self._count, self._mean, self._squares]) + "\n",
            encoding="utf-8",
        )

    def load(self, folder: Path) -> None:
        """What `save` wrote; a coefficient that is fixed is the configuration's. Earlier releases
        wrote none: then as at a run's start.
        """
        if not (folder / STATE_FILE).is_file():
            return
        try:
            coefficient, count, mean, squares = json.loads(
                (folder / STATE_FILE).read_text(encoding="utf-8")
            )
            self._count = int(count)
            self._mean = float(mean)
            self._squares = float(squares)
        except (OSError, TypeError, ValueError) as error:
            given = f"{folder / STATE_FILE}: {error!r}"
            do = "Start without --resume."
            raise CheckpointError(
                "The saved run is damaged.", given=given, expected="four numbers", do=do
            ) from None
        if self._config.kl_goal is not None:
            self.kl_coefficient = float(coefficient)


def learning_rate_share(config: PPOConfig, step: int) -> float:
    """Share of the configured step sizes that a PPO step learns with. A function of the step
    alone.
    """
    share = 1.0
    warmup = config.warmup_steps or 0
    if step < warmup:
        share = (step + 1) / (warmup + 1)
    elif config.learning_rate_schedule is not None:
        done = min(1.0, (step - warmup) / max(1, config.steps - warmup))
        share = (
            1 - done
            if config.learning_rate_schedule == "linear"
            else (1 + math.cos(math.pi * done)) / 2
        )
    return share


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


class GradientNorms:
    """The gradient norms of an update's optimizer steps; a step whose gradient is not finite is
    left out and counted.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.skipped = 0

    def sound(self, norm: float) -> bool:
        """Take this step."""
        if math.isfinite(norm):
            self.norms.append(norm)
            return True
        self.skipped += 1
        return False

    def mean(self, who: str) -> float:
        """Of the steps that were taken; 0 where there was nothing to learn from. RunError when
        every step had to be left out.
        """
        if self.skipped and not self.norms:
            raise RunError(
                f"The gradient of the {who} is not finite.",
                given=f"in all {self.skipped} optimizer step(s) of an update",
                expected="a finite norm",
                do=(
                    f"Lower ppo.{who}_learning_rate, check the rewards for huge values, and go on"
                    " with --resume."
                ),
            )
        return sum(self.norms) / max(1, len(self.norms))


def engine_gap(
    batch: PPOBatch, found: PolicyScores, bound: float | None
) -> tuple[Tensor, dict[str, float]]:
    """log pi - log pi_engine of each token, 0 on padding, and what the log says about it."""
    mask_SR = batch.mask_SR
    gap_SR = torch.where(mask_SR, found.logprobs_SR - batch.behaviour_SR, 0.0)
    ratio_SR = gap_SR.exp()
    return gap_SR, {
        names.LOGPROB_GAP: models.masked_mean(gap_SR.abs(), mask_SR).item(),
        names.LOGPROB_GAP_MAX: gap_SR.abs().max().item(),
        names.ENGINE_KL: models.masked_mean(ratio_SR - 1 - gap_SR, mask_SR).item(),
        names.IMPORTANCE_CUT: (
            models.masked_mean((ratio_SR > (bound or IMPORTANCE_BOUND)).float(), mask_SR).item()
        ),
    }


def adamw(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    # No weight decay: it would pull the policy towards zero and away from the reference.
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPSILON,
        weight_decay=0.0,
        fused=True,
    )
