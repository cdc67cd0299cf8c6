"""The replay estimate against vLLM's own counters, on rollouts that the same heads drafted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.acceptance import (
    draft_ids_for_rows,
    draft_logprobs_for_rows,
    replay_estimate,
    replay_sampled,
)
from heads.checkpoint import save_state
from heads.losses import LossConfig, head_loss
from heads.modules import MedusaHeads
from heads.targets import head_targets, segments_from_lengths
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.offline.collect import samples_of
from medusa_ppo.offline.hidden import HiddenReader, read_all
from tests.medusa_ppo.conftest import CPU

HEADS = 4


def packed(model: torch.nn.Module, rollouts: Rollouts) -> RolloutBatch:
    return read_all(
        HiddenReader(model, rollouts.sampling.temperature), samples_of([rollouts]), lambda *_: None
    )


def learn(heads: MedusaHeads, batch: RolloutBatch, lm_head_VD: torch.Tensor) -> None:
    """A few seconds of cross-entropy: enough that drafts are accepted at every position."""
    targets_MK, mask_MK = head_targets(
        batch.response_ids_M, segments_from_lengths(batch.lengths_S), HEADS
    )
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for rows_N in torch.randperm(targets_MK.shape[0], generator=generator).split(256):
            loss_K = head_loss(
                heads.factored(batch.hidden_MD[rows_N], lm_head_VD),
                targets_MK[rows_N],
                mask_MK[rows_N],
                LossConfig(),
            )
            optimizer.zero_grad()
            loss_K.sum().backward()
            optimizer.step()


@pytest.mark.engine
def test_replay_reproduces_the_counters_of_the_engine_that_drafted(
    engine: ColocatedEngine, actor, serving: str, tmp_path: Path
) -> None:
    """One-hot: draft steps exactly, accepted tokens up to what was accepted behind the ends.
    Sampled: within noise.
    """
    heads = MedusaHeads(actor.random_heads(0, scale=0.0).config)
    engine.configure(sampled=False, choose=False)
    learn(
        heads,
        packed(actor.model, engine.generate(actor.prompts, Sampling(max_new_tokens=64, seed=1))),
        actor.lm_head_VD,
    )
    save_state(tmp_path / "heads.safetensors", heads.trainable_state())
    engine.swap_heads(tmp_path / "heads.safetensors", 1)

    for sampled, temperature in ((False, 1.0), (True, 1.0), (True, 0.7)):
        engine.configure(sampled=sampled, draft_temperature=0.8 if sampled else 1.0, choose=False)
        rollouts = engine.generate(
            actor.prompts,
            Sampling(temperature=temperature, max_new_tokens=64, responses_per_prompt=2, seed=2),
        )
        batch = packed(actor.model, rollouts)
        counted = rollouts.counters
        if sampled:
            targets_MK, _ = head_targets(
                batch.response_ids_M, segments_from_lengths(batch.lengths_S), HEADS
            )
            logq_MK = draft_logprobs_for_rows(
                heads,
                batch.hidden_MD,
                targets_MK,
                actor.lm_head_VD,
                temperatures=(0.8 * temperature,),
            )[0]
            replayed = replay_sampled(logq_MK, batch.logprobs_M, batch.lengths_S)
        else:
            replayed = replay_estimate(
                draft_ids_for_rows(heads, batch.hidden_MD, actor.lm_head_VD),
                batch.response_ids_M,
                batch.lengths_S,
            )
            # On a GPU a draft and its token may be told apart where two logits are as good as one.
            off = 0.0 if serving == CPU else 0.02
            assert counted.drafts == pytest.approx(replayed.drafts, rel=off, abs=0)
            assert replayed.accepted * (1 - off) <= counted.accepted
            assert counted.accepted <= replayed.accepted_upper * (1 + off)
        interval = replayed.confidence_interval(0.99)
        noise = interval.high - interval.low if sampled else 0.0
        assert replayed.mean_acceptance_length > 1.15
        assert (
            abs(counted.mean_acceptance_length - replayed.mean_acceptance_length)
            < 0.03 * replayed.mean_acceptance_length + noise
        )
