"""Freed memory stays with the process: blocks that are taken again cost no page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from medusa_ppo.runtime.kept_memory import ENVIRONMENT, environment, keep_freed_memory

FAULTS = """
import resource, sys, threading
import torch
from medusa_ppo.runtime.kept_memory import keep_freed_memory

def work():
    for _ in range(3):
        blocks = [torch.empty(12_000_000).fill_(1.0) for _ in range(4)]
        del blocks

if sys.argv[1] == "call":
    assert keep_freed_memory()
run = work
if sys.argv[2] == "thread":
    def run():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
for _ in range(3):
    run()  # What else lies on the heap has found its place then.
counts = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(counts)[2])
"""


def faults(how: str, thread: str) -> int:
    """Page faults of taking the same blocks once more, in a process of its own: the median of five
    times, because now and then something else takes a place within a block.
    """
    env = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    if how == "environment":
        env |= ENVIRONMENT
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how, thread],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(
    ("how", "thread"), [("call", "main"), ("environment", "main"), ("environment", "thread")]
)
def test_blocks_that_were_freed_are_taken_again_without_a_page_fault(how: str, thread: str) -> None:
    without = faults("nothing", thread)
    kept = faults(how, thread)
    assert kept < without / 10, f"{without} page faults without, {kept} with"


def test_a_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert environment() == ENVIRONMENT
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert environment() == {} and not keep_freed_memory()
