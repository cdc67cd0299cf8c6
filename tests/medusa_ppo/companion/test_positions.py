"""What a sample of positions holds, and that it estimates what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heads.errors import DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.holdout import hold_out
from medusa_ppo.companion.positions import BLOCK, EarlySample, look_up
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from tests.medusa_ppo.companion.conftest import some_weights


def compact(batch: RolloutBatch, weights_M: torch.Tensor) -> RolloutBatch:
    """The batch with the states of weighted rows only, as the collector makes it."""
    return replace(
        batch,
        weights_M=weights_M.where(weights_M > 0, -1.0),
        hidden_MD=batch.hidden_MD[weights_M > 0],
    )


def test_rows_without_a_weight_have_no_target(chain) -> None:
    batch = chain().batch(4)
    weights_M = torch.zeros(batch.response_ids_M.shape[0])
    weights_M[[0, 2]] = torch.tensor([1.0, 1.0])
    plain = look_up(batch, 3, False)
    some = look_up(replace(batch, weights_M=weights_M), 3, False)
    assert some.mask_MK.dtype == torch.bool and some.usable_N.tolist() == [
        n for n in (0, 2) if plain.mask_MK[n].any()
    ]
    assert torch.equal(some.mask_MK[0], plain.mask_MK[0])
    heavy = look_up(replace(batch, weights_M=weights_M * 4), 3, False)
    assert torch.equal(heavy.mask_MK, plain.mask_MK * (4 * weights_M).unsqueeze(1))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("loss", ["ce", "ce_tv"])
def test_states_that_were_left_out_change_nothing(chain, kind: str, loss: str) -> None:
    """The same sample, with all states or with those of the sampled rows alone: the same training
    to the bit.
    """
    task = chain()
    batch = task.batch()
    older = task.batch()
    weights_M, older_M = (some_weights(b.lengths_S, 0.4, seed=2) for b in (batch, older))
    states = []
    for make_sample in (lambda b, w: replace(b, weights_M=w), compact):
        trainer = trainer_of(task, kind, loss=loss)
        report = trainer.train_batch(
            make_sample(batch, weights_M), [(make_sample(older, older_M), 0.5)]
        )
        assert report.tokens == int(weights_M.sum())
        states.append(trainer.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_weighted_rows_count_as_often_as_they_weigh(chain) -> None:
    """A first step with weights 1 and 2 is that of a batch which holds the heavy response twice."""
    task = chain()
    light = task.batch(1)
    heavy = task.batch(1)
    twice = joined(light, heavy, heavy)
    once = joined(light, heavy)
    weights_M = torch.cat(
        [
            torch.ones(light.response_ids_M.shape[0]),
            torch.full((heavy.response_ids_M.shape[0],), 2.0),
        ]
    )
    settings = {"batch_positions": 10_000, "epochs": 1, "loss": "ce_tv"}
    first = trainer_of(task, "medusa", **settings)
    second = trainer_of(task, "medusa", **settings)
    loss = first.train_batch(twice).losses
    weighted = second.train_batch(replace(once, weights_M=weights_M)).losses
    assert loss == pytest.approx(weighted, rel=1e-5)
    left = first.heads.trainable_state()
    right = second.heads.trainable_state()
    assert all(torch.allclose(value, right[name], atol=1e-6) for name, value in left.items())


def test_a_loss_that_reads_neighbours_refuses_a_sample_without_them(chain) -> None:
    task = chain()
    batch = task.batch()
    weights_M = some_weights(batch.lengths_S, 0.4, seed=2)
    trainer = trainer_of(task, "medusa", loss="kl")
    assert trainer.train_batch(replace(batch, weights_M=weights_M)).problem == ""
    with pytest.raises(DataError, match="states of the rows that follow"):
        trainer.train_batch(compact(batch, weights_M))


def test_a_batch_knows_which_states_it_has(chain) -> None:
    batch = chain().batch(6)
    weights_M = some_weights(batch.lengths_S, 0.5, seed=0)
    some = compact(batch, weights_M)
    assert some.nbytes < batch.nbytes
    rows_M = some.state_rows_M
    assert torch.equal(rows_M >= 0, weights_M > 0) and torch.equal(
        some.hidden_MD[rows_M[rows_M >= 0]], batch.hidden_MD[weights_M > 0]
    )
    picked = some.select(torch.tensor([4, 1]))
    whole = batch.select(torch.tensor([4, 1]))
    assert torch.equal(picked.response_ids_M, whole.response_ids_M)
    assert torch.equal(picked.hidden_MD, whole.hidden_MD[picked.weights_M > 0])
    with pytest.raises(DataError, match="do not fit together"):
        replace(some, hidden_MD=some.hidden_MD[1:])


def test_an_early_sample_leaves_the_holdout_whole() -> None:
    lengths_S = torch.full((96,), 150)
    prompts_S = torch.arange(96) // 2
    sample = EarlySample(0.25, 0.4, seed=3, ahead=3)
    weights_M, held_S = sample.draw(lengths_S, prompts_S, policy_version=5)
    by_response = weights_M.view(96, 150)
    assert (
        round(0.4 * 0.25 * 48) == 5
        and held_S.sum() == 2 * 6
        and torch.equal(held_S[::2], held_S[1::2])
    ), "whole prompts, at least six"
    assert bool((by_response[held_S] == 1).all())
    assert 0.22 < float((weights_M >= 0).float().mean()) < 0.27, "the share is of all states"
    assert torch.equal(held_S, sample.draw(lengths_S, prompts_S, 5)[1])
    assert any(
        not torch.equal(held_S, sample.draw(lengths_S, prompts_S, version)[1])
        for version in range(5)
    )


def test_a_sample_is_blocks_whose_edges_are_there_for_the_others() -> None:
    """Every row that is trained on has the states that its teacher and its context read, and all
    rows are as likely.
    """
    lengths_S = torch.randint(1, 400, (300,), generator=torch.Generator().manual_seed(1))
    chosen_T = torch.zeros(400)
    for version in range(12):
        weights_M, held_S = EarlySample(0.3, 0.2, 7, ahead=4, behind=8).draw(
            lengths_S, None, version
        )
        padded_ST = torch.nn.utils.rnn.pad_sequence(
            list(weights_M.split(lengths_S.tolist())), batch_first=True
        )  # Beyond the end: 0.
        present_ST = padded_ST >= 0
        scored_ST = padded_ST > 0
        for shift in range(-8, 5):
            there_ST = present_ST.roll(-shift, 1)
            there_ST[:, padded_ST.shape[1] - max(0, shift) :] = True
            there_ST[:, : max(0, -shift)] = True
            assert bool(there_ST[scored_ST].all()), f"a state {shift} rows away"
        edges_S = (present_ST.int().diff(dim=1) != 0).sum(1)
        assert bool((edges_S <= 2 * (lengths_S // BLOCK + 2)).all())
        chosen_T[: padded_ST.shape[1]] += scored_ST[~held_S].sum(0)
    enough_T = torch.stack([(lengths_S > t).sum() for t in range(400)])
    rate_T = (chosen_T / enough_T / 12)[50:250].view(4, 50).mean(1)
    assert rate_T.max() < 1.2 * rate_T.min(), rate_T


@pytest.mark.parametrize("loss", ["kl_tv", "ce_tv"])
def test_heads_learn_from_blocks_what_they_learn_from_all(chain, loss: str) -> None:
    """A batch of twenty times the budget was dropped; losses that read the actor's distribution
    could not be sampled at all.
    """
    task = chain(sure=0.8)
    batches = [task.batch(100, 100) for _ in range(4)]
    whole = trainer_of(task, "medusa", loss=loss)
    part = trainer_of(task, "medusa", loss=loss)
    for version, batch in enumerate(batches):
        whole.train_batch(batch)
        some = EarlySample(0.1, 0.0001, 0, ahead=3).of(replace(batch, policy_version=version))
        assert (
            some.nbytes < 0.4 * batch.nbytes
            and some.hidden_MD.shape[0] < 0.12 * batch.hidden_MD.shape[0]
        )
        for _ in range(10):
            assert part.train_batch(hold_out(some, 0.1, 0)[0]).problem == ""
    held = task.batch(100, 40)
    lengths = [
        replay(trainer.heads, held, task.lm_head_VD).mean_acceptance_length
        for trainer in (whole, part)
    ]
    assert lengths[1] > 0.97 * lengths[0] > 1.2, lengths


def joined(*batches: RolloutBatch) -> RolloutBatch:
    parts = {
        name: torch.cat([getattr(b, name) for b in batches])
        for name in ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S")
    }
    return RolloutBatch(**parts)


def trainer_of(task, kind: str, **settings) -> HeadsTrainer:
    torch.manual_seed(7)
    heads = MedusaHeads(HeadsConfig(task.hidden, task.vocab, num_heads=3, kind=kind))
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    return HeadsTrainer(
        heads, task.lm_head_VD, config, 0, embedding_VD=task.lm_head_VD if kind == "hydra" else None
    )


def trained(task, kind: str) -> MedusaHeads:
    trainer = trainer_of(task, kind)
    for _ in range(8):
        trainer.train_batch(task.batch())
    return trainer.heads


@pytest.mark.parametrize(("prompts", "held"), [(2, 1), (6, 2), (12, 4), (18, 6), (27, 6), (40, 8)])
def test_of_few_prompts_a_third_is_held_out(chain, prompts: int, held: int) -> None:
    """A fifth of a dozen would be two, and three batches would pass before the gate has the six
    that it asks for.
    """
    batch = replace(chain().batch(2 * prompts, 4), prompts_S=torch.arange(2 * prompts) // 2)
    assert hold_out(batch, HOLDOUT_SHARE, 0)[1].prompts_S.unique().numel() == held
