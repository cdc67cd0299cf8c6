"""Does PPO learn the same with the plugin, and in fewer seconds? PPO with a critic, GRPO and RLOO,
each with the plugin and without it, for several seeds.

    python benchmarks/curves.py run --out runs/curves [--seeds 0 1 2] [--steps 100]
        [--algorithms gae grpo rloo] [--config configs/demo.yaml] [--heads DIR] [--minutes 60]
        [key=value ...]
    python benchmarks/curves.py table [--out runs/curves]   # prints the tables
    python benchmarks/curves.py keep --out runs/curves      # adds them to curves.json, beside this
    python benchmarks/curves.py draw                        # draws curves.svg in docs from it
    python benchmarks/curves.py run --out runs/gsm8k --config configs/gsm8k.yaml model.path=DIR
        data.path=FILE ppo.reward=benchmarks.companion_defaults:numbers

`run` starts `medusa-ppo ppo` once for each seed, algorithm and arm, and begins no further run after
--minutes. A finished run is not run again, so the same command continues in a later session; one
that was stopped begins anew. The two arms of a seed follow each other, in changing order.

- with: the plugin at its defaults. Companion, engine and loop share the cores. Heads start with
  the warm-up, which counts in the run's seconds, or with those of --heads (`medusa-ppo train`).
- without: vLLM at its defaults without speculation, and no companion.

Rewards: means over the last fifth of the steps. Those of two arms count as the same if their means
over the seeds differ by less than one arm's own seeds do (highest - lowest); the 95 % interval of
the difference (Student, pooled) stands beside it. Seconds: the loop's, from the warm-up to the end
of the last step, with / without for each seed; starting engines and saving is left out.

The default sizes are small, so that the 100 steps of a run take two or three minutes on two cores:
the smaller embedded actor, eight responses a step. The warm-up takes one or two minutes more.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from heads.errors import RunError
from medusa_ppo.contract import metrics as names
from medusa_ppo.reports.picture_files import frame, line, text
from medusa_ppo.reports.run_files import read_run
from medusa_ppo.reports.svg import nice_ticks
from medusa_ppo.runtime.console import say
from medusa_ppo.runtime.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "curves.json"
PICTURE = ROOT / "docs" / "curves.svg"
SETTINGS = (
    "model.path=demo",
    "ppo.prompts_per_step=2",
    "ppo.minibatch_size=8",
    "sampling.responses_per_prompt=4",
    "engine.max_num_seqs=2",
    "report.compare_pairs=null",
    "report.speed_every=null",
    "ppo.checkpoint_every=null",
)
"""Overrides of the configuration, in both arms."""
WITHOUT_CRITIC = (
    "model.critic_path=null",
    "ppo.step_separator=null",
    "ppo.reward=medusa_ppo.demo.task:graded",
)
"""Without a critic the example's rewards are one number for a response."""
ALGORITHMS = {
    "gae": ("PPO with a critic", ("ppo.advantages=gae",)),
    "grpo": ("GRPO", ("ppo.advantages=grpo", *WITHOUT_CRITIC)),
    "rloo": ("RLOO", ("ppo.advantages=rloo", *WITHOUT_CRITIC)),
}
"""Algorithm -> how it is called, and its overrides."""
WITH, WITHOUT = "with", "without"
ARMS = {WITH: (), WITHOUT: ("companion.enabled=false", "engine.num_drafts=0")}
LATE = 5
"""The last 1 / LATE of the steps are the end of a run."""
TOGETHER = 5
"""Each point of a drawn curve is the mean of this many steps."""
# Two-sided 95 % quantiles of Student's distribution for 1 to 10 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# Not the installed command: `-c` uses the checkout in the working directory.
CALL = "from medusa_ppo.cli import main; main()"
Record = dict[str, Any]


# ---- the runs


def planned(seeds: Sequence[int], algorithms: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Seed, algorithm and arm of each run. Either arm is first as often as second."""
    for seed in seeds:
        for number, algorithm in enumerate(algorithms):
            for arm in list(ARMS)[:: 1 if (seed + number) % 2 else -1]:
                yield seed, algorithm, arm


def is_complete(folder: Path, steps: int) -> bool:
    if not (folder / "run.json").is_file():
        return False
    run = read_run(folder)
    return run.status == "finished" and len(run.steps) == steps


def run_missing(args: argparse.Namespace) -> None:
    """All runs that are not complete, until the time is up."""
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    wanted = list(planned(args.seeds, args.algorithms))
    for number, (seed, algorithm, arm) in enumerate(wanted):
        name = f"{algorithm}-{seed}-{arm}"
        folder = args.out / name
        if is_complete(folder, args.steps):
            continue
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            say(f"{len(wanted) - number} of {len(wanted)} runs were not looked at: time is up")
            return
        shutil.rmtree(folder, ignore_errors=True)
        own = (f"seed={seed}", f"name={name}", f"out={args.out}", f"ppo.steps={args.steps}")
        heads = [f"heads.path={args.heads.resolve()}"] if args.heads and arm == WITH else []
        settings = [*SETTINGS, *ALGORITHMS[algorithm][1], *ARMS[arm], *heads, *args.overrides, *own]
        command = [sys.executable, "-c", CALL, "ppo", "--config", args.config, *settings]
        started = time.monotonic()
        # A process for each run: Ray, vLLM and torch's threads start fresh, as for a user.
        with (args.out / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
        say(f"{name}: {time.monotonic() - started:.0f} s in all")


# ---- what is kept of them


def record(folder: Path) -> Record:
    """One run: its curves, and where it was made."""
    run = read_run(folder)
    config = run.meta["config"]
    plugin = config["companion"]["enabled"]

    def curve(name: str, digits: int) -> list[float]:
        return [round(step[name], digits) for step in run.steps]

    judged = all(names.CORRECT_FRAC in step for step in run.steps)
    lengths = [step.get(names.MAL_SERVING) for step in run.steps]
    found = [length for length in lengths if length is not None]
    return {
        "algorithm": config["ppo"]["advantages"],
        "arm": WITH if plugin else WITHOUT,
        "seed": config["seed"],
        "command": re.sub(r"\b(heads\.path|out)=\S+", r"\1=DIR", run.meta.get("command") or ""),
        "commit": run.meta.get("commit"),
        "cpu": run.section("hardware").get("cpu"),
        "reward": curve(names.REWARD_MEAN, 4),
        "correct": curve(names.CORRECT_FRAC, 4) if judged else None,
        "length": curve(names.RESPONSE_LENGTH, 1),
        "wall_s": curve(names.WALL_S, 2),
        "generate_s": round(sum(step[names.GENERATE_S] for step in run.steps), 2),
        "warm_up_s": round(run.steps[0].get(names.WARM_UP_S) or 0.0, 2),
        "tokens_a_step": round(fmean(late(found)), 3) if plugin and found else None,
    }


def records(out: Path) -> list[Record]:
    """All finished runs in a folder.

    Raises:
        RunError: there is none.
    """
    found = [
        record(meta.parent)
        for meta in sorted(out.glob("*/run.json"))
        if read_run(meta.parent).status == "finished"
    ]
    if not found:
        raise RunError(
            "There is nothing to compare.",
            given=out,
            expected="finished runs of `curves.py run`",
            do="Run that first, with the same --out.",
        )
    return found


def together(earlier: Sequence[Record], later: Sequence[Record]) -> list[Record]:
    """What was kept before and what came since; the later one of runs that were made twice."""
    runs = {(run["algorithm"], run["arm"], run["seed"]): run for run in [*earlier, *later]}
    return [runs[key] for key in sorted(runs)]


# ---- figures


def late(values: Sequence[float]) -> Sequence[float]:
    """The last part of a curve."""
    return values[-max(1, len(values) // LATE) :]


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Difference of two means, and half of its 95 % interval (Student, pooled variance)."""
    apart = fmean(ours) - fmean(theirs)
    freedom = len(ours) + len(theirs) - 2
    if min(len(ours), len(theirs)) < 2:
        return apart, math.inf
    inner = (len(ours) - 1) * variance(ours) + (len(theirs) - 1) * variance(theirs)
    error = math.sqrt(inner / freedom * (1 / len(ours) + 1 / len(theirs)))
    return apart, STUDENT[min(freedom, len(STUDENT)) - 1] * error


def by_arm(found: Sequence[Record], algorithm: str) -> dict[str, dict[int, Record]]:
    """The runs of one algorithm: arm -> seed -> run, for seeds that have both arms."""
    arms: dict[str, dict[int, Record]] = {arm: {} for arm in ARMS}
    for one in found:
        if one["algorithm"] == algorithm:
            arms[one["arm"]][one["seed"]] = one
    both = sorted(arms[WITH].keys() & arms[WITHOUT].keys())
    return {arm: {seed: runs[seed] for seed in both} for arm, runs in arms.items()}


def rewards_row(algorithm: str, arms: dict[str, dict[int, Record]], what: str) -> str:
    ends = {arm: [fmean(late(one[what])) for one in runs.values()] for arm, runs in arms.items()}
    starts = fmean(one[what][0] for runs in arms.values() for one in runs.values())
    apart, half = difference(ends[WITH], ends[WITHOUT])
    spread = max(max(values) - min(values) for values in ends.values())
    shown = [
        f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in ends.values()
    ]
    same = "yes" if abs(apart) <= spread else "no"
    if half == math.inf:
        same = "one seed says nothing"
    cells = [ALGORITHMS[algorithm][0], str(len(ends[WITH])), f"{starts:.3f}", *shown]
    cells += [f"{apart:+.3f} (95 %: {half:.3f})", f"{spread:.3f}", same]
    return f"| {' | '.join(cells)} |"


def seconds_row(algorithm: str, arms: dict[str, dict[int, Record]]) -> str:
    pairs = [(arms[WITH][seed], arms[WITHOUT][seed]) for seed in arms[WITH]]

    def ratios(seconds: Any) -> list[float]:
        return [seconds(ours) / seconds(theirs) for ours, theirs in pairs]

    whole = ratios(lambda one: one["wall_s"][-1])
    # The warm-up counts in the seconds of the first step, and belongs to no step.
    steps = ratios(lambda one: one["wall_s"][-1] - one["warm_up_s"])
    writing = ratios(lambda one: one["generate_s"])
    seconds = [median(one["wall_s"][-1] for one in runs.values()) for runs in arms.values()]
    tokens = [one["tokens_a_step"] for one in arms[WITH].values() if one["tokens_a_step"]]
    cells = [ALGORITHMS[algorithm][0], *(f"{value:.0f}" for value in seconds)]
    cells.append(f"{median(whole):.3f} ({min(whole):.3f} to {max(whole):.3f})")
    cells += [f"{median(steps):.3f}", f"{median(writing):.3f}"]
    cells.append(f"{fmean(tokens):.2f}" if tokens else "")
    return f"| {' | '.join(cells)} |"


def tables(found: Sequence[Record]) -> list[str]:
    """Markdown: rewards, right answers and seconds of each algorithm that has both arms."""
    have = {name: arms for name in ALGORITHMS if (arms := by_arm(found, name))[WITH]}
    lines = []
    for what, title in (("reward", "reward"), ("correct", "right answers")):
        if any(one[what] is None for one in found):  # A reward model knows no right answers.
            continue
        head = (
            f"{title} | seeds | step 0 | with | without | difference | seeds differ by | the same"
        )
        lines += [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
        lines += [rewards_row(name, arms, what) for name, arms in have.items()]
        lines.append("")
    head = (
        "seconds | with | without | with / without | without the warm-up | generation"
        " | tokens a step"
    )
    lines += [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    lines += [seconds_row(name, arms) for name, arms in have.items()]
    made = sorted({f"{one['commit']}, {one['cpu']}" for one in found})
    return [*lines, "", f"{len(found)} runs: {'; '.join(made)}"]


# ---- the picture

LEFT, PANEL, GAP, TALL = 52.0, 196, 48, 150
LEAST_WIDTH = 520
STEPS, SECONDS = "PPO step", "seconds"
TOPS = {STEPS: 58, SECONDS: 262}
"""Row of the charts -> its upper edge."""
COLOURS = {WITH: 2, WITHOUT: 0}
Point = tuple[float, float, float, float]
"""Place on the axis; lowest, mean and highest reward of the seeds there."""


def means(values: Sequence[float]) -> list[float]:
    """One value for each group of steps; steps beyond the last whole group are left out."""
    count = max(1, len(values) // TOGETHER)
    size = min(TOGETHER, len(values))
    return [fmean(values[number * size : (number + 1) * size]) for number in range(count)]


def over_seeds(runs: dict[int, Record], what: str) -> list[tuple[float, float, float]]:
    """Lowest, mean and highest value over the seeds, by group of steps."""
    columns = zip(*(means(one[what]) for one in runs.values()), strict=True)
    return [(min(column), fmean(column), max(column)) for column in columns]


def points_of(runs: dict[int, Record], axis: str) -> list[Point]:
    """The rewards of an arm over its steps or seconds."""
    rewards = over_seeds(runs, "reward")
    if axis == STEPS:
        steps = len(next(iter(runs.values()))["reward"])
        places = means([float(step) for step in range(steps)])
    else:
        places = [mean for _, mean, _ in over_seeds(runs, "wall_s")]
    return [(place, *values) for place, values in zip(places, rewards, strict=True)]


def panel(
    left: float, top: float, curves: dict[str, list[Point]], unit: str, ticks: Sequence[float]
) -> list[str]:
    """One chart: for each arm a line of means, and the range of its seeds behind it.

    Args:
        ticks: of the vertical axis, the same in all charts.
    """
    low, high = ticks[0], ticks[-1]
    across = max(place for points in curves.values() for place, *_ in points)

    def x(place: float) -> float:
        return left + PANEL * place / across

    def y(value: float) -> float:
        return top + TALL * (1 - (value - low) / (high - low))

    shapes = []
    for tick in ticks:
        shapes.append(line(left, y(tick), left + PANEL, y(tick), "grid"))
        shapes.append(text(left - 6, y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    for tick in nice_ticks(0, across, 4):
        if tick <= across:
            shapes.append(text(x(tick), top + TALL + 15, f"{tick:g}", 'text-anchor="middle"'))
    shapes.append(text(left + PANEL / 2, top + TALL + 30, unit, 'text-anchor="middle"'))
    for arm, points in curves.items():
        there = [f"{x(place):.1f},{y(most):.1f}" for place, _, _, most in points]
        back = [f"{x(place):.1f},{y(least):.1f}" for place, least, _, _ in reversed(points)]
        around = " ".join([*there, *back])
        shapes.append(f'<polygon points="{around}" class="fill{COLOURS[arm]}" opacity="0.15"/>')
    for arm, points in curves.items():
        along = " ".join(f"{x(place):.1f},{y(mean):.1f}" for place, _, mean, _ in points)
        shapes.append(f'<polyline points="{along}" class="line{COLOURS[arm]}"/>')
    return shapes


def picture(found: Sequence[Record]) -> str:
    """Rewards by step and by second, a column for each algorithm."""
    have = {name: arms for name in ALGORITHMS if (arms := by_arm(found, name))[WITH]}
    counts = {len(arms[WITH]) for arms in have.values()}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    title = f"Reward with and without the plugin: means and ranges of {seeds} seeds"
    width = max(LEAST_WIDTH, LEFT + (PANEL + GAP) * len(have))
    shapes = [text(12, 20, title, 'font-weight="bold"')]
    for number, arm in enumerate(ARMS):
        at = width - 160 + 70 * number
        shapes.append(line(at, 44, at + 16, 44, f"line{COLOURS[arm]}"))
        shapes.append(text(at + 20, 48, arm))
    charts = {
        (name, axis): {arm: points_of(runs, axis) for arm, runs in arms.items()}
        for name, arms in have.items()
        for axis in TOPS
    }
    points = [one for curves in charts.values() for arm in curves.values() for one in arm]
    ticks = nice_ticks(min(one[1] for one in points), max(one[3] for one in points))
    for column, name in enumerate(have):
        left = LEFT + (PANEL + GAP) * column
        shapes.append(text(left, 48, ALGORITHMS[name][0], 'font-weight="bold"'))
        for axis, top in TOPS.items():
            shapes += panel(left, top, charts[name, axis], axis, ticks)
    return frame(title, width, max(TOPS.values()) + TALL + 44, shapes)


# ---- commands


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table", "keep", "draw"))
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS)
    )
    parser.add_argument("--config", default=str(ROOT / "configs" / "demo.yaml"))
    parser.add_argument(
        "--heads", type=Path, help="native heads that runs with the plugin start with"
    )
    parser.add_argument("--minutes", type=float, help="begin no run after this time")
    parser.add_argument("overrides", nargs="*", help="key=value pairs over the configuration")
    # Intermixed: overrides may follow options.
    args = parser.parse_intermixed_args(given)
    if args.out is None and args.what in ("run", "keep"):
        parser.error(f"{args.what} needs --out")
    return args


def main() -> None:
    args = arguments()
    if args.what == "run":
        # Runs have the checkout as their working directory (a reward may be imported from there).
        args.out = args.out.resolve()
        run_missing(args)
    elif args.what == "keep":
        earlier = kept() if KEPT.is_file() else []
        write_atomic(KEPT, json.dumps(together(earlier, records(args.out))) + "\n")
    elif args.what == "table":
        say("\n".join(tables(records(args.out) if args.out else kept())))
    else:
        write_atomic(PICTURE, picture(kept()))


def kept() -> list[Record]:
    found: list[Record] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
