"""How a training is cut into parts and optimizer steps. All of it is known before the first step,
because the step size falls over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from medusa_ppo.offline.options import TrainOptions

# Length of the warm-up in optimizer steps, and the share of the step size left at the end.
WARM_UP_STEPS = 20
LAST_FACTOR = 0.01
# The minimum, even with little text: at these steps heads are judged, and the best are kept.
LOG_STEPS_PER_EPOCH = 4
PART_TOKENS = 32_768
"""Tokens of a worker between two log steps, and in memory at once besides the cache; more only if
an optimizer step has more.
"""


def cosine_schedule(steps: int) -> Callable[[int], float]:
    """The step size's factor at each optimizer step: a linear warm-up, then a cosine that falls to
    LAST_FACTOR at `steps`.
    """

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / WARM_UP_STEPS)
        # After `steps` the cosine would rise again.
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / max(1, steps)))
        return warm * max(LAST_FACTOR, cosine)

    return factor


def deal_parts(
    groups: int, parts: int, workers: int, seed: int, epoch: int
) -> list[list[list[int]]]:
    """The groups of each part of an epoch, by worker. They depend on seed and epoch alone.

    A worker always has the same groups, so that its cache holds what it needs; each epoch goes
    through them in a new order.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    shares = []
    for rank in range(workers):
        own = torch.arange(rank, groups, workers)
        shuffled = own[torch.randperm(own.numel(), generator=generator)]
        shares.append([part.tolist() for part in shuffled.tensor_split(parts)])
    return [[share[part] for share in shares] for part in range(parts)]


@dataclass(frozen=True)
class TrainingPlan:
    """The parts and optimizer steps of a training, the same in all workers. A part is cut into
    equal steps: one of what is left over would move the heads as far as a whole one.

    Attributes:
        positions: positions to train on in each group.
        parts: parts of an epoch.
    """

    options: TrainOptions
    positions: tuple[int, ...]
    parts: int

    @classmethod
    def of(cls, options: TrainOptions, positions: Sequence[int], tokens: int) -> TrainingPlan:
        """
        Args:
            positions: positions to train on in each group.
            tokens: written tokens of all groups.
        """
        step = options.worker_positions
        # The nearest number: one step more of little text would halve all of them.
        steps = max(1, round(tokens / options.workers / step))
        parts = math.ceil(steps / max(1, PART_TOKENS // step))
        least = min(LOG_STEPS_PER_EPOCH, steps)
        # At most as many parts as a worker has groups: every part needs a group on every worker.
        most = len(positions) // options.workers
        return cls(options, tuple(positions), max(1, min(most, max(least, parts))))

    @property
    def steps(self) -> int:
        """Optimizer steps of all epochs."""
        return sum(
            self.steps_of(dealt)
            for epoch in range(self.options.epochs)
            for dealt in self.dealt(epoch)
        )

    def dealt(self, epoch: int) -> list[list[list[int]]]:
        """`deal_parts` of an epoch."""
        options = self.options
        return deal_parts(len(self.positions), self.parts, options.workers, options.seed, epoch)

    def steps_of(self, dealt: list[list[int]]) -> int:
        """Optimizer steps of a part: as many as the worker with most positions needs."""
        most = max(sum(self.positions[group] for group in groups) for groups in dealt)
        return max(1, round(most / self.options.worker_positions))
