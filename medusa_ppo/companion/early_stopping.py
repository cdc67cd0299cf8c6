"""Training on one batch for as long as acceptance on its held-out part rises: the warm-up before a
run's first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from medusa_ppo.companion.trainer import HeadsTrainer, TrainReport
from medusa_ppo.contract.rollout_batch import RolloutBatch

LOOK_STEPS = 16
"""Minimum optimizer steps between two looks at the held-out part."""
RISE = 0.01
"""Share of the extra tokens per engine step by which a look must beat the previous best."""
PATIENCE = 3
"""Number of looks in a row without such a gain after which training stops."""


def train_while_rising(
    trainer: HeadsTrainer,
    training: RolloutBatch,
    extra_tokens: Callable[[], float],
    judged_state: Callable[[], dict[str, torch.Tensor]],
    steps: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[TrainReport, float]:
    """Train on a batch until acceptance on its held-out part stops rising or there is no time for
    another look; the heads then are those of the best look.

    Args:
        extra_tokens: what an engine step accepts beyond the first token, on the held-out part.
        judged_state: trainable tensors of the heads that this measures.
        steps: optimizer steps of a pass.
        seconds: time limit. With several workers, the first one whose time is up ends it for all.

    Returns:
        What all passes did, and how many they were.
    """
    began = clock()
    ends = began + seconds
    longest = 0.0
    passes = math.ceil(LOOK_STEPS / max(1, steps))
    total = TrainReport()
    best = -math.inf
    best_state: dict[str, torch.Tensor] = {}
    done = without_rise = 0
    while without_rise < PATIENCE:
        report = trainer.train_batch(training, epochs=passes)
        if report.problem:
            # Earlier looks count; without any the batch was of no use.
            total = total if best_state else report
            break
        done += passes
        total = replace(
            report,
            optimizer_steps=total.optimizer_steps + report.optimizer_steps,
            rows=total.rows + report.rows,
        )
        extra = extra_tokens()
        without_rise = 0 if extra > best * (1 + RISE) or not best_state else without_rise + 1
        if extra > best or not best_state:
            best = extra
            best_state = {name: tensor.clone() for name, tensor in judged_state().items()}
        now = clock()
        # A look that ends too late is waited for, or its heads come too late.
        longest, began = max(longest, now - began), now
        if _time_is_up(trainer, now + longest > ends):
            break
    if best_state and without_rise:
        trainer.reset_to(best_state)
    return total, float(done)


def _time_is_up(trainer: HeadsTrainer, here: bool) -> bool:
    return bool(trainer.team.most(int(here))) if trainer.team else here
