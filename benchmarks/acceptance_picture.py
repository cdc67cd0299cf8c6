"""Tokens per engine step over the PPO steps of a run, as a picture: for heads trained beside the
run, and for its initial heads.

    python benchmarks/acceptance_picture.py RUN docs/acceptance.svg

Both are judged by replay on the same responses, those that the run held out at each step. Steps
without held-out responses are left out, and each point is the mean of three steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from medusa_ppo.contract import metrics as m
from medusa_ppo.reports.picture_files import draw_steps
from medusa_ppo.reports.run_files import read_run
from medusa_ppo.runtime.files import write_atomic

TOGETHER = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    found = [
        (step[m.STEP], step[m.REPLAY_SERVING], step[m.REPLAY_FROZEN])
        for step in read_run(options.run).steps
        if step.get(m.REPLAY_SERVING) and step.get(m.REPLAY_FROZEN)
    ]
    groups = [found[start : start + TOGETHER] for start in range(0, len(found), TOGETHER)]
    means = [tuple(fmean(column) for column in zip(*group, strict=True)) for group in groups]
    steps, trained, frozen = (list(column) for column in zip(*means, strict=True))
    write_atomic(
        options.out,
        draw_steps(
            "Tokens per engine step, on responses held out at each PPO step",
            [round(step) for step in steps],
            {"trained": trained, "frozen": frozen},
            "PPO step",
        ),
    )


if __name__ == "__main__":
    main()
