"""Rewards before they become advantages, and the KL coefficient: by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads.errors import CheckpointError
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.shaping import STATE_FILE, Shaping


@pytest.fixture
def batch(make_rollouts) -> PPOBatch:
    """Four responses, of which the second was cut."""
    rollouts = make_rollouts(4)
    first, second, *rest = rollouts.responses
    return PPOBatch(
        replace(rollouts, responses=(first, replace(second, finish_reason="length"), *rest))
    )


REWARDS = torch.tensor([1.0, 2.0, 3.0, 6.0])


@pytest.mark.parametrize(
    "options", [{}, {"length_penalty": 0.0}, {"cut_responses": 0.0}, {"cut_responses": "mask"}]
)
def test_rewards_stay_to_the_bit(batch: PPOBatch, options: dict):
    assert torch.equal(Shaping(PPOConfig(**options)).rewards(batch, REWARDS), REWARDS)


def test_length_and_cuts_cost(batch: PPOBatch):
    taken = torch.tensor([0.0, 4.0, 0.0, 0.0]) + 0.5 * batch.lengths_S
    shaping = Shaping(PPOConfig(length_penalty=0.5, cut_responses=4))
    torch.testing.assert_close(shaping.rewards(batch, REWARDS), REWARDS - taken)
    by_token_SR = torch.ones(batch.mask_SR.shape)
    found_SR = shaping.rewards(batch, by_token_SR)
    torch.testing.assert_close(found_SR.sum(1), by_token_SR.sum(1) - taken)
    assert (found_SR != 1).nonzero().tolist() == [
        [s, int(length) - 1] for s, length in enumerate(batch.lengths_S)
    ]


def test_masked_responses_are_left_out(batch: PPOBatch):
    assert Shaping(PPOConfig()).trained(batch).tolist() == [True] * 4
    assert Shaping(PPOConfig(cut_responses="mask")).trained(batch).tolist() == [
        True,
        False,
        True,
        True,
    ]


def test_rewards_are_scaled_by_their_spread_over_the_run(batch: PPOBatch):
    shaping = Shaping(PPOConfig(scale_rewards=True))
    torch.testing.assert_close(
        shaping.rewards(batch, REWARDS), REWARDS / REWARDS.std(unbiased=False)
    )
    later = 10 * REWARDS
    torch.testing.assert_close(
        shaping.rewards(batch, later), later / torch.cat([REWARDS, later]).std(unbiased=False)
    )
    same = torch.full((4,), 3.0)
    assert torch.equal(Shaping(PPOConfig(scale_rewards=True)).rewards(batch, same), same), (
        "no spread, no scale"
    )


def test_the_coefficient_follows_the_kl():
    shaping = Shaping(PPOConfig(kl_coefficient=0.1, kl_goal=0.05))
    found = []
    for kl in (0.05, 0.06, 5.0, 0.0, -1.0):
        shaping.adapt(kl)
        found.append(shaping.kl_coefficient)
    changes = [after / before for before, after in zip([0.1, *found], found, strict=False)]
    assert changes == pytest.approx([1.0, 1.02, 1.1, 0.9, 0.9])
    fixed = Shaping(PPOConfig(kl_coefficient=0.1))
    fixed.adapt(5.0)
    assert fixed.kl_coefficient == 0.1


def test_what_is_remembered_is_saved(batch: PPOBatch, tmp_path: Path):
    config = PPOConfig(scale_rewards=True, kl_goal=0.05)
    one = Shaping(config)
    other = Shaping(config)
    one.rewards(batch, REWARDS)
    one.adapt(1.0)
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.kl_coefficient == one.kl_coefficient
    assert torch.equal(one.rewards(batch, 10 * REWARDS), other.rewards(batch, 10 * REWARDS))
    fixed = Shaping(PPOConfig(kl_coefficient=0.3))
    fixed.load(tmp_path)
    assert fixed.kl_coefficient == 0.3, "a fixed coefficient is the configuration's"
    Shaping(config).load(tmp_path / "of an earlier release")
    (tmp_path / STATE_FILE).write_text("[1]")
    with pytest.raises(CheckpointError, match="damaged"):
        Shaping(config).load(tmp_path)
