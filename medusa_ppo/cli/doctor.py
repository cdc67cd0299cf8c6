"""`medusa-ppo doctor`: what this machine has, whether our vLLM plug-in really loads, and whether the engine samples honestly."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from medusa_ppo.vllm_plugin.registration import TESTED, is_allowed, is_cpu_build, is_tested, vllm_version

MIN_MEMORY_GIB = 6.0
MIN_SHM_GIB = 1.0
MIN_DISK_GIB = 2.0
PROBE_TIMEOUT_S = 300
# Versions the package was checked with; pyproject.toml says the same for pip.
RANGES = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 16), (5, 20)), "ray": ((2, 55), (3, 0)), "datasets": ((5, 0), (6, 0))}
GIB = 1024**3


@dataclass(frozen=True)
class Check:
    """One finding: `do` is the next step for the reader and only shown when `ok` is false; `warn` marks what may turn out well."""

    name: str
    ok: bool
    found: str
    do: str = ""
    warn: bool = False


def run_checks(quick: bool = False) -> Iterator[Check]:
    """Yield the findings one by one, cheap ones first; `quick` leaves out those that start Ray, vLLM and an engine."""
    checks: list[Callable[[], Check]] = [_python, _memory, _shared_memory, _disk]
    checks += [_package(name) for name in RANGES]
    checks += [_vllm, _entry_point]
    for check in checks:
        yield check()
    if not quick:
        yield _ray()
        yield from _hooks()
        yield from _engine()


def _python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Check("Python", (3, 11) <= sys.version_info[:2] < (3, 13), found, "Use Python 3.11 or 3.12: make setup PYTHON=python3.11")


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}, {os.cpu_count()} cores"
    return Check("Memory", memory.available / GIB >= MIN_MEMORY_GIB, found, f"Free at least {MIN_MEMORY_GIB:.0f} GiB: end other programs.")


def _shared_memory() -> Check:
    if not os.path.isdir("/dev/shm"):
        return Check("Shared memory", True, "no /dev/shm here; temporary files are used instead")
    free = shutil.disk_usage("/dev/shm").free / GIB
    return Check("Shared memory", free >= MIN_SHM_GIB, f"{free:.1f} GiB free in /dev/shm", "Enlarge /dev/shm (docker run --shm-size=8g).")


def _disk() -> Check:
    free = shutil.disk_usage(".").free / GIB
    return Check("Disk", free >= MIN_DISK_GIB, f"{free:.1f} GiB free here", f"Free at least {MIN_DISK_GIB:.0f} GiB.")


def _package(name: str) -> Callable[[], Check]:
    def check() -> Check:
        low, high = RANGES[name]
        expected = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return Check(name, False, "not installed", f"Install {name}{expected}: make setup")
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        return Check(name, low <= numbers < high, version, f"Install {name}{expected}: make setup")

    return check


def _vllm() -> Check:
    version = vllm_version()
    do = f"Install vLLM {' or '.join(TESTED)}: make setup VLLM={TESTED[-1]} (it picks the CPU or the CUDA build)"
    if not version:
        return Check("vLLM", False, "not installed", do)
    found = f"{version} ({'CPU' if is_cpu_build() else 'GPU'} build)"
    if is_allowed(version) and not is_tested(version):
        return Check("vLLM", True, f"{found}, not tested; tested: {', '.join(TESTED)}", warn=True)
    return Check("vLLM", is_allowed(version), found, do)


def _hooks() -> Iterator[Check]:
    """The names inside vLLM that we rely on, one finding each; looked for in a process of their own, which imports vLLM."""
    hooks = _answer("medusa_ppo.vllm_plugin.hook_table", "Hooks")
    if isinstance(hooks, Check):
        yield hooks
        return
    for hook in hooks:
        found = hook["fault"] or f"({hook['runner']}, {hook['releases']}, {hook['checked']})"
        yield Check(
            f"Hook: {hook['need']}", not hook["fault"], f"{hook['where']} {found}", f"Install a vLLM that was tested: {', '.join(TESTED)}."
        )


def _entry_point() -> Check:
    names = [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]
    found = "registered" if "medusa_ppo" in names else f"not among {names or 'none'}"
    return Check(
        "Plug-in registered", "medusa_ppo" in names, found, "Install this package (make setup): vLLM finds the plug-in by its entry point."
    )


def _ray() -> Check:
    code = (
        "import ray; ray.init(num_cpus=1, include_dashboard=False, logging_level='ERROR', object_store_memory=100_000_000);"
        "print(ray.get(ray.remote(lambda: 6 * 7).remote())); ray.shutdown()"
    )
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("Ray starts", False, f"no answer in {PROBE_TIMEOUT_S} s", "Look for left-over Ray processes: ray status, ray stop")
    ok = done.returncode == 0 and done.stdout.strip().endswith("42")
    return Check(
        "Ray starts",
        ok,
        "a local cluster ran a task" if ok else _last_line(done.stderr),
        "Look for left-over Ray processes: ray status, ray stop",
    )


def _answer(module: str, name: str) -> Any:
    """What a module prints as JSON in a process of its own, or the finding that it failed."""
    try:
        done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check(name, False, f"no answer in {PROBE_TIMEOUT_S} s", "Free memory and cores, then try again.")
    if done.returncode != 0:
        return Check(name, False, _last_line(done.stderr), f"Run `python -m {module}` and read what it prints.")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _engine() -> Iterator[Check]:
    """Start a tiny engine in a process of its own; it says which plug-in it loaded and how it samples."""
    report = _answer("medusa_ppo.engines.probe", "Engine starts")
    if isinstance(report, Check):
        yield report
        return
    yield Check("Engine starts", True, f"vLLM {report['vllm']}, worker process {report['pid']}")
    yield Check(
        "Plug-in loaded",
        report["active"],
        f"mends: {', '.join(report['mends']) or 'none needed'}",
        "Unset VLLM_PLUGINS, or let it name medusa_ppo.",
    )
    yield Check(
        "Honest sampling",
        abs(report["z"]) < report["limit"],
        f"{report['tokens']} tokens drafted at temperature {report['temperature']}: {report['z']:+.2f} standard errors off",
        "Do not trust any figure at temperature > 0 here: the sampler is wrong. Report this with the lines above.",
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
