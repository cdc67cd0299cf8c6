"""A long run of a tiny actor, watched from outside: does anything grow, is anything left behind?

    python tests/robustness/soak.py --steps 500
    python tests/robustness/soak.py --minutes 45 --json soak.json

Every few seconds it counts, for each role of process (loop, engine, companion, Ray's own), resident
and private memory, open files and threads, and for the whole run its processes and its bytes in
shared memory. After the first third (libraries load, caches fill) a line is laid through the means
of BLOCKS stretches of time. A figure grows when the line's slope is above zero by its 95 % interval
and has risen by more than LEAST over the window. Exit code 1 when something grows or is left
behind.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from watched import TINY, WatchedRun, small_run

START_S = 600.0
WARM_UP_SHARE = 1 / 3
BLOCKS = 10
T_QUANTILE = 2.306  # 97.5 %, BLOCKS - 2 degrees of freedom.
LEAST = {
    "resident MiB": 4.0,
    "private MiB": 4.0,
    "files": 1.0,
    "threads": 1.0,
    "processes": 0.5,
    "shared memory MiB": 0.25,
}
"""What a figure may rise by over the window before it counts: an allocator's arena, one file."""
MIB = 1024**2
SHARED_MEMORY = Path("/dev/shm")
ENDLESS = 1_000_000


@dataclass(frozen=True)
class Trend:
    """A figure over the window.

    Attributes:
        mean: over the window.
        per_hour, low, high: the slope and its 95 % interval.
        rise: slope times the window's length.
        grows: the verdict.
    """

    name: str
    mean: float
    per_hour: float
    low: float
    high: float
    rise: float
    grows: bool


def trend(name: str, times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """A least-squares line through block means; neighbouring samples are much alike, blocks hardly
    are.
    """
    size = len(times_s) / BLOCKS
    if size < 1:
        raise ValueError(f"{len(times_s)} samples are too few: at least {BLOCKS} after the warm-up")
    cuts = [round(index * size) for index in range(BLOCKS + 1)]
    x = [statistics.fmean(times_s[a:b]) for a, b in pairwise(cuts)]
    y = [statistics.fmean(values[a:b]) for a, b in pairwise(cuts)]
    slope, start = statistics.linear_regression(x, y)
    left = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (BLOCKS - 2)
    half = T_QUANTILE * math.sqrt(left / sum((a - statistics.fmean(x)) ** 2 for a in x))
    rise = slope * (times_s[-1] - times_s[0])
    least = LEAST[name.split(": ")[-1]]
    return Trend(
        name,
        statistics.fmean(values),
        3600 * slope,
        3600 * (slope - half),
        3600 * (slope + half),
        rise,
        slope > half and rise > least,
    )


def sample(run: WatchedRun) -> dict[str, float]:
    """All figures now, by name."""
    figures: dict[str, float] = {"processes": 0.0}
    for role, processes in run.processes().items():
        for process in processes:
            try:
                memory = process.memory_info()
                files = process.num_fds()
                threads = process.num_threads()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            own = {
                "resident MiB": memory.rss / MIB,
                "private MiB": (memory.rss - memory.shared) / MIB,
                "files": files,
                "threads": threads,
            }
            for name, value in own.items():
                figures[f"{role}: {name}"] = figures.get(f"{role}: {name}", 0.0) + value
            figures["processes"] += 1
    figures["shared memory MiB"] = shared_bytes(run) / MIB
    return figures


def shared_bytes(run: WatchedRun) -> int:
    """Bytes of the run's files in shared memory."""
    total = 0
    for path in [path for path in run.files() if path.is_relative_to(SHARED_MEMORY)]:
        for file in [path, *path.rglob("*")]:
            try:
                total += file.stat().st_size if file.is_file() else 0
            except FileNotFoundError:
                continue
    return total


def watch(run: WatchedRun, minutes: float, every_s: float) -> list[tuple[float, dict[str, float]]]:
    """Samples until the run ends or the time is up; the first one after the first step."""
    if not run.wait_for(lambda: bool(run.steps()), START_S):
        raise RuntimeError(f"no step within {START_S:.0f} s:\n{run.tail()}")
    samples = []
    began = time.monotonic()
    while run.code is None and (not minutes or time.monotonic() - began < 60 * minutes):
        samples.append((time.monotonic() - began, sample(run)))
        time.sleep(every_s)
    return samples[:-1]  # The last one may have caught the run at its end.


def judge(samples: Sequence[tuple[float, dict[str, float]]]) -> list[Trend]:
    """Trends after the warm-up. A role that is not there in every sample counts as zero there: Ray
    starts workers when it likes.
    """
    window = samples[math.ceil(len(samples) * WARM_UP_SHARE) :]
    times_s = [at for at, _ in window]
    names = sorted({name for _, figures in window for name in figures})
    return [
        trend(name, times_s, [figures.get(name, 0.0) for _, figures in window]) for name in names
    ]


def table(trends: Sequence[Trend]) -> str:
    """Markdown."""
    lines = [
        "| figure | mean | slope an hour (95 % interval) | rise over the window | |",
        "|---|---|---|---|---|",
    ]
    for t in trends:
        slope = f"{t.per_hour:+.2f} ({t.low:+.2f} to {t.high:+.2f})"
        lines.append(
            f"| {t.name} | {t.mean:.1f} | {slope} | {t.rise:+.2f} | {'GROWS' if t.grows else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Watch a long run for growth and for what it leaves behind."
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=500, help="PPO steps")
    length.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="minutes from the first step on, in the place of steps",
    )
    parser.add_argument("--model", default=TINY, help=f"folder of an actor, demo, or {TINY}")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    write = sys.stdout.write
    with tempfile.TemporaryDirectory(prefix="ms-") as name:
        config = small_run(
            options.model, Path(name), ENDLESS if options.minutes else options.steps, options.seed
        )
        with WatchedRun(config, Path(name)) as run:
            samples = watch(run, options.minutes, options.every)
            code = run.stop()
            expected = 130 if options.minutes else 0
            steps = len(run.steps())
            left = run.left_behind()
            problem = (
                ""
                if code == expected
                else f"exit code {code}, expected {expected}:\n{run.tail()}\n"
            )
    trends = judge(samples)
    write(
        f"{table(trends)}\n\n{steps} PPO steps in {samples[-1][0] / 60:.1f} min, {len(samples)}"
        " samples\n"
    )
    write(problem + "".join(f"left behind: {what}\n" for what in left))
    if options.json:
        figures = {
            "steps": steps,
            "left": left,
            "trends": [asdict(t) for t in trends],
            "samples": samples,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(bool(left or problem or any(t.grows for t in trends)))


if __name__ == "__main__":
    main()
