"""Chooses the dtype of the embedded example on this CPU by timing both for a moment.

A CPU's flags say whether it has instructions for bfloat16, not whether they are faster at these
sizes, nor how slow emulation is. So the products of the example's own actor are timed: one token's,
a drafted step's, and those of a PPO update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import geometric_mean
from typing import NamedTuple

import torch
import torch.nn.functional as F

from medusa_ppo.demo.pretraining import RECIPES

UPDATE = "a PPO update"
ROWS = {"one token": 1, "a step with 4 drafts": 5, UPDATE: 512}
"""What is timed: the number of rows in a product."""
ROUNDS = 25
LEAST_GAIN = 0.9
"""bfloat16 is used if its mean time is below this share of float32's."""
MOST_LOSS = 1.1
"""It is not used if any timed product takes more than this share of float32's time."""

Timer = Callable[[int, torch.dtype], float]
"""Returns the seconds of products with this many rows in a dtype."""


class Bfloat16(NamedTuple):
    """Time in bfloat16 relative to float32, for each timed product; and whether it pays."""

    ratios: dict[str, float]
    taken: bool

    def __str__(self) -> str:
        parts = ", ".join(f"{what} x{ratio:.2f}" for what, ratio in self.ratios.items())
        return f"bfloat16 takes, against float32: {parts}."


def time_bfloat16(timer: Timer | None = None, rounds: int = ROUNDS) -> Bfloat16:
    """Time both dtypes alternately; this takes a second. The best time of each product counts: a
    program that takes a core for a moment makes a product of 0.1 ms ten times as long, and never
    shorter.

    Args:
        timer: for tests; None: the clock and real products.
    """
    measure = timer or _time_products()
    best_s: dict[tuple[str, torch.dtype], float] = {}
    for _ in range(rounds):
        for what, rows in ROWS.items():
            for dtype in (torch.bfloat16, torch.float32):
                seconds = measure(rows, dtype)
                best_s[what, dtype] = min(seconds, best_s.get((what, dtype), seconds))
    ratios = {what: best_s[what, torch.bfloat16] / best_s[what, torch.float32] for what in ROWS}
    mean = geometric_mean(ratios.values())
    return Bfloat16(ratios, mean < LEAST_GAIN and max(ratios.values()) < MOST_LOSS)


def _time_products() -> Timer:
    """Times the feed-forward product of the grown actor, which has most of its weights."""
    recipe = RECIPES["demo-grown"]
    generator = torch.Generator().manual_seed(0)
    weight_FD = torch.randn(recipe.grown_to, recipe.hidden_size, generator=generator)
    rows_ND = torch.randn(max(ROWS.values()), recipe.hidden_size, generator=generator)
    tensors = {
        dtype: (rows_ND.to(dtype), weight_FD.to(dtype)) for dtype in (torch.float32, torch.bfloat16)
    }

    def measure(rows: int, dtype: torch.dtype) -> float:
        states_ND, table_FD = tensors[dtype]
        F.linear(states_ND[:rows], table_FD)  # The first call of a shape prepares kernels.
        began = time.perf_counter()
        F.linear(states_ND[:rows], table_FD)
        return time.perf_counter() - began

    return measure
