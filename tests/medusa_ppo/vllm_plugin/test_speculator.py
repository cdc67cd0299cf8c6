"""vLLM's V2 model runner with our speculator, on a CPU by Triton's interpreter: `make test-vllm
VLLM=0.32 RUNNER=v2`. Here with heads that don't copy; test_speculator_copying.py has the others, so
that two processes share the minutes.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.vllm_plugin.vllm_versions import has_block, schedules_ahead, vllm_version

SCRIPT = Path(__file__).with_name("serve_on_v2.py")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs Triton: make test-vllm VLLM=0.32 RUNNER=v2",
    ),
]


@functools.cache
def serve(context: int, copy_parts: int, runner: str) -> dict[str, Any]:
    """A process of its own: the interpreter has to be there before vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        return served(folder, context, copy_parts, runner)


def served(folder: str, context: int, copy_parts: int, runner: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), folder, str(context), str(copy_parts), runner]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


FORMS = {
    "alone": (0, 0, "v2"),
    "context": (3, 0, "v2"),
    "copying": (3, 2, "v2"),
    "ahead": (3, 2, "v2-ahead"),
}
"""A context, parts of the attention that copies, and how steps are scheduled."""


def seen_with(*names: str) -> Any:
    """A fixture `seen`: what an engine with each of these forms did."""

    @pytest.fixture(scope="module", params=[FORMS[name] for name in names], ids=names)
    def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
        context, copy_parts, runner = request.param
        if runner == "v2-ahead" and not schedules_ahead(vllm_version()):
            pytest.skip("this vLLM does not tell how many drafts a step will verify")
        return serve(context, copy_parts, runner) | {
            "v1": serve(context, copy_parts, "v1")["drafted"],
            "copies": copy_parts > 0,
            "asked ahead": runner == "v2-ahead",
            "drawn synchronously": serve(context, copy_parts, "v2")["drawn"],
        }

    return seen


seen = seen_with("alone", "context")


def figures_of(seen: dict[str, Any], name: str) -> Any:
    """Skips a memory's where it was left out: beside heads that don't copy."""
    if name == "memory" and not seen["copies"]:
        pytest.skip("a memory is tried with heads that copy")
    if name == "early end" and seen["asked ahead"]:
        pytest.skip("no run ends early where steps are scheduled ahead")
    return seen[name]


def test_it_is_v2_that_runs(seen: dict[str, Any]) -> None:
    assert seen["runner"] in ("vllm.v1.worker.cpu.model_runner", "vllm.v1.worker.gpu.model_runner")
    assert seen["report"]["kind"] == "hydra" and seen["report"]["max_drafts"] == 2
    assert seen["block"] == has_block(vllm_version()), "drafts are verified as a block"


def test_steps_are_scheduled_ahead_where_that_is_asked_for(seen: dict[str, Any]) -> None:
    assert seen["ahead"] == seen["asked ahead"]
    if seen["ahead"]:
        assert "before it knows where runs of drafts end" in seen["no early end"]


def test_when_steps_are_scheduled_changes_no_token(seen: dict[str, Any]) -> None:
    """With the same random numbers, drafts sampled and verified: one by one the same."""
    assert seen["drawn"] == seen["drawn synchronously"]
    assert len(set(map(tuple, seen["drawn"]))) == 8


def test_a_recorded_drafting_call_is_used_again_and_draws_the_same(seen: dict[str, Any]) -> None:
    """What it reads from vLLM keeps its place while vLLM goes from step to step."""
    assert seen["recorded"]["alike"]
    replays = seen["recorded"]["replays"]
    assert sum(replays) >= 3, replays


def test_greedy_tokens_are_the_models_own_whatever_is_drafted(seen: dict[str, Any]) -> None:
    for count in range(3):
        same, drafts, draft_tokens = seen[f"greedy {count}"]
        assert same
        # Four requests; two steps are scheduled ahead, with as many drafts as before.
        beyond = 2 * 4 if seen["ahead"] else 0
        assert (drafts > beyond) == (count > 0) and draft_tokens <= count * drafts + beyond


def test_it_drafts_what_v1_drafts(seen: dict[str, Any]) -> None:
    """Greedy drafts of 32 requests, some accepted and most not: their states, tokens and pairs were
    the same.
    """
    assert seen["drafted"] == seen["v1"] and len(seen["drafted"]) > 500


LEAST_ACCEPTED = {
    "plain": 20,
    "top-p": 20,
    "top-k": 20,
    "draft vocabulary": 10,
    "early end": 5,
    "memory": 20,
}


@pytest.mark.parametrize(("name", "accepted"), LEAST_ACCEPTED.items())
def test_sampled_tokens_have_the_models_distribution(
    seen: dict[str, Any], name: str, accepted: int
) -> None:
    figures = figures_of(seen, name)
    assert figures["honest"] and figures["tokens"] >= 700, figures
    assert figures["accepted"] > accepted, figures
    if name == "early end":
        assert figures["draft_tokens"] < 2 * figures["drafts"], "runs end before the last head"


def test_swaps_and_syncs_reach_what_drafts_and_what_samples(seen: dict[str, Any]) -> None:
    before, after, version = seen["swap"]
    assert before != after and version == 3 and seen["synced"]


def test_rows_of_q_made_as_they_are_read_are_a_whole_table_to_the_kernels(
    seen: dict[str, Any],
) -> None:
    """The same tokens and the same runs, with each draft's q; from all tokens, from a draft
    vocabulary, and for a few requests at a time.
    """
    for found in (seen["table"], seen["table of few"]):
        assert found["alike"] and found["drafts"] > 30, found
        assert found["drawn"] == found["drafts"], "no draft has lost its q"
        assert found["off"] < 1e-6, "the kernel writes what its reference does"
    assert 0 < seen["parts"] <= 6


def test_a_memory_has_what_was_written_and_learns_from_it(seen: dict[str, Any]) -> None:
    """What V2 has sampled reaches the host a step later, and the drafts' probabilities come from
    the logits that it verifies against.
    """
    found = figures_of(seen, "memory")
    assert found["remembered"] and found["scored"] > 0, found


def test_the_number_of_drafts_is_chosen_from_steps_that_were_timed(seen: dict[str, Any]) -> None:
    """As on V1: seconds by sequences and drafts, none among them, and what was accepted."""
    assert seen["chooses"] is True and seen["timed drafts"] == [0, 1, 2]
    same, steps = seen["chosen"]
    assert same and steps > 0


def test_it_takes_versions_from_a_feed_while_requests_run(seen: dict[str, Any]) -> None:
    same, published, version = seen["fed"]
    assert same and published - 1 <= version <= published and version > 2
