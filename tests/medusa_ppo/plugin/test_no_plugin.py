"""The hooks that do nothing are those that do something: the same names, the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medusa_ppo.contract.rollouts import Counters, Rollouts, Sampling
from medusa_ppo.plugin import MedusaPlugin, NoPlugin

MAKING = {"start", "start_from_tables", "prepare_heads"}
"""What makes a plugin is no hook."""


def hooks(cls: type) -> dict[str, Callable]:
    return {
        name: inspect.unwrap(member)
        for name, member in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(member) and name not in MAKING
    }


def test_there_are_hooks_to_compare() -> None:
    assert {"before_generation", "rollout_ready", "actor_forward", "close"} <= set(
        hooks(MedusaPlugin)
    )


def test_both_have_the_same_hooks() -> None:
    assert set(hooks(NoPlugin)) == set(hooks(MedusaPlugin))


@pytest.mark.parametrize("name", sorted(hooks(MedusaPlugin)))
def test_each_hook_takes_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(hooks(cls)[name]) for cls in (NoPlugin, MedusaPlugin))
    assert list(ours.parameters.values()) == list(theirs.parameters.values())


def test_nothing_is_done(tmp_path: Path) -> None:
    plugin = NoPlugin()
    rollouts = Rollouts((), (), Counters(), 0.0, Sampling())
    plugin.before_generation()
    assert plugin.rollout_ready(rollouts) is None and plugin.tap is None
    with plugin.actor_forward(torch.nn.Linear(1, 1), torch.zeros(1, 1), [0]):
        pass
    with plugin.exposed():
        pass
    plugin.policy_updated(None, 1)
    plugin.tables_updated(None, 1)
    assert plugin.metrics() == {} and plugin.drain() and not plugin.save(tmp_path / "state")
    plugin.save_heads(tmp_path / "heads")
    plugin.close()
    assert list(tmp_path.iterdir()) == []
