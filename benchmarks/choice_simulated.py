"""Tokens per second of the chosen number of drafts relative to the best fixed number, on simulated
machines: with noise of 10 %, stretches of slow steps, single pauses, and a calibration that is
wrong for all steps of a size.

    python benchmarks/choice_simulated.py

One line per machine: mean and worst of 12 seeds after 100, 500 and 2,000 engine steps; the steps
spent on learning count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from medusa_ppo.drafting.choice import DraftChooser

DRAFTS = 4
SEEDS = 12
LENGTHS = (100, 500, 2000)
CALIBRATION_NOISE, SIZE_NOISE, STEP_NOISE = 0.05, 0.4, 0.1
"""Standard deviations (log): of a calibrated kind, of the common factor of all kinds of a size in
service, and of a step.
"""
MEASURED = (23.3e-3, 52.7e-3, 63.9e-3, 75.0e-3, 86.0e-3)
"""Seconds of the demo's actor at 64 sequences in bfloat16 (benchmarks/RESULTS.md)."""
MACHINES: dict[str, Callable[[int, int], float]] = {
    "memory": lambda b, k: 0.010 + 0.0004 * (k > 0) + 0.0003 * k + 0.00045 * b * (k + 1) ** 0.9,
    "cache": lambda b, k: 0.0035 + 0.0008 * (k > 0) + 0.0006 * k + 0.0003 * b * (k + 1),
    "demo, bfloat16": lambda b, k: MEASURED[k],
}
CASES = (
    ("demo, bfloat16", 0.93, 64),
    ("demo, bfloat16", 0.3, 64),
    ("memory", 0.9, 1),
    ("memory", 0.5, 4),
    ("memory", 0.3, 4),
    ("memory", 0.9, 64),
    ("memory", 0.9, 48),
    ("cache", 0.9, 1),
    ("cache", 0.5, 4),
    ("cache", 0.9, 64),
    ("cache", 0.3, 16),
    ("cache", 0.5, 6),
)
"""Machine, acceptance rate of each draft after accepted ones, sequences."""


def served(machine: str, keep: float, batch: int, steps: int, seed: int) -> float:
    """Tokens per second over `steps` steps, by true seconds."""
    rng = np.random.default_rng(seed)
    cost = MACHINES[machine]
    chooser = DraftChooser(DRAFTS)
    for power in range(7):
        in_common = SIZE_NOISE * rng.standard_normal()
        chooser.table.learn(
            {
                "running": 2**power,
                "drafts": k,
                "steps": 6,
                "seconds": cost(2**power, k)
                * float(np.exp(in_common + CALIBRATION_NOISE * rng.standard_normal())),
            }
            for k in range(DRAFTS + 1)
        )
    tokens = seconds = pace = 0.0
    slow = 0
    for _ in range(steps):
        k = chooser.choose(batch)
        pace = 0.95 * pace + 0.02 * rng.standard_normal()
        slow = slow - 1 if slow else int(rng.integers(20, 80)) if rng.random() < 1 / 150 else 0
        pause = 0.7 if rng.random() < 0.03 else 0.0
        off = pace + pause + 0.6 * (slow > 0) + STEP_NOISE * rng.standard_normal()
        accepted = np.minimum(rng.geometric(1 - keep, size=batch) - 1, k)
        chooser.observe_step(batch, k, cost(batch, k) * float(np.exp(off)))
        chooser.observe_acceptance([k] * batch, accepted.tolist())
        tokens += batch + float(accepted.sum())
        seconds += cost(batch, k)
    best = max(
        sum(keep**j for j in range(k + 1)) * batch / cost(batch, k) for k in range(DRAFTS + 1)
    )
    return tokens / seconds / best


def main() -> None:
    for machine, keep, batch in CASES:
        found = [
            [served(machine, keep, batch, steps, seed) for seed in range(SEEDS)]
            for steps in LENGTHS
        ]
        cells = "   ".join(f"{np.mean(row):.3f} ({min(row):.2f})" for row in found)
        sys.stdout.write(f"{machine:15} keep {keep:.2f}  {batch:3} sequences   {cells}\n")


if __name__ == "__main__":
    main()
