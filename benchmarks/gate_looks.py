"""How often does the gate publish candidates that are no better, and how soon ones that are?
Simulated runs with the companion's own evidence and verdicts, and counts drawn for each prompt.

    python benchmarks/gate_looks.py [--runs 1000] [--batches 50]

A run is a serving set of heads and a candidate at each batch, judged on held-out prompts until one
is published. On a prompt with n draft steps the candidate accepts n (gain + luck of the prompt) and
the noise of n steps more than the serving heads. Two sizes of hold-out: LARGE, what a sample of an
8B actor's batch holds out (13 prompts, a stretch of 600 tokens of one answer to each), and DEMO,
what the embedded example judges ahead of training (6 prompts, four answers of 80 tokens to each).
The spreads are larger than those between candidates that follow each other: those hardly differ.

The output: for candidates that are no better (gain 0; a little worse; each slightly worse by its
own amount) the share of runs that published one; for a gain of 0.05 tokens the share that had
published within 2, 4, 6 and 12 batches; for gains of 0.05, 0.1 and 0.2 that begin after LATE
batches the share within 1, 2, 4 and 8 batches more; and of versions that are worse than their
predecessor by so much, the share that `versions_worse` counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heads.acceptance import ReplayResult
from medusa_ppo.companion.cycle import CERTAIN
from medusa_ppo.companion.gate import Evidence, judge
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.runtime.console import say

CONFIDENCE = 0.95
LATE = 16
"""Batches without a gain before a policy changes its wording."""


@dataclass(frozen=True)
class Size:
    """A hold-out.

    Attributes:
        prompts: prompts of each batch.
        steps: draft steps of a prompt's answers.
        step_spread: standard deviation of one step's difference in accepted drafts.
        prompt_spread: standard deviation of how much a prompt suits the candidate.
    """

    prompts: int
    steps: int
    step_spread: float = 0.3
    prompt_spread: float = 0.05


LARGE = Size(13, 270)
DEMO = Size(6, 80)


def add_batch(
    evidence: Evidence,
    batch: int,
    generator: torch.Generator,
    gain: float,
    spread: float,
    size: Size,
) -> tuple[ReplayResult, ReplayResult]:
    """Judge a batch on which one set of heads is `gain` tokens a step better than another, less
    luck; what the two did.
    """
    ids_M = torch.zeros(size.prompts, dtype=torch.int64)
    # The evidence only reads lengths and prompts of the hold-out.
    holdout = RolloutBatch(
        torch.zeros(size.prompts, 1), ids_M, ids_M.float(), torch.ones_like(ids_M)
    )
    luck_P = size.prompt_spread * torch.randn(
        size.prompts, generator=generator, dtype=torch.float64
    )
    noise_P = size.step_spread * torch.randn(size.prompts, generator=generator, dtype=torch.float64)
    steps_P = size.steps * (
        0.5 + torch.rand(size.prompts, generator=generator, dtype=torch.float64)
    )
    own = gain - spread * abs(float(torch.randn(1, generator=generator)))
    more_P = steps_P * (own + luck_P) + steps_P.sqrt() * noise_P
    second = ReplayResult(steps_P, steps_P[:, None], torch.zeros_like(steps_P))
    first = ReplayResult(steps_P, (steps_P + more_P)[:, None], torch.zeros_like(steps_P))
    evidence.add(batch, first, second, holdout)
    evidence.tokens[batch] = 1000
    return first, second


def run(
    seed: int, batches: int, gain: float, size: Size, spread: float = 0.0, late: int = 0
) -> int | None:
    """The batch (from 1) at which a candidate was published; None: none was.

    Args:
        gain: tokens per step by which every candidate is better than the serving heads.
        spread: standard deviation by which each candidate is worse than that, one-sided.
        late: batches before the gain begins.
    """
    generator = torch.Generator().manual_seed(seed)
    evidence = Evidence()
    for batch in range(1, batches + 1):
        candidate, serving = add_batch(
            evidence, batch, generator, gain * (batch > late), spread, size
        )
        verdict = judge(candidate, serving, serving, evidence, CONFIDENCE)
        if verdict.publish:
            return batch
        if verdict.worse:
            evidence.clear(same_second=True)
    return None


def counted_as_worse(seed: int, gain: float, size: Size) -> bool:
    """Whether a version that is `gain` better than its predecessor is counted in `versions_worse`,
    on the first batches after its swap that are enough for a verdict.
    """
    generator = torch.Generator().manual_seed(seed)
    evidence = Evidence()
    batch = 0
    while not evidence.enough:
        batch += 1
        add_batch(evidence, batch, generator, gain, 0.0, size)
    return evidence.difference(CERTAIN).high < 0


def within(found: Sequence[int | None], counts: Sequence[int], late: int = 0) -> dict[int, float]:
    """Share of the runs that had published within so many batches after the first `late`."""
    return {
        count: sum(batch is not None and batch <= late + count for batch in found) / len(found)
        for count in counts
    }


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, size in (("LARGE", LARGE), ("DEMO", DEMO)):
        for label, gain, spread in (
            ("gain 0", 0.0, 0.0),
            ("gain -0.01", -0.01, 0.0),
            ("each up to some 0.02 worse", 0.0, 0.01),
        ):
            found = [run(seed, options.batches, gain, size, spread) for seed in range(options.runs)]
            share = sum(batch is not None for batch in found) / options.runs
            say(f"{name}: {label}: {share:.1%} of {options.runs} runs of {options.batches}")
        found = [run(seed, options.batches, 0.05, size) for seed in range(options.runs)]
        say(f"{name}: gain 0.05: published within {within(found, (2, 4, 6, 12))}")
        for gain in (0.05, 0.1, 0.2):
            found = [run(seed, LATE + 12, gain, size, late=LATE) for seed in range(options.runs)]
            # What was published earlier is an error of the rows above.
            later = [batch for batch in found if batch is None or batch > LATE]
            shares = within(later, (1, 2, 4, 8), LATE)
            say(f"{name}: gain {gain} after {LATE} batches without: published within {shares}")
        counted = {
            worse: sum(counted_as_worse(seed, -worse, size) for seed in range(options.runs))
            / options.runs
            for worse in (0.0, 0.02, 0.05, 0.1)
        }
        say(f"{name}: versions worse by so much that versions_worse counts: {counted}")


if __name__ == "__main__":
    main()
