"""Critic and reward model on the actor's ranks: what they do in one process, cut as the actor is,
side by side, in turn, and the reward model in the critic's memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from heads.tensorfile import load_state
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.placement import GIB
from medusa_ppo.ppo.rewards import ModelReward, RewardSource
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


def judge_of(folder: Path, actor: Path, save_judge: Callable[..., None]) -> Path:
    """A reward model of the actor's sizes, with a tokenizer of its own."""
    save_judge(folder)
    config = AutoConfig.from_pretrained(actor, num_labels=1, pad_token_id=0)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config).float()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def texts(count: int, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    return ["".join(drawn.choices("abc", k=drawn.randrange(40))) for _ in range(count)]


def judged(source: RewardSource, responses: list[str]) -> Tensor:
    return source.score(["ab"] * len(responses), responses, [{}] * len(responses))


def reward_of(pair: Pair) -> RewardSource:
    from medusa_ppo.ppo.megatron.megatron_learner import RankedReward

    found = RankedReward(pair.config.ppo)
    found.attach(pair.ranked._team)
    return found


def check_reward(pair: Pair, judge: Path) -> None:
    """The rewards of one process, and to the bit the same whatever else is in the batch."""
    source = reward_of(pair)
    every = texts(23)
    found_S = judged(source, every)
    torch.testing.assert_close(found_S, judged(ModelReward(str(judge)), every), **NEAR)
    assert len(set(found_S.tolist())) > 15, "scores of these texts, not of a place"
    chosen = [20, 3, 11]
    assert torch.equal(judged(source, [every[s] for s in chosen]), found_S[chosen])


def check_threads(pair: Pair, make_rollouts: Any) -> None:
    """Rewards are asked for in one thread and passes in another, as pieces are scored: all ranks
    get both in one order, or they would wait for each other in different collectives.
    """
    source = reward_of(pair)
    batch = batch_of(make_rollouts, 0)
    every = texts(6)
    rewards_S = judged(source, every)
    pair.ranked.begin_batch(SAMPLING)
    expected = pair.ranked.measure(batch, SAMPLING)
    found = list[Tensor]()

    def judge_all() -> None:
        for _ in range(8):
            found.append(judged(source, every))

    other = threading.Thread(target=judge_all)
    other.start()
    for _ in range(4):
        again = pair.ranked.measure(batch, SAMPLING)
        assert torch.equal(again.policy.logprobs_SR, expected.policy.logprobs_SR)
        assert torch.equal(again.values_SR, expected.values_SR)
    other.join()
    assert len(found) == 8 and all(torch.equal(scores_S, rewards_S) for scores_S in found)


def check_memory(pair: Pair) -> dict[str, Any]:
    """What a rank had at once is what its placement says."""
    figures = pair.ranked.take_memory()
    roles = figures[names.LEDGER_ROLES]
    peak, largest = figures[names.LEDGER_PEAK], max(roles.values())
    placement = pair.config.ppo.placement
    if placement == "in_turn":
        assert peak == largest, "one at a time"
    assert (names.OFFLOAD_S in figures) == (placement != "separate")
    return figures


def test_all_roles_on_two_ranks_in_turn_do_what_they_do_in_one_process(
    shim_in_reach: Path, ray_session: None, tmp_path: Path, make_rollouts: Any, save_judge: Any
) -> None:
    path = actor_of(tmp_path / "actor", "llama")
    judge = judge_of(tmp_path / "judge", path, save_judge)
    ppo = {"placement": "in_turn", "reward": str(judge)}
    with pair_of(path, ppo, tensor_parallel=2, **ROLES) as pair:
        assert pair.ranked.critic is None and pair.ranked.has_critic
        check_reward(pair, judge)
        check_critic(pair, make_rollouts, tmp_path)
        check_threads(pair, make_rollouts)
        check_reward(pair, judge)
        check_taken_over(pair, make_rollouts, tmp_path)
        check_memory(pair)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cuts", "ppo"),
    [
        ({}, {"pipeline_parallel": 2}, {"value_clip_unit": "returns", "placement": "in_turn"}),
        (
            {"tie_word_embeddings": True},
            {"tensor_parallel": 2, "sequence_parallel": True},
            {"placement": "swapped"},
        ),
        (
            {},
            {"data_parallel": 2, "distributed_optimizer": True},
            {"recompute": True, "placement": "in_turn"},
        ),
        (
            {},
            {"data_parallel": 2, "distributed_optimizer": True},
            {"placement": "swapped"},
        ),
        ({}, {"context_parallel": 2}, {"micro_batch_tokens": 40}),
    ],
    ids=["stages", "sequences", "shares", "shares-swapped", "context"],
)
def test_however_it_is_cut(
    shim_in_reach: Path,
    ray_session: None,
    tmp_path: Path,
    make_rollouts: Any,
    save_judge: Any,
    settings: dict[str, Any],
    cuts: dict[str, Any],
    ppo: dict[str, Any],
) -> None:
    path = actor_of(tmp_path / "actor", "llama", **settings)
    judge = judge_of(tmp_path / "judge", path, save_judge)
    with pair_of(path, ppo | {"reward": str(judge)}, **cuts, **ROLES) as pair:
        check_critic(pair, make_rollouts, tmp_path)
        check_reward(pair, judge)
        check_threads(pair, make_rollouts)
        check_taken_over(pair, make_rollouts, tmp_path)
        check_memory(pair)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_to_the_bit_side_by_side_in_turn_and_swapped(
    shim_in_reach: Path,
    ray_session: None,
    tmp_path: Path,
    make_rollouts: Any,
    save_judge: Any,
    dtype: str,
) -> None:
    """With scores, updates, a save and a load in between; and memory falls in this order."""
    path = actor_of(tmp_path / "actor", "llama", hidden_size=64, intermediate_size=192)
    judge = judge_of(tmp_path / "judge", path, save_judge)
    if dtype == "bfloat16":
        model = AutoModelForSequenceClassification.from_pretrained(judge)
        model.bfloat16().save_pretrained(judge)
    found = {}
    peaks = []
    for placement in ("separate", "swapped", "in_turn"):
        ppo = {"placement": placement, "reward": str(judge)}
        with pair_of(path, ppo, dtype, tensor_parallel=2, **ROLES) as pair:
            source = reward_of(pair)
            figures: list[Any] = []
            for step in range(3):
                batch = batch_of(make_rollouts, step)
                rewards_S = judged(source, texts(len(batch), step))
                scores, report = pair.ranked.score(batch, rewards_S, SAMPLING)
                figures += [rewards_S.tolist(), scores.values_SR.tolist(), report]
                figures.append(pair.ranked.update(batch, scores, SAMPLING, step))
                if step == 1:
                    save_checkpoint(
                        tmp_path / placement, pair.ranked, RunPosition(2, 2, 0.0), pair.config
                    )
                    pair.ranked.load(tmp_path / placement / "checkpoint")
                memory = pair.ranked.take_memory()
            files = sorted((tmp_path / placement / "checkpoint").glob("*.safetensors"))
            found[placement] = figures, [file.read_bytes() for file in files]
            assert len(files) == 4
            roles = memory[names.LEDGER_ROLES]
            peaks.append(memory[names.LEDGER_PEAK])
            print(f"\n{dtype}, {placement}: {memory}")
    assert found["swapped"] == found["separate"] and found["in_turn"] == found["separate"]
    separate, swapped, in_turn = peaks
    assert separate - swapped == pytest.approx(roles["reward"]) and roles["reward"] > 1000 / GIB
    assert in_turn == pytest.approx(roles["actor"]) and in_turn < 0.55 * separate
