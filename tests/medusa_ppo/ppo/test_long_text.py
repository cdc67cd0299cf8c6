"""Long responses through what the learner does with a batch: what it keeps grows with the tokens,
not with their square.
"""

from __future__ import annotations

import copy

import pytest
import torch

from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.test_recompute import peak_bytes

PROMPT = tuple(range(1, 9))
SIZES = (512, 2048, 8192)


def rollouts(tokens: int) -> Rollouts:
    """Two responses to one prompt, of which one is a quarter as long."""
    drawn = torch.randint(1, 16, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    both = [tuple(drawn), tuple(drawn[: tokens // 4])]
    responses = tuple(Response(0, ids, (-2.7,) * len(ids), "length") for ids in both)
    return Rollouts((PROMPT,), responses, Counters(), 1.0, Sampling(responses_per_prompt=2))


@pytest.mark.parametrize("advantages", ["gae", "grpo"])
def test_scoring_tapping_and_learning_take_memory_that_grows_with_the_tokens(
    tiny_actor, sampling_engine, advantages: str
):
    peaks = {}
    for tokens in SIZES:
        actor = copy.deepcopy(tiny_actor())
        critic = Critic(actor) if advantages == "gae" else None
        config = PPOConfig(advantages=advantages, minibatch_size=2, micro_batch_size=1, epochs=1)
        learner = Learner(actor, critic, config, seed=0)
        companion = RecordingCompanion()
        plugin = MedusaPlugin(sampling_engine(actor), companion)
        given = rollouts(tokens)
        batch = PPOBatch(given)

        def step(learner=learner, plugin=plugin, given=given, batch=batch) -> None:
            plugin.before_generation()
            plugin.rollout_ready(given)
            rewards = torch.tensor([1.0, 0.0])
            scores, _ = learner.score(batch, rewards, given.sampling, plugin.tap)
            learner.update(batch, scores, given.sampling, 0)

        peaks[tokens] = peak_bytes(step, learner.actor)
        (handed,) = companion.batches
        assert len(handed.hidden_MD) == tokens + tokens // 4, "the tap saw all of it"
    first, second, third = (peaks[tokens] for tokens in SIZES)
    # Weights and moments are the same in all: growth is compared with growth.
    assert (third - second) / (second - first) == pytest.approx(4, rel=0.15), peaks
