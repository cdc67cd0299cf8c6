"""Is a PPO loop as a whole faster with the plugin than without it? Whole steps in turn, at the end
of a run, for several seeds.

    python benchmarks/step_pairs.py --out runs/pairs [--config configs/demo.yaml]
        [--seeds 0 1 2] [--steps 14] [--pairs 6] [key=value ...]

Each seed is a run of `medusa-ppo ppo` that does not wait for its companion and shares the loop's
cores with it. After its last step, steps with the plugin alternate with steps of the same loop
without it (a separate engine without speculation, compiled, vLLM's defaults); see
`medusa_ppo/ppo/comparison.py`. The figure is the median over the pairs of seconds without / seconds
with: above 1 the plugin pays. Next to it is the companion's own account: seconds saved and lost,
step by step. A completed run is not repeated.

    python benchmarks/step_pairs.py --out runs/old --old FOLDER --actor FOLDER
        [--seeds 0 1 2] [--steps 8] [--both k=v ...] [-- k=v ...]

With `--old` whole runs of another checkout (the serial loop: commit 09356bd; `make setup` there)
alternate with runs of this one, each with its own environment and `configs/demo.yaml`, on the same
actor and the same batches (`--both`; keys after it are for this checkout only). The figure is
samples per second, this / the other, over the steps after the first two, one pair for each seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.run_files import Run, read_run
from medusa_ppo.reports.summary import STEP_S

COLUMNS = (
    "seed",
    "pairs",
    "without / with",
    "smallest",
    "largest",
    "s with",
    "s without",
    "generation with",
    "without",
    "tokens a step",
)


def figures(run: Run) -> dict[str, Any]:
    """The figures of one run; the account covers its last half."""
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
    cells = [
        str(seed),
        str(len(ratios)),
        *(f"{value:.3f}" for value in (median(ratios), min(ratios), max(ratios))),
    ]
    cells += [
        f"{found[name]:.2f}"
        for name in ("with_s", "without_s", "generate_with_s", "generate_without_s", "length")
    ]
    return "| " + " | ".join(cells) + " |"


# Said outright, because the two checkouts' demo.yaml differ.
SAME = [
    "data.max_prompt_tokens=48",
    "sampling.max_new_tokens=112",
    "sampling.responses_per_prompt=8",
    "ppo.prompts_per_step=12",
]
SAME += [
    "ppo.minibatch_size=12",
    "ppo.micro_batch_size=12",
    "ppo.epochs=1",
    "engine.max_num_seqs=8",
]
WARM_UP = 2


def samples_per_s(folder: Path, checkout: Path, given: list[str]) -> float:
    """Samples per second of a whole run of a checkout, without its first steps."""
    # The summary is written at a run's end; without one the run was stopped.
    if not (folder / "summary.json").is_file():
        # vLLM loads the plugin of its environment, whatever PYTHONPATH says.
        own = checkout / ".venv" / "bin" / "python"
        python = str(own) if own.is_file() else sys.executable
        command = [
            python,
            "-c",
            "from medusa_ppo.cli import main; main()",
            "ppo",
            "--config",
            "configs/demo.yaml",
        ]
        given = [*given, f"out={folder.parent.resolve()}", f"name={folder.name}"]
        subprocess.run(
            [*command, *given],
            check=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    # One more line than steps that count: its clock is where they begin.
    late = lines[WARM_UP - 1 :]
    settings = dict(text.split("=", 1) for text in given)
    samples = (
        int(settings["ppo.prompts_per_step"])
        * int(settings["sampling.responses_per_prompt"])
        * (len(late) - 1)
    )
    return samples / (late[-1][names.WALL_S] - late[0][names.WALL_S])


def beside_old(args: argparse.Namespace) -> None:
    """Pairs of runs; the order alternates from pair to pair."""
    ratios = []
    for number, seed in enumerate(args.seeds):
        both = [
            *SAME,
            *args.both,
            f"model.path={args.actor.resolve()}",
            f"ppo.steps={args.steps}",
            f"seed={seed}",
        ]
        speed = {}
        # The old release turns both off with 0, this one with null.
        arms = {"old": (args.old.resolve(), ["report.speed_every=0", "ppo.checkpoint_every=0"])}
        arms["new"] = (
            Path.cwd(),
            [
                "model.critic_path=null",
                "report.compare_pairs=null",
                "report.speed_every=null",
                *args.settings,
            ],
        )
        # Each is first as often as second.
        for name in list(arms)[:: 1 if number % 2 else -1]:
            checkout, own = arms[name]
            speed[name] = samples_per_s(args.out / f"{name}-{seed}", checkout, [*both, *own])
        ratios.append(speed["new"] / speed["old"])
        sys.stdout.write(
            f"seed {seed}: new {speed['new']:.2f}, old {speed['old']:.2f} samples a second,"
            f" {ratios[-1]:.3f}\n"
        )
    low, high = (fmean(ratios) + sign * student_error(ratios) for sign in (-1, 1))
    sys.stdout.write(
        f"new / old: mean {fmean(ratios):.3f} ({low:.3f} to {high:.3f}, 95 %), median"
        f" {median(ratios):.3f} of {len(ratios)}\n"
    )


def student_error(values: list[float]) -> float:
    """Half of a mean's 95 % interval."""
    # Student's, two-sided, 1 to 9 degrees of freedom: with a few seeds 1.96 would promise too much.
    quantiles = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
    count = len(values)
    return (
        math.inf if count < 2 else quantiles[min(count - 2, 8)] * stdev(values) / math.sqrt(count)
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--old", type=Path, help="a checkout of the loop to compare with")
    parser.add_argument("--actor", type=Path, help="with --old: folder of the actor")
    parser.add_argument("--both", nargs="+", default=[], help="with --old: key=value of both")
    args = parser.parse_args(arguments)
    if args.old is not None:
        if args.actor is None:
            parser.error("--old needs --actor")
        return beside_old(args)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    ratios: list[float] = []
    for seed in args.seeds:
        folder = args.out / f"seed-{seed}"
        if not (folder / "summary.json").is_file():
            given = [
                f"out={args.out}",
                f"name=seed-{seed}",
                f"seed={seed}",
                f"ppo.steps={args.steps}",
                "companion.wait=false",
            ]
            given += [
                f"report.compare_pairs={args.pairs}",
                "report.speed_every=null",
                *args.settings,
            ]
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "from medusa_ppo.cli import main; main()",
                    "ppo",
                    "--config",
                    args.config,
                    *given,
                ],
                check=True,
            )
        found = figures(read_run(folder))
        ratios += found["ratios"]
        lines.append(row(seed, found))
        sys.stdout.write(json.dumps({"seed": seed, **found}) + "\n")
    sys.stdout.write(
        "\n".join([*lines, "", f"All pairs: median {median(ratios):.3f} of {len(ratios)}."]) + "\n"
    )


if __name__ == "__main__":
    main()
