"""What does a companion that trains beside the loop cost a PPO step? Steps with training alternate
with steps without, in one run.

    python benchmarks/training_beside.py --out runs/beside [--config demo] [--block 4]
        [--blocks 12] [key=value ...]

The run is `medusa-ppo ppo` with the configuration's companion, which shares the loop's cores. It
trains in every other block of steps, within `companion.share`, and in the blocks between it is
given nothing, which neither fills its budget nor empties it. A batch is trained on during the step
after it, so the first step of each block belongs to the one before and is left out.

The output for each pair of neighbouring blocks: seconds of a step for each 1,000 tokens written,
with training and without, and their ratio; then the median ratio with the smallest and the
largest, and the share of the loop's seconds that training took by the companion's account. Steps
draw their own responses, hence the seconds by token. During generation nothing is trained, and how
many tokens a draft step brings differs by chance: both steps of a pair count the mean of their
generations, and the ratio of generation alone stands beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from medusa_ppo.companion.budget import Budget, Decision, StepSeen
from medusa_ppo.config.config_file import preset
from medusa_ppo.config.run_config import load_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.plugin import medusa_plugin
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.ppo.run_progress import make_progress
from medusa_ppo.reports.store import read_run

NOT_NOW = "waiting"
"""The reason of a step in which there is no budget."""


class InTurns(Budget):
    """Trains in every other block of steps."""

    block = 1

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._decided = 0

    @property
    def _trains(self) -> bool:
        return (self._decided - 1) // self.block % 2 == 0

    def step(self, seen: StepSeen) -> None:
        if self._trains:
            super().step(seen)
        else:  # What the block before still had in training.
            self.take(seen.trained_s)

    def decide(self) -> Decision:
        self._decided += 1
        if self._trains:
            return super().decide()
        self.last = Decision(0.0, NOT_NOW)
        return self.last


def seconds_by_token(steps: list[dict[str, Any]], began_s: float) -> tuple[float, float]:
    """Seconds of these steps, and of generation in them, for each 1,000 tokens.

    Args:
        began_s: when the step before the first of them ended.
    """
    writing_s = [step[names.GENERATE_S] for step in steps]
    rates = [step[names.TOKENS_PER_S] for step in steps]
    thousands = sum(rate * s for rate, s in zip(rates, writing_s, strict=True)) / 1e3
    return (steps[-1][names.WALL_S] - began_s) / thousands, sum(writing_s) / thousands


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", default="demo", help="a preset or a file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block", type=int, default=4, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=12)
    args = parser.parse_intermixed_args()
    InTurns.block = args.block
    medusa_plugin.Budget = InTurns  # type: ignore[misc]  # For this process alone.
    path = preset(args.config) if not Path(args.config).is_file() else args.config
    own = (
        f"ppo.steps={args.block * args.blocks}",
        "report.compare_pairs=null",
        "report.speed_every=null",
    )
    with make_progress() as progress:
        config = load_config(path, [*own, *args.overrides, f"out={args.out}", "name=run"])
        run_ppo(config, progress)
    steps = list(read_run(args.out / "run").steps)
    found = [
        seconds_by_token(steps[first + 1 : first + args.block], steps[first][names.WALL_S])
        for first in range(0, len(steps), args.block)
    ]
    sys.stdout.write("steps | with, s | without, s | with / without | generation with / without\n")
    ratios = []
    for number in range(0, len(found) - 1, 2):
        (with_s, writing_s), (without_s, alone_s) = found[number : number + 2]
        mean_s = (writing_s + alone_s) / 2
        with_s, without_s = with_s - writing_s + mean_s, without_s - alone_s + mean_s
        ratios.append((with_s / without_s, writing_s / alone_s))
        sys.stdout.write(
            f"{number * args.block}.. | {with_s:.2f} | {without_s:.2f} |"
            f" {ratios[-1][0]:.3f} | {ratios[-1][1]:.3f}\n"
        )
    for what, column in zip(("a step", "its generation"), zip(*ratios, strict=True), strict=True):
        sys.stdout.write(
            f"{what}: {median(column):.3f} ({min(column):.3f} to {max(column):.3f})"
            f" in {len(column)} pairs\n"
        )
    trained = [step[names.COMPANION_PASSES] for step in steps]
    sys.stdout.write(
        f"steps with training: {sum(passes > 0 for passes in trained)} of {len(steps)}; share of"
        f" the seconds of blocks with training: {steps[-1][names.COMPANION_TAKEN]:.3f}\n"
    )


if __name__ == "__main__":
    main()
