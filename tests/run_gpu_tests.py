"""`make test-gpu`: the GPU tests, part by part in the order of medusa_ppo/cli/gpu_suite.py, each
file in its own process. Results go to build/gpu-tests/results.json, which `medusa-ppo check-setup`
reads.

    python tests/run_gpu_tests.py [PART ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
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


def run(part: TestPart) -> PartResult:
    """Run all files of a part; a file that ends without a report counts as a failure."""
    began = time.monotonic()
    passed = failed = left_out = 0
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = [(file, chosen) for file in part.files for chosen in served(file)]
        for number, (file, chosen) in enumerate(runs):
            report = Path(folder) / f"{number}.xml"
            command = [sys.executable, "-m", "pytest", "-m", f"gpu and {part.marks}", "-k", chosen]
            code = subprocess.run([*command, f"--junitxml={report}", file], check=False).returncode
            if code == NOTHING:
                continue
            found = read_report(report)
            if found is None:
                found = (0, [f"{file}: ended with {code} and without a report"], 0)
            passed += found[0]
            failed += len(found[1])
            failures += found[1]
            left_out += found[2]
    return PartResult(
        passed,
        failed,
        left_out,
        round(time.monotonic() - began, 1),
        tuple(failures[:NAMED]),
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


def main(names: list[str]) -> int:
    wanted = [part_named(name) for name in names]
    if None in wanted:
        known = ", ".join(part.name for part in PARTS)
        sys.stderr.write(
            f"No such part. given: {' '.join(names)}  expected: {known}  do this: medusa-ppo"
            " check-setup\n"
        )
        return 2
    parts = [part for part in wanted if part] or list(parts_for(len(gpu_names())))
    if not parts:
        sys.stderr.write(
            "There is no GPU. given: none from nvidia-smi  expected: one or more  do this: run it"
            " on a machine where `medusa-ppo doctor` names a GPU\n"
        )
        return 2
    red = False
    for part in parts:
        print(f"== {part.name}: {part.shows} (about {part.minutes} min)", flush=True)
        result = run(part)
        write_atomic(RESULTS, results_text(read_results() | {part.name: result}))
        print(
            f"== {part.name}: {result.passed} passed, {result.failed} failed, {result.left_out}"
            f" left out, {result.seconds:.0f} s",
            flush=True,
        )
        red = red or bool(result.failed) or not result.passed
    print("For a bug report: medusa-ppo check-setup --page page.md")
    return int(red)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
