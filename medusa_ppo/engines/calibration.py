"""Times an engine's steps when it starts: each number of drafts at each batch size.

Choosing K needs these times. If the engine only learned them while serving, each batch size would
start without drafts and try the other numbers one by one, again in every run.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

CALIBRATION_S = 10.0
"""Maximum seconds of a calibration; starting vLLM takes longer anyway."""
ROUNDS = 2
"""Number of turns that each number of drafts gets, so that a machine that is slow for a while does
not make a number of drafts look slow.
"""
TIMED_STEPS = 4
"""Steps in each turn: `choice.LEAST_STEPS` of them, so that one turn is enough for a number to be
chosen.
"""
WARM_STEPS = 2
"""Uncounted steps at the start of a turn: the first one still verifies the previous turn's drafts,
and whatever is created on first use (products, kernels, memory) is created in them. They begin
later where steps are scheduled ahead (`StepBench.ahead`).
"""
LEAST_GAP = 1.25
"""If the largest batch is not a power of two, it is timed as well, provided that it is this much
larger than the power below: the table is at powers of two, and extrapolating from two close points
is useless.
"""


class Timed(NamedTuple):
    """One pure decode step."""

    running: int
    drafts: int
    seconds: float


class StepBench(ABC):
    """An engine whose steps are timed.

    Attributes:
        ahead: number of steps that are scheduled before one has ended; these still have as many
            drafts as the steps before.
    """

    ahead: int = 0

    @abstractmethod
    def begin(self, running: int) -> None:
        """Let every step have this many sequences from now on."""

    @abstractmethod
    def draft(self, drafts: int) -> list[Timed]:
        """Let steps have this many drafts, from the step after the next on. Returns the times since
        the last call.
        """

    @abstractmethod
    def step(self) -> None:
        """One step of the engine."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to time: one, then the largest and ever smaller ones, so that a time limit cuts
    off sizes that lie between others.
    """
    largest = 2 ** int(math.log2(max_num_seqs))
    sizes = [largest >> shift for shift in range(int(math.log2(largest)))]
    if max_num_seqs >= LEAST_GAP * largest:
        sizes.insert(0, max_num_seqs)
    return [1, *sizes]


def measure(
    bench: StepBench,
    sizes: Sequence[int],
    choices: Sequence[int],
    *,
    longest_s: float = CALIBRATION_S,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Time steps of each size with each number of drafts, for `longest_s` seconds at most."""
    found: list[Timed] = []
    began = clock()
    for running in sizes:
        bench.begin(running)
        for _ in range(ROUNDS):
            for drafts in choices:
                if clock() - began > longest_s:
                    return found
                bench.draft(drafts)
                for _ in range(WARM_STEPS + bench.ahead):
                    bench.step()
                bench.draft(drafts)
                for _ in range(TIMED_STEPS):
                    bench.step()
                timed = bench.draft(drafts)
                found += [step for step in timed if step[:2] == (running, drafts)]
    return found


def rows_of(steps: Iterable[Timed]) -> list[dict[str, float]]:
    """The median of each kind of step, as rows of a `StepTable`, whose sizes are powers of two."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        if step.seconds > 0:
            seconds.setdefault((step.running, step.drafts), []).append(step.seconds)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    rows = []
    for running, drafts in sorted(medians):
        median = medians[running, drafts]
        below = 2 ** int(math.log2(running))
        at: float = running
        if running != below:
            # Extrapolated linearly to the next power of two.
            if (below, drafts) not in medians:
                continue
            first = medians[below, drafts]
            median = first + max(median - first, 0.0) * below / (running - below)
            at = 2 * below
        rows.append(
            {
                "running": at,
                "drafts": drafts,
                "seconds": median,
                "steps": len(seconds[running, drafts]),
            }
        )
    return rows


def in_words(rows: Sequence[dict[str, float]]) -> str:
    """The cost of drafts at the smallest and the largest batch, in words."""
    seconds = {(row["running"], row["drafts"]): row["seconds"] for row in rows}
    sizes = sorted({running for running, drafts in seconds if (running, 0) in seconds})
    most = max((drafts for _, drafts in seconds), default=0)
    parts = []
    for running in sorted({sizes[0], sizes[-1]} if sizes else ()):
        if (running, most) in seconds and most:
            ratio = seconds[running, most] / seconds[running, 0]
            parts.append(f"x{ratio:.2f} at {running:.0f} running")
    found = ", ".join(parts)
    return f"{most:.0f} drafts slow a step down {found}" if found else "too few to compare"
