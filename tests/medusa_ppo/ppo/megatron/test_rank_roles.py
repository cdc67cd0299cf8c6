"""The critic on the actor's ranks: what a critic in one process does, cut as the actor is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.tensorfile import load_state
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.run_state import RunPosition, save_checkpoint
from tests.medusa_ppo.ppo.megatron.test_megatron_learner import VOCAB, Pair, actor_of, pair_of

pytest.importorskip("megatron.core")
SAMPLING = Sampling(temperature=0.8)
ROLES = {"roles": "all"}
NEAR = {"rtol": 0.0, "atol": 1e-6}


def batch_of(make_rollouts: Any, step: int, sequences: int = 9) -> PPOBatch:
    rollouts = make_rollouts(sequences + 1, seed=step, vocab=VOCAB)
    return PPOBatch(replace(rollouts, responses=rollouts.responses[:sequences]))


def saved(pair: Pair, learner: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments of the critic, as the learner saves them."""
    at = save_checkpoint(folder, learner, RunPosition(0, 0, 0.0), pair.config)
    return tuple(load_state(at / f"critic{more}.safetensors") for more in ("", "_optimizer"))


def check_critic(pair: Pair, make_rollouts: Any, tmp_path: Path, steps: int = 3) -> None:
    """Values to 1e-6, losses to 1e-6, and what is saved."""
    for step in range(steps):
        batch = batch_of(make_rollouts, step)
        rewards_S = torch.linspace(-1, 1, len(batch))
        plain, _ = pair.plain.score(batch, rewards_S, SAMPLING)
        ranked, _ = pair.ranked.score(batch, rewards_S, SAMPLING)
        torch.testing.assert_close(ranked.values_SR, plain.values_SR, **NEAR)
        assert bool(plain.values_SR.any()) == (step > 0), "it starts at zero, and learns"
        # The same scores: what is compared is the critic, not the actor's rounding.
        expected = pair.plain.update(batch, plain, SAMPLING, step)
        found = pair.ranked.update(batch, plain, SAMPLING, step)
        assert found[names.VALUE_LOSS] == pytest.approx(expected[names.VALUE_LOSS], abs=1e-6)
        assert found[names.STEPS_SKIPPED] == expected[names.STEPS_SKIPPED] == 0
    ours, theirs = (
        saved(pair, learner, tmp_path / str(n))
        for n, learner in enumerate((pair.ranked, pair.plain))
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-4, atol=2e-5, msg=name)


def check_taken_over(pair: Pair, make_rollouts: Any, tmp_path: Path) -> None:
    """A run goes on on ranks with what one process has saved, and the other way round."""
    for n, (source, target) in enumerate(((pair.plain, pair.ranked), (pair.ranked, pair.plain))):
        kept = saved(pair, source, tmp_path / f"kept{n}")
        target.load(tmp_path / f"kept{n}" / "checkpoint")
        again = saved(pair, target, tmp_path / f"again{n}")
        for one, other in zip(kept, again, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_a_critic_on_two_ranks_does_what_one_in_one_process_does(
    shim_in_reach: Path, ray_session: None, tmp_path: Path, make_rollouts: Any
) -> None:
    path = actor_of(tmp_path / "actor", "llama")
    with pair_of(path, tensor_parallel=2, **ROLES) as pair:
        assert pair.ranked.critic is None and pair.ranked.has_critic
        check_critic(pair, make_rollouts, tmp_path)
        check_taken_over(pair, make_rollouts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cuts", "ppo"),
    [
        ({}, {"pipeline_parallel": 2}, {"value_clip_unit": "returns"}),
        ({"tie_word_embeddings": True}, {"tensor_parallel": 2, "sequence_parallel": True}, {}),
        ({}, {"data_parallel": 2, "distributed_optimizer": True}, {"recompute": True}),
        ({}, {"context_parallel": 2}, {"micro_batch_tokens": 40}),
    ],
    ids=["stages", "sequences", "shares", "context"],
)
def test_however_it_is_cut(
    shim_in_reach: Path,
    ray_session: None,
    tmp_path: Path,
    make_rollouts: Any,
    settings: dict[str, Any],
    cuts: dict[str, Any],
    ppo: dict[str, Any],
) -> None:
    path = actor_of(tmp_path / "actor", "llama", **settings)
    with pair_of(path, ppo, **cuts, **ROLES) as pair:
        check_critic(pair, make_rollouts, tmp_path)
        check_taken_over(pair, make_rollouts, tmp_path)
