"""`make test-gpu`: the GPU tests, part by part in the order of medusa_ppo/cli/gpu_suite.py, each
file in its own process. Results go to build/gpu-tests/results.json, which `medusa-ppo check-setup`
reads, and what each process says to build/gpu-tests/logs.

    python tests/run_gpu_tests.py [--jobs 4] [PART ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from medusa_ppo.cli.gpu_suite import (
    NAMED,
    PARTS,
    RESULTS,
    PartResult,
    TestPart,
    part_named,
    parts_for,
    read_results,
    results_text,
)
from medusa_ppo.reports.store import gpu_names
from medusa_ppo.runtime.files import write_atomic
from medusa_ppo.vllm_plugin.vllm_versions import vllm_version

NOTHING = 5
"""pytest's exit code if no test was selected."""


LOGS = RESULTS.with_name("logs")


@dataclass(frozen=True)
class FileResult:
    """What a process found: how many tests passed, `test: error` of those that failed, and how many
    were left out.
    """

    passed: int
    failures: list[str]
    left_out: int
    seconds: float


def run_file(part: TestPart, file: str, chosen: str) -> FileResult:
    """Run a file's tests; a process that ends without a report counts as a failure."""
    name = "-".join([Path(file).stem, part.name, *chosen.split()])
    report = LOGS / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", f"gpu and {part.marks}", "-k", chosen]
    began = time.monotonic()
    with (LOGS / f"{name}.log").open("w") as log:
        code = subprocess.run(
            [*command, f"--junitxml={report}", file],
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    if code == NOTHING:
        found: tuple[int, list[str], int] | None = (0, [], 0)
    else:
        found = read_report(report)
    passed, failures, left_out = found or (
        0,
        [f"{file}: ended with {code} and without a report; see {log.name}"],
        0,
    )
    seconds = time.monotonic() - began
    print(f"{name}: {passed} passed, {len(failures)} failed, {seconds:.0f} s", flush=True)
    for line in failures:
        print(f"    FAILED {line}", flush=True)
    return FileResult(passed, failures, left_out, seconds)


def start(part: TestPart, pool: ThreadPoolExecutor) -> list[Future[FileResult]]:
    """Queue all files of a part."""
    return [
        pool.submit(run_file, part, file, chosen) for file in part.files for chosen in served(file)
    ]


def result_of(found: Sequence[FileResult]) -> PartResult:
    return PartResult(
        sum(one.passed for one in found),
        sum(len(one.failures) for one in found),
        sum(one.left_out for one in found),
        round(sum(one.seconds for one in found), 1),
        tuple(line for one in found for line in one.failures)[:NAMED],
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        f"{'; '.join(gpu_names()) or 'no GPU'}, vLLM {vllm_version() or 'none'}",
    )


def served(file: str) -> tuple[str, ...]:
    """pytest's `-k` for each process of a file. vLLM allows one engine that can sleep a process, so
    eager engines and those with CUDA graphs have a process each.
    """
    return ("not cuda-graphs", "cuda-graphs") if "/engines/" in file else ("",)


def read_report(path: Path) -> tuple[int, list[str], int] | None:
    """How many tests passed, `test: error` for each that failed, and how many were left out."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    failures = []
    left_out = 0
    for case in cases:
        wrong = [part for part in case if part.tag in ("failure", "error")]
        left_out += any(part.tag == "skipped" for part in case)
        if wrong:
            words = (wrong[0].get("message") or "").splitlines()
            failures.append(f"{case.get('name')}: {words[0][:200] if words else 'no message'}")
    return len(cases) - len(failures) - left_out, failures, left_out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--jobs", type=int, default=1, help="files at once, on one GPU or several")
    options = parser.parse_args(argv)
    wanted = [part_named(name) for name in options.parts]
    if None in wanted:
        known = ", ".join(part.name for part in PARTS)
        sys.stderr.write(
            f"No such part. given: {' '.join(options.parts)}  expected: {known}  do this:"
            " medusa-ppo check-setup\n"
        )
        return 2
    parts = [part for part in wanted if part] or list(parts_for(len(gpu_names())))
    if not parts:
        sys.stderr.write(
            "There is no GPU. given: none from nvidia-smi  expected: one or more  do this: run it"
            " on a machine where `medusa-ppo doctor` names a GPU\n"
        )
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    red = False
    with ThreadPoolExecutor(options.jobs) as pool:
        # All at once, so that no part waits for the last file of the one before.
        started = [(part, start(part, pool)) for part in parts]
        for part, files in started:
            result = result_of([file.result() for file in files])
            write_atomic(RESULTS, results_text(read_results() | {part.name: result}))
            print(
                f"== {part.name}: {result.passed} passed, {result.failed} failed,"
                f" {result.left_out} left out, {result.seconds:.0f} s: {part.shows}",
                flush=True,
            )
            red = red or bool(result.failed) or not result.passed
    print("For a bug report: medusa-ppo check-setup --page page.md")
    return int(red)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
