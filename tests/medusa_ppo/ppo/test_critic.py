"""The critic: where it starts, and what it sees."""

from __future__ import annotations

import torch

from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic

VOCAB = 16


def test_critic_starts_at_zero_and_shares_nothing(make_rollouts, tiny_actor):
    actor = tiny_actor()
    critic = Critic(actor)
    (micro,) = PPOBatch(make_rollouts(4)).micro_batches([0, 1, 2, 3], 4)
    values = critic(micro)
    assert (
        values.shape == micro.response_ids_M.shape
        and values.dtype == torch.float32
        and not values.any()
    )
    assert not {p.data_ptr() for p in actor.parameters()} & {
        p.data_ptr() for p in critic.parameters()
    }
    assert all(p.requires_grad for p in critic.parameters())


def test_critic_reads_the_state_before_the_token(make_rollouts, tiny_actor):
    critic = Critic(tiny_actor())
    torch.nn.init.normal_(critic.value_head.weight)
    (micro,) = PPOBatch(make_rollouts(2)).micro_batches([0], 1)
    last = micro.input_ids_BT.clone()
    last[0, -1] = (last[0, -1] + 1) % VOCAB
    changed = type(micro)(micro.sequences, last, micro.response_mask_BT)
    torch.testing.assert_close(
        critic(micro),
        critic(changed),
        msg="V must not see the token that it judges the state before",
    )
