"""Do heads that keep learning hold their acceptance while the policy changes? `medusa-ppo ppo`,
seed by seed, with a reward that changes the policy.

    python benchmarks/holding.py [model.path=DIR key=value ...] --out runs/holding
        --heads HEADS --seeds 0 1 2
    python benchmarks/holding.py [model.path=DIR key=value ...] --out runs/memory
        --heads HEADS --seeds 0 --steps 16 --memory-bytes 4000000

Every seed is a real run: vLLM drafts with the serving heads, the companion trains beside PPO. The
reward pays for digits (`numbers` in companion_defaults.py), with a large step size, so reward, KL
to the reference and entropy all change. HEADS are trained before the run; without them it starts
with new heads. The frozen control is the first version that the run publishes, which with HEADS
hardly differs from these.

The output for each seed: extra tokens per step (mean acceptance length - 1) of the serving heads by
vLLM's counters and by replay, and of the frozen heads by replay on the same holdouts, over the last
sixth of the steps; how many versions were published, how many of them were compared with the
previous one on later batches, which took no part in the choice, and how many were significantly
worse there. Then the share of worse versions of all seeds together, with its 95 % interval
(Clopper and Pearson); of versions that are as good as their predecessors it is 2.5 % on average. A
completed seed is not run again.

With --memory-bytes it is GRPO instead, at temperature 0.7, repeatedly over the same PROMPTS
prompts: each seed once with a memory of earlier responses and once without. Acceptance by vLLM's
counters is printed epoch by epoch.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import binomtest

from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.store import read_run

REWARD = "benchmarks.companion_defaults:numbers"
ROOT = Path(__file__).parent.parent
SETTINGS = (
    "data.max_prompt_tokens=64",
    "sampling.responses_per_prompt=4",
    "sampling.max_new_tokens=48",
    "engine.max_num_seqs=48",
    "engine.threads=1",
    "engine.num_drafts=4",
    "companion.wait=true",
    f"ppo.reward={REWARD}",
    "ppo.actor_learning_rate=2.0e-4",
    "ppo.epochs=1",
    "ppo.prompts_per_step=12",
    "ppo.minibatch_size=24",
    "ppo.micro_batch_size=null",
    "ppo.threads=1",
    "ppo.checkpoint_every=20",
)
"""Overrides of configs/gsm8k.yaml. The loop waits for the companion, so that a seed gives the same
numbers however busy the machine is, and the engine drafts in every step.
"""
PROMPTS = 64
PROMPTS_A_STEP = 16
EPOCHS = (
    f"data.split=train[:{PROMPTS}]",
    "data.max_prompt_tokens=256",
    "sampling.temperature=0.7",
    "sampling.responses_per_prompt=8",
    "sampling.max_new_tokens=64",
    "engine.max_num_seqs=64",
    "ppo.advantages=grpo",
    "ppo.actor_learning_rate=5.0e-5",
    f"ppo.prompts_per_step={PROMPTS_A_STEP}",
    "ppo.minibatch_size=64",
    "ppo.checkpoint_every=null",
)
"""Further overrides with --memory-bytes."""
POLICY = (names.REWARD_MEAN, names.KL_REFERENCE, names.ENTROPY)
CURVE = (*POLICY, names.MAL_SERVING, names.REPLAY_SERVING, names.REPLAY_FROZEN)
# Not the installed command: `-c` uses the checkout in the working directory.
CALL = "from medusa_ppo.cli import main; main()"
COLUMNS = (
    "seed | reward | KL, nats | entropy, nats | extra tokens: counters | replay | frozen | of"
    " frozen | versions | followed | worse"
)


def run(
    args: argparse.Namespace, seed: int, arm: str = "", more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The steps of one seed, from its file if it is complete."""
    name = f"seed-{seed}{arm}"
    folder = args.out / name
    if not (folder / "metrics.jsonl").is_file() or len(read_run(folder).steps) < args.steps:
        heads = [f"heads.path={args.heads}"] if args.heads else []
        own = (f"seed={seed}", f"name={name}", f"out={args.out}", f"ppo.steps={args.steps}")
        settings = [*SETTINGS, *heads, *more, *own, *args.overrides]
        command = [
            sys.executable,
            "-c",
            CALL,
            "ppo",
            "--config",
            str(ROOT / "configs" / "gsm8k.yaml"),
            *settings,
        ]
        # A process for each run: Ray, vLLM and torch's threads start fresh, as for a user.
        with (args.out / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    return list(read_run(folder).steps[: args.steps])


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of one seed."""
    late = steps[-(len(steps) // 6) :]

    def extra(lines: list[dict[str, Any]], name: str) -> float:
        # Estimates are missing in steps without a judged batch, and before the first version.
        found = [line[name] for line in lines if line.get(name) is not None]
        return fmean(found) - 1.0 if found else math.nan

    return {
        "counters": extra(late, names.MAL_SERVING),
        "serving": extra(late, names.REPLAY_SERVING),
        "frozen": extra(late, names.REPLAY_FROZEN),
        "of_frozen": extra(late, names.REPLAY_SERVING) / extra(late, names.REPLAY_FROZEN),
        "versions": late[-1][names.VERSIONS_PUBLISHED],
        "followed": late[-1].get(names.VERSIONS_FOLLOWED) or 0,
        "worse": late[-1].get(names.VERSIONS_WORSE) or 0,
    }


def table(runs: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Markdown: the figures of each seed, then the means over all seeds by step."""
    lines = [f"| {COLUMNS} |", "|---" * (COLUMNS.count("|") + 1) + "|"]
    for seed, steps in runs.items():
        figures = summary(steps)
        ends = [
            f"{steps[0][name]:.2f} -> {fmean(line[name] for line in steps[-3:]):.2f}"
            for name in POLICY
        ]
        cells = [
            str(seed),
            *ends,
            *(f"{figures[name]:.3f}" for name in ("counters", "serving", "frozen", "of_frozen")),
        ]
        cells += [
            f"{figures['versions']:.0f}",
            f"{figures['followed']:.0f}",
            f"{figures['worse']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    found = [summary(steps) for steps in runs.values()]
    worse, followed = (round(sum(one[name] for one in found)) for name in ("worse", "followed"))
    lines += ["", worse_share(worse, followed)]
    lines += ["", f"| steps | {' | '.join(CURVE)} |", "|---" * (len(CURVE) + 1) + "|"]
    # If seeds have different numbers of steps, only the steps that all have are shown.
    length = min(map(len, runs.values()))
    block = max(1, length // 10)
    for start in range(0, length, block):
        part = [line for steps in runs.values() for line in steps[start : start + block]]
        means = [[line[name] for line in part if line.get(name) is not None] for name in CURVE]
        lines.append(
            f"| {start}-{start + block - 1} |"
            f" {' | '.join(f'{fmean(values):.3f}' if values else '' for values in means)} |"
        )
    return lines


def worse_share(worse: int, followed: int) -> str:
    """How many of the compared versions were worse, with the interval of that share."""
    if not followed:
        return "No version was compared on later batches."
    found = binomtest(worse, followed).proportion_ci(0.95, "exact")
    return (
        f"Worse: {worse} of {followed} versions, {worse / followed:.1%} ({found.low:.1%} to"
        f" {found.high:.1%})"
    )


def epochs(pairs: dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> list[str]:
    """Markdown: means over the seeds by epoch, without a memory and with one."""
    shown = (names.MAL_SERVING, names.ENTROPY, names.REWARD_MEAN, names.TOKENS_PER_S)
    lines = [
        f"| epoch | {' | '.join(f'{name}, without / with' for name in shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    width = PROMPTS // PROMPTS_A_STEP
    for epoch in range(min(len(arm) for arms in pairs.values() for arm in arms) // width):
        part = slice(epoch * width, (epoch + 1) * width)
        means = [
            [
                fmean(line[name] for arms in pairs.values() for line in arms[place][part])
                for place in (0, 1)
            ]
            for name in shown
        ]
        lines.append(
            f"| {epoch + 1} |"
            f" {' | '.join(f'{without:.3f} / {with_one:.3f}' for without, with_one in means)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", default="", help="native heads that the runs start with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--memory-bytes",
        type=int,
        default=0,
        help="GRPO over a few prompts, with a memory of this many bytes and without",
    )
    parser.add_argument("overrides", nargs="*", help="key=value pairs over the configuration")
    args = parser.parse_args()
    # Runs have the checkout as their working directory (REWARD is imported from there).
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.memory_bytes:
        arms = {"-without": EPOCHS, "-with": (*EPOCHS, f"engine.memory_bytes={args.memory_bytes}")}
        found = {
            seed: [run(args, seed, arm, more) for arm, more in arms.items()] for seed in args.seeds
        }
        lines = epochs({seed: (without, with_one) for seed, (without, with_one) in found.items()})
    else:
        lines = table({seed: run(args, seed) for seed in args.seeds})
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
