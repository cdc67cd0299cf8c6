"""Faults in a run that goes on: companion and engine killed or stopped at random moments while
`medusa-ppo ppo` makes its steps.

    python tests/robustness/faults.py --companion-kills 20 --engine-kills 5 --hangs 2

After each fault it waits until the run has recovered, and says how long that took and how many PPO
steps were made meanwhile:

    companion    another process (the kernel's memory killer ends it as SIGKILL does), and it has
                 trained more than before
    engine       another process, and it drafts, with heads no older than before

At the end no PPO step may be missing or made twice, versions of the heads may only have grown, and
nothing may be left behind. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from watched import TINY, WatchedRun, small_run

from medusa_ppo.contract import metrics as names

START_S = 600.0
RECOVER_S = 300.0
HANG_S = (
    "from medusa_ppo.companion.client import CompanionClient as c;"
    " c.__init__.__kwdefaults__['hang_s'] = 5.0"
)
"""A run gives its companion 300 s; here nobody waits for so long."""
STOPPED = 130  # Exit code of a run that was asked to stop.
ENDLESS = 1_000_000


@dataclass(frozen=True)
class FaultKind:
    """A fault: which process it hits, and with what signal."""

    name: str
    role: str
    number: signal.Signals


KINDS = (
    FaultKind("companion killed", "companion", signal.SIGKILL),
    FaultKind("companion stopped", "companion", signal.SIGSTOP),
    FaultKind("engine killed", "engine", signal.SIGKILL),
)


@dataclass(frozen=True)
class Record:
    """What became of one fault."""

    kind: str
    step: int
    recovered: bool
    seconds: float
    steps_meanwhile: int


def inflict(
    run: WatchedRun, kind: FaultKind, moment_s: float, write: Callable[[str], object]
) -> Record:
    """Hit the run once, after `moment_s`, and wait until it has recovered."""
    time.sleep(moment_s)
    before = run.steps()[-1]
    pid = run.pid_of(kind.role)
    began = time.monotonic()
    if pid is not None:
        os.kill(pid, kind.number)

    def recovered() -> bool:
        now = run.steps()[-1]
        if (
            pid is None
            or run.pid_of(kind.role) in (None, pid)
            or restarts(now)[kind.role] == restarts(before)[kind.role]
        ):
            # What the old process said last may come in after its end: the run has to have seen the
            # new one.
            return False
        if kind.role == "engine":
            return now[names.STEP] > before[names.STEP] + 1 and now[names.DRAFTS] > 0
        return now[names.COMPANION_TRAINED_TOKENS] > before[names.COMPANION_TRAINED_TOKENS]

    well = run.wait_for(recovered, RECOVER_S)
    made = run.steps()[-1][names.STEP] - before[names.STEP]
    record = Record(kind.name, before[names.STEP], well, time.monotonic() - began, made)
    write(
        f"{kind.name} after step {record.step}: {'well' if well else 'NOT WELL'} after"
        f" {record.seconds:.1f} s, {made} steps made\n"
    )
    return record


def faults_of_steps(steps: list[dict[str, float]]) -> list[str]:
    """What is wrong with a run's step lines; empty when nothing is."""
    wrong = []
    numbers = [int(step[names.STEP]) for step in steps]
    if numbers != list(range(len(numbers))):
        wrong.append(
            "steps are missing or were made twice:"
            f" {[pair for pair in pairwise(numbers) if pair[1] != pair[0] + 1][:5]}"
        )
    if any(step[names.POLICY_VERSION] != step[names.STEP] for step in steps):
        wrong.append("a step's rollouts were not written by the policy of the step before")
    fell = [
        (a[names.STEP], a[names.HEADS_VERSION], b[names.HEADS_VERSION])
        for a, b in pairwise(steps)
        if b[names.HEADS_VERSION] < a[names.HEADS_VERSION]
    ]
    if fell:
        wrong.append(f"the heads' version fell: {fell[:5]}")
    return wrong


def restarts(step: dict[str, float]) -> dict[str, int]:
    return {
        "companion": int(step[names.COMPANION_RESTARTS]),
        "engine": int(step[names.ENGINE_RESTARTS]),
    }


def table(records: list[Record]) -> str:
    """Markdown, one line a kind."""
    lines = [
        "| fault | times | recovered | seconds, median (largest) | PPO steps meanwhile |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(record.kind for record in records):
        own = [record for record in records if record.kind == kind]
        seconds = [record.seconds for record in own]
        made = [record.steps_meanwhile for record in own]
        well = sum(record.recovered for record in own)
        lines.append(
            f"| {kind} | {len(own)} | {well} | {statistics.median(seconds):.1f}"
            f" ({max(seconds):.1f}) | {min(made)} to {max(made)} |"
        )
    return "\n".join(lines)


def run_faults(
    model: str, counts: dict[str, int], seed: int, folder: Path, write: Callable[[str], object]
) -> tuple[list[Record], list[str], int]:
    """Records of all faults, what is wrong besides, and the number of steps."""
    generator = random.Random(seed)
    schedule = [kind for kind in KINDS for _ in range(counts.get(kind.name, 0))]
    generator.shuffle(schedule)
    config = small_run(model, folder, ENDLESS, seed)
    with WatchedRun(config, folder, HANG_S) as run:
        if not run.wait_for(
            lambda: any(step[names.HEADS_VERSION] > 0 for step in run.steps()), START_S
        ):
            return [], [f"no heads were served within {START_S:.0f} s:\n{run.tail()}"], 0
        records = []
        for kind in schedule:
            recent = [step[names.WALL_S] for step in run.steps()[-6:]]
            usual_s = (recent[-1] - recent[0]) / max(1, len(recent) - 1)
            records.append(inflict(run, kind, generator.uniform(0, 2 * usual_s), write))
        code = run.stop()
        wrong = faults_of_steps(run.steps()) + [
            f"left behind: {left}" for left in run.left_behind()
        ]
        if code != STOPPED:
            wrong.append(f"exit code {code}, expected {STOPPED}:\n{run.tail()}")
        seen = restarts(run.steps()[-1])
        due = {
            role: sum(kind.role == role for kind in schedule) for role in ("companion", "engine")
        }
        if seen != due:
            wrong.append(f"restarts that the run has counted: {seen}, faults: {due}")
        wrong += [f"did not recover: {record}" for record in records if not record.recovered]
        return records, wrong, len(run.steps())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill and stop parts of a run, and see that it goes on."
    )
    parser.add_argument("--model", default="demo", help=f"folder of an actor, demo, or {TINY}")
    parser.add_argument("--companion-kills", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=2)
    parser.add_argument("--engine-kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = dict(
        zip(
            [kind.name for kind in KINDS],
            (options.companion_kills, options.hangs, options.engine_kills),
            strict=True,
        )
    )
    write = sys.stdout.write
    with tempfile.TemporaryDirectory(prefix="mf-") as name:
        records, wrong, steps = run_faults(options.model, counts, options.seed, Path(name), write)
    write(
        f"\n{table(records)}\n\n{steps} PPO steps,"
        f" {'none missing, none made twice' if not wrong else 'and this is wrong:'}\n"
    )
    for line in wrong:
        write(f"- {line}\n")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"records": [asdict(record) for record in records], "wrong": wrong, "steps": steps},
                indent=1,
            )
            + "\n"
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
