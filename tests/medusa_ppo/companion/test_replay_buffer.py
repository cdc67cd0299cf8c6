"""Older batches join with a share that falls with age, within the byte budget, and survive a
restart when asked to.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heads.checkpoint import load_state, save_state
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.positions import ReplayBuffer
from medusa_ppo.config.companion_section import CompanionConfig
from tests.medusa_ppo.companion.conftest import sampled


def test_share_falls_with_age_and_old_batches_go(chain) -> None:
    task = chain()
    buffer = ReplayBuffer(2, 1 << 30, 0.5)
    for version in (3, 4, 4, 5):
        buffer.add(dataclasses.replace(task.batch(), policy_version=version))
    assert [(b.policy_version, share) for b, share in buffer.older(5)] == [
        (3, 0.25),
        (4, 0.5),
        (4, 0.5),
        (5, 1.0),
    ]
    assert [b.policy_version for b, _ in buffer.older(6)] == [4, 4, 5]
    assert buffer.older(20) == [] and len(buffer) == 0


def test_budget_holds_and_nothing_is_kept_when_off(chain) -> None:
    task = chain()
    batch = task.batch()
    buffer = ReplayBuffer(100, 3 * batch.nbytes, 0.5)
    for version in range(10):
        buffer.add(dataclasses.replace(batch, policy_version=version))
        assert buffer.nbytes <= 3 * batch.nbytes
    assert [b.policy_version for b, _ in buffer.older(10)] == [7, 8, 9]
    off = ReplayBuffer(0, 1 << 30)
    tight = ReplayBuffer(5, batch.nbytes - 1)
    off.add(batch)
    tight.add(batch)
    assert len(off) == len(tight) == 0


def cycle_of(task, **settings) -> Cycle:
    config = CompanionConfig(
        **{"batch_positions": 64, "learning_rate": 2e-2, "replay_versions": 3, **settings}
    )
    return Cycle(HeadsConfig(task.hidden, task.vocab, num_heads=3), config, task.lm_head_VD, seed=0)


def test_cycle_replays_what_it_trained_on_and_nothing_held_out(chain) -> None:
    task = chain()
    once = cycle_of(task, replay_versions=0)
    again = cycle_of(task)
    batches = [task.batch() for _ in range(3)]
    for batch in batches:
        once.run(batch)
        again.run(batch)
    assert (
        again.trainer.optimizer_steps > once.trainer.optimizer_steps
        and again.trainer.trained_tokens == once.trainer.trained_tokens
    )
    kept = sum(batch.lengths_S.numel() for batch, _ in again.replay.older(0))
    assert kept == sum(round(0.8 * batch.lengths_S.numel()) for batch in batches)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_resumed_with_replay_is_the_same_to_the_bit(chain, share: float, tmp_path) -> None:
    task = chain(dtype=torch.bfloat16)
    batches = []
    for _ in range(6):
        batches.append(sampled(task.batch(), share) if share < 1 else task.batch())
        task.policy_version += 1
    straight, first, second = (cycle_of(task, wait=True) for _ in range(3))
    for batch in batches:
        straight.run(batch)
    for batch in batches[:3]:
        first.run(batch)
    save_state(tmp_path / "state.safetensors", first.state_dict())
    second.load_state_dict(load_state(tmp_path / "state.safetensors"))
    for batch in batches[3:]:
        second.run(batch)
    left = straight.state_dict()
    right = second.state_dict()
    assert left.keys() == right.keys() and any(name.startswith("replay.") for name in left)
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_hidden_states_stay_off_the_disk_by_default(chain) -> None:
    task = chain()
    cycle = cycle_of(task)
    cycle.run(task.batch())
    assert len(cycle.replay) == 1 and not any("hidden" in name for name in cycle.state_dict())
