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


def test_a_loop_that_begins_again_replays_nothing_of_what_was_after(chain) -> None:
    """A stand-alone companion outlives its loop. The next one begins at version 0, or at that of
    its checkpoint: batches of higher versions joined each of its batches, and never grew old.
    """
    task = chain()
    buffer = ReplayBuffer(2, 1 << 30, 0.5)
    for version in (6, 7, 8):
        buffer.add(dataclasses.replace(task.batch(), policy_version=version))
    assert [(b.policy_version, share) for b, share in buffer.older(7)] == [(6, 0.5), (7, 1.0)]
    assert buffer.older(0) == [] and len(buffer) == 0
    for version in (0, 1):
        buffer.add(dataclasses.replace(task.batch(), policy_version=version))
    assert [(b.policy_version, share) for b, share in buffer.older(2)] == [(0, 0.25), (1, 0.5)]


def test_a_companion_that_outlives_its_loop_trains_on_the_new_loops_batches(chain) -> None:
    task = chain()
    cycle = cycle_of(task)
    for version in (40, 41, 0):
        cycle.run(dataclasses.replace(task.batch(), policy_version=version))
    assert [batch.policy_version for batch, _ in cycle.replay.older(0)] == [0]


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


WIDE = 600  # Tokens of a vocabulary of which a batch sees a few.


def wide_cycle(task, **settings) -> Cycle:
    """Its heads draft from eight tokens, once these were counted."""
    config = CompanionConfig(batch_positions=64, replay_versions=2, **settings)
    sizes = HeadsConfig(task.hidden, WIDE, num_heads=3, kind="hydra", context=2, copy_parts=1)
    generator = torch.Generator().manual_seed(5)
    lm_head_VD = torch.randn(WIDE, task.hidden, generator=generator)
    lm_head_VD[: task.vocab] = task.lm_head_VD
    embedding_VD = torch.randn(WIDE, task.hidden, generator=generator)
    return Cycle(sizes, config, lm_head_VD, seed=0, embedding_VD=embedding_VD, draft_vocab=8)


def test_a_batch_is_kept_with_the_rows_of_the_tables_that_it_needs(chain) -> None:
    """With whole tables in float32 a batch of V = 152k was larger than the buffer: nothing was
    kept, and nobody was told. What they teach is the same to the bit.
    """
    task = chain()
    batches = [task.batch() for _ in range(3)]
    rows, whole = wide_cycle(task), wide_cycle(task)
    for cycle, part in ((rows, True), (whole, False)):
        for number, batch in enumerate(batches):
            before_ids_X = torch.arange(3, dtype=torch.int32).repeat(batch.lengths_S.numel())
            before_S = torch.full_like(batch.lengths_S, 3)
            some = dataclasses.replace(
                batch, before_ids_X=before_ids_X, before_S=before_S, policy_version=number
            )
            assert cycle.run(some).problem == ""
            if not part:  # The slow way: all rows beside those that are read.
                newest = cycle.replay._batches[-1]
                tables = cycle.trainer.lm_head_VD, cycle.trainer.embedding_VD
                cycle.replay._batches[-1] = dataclasses.replace(
                    newest, lm_head_VD=tables[0], embedding_VD=tables[1], table_ids_R=None
                )
                assert newest.table_ids_R is not None and newest.table_ids_R.numel() < 20
                assert newest.nbytes < 0.5 * cycle.replay._batches[-1].nbytes
    for name, value in rows.trainer.state_dict().items():
        assert torch.equal(value, whole.trainer.state_dict()[name]), name


def test_a_batch_that_is_too_large_to_keep_is_told(chain) -> None:
    task = chain()
    cycle = cycle_of(task, queue_bytes=2000)
    assert "not kept for replay" in cycle.run(task.batch()).problem and len(cycle.replay) == 0


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
