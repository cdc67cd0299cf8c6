"""Reading a run folder: metrics.jsonl and run.json, finished or not, into one Run."""

from __future__ import annotations

import json
import logging
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from heads.errors import RunError, UsageError
from medusa_ppo.contract import metrics

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
META_FILE = "run.json"
BEST_FOLDER = "best"
"""Holds the actor that did best in an evaluation."""
KEPT_FOLDER = "checkpoints"
"""Holds the last saves of the run's state."""
ROLLOUTS_FOLDER = "rollouts"
# Columns of the rollout files; beside them stand step, policy_version, temperature, top_p and
# top_k.
PROMPT_IDS = "prompt_ids"
RESPONSE_IDS = "response_ids"
LOGPROBS = "logprobs"
STATUSES = ("running", "finished", "interrupted", "failed")
"""What a run writes of itself; the two below are what a reader finds out instead."""
KILLED = "killed"
UNKNOWN = "unknown"
LAST_STEP = 1 << 53
"""Above this a float can't tell two step numbers apart, and the charts' axes are floats."""
NONFINITE = "nonfinite"
"""Key of a step line that names the metrics that were NaN or infinite in it (JSON has neither; they
are stored as null).
"""


@dataclass(frozen=True)
class Run:
    """One run as it lies on disk.

    Attributes:
        path: its folder.
        steps: one dict per PPO step, ascending in `step`, keys from medusa_ppo/contract/metrics.py.
        meta: run.json (name, config, versions, hardware, started_at, status ...); empty when the
            file is missing.
        unreadable_lines: lines of metrics.jsonl that were no JSON object with a step; a torn last
            line is not counted.
        status: running | finished | interrupted | failed, `killed` when run.json says running but
            the process is gone, `unknown` without run.json.
    """

    path: Path
    steps: tuple[dict[str, Any], ...]
    meta: dict[str, Any] = field(default_factory=dict)
    unreadable_lines: int = 0
    status: str = UNKNOWN

    @property
    def name(self) -> str:
        return str(self.meta.get("name") or self.path.name)

    @property
    def config(self) -> dict[str, Any]:
        return self.section("config")

    def section(self, name: str) -> dict[str, Any]:
        """A mapping of run.json (config, versions, hardware, extras), empty when it is missing or
        something else.
        """
        value = self.meta.get(name)
        return value if isinstance(value, dict) else {}

    def setting(self, section: str, key: str) -> Any:
        """One value of the configuration, or None: a run of another loop may have another
        configuration.
        """
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def column(self, name: str) -> list[float | None]:
        """One metric over all steps; None where it is missing, null or not a finite number."""
        return [number(step.get(name)) for step in self.steps]

    def step_numbers(self) -> list[int]:
        return [int(step[metrics.STEP]) for step in self.steps]


def number(value: object) -> float | None:
    """A finite number as float, anything else as None (a bool is not a number)."""
    # bool is an int to Python.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    # A whole number beyond all floats.
    except OverflowError:
        return None


def numbers(value: object) -> list[float] | None:
    """A list of finite numbers, or None when it is anything else or empty."""
    if not isinstance(value, list | tuple) or not value:
        return None
    found = [number(item) for item in value]
    finite = [item for item in found if item is not None]
    return finite if len(finite) == len(found) else None


def read_run(run_dir: Path | str) -> Run:
    """Read a run, finished or not; a torn last line is left out, other unreadable lines are
    counted.

    Raises:
        UsageError: the folder does not exist or is no run.
        RunError: it is a run, but its files are damaged beyond use.
    """
    path = Path(run_dir)
    metrics_path = path / METRICS_FILE
    meta_path = path / META_FILE
    if not metrics_path.is_file() and not meta_path.is_file():
        raise _no_run(path)
    meta = read_meta(meta_path)
    steps, bad = read_steps(metrics_path)
    return Run(path, tuple(steps), meta, bad, _status(meta))


def _no_run(path: Path) -> UsageError:
    """The error for a folder that holds no run; names the runs nearby."""
    place = path if path.is_dir() else path.parent
    runs = place.glob(f"*/{METRICS_FILE}") if place.is_dir() else ()
    # Mostly the folder of all runs was given: these are what was meant.
    near = sorted(str(found.parent) for found in runs)[:8]
    expected = f"a folder with {METRICS_FILE}"
    if near:
        expected += f", e.g. {', '.join(near)}"
    return UsageError(
        "This folder is no run." if path.is_dir() else "There is no such run folder.",
        given=path,
        expected=expected,
        do="Give the folder of one run, OUT/NAME of its configuration.",
    )


def read_meta(path: Path) -> dict[str, Any]:
    """run.json as a dict; empty when there is none. Raises RunError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        found = "" if isinstance(meta, dict) else type(meta).__name__
    except (ValueError, RecursionError) as error:
        meta = {}
        found = str(error)
    if found:
        given = f"{path}: {found}"
        do = "Move the file away and ask again."
        raise RunError(f"{META_FILE} is damaged.", given=given, expected="a JSON object", do=do)
    return dict(meta)


def read_steps(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Steps ascending (the last line wins when a step stands twice) and the number of unreadable
    lines.

    Raises:
        RunError: not one line is readable.
    """
    if not path.is_file():
        return [], 0
    # Bytes, because a line that was torn in the middle may be no UTF-8; each line is decoded by
    # itself.
    *lines, last = path.read_bytes().split(b"\n")
    records = [parse_line(line) for line in [*lines, last] if line.strip()]
    # A resumed run may have written a step again before its old line was cut.
    by_step = {int(record[metrics.STEP]): record for record in records if record is not None}
    bad = records.count(None)
    # A line that is being written just now, or was when the process was killed.
    if last.strip() and records[-1] is None:
        logger.info("%s ends in a torn line; it is left out", path)
        bad -= 1
    if bad and not by_step:
        given = f"{path}: {bad} unreadable lines"
        raise RunError(
            f"{METRICS_FILE} holds no step.",
            given=given,
            expected="one JSON object per line",
            do="Check the file.",
        )
    if bad:
        logger.warning("%s has %d unreadable lines; they are left out", path, bad)
    return [by_step[step] for step in sorted(by_step)], bad


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A step, or None when the line is no JSON object with a whole-numbered step."""
    try:
        record = json.loads(line)
    # Hundreds of nested brackets are valid JSON, and more than Python's reader takes.
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get(metrics.STEP)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    return record if 0 <= step < LAST_STEP else None


def _status(meta: dict[str, Any]) -> str:
    """What run.json says, or `killed` where the process that was running is gone."""
    status = meta.get("status")
    if status not in STATUSES:
        return UNKNOWN
    if status == "running" and not process_alive(meta):
        return KILLED
    return str(status)


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since the boot, which no change of the clock moves; None
    without such a process or /proc.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The process's name may hold spaces and brackets; the fields after it don't. The start
        # time is field 22 (proc(5)), the 20th behind the name.
        _, _, fields = line.rpartition(")")
        return int(fields.split()[19])
    except (OSError, ValueError, IndexError):
        return None


def process_alive(meta: dict[str, Any]) -> bool:
    """Whether the process that wrote run.json still runs; True when that can't be told from here
    (another host).
    """
    process = meta.get("process")
    # Process numbers of another host say nothing here.
    if not isinstance(process, dict) or process.get("host") != platform.node():
        return True
    try:
        # psutil's time follows the clock, and a clock that is set would make a living run look
        # dead.
        if "start_ticks" in process:
            return start_ticks(int(process["pid"])) == process["start_ticks"]
        started = psutil.Process(int(process["pid"])).create_time()
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    # Another process may have got the number since; it has another start time.
    # psutil works the time out of the boot's, which moves with the clock by a little.
    return abs(started - (number(process.get("create_time")) or 0.0)) < 2.0
