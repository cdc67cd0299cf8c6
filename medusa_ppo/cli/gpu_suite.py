"""The tests for a machine with GPUs: which ones to run there, in what order, about how long they
take, and what their last run found.

`make test-gpu` (tests/run_gpu_tests.py) runs the tests of this table and `medusa-ppo check-setup`
prints it; tests/test_gpu_suite.py compares it with what pytest collects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path("build/gpu-tests/results.json")
"""Where `make test-gpu` stores what it found, relative to the checkout."""
ONE, MORE = "not gpus", "gpus"
QUICK, LONG = "not slow", "slow"
NAMED = 20
"""Maximum number of failed tests that a page names."""


@dataclass(frozen=True)
class TestPart:
    """Tests that run together. Each file runs in a separate process: its end frees what the tests
    left on the GPU, and vLLM allows only one engine per process.

    Attributes:
        name: the PART of `make test-gpu PART=`.
        shows: what works if all of them pass.
        files: test files, relative to the checkout.
        marks: pytest's marker expression, besides `gpu`.
        gpus: the smallest number that any of its tests needs.
        minutes: an estimate: one for each engine that starts, two if it captures CUDA graphs,
            because vLLM compiles first; without engines, the time on two CPU cores. Seven parts
            took 7 minutes on an H100 with nine files at a time.
    """

    name: str
    shows: str
    files: tuple[str, ...]
    marks: str
    gpus: int
    minutes: int

    __test__ = False  # Pytest collects classes whose name begins with Test.


def _under(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/medusa_ppo/{folder}/test_{name}.py" for name in names)


PARTS = (
    TestPart(
        "arithmetic",
        "losses, heads, drafting and verification on the GPU agree with their references",
        (
            "tests/heads/test_losses.py",
            "tests/heads/test_modules.py",
            *_under("drafting", "core", "verify", "slots", "context", "draft_vocabulary"),
            *_under("vllm_plugin", "proposer", "running_requests"),
        ),
        f"{ONE} and {QUICK}",
        1,
        4,
    ),
    TestPart(
        "training",
        "heads, PPO and the demo's actor learn on the GPU, hidden states reach the host, and roles"
        " that take turns leave nothing behind",
        (
            *_under("actors", "hf"),
            *_under("companion", "collector", "trainer"),
            *_under("ppo", "learner", "placement"),
            *_under("demo", "pretrain"),
        ),
        f"{ONE} and {QUICK}",
        1,
        3,
    ),
    TestPart(
        "companion",
        "a companion in its own process shares the GPU, and comes back when it is killed",
        _under("companion", "client", "pace", "team"),
        ONE,
        1,
        8,
    ),
    TestPart(
        "serving",
        "vLLM drafts with our heads, eager and from CUDA graphs: greedy tokens, honest sampling,"
        " swaps and syncs in flight, sleep of both levels",
        _under("engines", "vllm_engine", "replay_against_counters"),
        f"{ONE} and {QUICK}",
        1,
        12,
    ),
    TestPart(
        "sync",
        "a broadcast actor equals one from a file, and engines take versions from a feed while"
        " requests run",
        _under("engines", "broadcast", "self_feeding"),
        f"{ONE} and {QUICK}",
        1,
        12,
    ),
    TestPart(
        "processes",
        "engines run in a Ray process and as vLLM's server, and know the times of their steps when"
        " they start again",
        _under("engines", "ray_engine", "auto_drafts", "http_server"),
        ONE,
        1,
        14,
    ),
    TestPart(
        "hooks",
        "loops with hooks feed the engine: the taps, the example for any loop, a loop around our"
        " engine, and TRL's own trainers",
        _under("loops", "passes", "tap", "bare_loop", "drafting_engine", "trl_grpo"),
        ONE,
        1,
        10,
    ),
    TestPart(
        "distribution",
        "tokens have the model's joint distribution, also with preemption, with a context and with"
        " a different number of drafts in each step",
        (
            *_under("engines", "probe", "lossless", "preemption", "hydra", "chi_square"),
            *_under("vllm_plugin", "proposer"),
        ),
        f"{ONE} and {LONG}",
        1,
        30,
    ),
    TestPart(
        "v2",
        "vLLM's V2 model runner: greedy tokens, honest sampling with each kind of drafts, swaps,"
        " syncs, a feed, a memory, the choice of the number of drafts, steps scheduled ahead",
        _under("vllm_plugin", "v2_on_a_gpu"),
        f"{ONE} and {LONG}",
        1,
        12,
    ),
    TestPart(
        "two",
        "tensor parallelism, two engines, and companion workers with a GPU each (NCCL)",
        (
            *_under("companion", "team"),
            *_under("engines", "tensor_parallel", "pool", "broadcast", "self_feeding"),
        ),
        MORE,
        2,
        15,
    ),
    TestPart(
        "many",
        "an actor reaches one engine on each GPU except the loop's over NCCL",
        _under("engines", "nccl_broadcast"),
        MORE,
        3,
        6,
    ),
)
"""In the order in which to run them: each relies on the ones before."""


def parts_for(gpus: int) -> tuple[TestPart, ...]:
    """The parts that a machine with this many GPUs can run."""
    return tuple(part for part in PARTS if part.gpus <= gpus)


def part_named(name: str) -> TestPart | None:
    return next((part for part in PARTS if part.name == name), None)


@dataclass(frozen=True)
class PartResult:
    """What a run of a part found.

    Attributes:
        passed, failed, left_out: numbers of tests; those that need more GPUs are left out.
        seconds: sum over its processes.
        failures: `test: error` of the first tests that failed.
        at: when it ended, UTC.
        machine: its GPUs and versions.
    """

    passed: int
    failed: int
    left_out: int
    seconds: float
    failures: tuple[str, ...]
    at: str
    machine: str


def read_results(path: Path = RESULTS) -> dict[str, PartResult]:
    """Results by part name; none if the file is missing, damaged or of another release."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: PartResult(**{**fields, "failures": tuple(fields["failures"])})
            for name, fields in raw.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def results_text(results: dict[str, PartResult]) -> str:
    """The text of a file that `read_results` reads."""
    return json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n"


def described(gpus: int, results: dict[str, PartResult]) -> Iterator[str]:
    """Lines of a page: the parts for this many GPUs, and what the last run of each found."""
    parts = parts_for(gpus)
    minutes = sum(part.minutes for part in parts)
    yield (
        f"Tests for {gpus} GPU{'s' * (gpus != 1)}: `make test-gpu` runs them in this order, about"
        f" {minutes} minutes (an estimate); with JOBS=8 so many files at a time."
    )
    for number, part in enumerate(parts, 1):
        yield ""
        yield f"{number}. {part.name}: {part.shows}."
        yield f"   needs:        {part.gpus} GPU{'s' * (part.gpus != 1)}, about {part.minutes} min"
        yield f"   run:          make test-gpu PART={part.name}"
        yield f"   last run:     {_found(results.get(part.name))}"
        yield from (f"                 FAILED {line}" for line in _failures(results, part))
    rest = [part for part in PARTS if part not in parts]
    if rest:
        yield ""
        names = ", ".join(f"{part.name} ({part.gpus} GPUs)" for part in rest)
        yield f"Need more GPUs: {names}."


def _found(result: PartResult | None) -> str:
    if result is None:
        return "never here"
    left_out = f", {result.left_out} left out" if result.left_out else ""
    return (
        f"{result.passed} passed, {result.failed} failed{left_out}, {result.seconds:.0f} s,"
        f" {result.at}, {result.machine}"
    )


def _failures(results: dict[str, PartResult], part: TestPart) -> tuple[str, ...]:
    return results[part.name].failures if part.name in results else ()
