"""The GPU tests, counted as pytest collects them: how many there are, how many of them run on the
CPU too, and that check-setup's table has each of them once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from medusa_ppo.cli.gpu_suite import PARTS
from tests.conftest import COLLECTED

ROOT = Path(__file__).resolve().parents[1]
ON_A_GPU = re.compile(r"cuda-eager|cuda-graphs|cuda|share-of-a-gpu|a-gpu-each")
LEAST, SHARED = 60, 0.8


def has(item: pytest.Item, marks: str) -> bool:
    names = {marker.name for marker in item.iter_markers()}
    return Expression.compile(marks).evaluate(lambda name, **_: name in names)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def function_of(test: str) -> str:
    return test.partition("[")[0]


def test_the_suite_of_a_gpu_is_one(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[COLLECTED]
    files = {file for part in PARTS for file in part.files}
    if not files <= {file_of(item) for item in items}:
        # Run alone: run it again together with the table's files.
        command = [sys.executable, "-m", "pytest", "-k", request.node.name, __file__]
        subprocess.run([*command, *sorted(files)], cwd=ROOT, check=True, capture_output=True)
        return
    on_gpu = [item for item in items if has(item, "gpu")]
    on_cpu = {item.nodeid for item in items if has(item, "not gpu and not slow")}
    functions = {function_of(item.nodeid) for item in on_gpu}
    assert len(functions) >= LEAST, "functions, not counting parameters"
    alone = [item for item in on_gpu if ON_A_GPU.sub("cpu", item.nodeid, count=1) not in on_cpu]
    few = Counter(function_of(item.nodeid) for item in alone)
    assert len(alone) <= (1 - SHARED) * len(on_gpu), few
    assert len(functions - {function_of(test) for test in on_cpu}) <= (1 - SHARED) * len(functions)
    # On a machine with enough GPUs `make test-gpu` runs each of them once.
    runs = Counter(
        item.nodeid
        for part in PARTS
        for item in on_gpu
        if file_of(item) in part.files and has(item, part.marks)
    )
    assert {test for test, count in runs.items() if count > 1} == set()
    assert {item.nodeid for item in on_gpu} - runs.keys() == set()
    for part in PARTS:
        here = [item for item in on_gpu if file_of(item) in part.files and has(item, part.marks)]
        needs = [marker.args[0] for item in here for marker in item.iter_markers("gpus")]
        assert here and min(needs, default=1) == part.gpus, part.name
        assert {file_of(item) for item in here} == set(part.files), part.name
