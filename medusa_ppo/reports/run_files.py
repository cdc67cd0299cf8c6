"""Reads a run folder (metrics.jsonl and run.json), finished or not, into a Run."""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Iterator
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
"""Folder of the actor with the best evaluation."""
KEPT_FOLDER = "checkpoints"
"""Folder of the last saves of the run's state."""
ROLLOUTS_FOLDER = "rollouts"
CHECKPOINT_FOLDER = "checkpoint"
"""Folder of the last save of the run's state."""
ACTOR_FOLDER = "actor"
HEADS_FOLDER = "heads-final"
"""Folders of the actor and the heads at the run's end."""
COMPANION_FOLDER = "companion"
"""Folder where the companion keeps its state."""
# Columns of the rollout files, besides step, policy_version, temperature, top_p and top_k.
PROMPT_IDS = "prompt_ids"
RESPONSE_IDS = "response_ids"
LOGPROBS = "logprobs"
STATUSES = ("running", "finished", "interrupted", "failed")
"""Statuses that a run writes itself; readers infer the two below."""
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
    """One run as stored on disk.

    Attributes:
        path: its folder.
        steps: one dict per PPO step, ascending in `step`, keys from medusa_ppo/contract/metrics.py.
        meta: run.json (name, config, versions, hardware, started_at, status ...); empty when the
            file is missing.
        unreadable_lines: lines of metrics.jsonl that are not a JSON object with a step; a torn last
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
        """A mapping of run.json (config, versions, hardware, extras); empty if it is missing or not
        a mapping.
        """
        value = self.meta.get(name)
        return value if isinstance(value, dict) else {}

    def setting(self, section: str, key: str) -> Any:
        """One value of the configuration, or None: another loop's run may have a different
        configuration.
        """
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def column(self, name: str) -> list[float | None]:
        """One metric over all steps; None where it is missing, null or not a finite number."""
        return [number(step.get(name)) for step in self.steps]

    def draft_choices(self, last: int = 0) -> Iterator[dict[str, Any]]:
        """Rows of running sequences, steps by number of drafts, and the engine's estimate, of the
        last steps (0: of all); what is not such a row is left out.
        """
        for step in self.steps[-last:]:
            rows = step.get(metrics.DRAFT_CHOICES)
            for row in rows if isinstance(rows, list) else ():
                if not isinstance(row, dict):
                    continue
                running, counts = number(row.get("running")), row.get("steps")
                if running is None or running < 1 or not isinstance(counts, list):
                    continue
                if all(number(count) is not None and count >= 0 for count in counts):
                    yield {
                        "running": int(running),
                        "steps": counts,
                        "speedup": number(row.get("speedup")),
                    }

    def step_numbers(self) -> list[int]:
        return [int(step[metrics.STEP]) for step in self.steps]


def number(value: object) -> float | None:
    """A finite number as float, anything else (including bools) as None."""
    # In Python a bool is an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    # An integer too large for a float.
    except OverflowError:
        return None


def numbers(value: object) -> list[float] | None:
    """A list of finite numbers, or None if it is anything else or empty."""
    if not isinstance(value, list | tuple) or not value:
        return None
    found = [number(item) for item in value]
    finite = [item for item in found if item is not None]
    return finite if len(finite) == len(found) else None


def read_run(run_dir: Path | str) -> Run:
    """Read a run, finished or not; a torn last line is left out, other unreadable lines are
    counted.

    Raises:
        UsageError: the folder does not exist or is not a run.
        RunError: it is a run, but its files are damaged beyond use.
    """
    path = Path(run_dir)
    metrics_path = path / METRICS_FILE
    meta_path = path / META_FILE
    if not metrics_path.is_file() and not meta_path.is_file():
        raise _no_run(path)
    meta = read_meta(meta_path)
    steps, bad = read_steps(metrics_path)
    return Run(path, tuple(steps), meta, bad, status_of(meta))


def _no_run(path: Path) -> UsageError:
    """The error for a folder without a run, naming the runs nearby."""
    place = path if path.is_dir() else path.parent
    runs = place.glob(f"*/{METRICS_FILE}") if place.is_dir() else ()
    # Usually somebody gave the folder that holds all runs, and meant one of them.
    near = sorted(str(found.parent) for found in runs)[:8]
    expected = f"a folder with {METRICS_FILE}"
    if near:
        expected += f", e.g. {', '.join(near)}"
    return UsageError(
        "This folder is not a run." if path.is_dir() else "There is no such run folder.",
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
        do = "Move the file away and try again."
        raise RunError(f"{META_FILE} is damaged.", given=given, expected="a JSON object", do=do)
    return dict(meta)


def read_steps(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Steps ascending (the last line of a repeated step wins) and the number of unreadable lines.

    Raises:
        RunError: no line is readable.
    """
    if not path.is_file():
        return [], 0
    # Bytes, because a torn line may not be valid UTF-8; each line is decoded by itself.
    *lines, last = path.read_bytes().split(b"\n")
    records = [parse_line(line) for line in [*lines, last] if line.strip()]
    # A resumed run may have rewritten a step before its old line was cut.
    by_step = {int(record[metrics.STEP]): record for record in records if record is not None}
    bad = records.count(None)
    # The last line may be incomplete: it is being written now, or was when the process was killed.
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
    """A step, or None if the line is not a JSON object with an integer step."""
    try:
        record = json.loads(line)
    # Hundreds of nested brackets are valid JSON, but too deep for Python's parser.
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get(metrics.STEP)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    return record if 0 <= step < LAST_STEP else None


def status_of(meta: dict[str, Any]) -> str:
    """The status in run.json, or `killed` if the running process is gone by now."""
    status = meta.get("status")
    if status not in STATUSES:
        return UNKNOWN
    if status == "running" and not process_alive(meta):
        return KILLED
    return str(status)


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot, which clock changes don't affect; None without
    such a process or /proc.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The process's name may contain spaces and brackets; the fields after it don't. The start
        # time is field 22 (proc(5)), the 20th after the name.
        _, _, fields = line.rpartition(")")
        return int(fields.split()[19])
    except (OSError, ValueError, IndexError):
        return None


def process_alive(meta: dict[str, Any]) -> bool:
    """Whether the process that wrote run.json is still running; True if that can't be determined
    from here (another host).
    """
    process = meta.get("process")
    # Process ids of another host mean nothing here.
    if not isinstance(process, dict) or process.get("host") != platform.node():
        return True
    try:
        # psutil's time follows the clock, so setting the clock would make a live run look dead.
        if "start_ticks" in process:
            return start_ticks(int(process["pid"])) == process["start_ticks"]
        started = psutil.Process(int(process["pid"])).create_time()
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    # Another process may have the same id now, but with a different start time. psutil derives the
    # time from the boot time, which shifts slightly with the clock.
    return abs(started - (number(process.get("create_time")) or 0.0)) < 2.0
