"""The example for any loop runs as it stands on the page: two steps on real parts, and the heads of the first draft in the second."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from medusa_ppo import metrics as names

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "bare_loop.py"
PAGE = ROOT / "docs" / "hooks.md"
HOOKS = ("before_generation()", "rollout_ready(", "actor_forward(", "policy_updated(", "metrics()")


@pytest.mark.engine
def test_two_steps_of_the_example_feed_the_engine(chain_actor: Path):
    torch.manual_seed(0)
    main = runpy.run_path(str(EXAMPLE))["main"]

    first, second = main(
        str(chain_actor),
        2,
        engine={"max_num_seqs": 32, "threads": 1},
        heads={"num_heads": 2},
        companion={"learning_rate": 1e-2, "wait": True, "epochs": 8, "batch_positions": 256},
    )

    assert (first[names.HEADS_VERSION], second[names.HEADS_VERSION]) == (0, 1)
    assert second[names.MAL_SERVING] > first[names.MAL_SERVING]


def test_the_example_is_short_and_calls_each_hook_once():
    text = EXAMPLE.read_text(encoding="utf-8")
    assert text.count("\n") <= 64
    for hook in HOOKS:
        assert text.count(f"plugin.{hook}") == 1
