"""Where docs/cluster.md, the header of a preset, or check-setup start Ray, it has GPUs for all that
the run asks it for: a loop that is started by hand needs one that Ray doesn't have, a job asks Ray.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from medusa_ppo.cli.machine_checks import setup_steps
from medusa_ppo.config.run_config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
HEADER = (ROOT / "configs" / "two-nodes.yaml").read_text(encoding="utf-8")
NODE_GPUS = 8
JOB = "ray job submit"


def blocks() -> list[str]:
    """Blocks of commands that start Ray and then this preset."""
    found = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [block for block in found if "--config two-nodes" in block]


def gpus_of_ray(text: str) -> int:
    """On the first node, for Ray's processes, as its `ray start --head` is written."""
    started = re.search(
        r"^(?:.*node: +)?(?:CUDA_VISIBLE_DEVICES=(\S+) +)?ray start --head", text, re.M
    )
    assert started, "no line starts Ray"
    return len(started[1].split(",")) if started[1] else NODE_GPUS


def gpus_asked(text: str) -> int:
    """By the engines, all on the first node, and by the loop if it is a job."""
    engine = load_config("two-nodes").engine
    entry = re.search(r"--entrypoint-num-gpus=(\d+)", text)
    assert bool(entry) == (JOB in text)
    return engine.replicas * engine.ranks + (int(entry[1]) if entry else 0)


def test_the_page_has_a_block_for_a_loop_started_by_hand_and_one_for_a_job() -> None:
    assert [JOB in block for block in blocks()] == [False, True]


@pytest.mark.parametrize("text", [*blocks(), HEADER], ids=["by hand", "a job", "header"])
def test_ray_has_as_many_gpus_as_are_asked_for(text: str) -> None:
    assert gpus_of_ray(text) == gpus_asked(text)


def test_check_setup_names_the_start_that_fits_its_job() -> None:
    step = next(step for step in setup_steps("actor", "rows.jsonl") if JOB in step.command)
    assert "as in docs/cluster.md for a job" in step.needs
    (shown,) = (block for block in blocks() if JOB in block)
    for option in ("--entrypoint-num-gpus=1", "--entrypoint-resources='{\"engines\": 0.001}'"):
        assert option in step.command and option in shown
    assert gpus_of_ray(shown) == gpus_asked(step.command)
