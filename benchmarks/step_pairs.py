"""Is a PPO loop as a whole faster with the plugin than without it? Whole steps in turn, at the end of a run, for some seeds.

    python benchmarks/step_pairs.py --out runs/pairs [--config configs/demo.yaml] [--seeds 0 1 2] [--steps 14] [--pairs 6] [key=value ...]

Each seed is a run of `medusa-ppo ppo` whose companion is not waited for and shares the loop's cores. After its last step, steps with the
plugin and steps of the same loop without it (an engine of its own, no speculation, compiled, vLLM's defaults) take turns; see
`medusa_ppo/ppo/comparison.py`. The figure is the median over the pairs of seconds without / seconds with: above 1 the plugin pays.
Beside it stands what the companion's own account says: seconds saved and lost, step by step. A run that is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from medusa_ppo import metrics as names
from medusa_ppo.reports import Run, read_run
from medusa_ppo.reports.summary import STEP_S

COLUMNS = ("seed", "pairs", "without / with", "smallest", "largest", "s with", "s without", "generation with", "without", "tokens a step")


def figures(run: Run) -> dict[str, Any]:
    """What one run shows; the account is of its last half."""
    pairs = run.section("comparison")["steps"]
    ratios = [pair["without"][STEP_S] / pair["with"][STEP_S] for pair in pairs]
    late = run.steps[len(run.steps) // 2 :]

    def seconds(side: str, name: str) -> float:
        return fmean(pair[side][name] for pair in pairs)

    return {
        "ratios": ratios,
        "with_s": seconds("with", STEP_S),
        "without_s": seconds("without", STEP_S),
        "generate_with_s": seconds("with", names.GENERATE_S),
        "generate_without_s": seconds("without", names.GENERATE_S),
        "length": fmean(step[names.MAL_SERVING] for step in late),
        "saved_s": fmean(step.get(names.COMPANION_SAVED_S, 0.0) for step in late),
        "lost_s": fmean(step.get(names.COMPANION_LOST_S, 0.0) for step in late),
        "passes": [step.get(names.COMPANION_PASSES) for step in run.steps],
        "reasons": [step.get(names.COMPANION_REASON) for step in run.steps],
    }


def row(seed: int, found: dict[str, Any]) -> str:
    """A line of the table."""
    ratios = found["ratios"]
    cells = [str(seed), str(len(ratios)), *(f"{value:.3f}" for value in (median(ratios), min(ratios), max(ratios)))]
    cells += [f"{found[name]:.2f}" for name in ("with_s", "without_s", "generate_with_s", "generate_without_s", "length")]
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("settings", nargs="*", help="key=value")
    args = parser.parse_args(arguments)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    ratios: list[float] = []
    for seed in args.seeds:
        folder = args.out / f"seed-{seed}"
        if not (folder / "summary.json").is_file():
            given = [f"out={args.out}", f"name=seed-{seed}", f"seed={seed}", f"ppo.steps={args.steps}", "companion.wait=false"]
            given += [f"report.compare_pairs={args.pairs}", "report.speed_every=null", *args.settings]
            subprocess.run(
                [sys.executable, "-c", "from medusa_ppo.cli import main; main()", "ppo", "--config", args.config, *given], check=True
            )
        found = figures(read_run(folder))
        ratios += found["ratios"]
        lines.append(row(seed, found))
        sys.stdout.write(json.dumps({"seed": seed, **found}) + "\n")
    sys.stdout.write("\n".join([*lines, "", f"All pairs: median {median(ratios):.3f} of {len(ratios)}."]) + "\n")


if __name__ == "__main__":
    main()
