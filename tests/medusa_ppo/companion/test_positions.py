"""What a sample of positions holds, and that it estimates what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heads.errors import DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.targets import segments_from_lengths
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.holdout import (
    AHEAD_TOKENS,
    HOLDOUT_PROMPTS,
    HOLDOUT_TOKENS,
    hold_out,
    stretches,
)
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
    # Steps that are whole with either number of rows: smaller ones have a smaller size.
    settings = {"batch_positions": 8, "epochs": 1, "loss": "ce_tv"}
    first = trainer_of(task, "medusa", **settings)
    second = trainer_of(task, "medusa", **settings)
    loss = first.train_batch(twice, steps=1).losses
    weighted = second.train_batch(replace(once, weights_M=weights_M), steps=1).losses
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
    with pytest.raises(DataError, match="states of the following rows"):
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


def test_a_sample_is_judged_on_a_stretch_of_one_answer_to_each_of_some_prompts() -> None:
    lengths_S = torch.full((96,), 150)
    prompts_S = torch.arange(96) // 2
    sample = EarlySample(96 * 150 // 2, 0.2, seed=3, ahead=3)
    weights_M, held_S = sample.draw(lengths_S, prompts_S)
    kept_ST = weights_M.view(96, 150) >= 0
    held = prompts_S[held_S]
    assert held.numel() == held.unique().numel() == 7, "as many prompts as have room"
    assert not kept_ST[torch.isin(prompts_S, held) & ~held_S].any(), "no other answer to these"
    stretches_S = kept_ST[held_S].sum(1)
    assert int(stretches_S.max()) <= 64 and int(stretches_S.sum()) <= sample.rows / 10
    assert bool((kept_ST[held_S].int().diff(dim=1).abs().sum(1) <= 2).all()), "each in one piece"
    assert 0.9 * sample.rows < int(kept_ST.sum()) <= sample.rows
    assert torch.equal(held_S, sample.draw(lengths_S, prompts_S)[1])
    assert any(
        not torch.equal(held_S, replace(sample, seed=seed).draw(lengths_S, prompts_S)[1])
        for seed in range(5)
    )


def test_of_a_large_batch_nearly_the_whole_budget_is_trained_on() -> None:
    """64 prompts x 16 answers in the proportions of an 8B actor, 8,192 tokens and 1 GiB (all of it
    a fourth): one prompt with its answers is as long as everything that may be kept.
    """
    lengths_S = torch.full((1024,), 2048)
    sample = EarlySample(32_672, HOLDOUT_SHARE, seed=0, ahead=4)
    weights_M, held_S = sample.draw(lengths_S, torch.arange(1024) // 16)
    trained = int((weights_M[~held_S.repeat_interleave(2048)] > 0).sum())
    assert trained >= 0.9 * sample.rows and int((weights_M >= 0).sum()) <= sample.rows
    assert int(held_S.sum()) >= HOLDOUT_PROMPTS, "one batch is enough to decide"


def test_a_sample_is_blocks_whose_ends_are_there_for_the_others() -> None:
    """Every row that is trained on has the states that its teacher reads, and all rows are as
    likely: of short and of long responses, early and late in them, first and last in the batch.
    """
    lengths_S = torch.randint(1, 1600, (300,), generator=torch.Generator().manual_seed(1))
    sample = EarlySample(int(0.3 * lengths_S.sum()), 0.2, 7, ahead=4)
    count, longest = 40, int(lengths_S.max())
    trained_ST = torch.zeros(300, longest)
    judged_ST = torch.zeros(300, longest)
    for seed in range(count):
        weights_M, held_S = replace(sample, seed=seed).draw(lengths_S, None)
        padded_ST = torch.nn.utils.rnn.pad_sequence(
            list(weights_M.split(lengths_S.tolist())), batch_first=True
        )  # Beyond the end: 0.
        present_ST = padded_ST >= 0
        for shift in range(5):
            there_ST = present_ST.roll(-shift, 1)
            there_ST[:, longest - shift :] = True
            assert bool(there_ST[(padded_ST > 0) & ~held_S[:, None]].all()), f"{shift} rows away"
        edges_S = (present_ST.int().diff(dim=1) != 0).sum(1)
        assert bool((edges_S <= 2 * (lengths_S // BLOCK + 2)).all())
        trained_ST += (padded_ST > 0) & ~held_S[:, None]
        judged_ST += (padded_ST > 0) & held_S[:, None]
    inside_ST = torch.arange(longest) < lengths_S[:, None]

    def rate(chosen_ST: torch.Tensor, among_ST: torch.Tensor) -> float:
        among_ST = among_ST & inside_ST
        return float(chosen_ST[among_ST].sum() / among_ST.sum() / count)

    late_T = torch.arange(longest) >= 400
    halves = [
        (lengths_S[:, None] < 800, lengths_S[:, None] >= 800),  # by length
        ((~late_T)[None, :], late_T[None, :]),  # by place in the response
        (torch.arange(300)[:, None] < 150, torch.arange(300)[:, None] >= 150),  # by place in it all
    ]
    for first, second in halves:
        rates = rate(trained_ST, first), rate(trained_ST, second)
        assert max(rates) < 1.15 * min(rates), rates
    long_S1 = lengths_S[:, None] >= 800
    judged = [rate(judged_ST, half & long_S1) for half in halves[1]]
    assert max(judged) < 1.3 * min(judged), judged


def test_a_share_of_less_than_a_block_is_a_whole_block_sometimes() -> None:
    """On average it is the share, and every row is as likely, whatever the size of its block."""
    lengths_S = torch.tensor([1500, 40, 300])
    segment_M = segments_from_lengths(lengths_S)
    place_M = torch.cat([torch.arange(n) for n in lengths_S.tolist()])
    count, rows = 12_000, 48.0
    chosen_M = torch.zeros(segment_M.numel())
    drawn = 0
    luck = torch.rand(count, generator=torch.Generator().manual_seed(5)).tolist()
    for seed in range(count):
        sample = EarlySample(rows, 0.0, seed, ahead=4, block=BLOCK, luck=luck[seed])
        weights_M, held_S = sample.draw(lengths_S, None)
        assert held_S is None
        kept_M = weights_M >= 0
        chosen_M += kept_M
        drawn += bool(kept_M.any())
    assert 0.1 < drawn / count < 0.4, "rows come in whole blocks"
    assert float(chosen_M.sum()) / count == pytest.approx(rows, rel=0.05)
    long_M = segment_M == 0
    groups = [
        *(segment_M == s for s in range(3)),
        long_M & (place_M < 100),
        long_M & (place_M >= 700) & (place_M < 800),
        long_M & (place_M >= 1400),
    ]
    rates = [float(chosen_M[group_M].mean()) / count for group_M in groups]
    expected = rows / segment_M.numel()
    assert max(rates) < 1.12 * expected and min(rates) > expected / 1.12, (rates, expected)


def test_a_stretch_is_judged_as_in_its_response(chain) -> None:
    """It knows what stood before it, and replays as these rows do."""
    task = chain()
    batch = replace(
        task.batch(40, 60),
        prompts_S=torch.arange(40),
        before_ids_X=torch.full((40,), 7, dtype=torch.int32),
        before_S=torch.ones(40, dtype=torch.int64),
    )
    sample = EarlySample(400, HOLDOUT_SHARE, seed=1, ahead=3)
    some = sample.of(batch)
    training, holdout = hold_out(some, HOLDOUT_SHARE, 0)
    assert holdout is not None and holdout.weights_M is None and training.weights_M is not None
    assert not set(training.prompts_S.tolist()) & set(holdout.prompts_S.tolist())
    ends_X = holdout.before_S.cumsum(0)
    starts = (batch.lengths_S.cumsum(0) - batch.lengths_S).tolist()
    ends_M = holdout.lengths_S.cumsum(0)
    for number, response in enumerate(holdout.prompts_S.tolist()):
        before = holdout.before_ids_X[: ends_X[number]][-holdout.before_S[number] :].tolist()
        ids = holdout.response_ids_M[: ends_M[number]][-holdout.lengths_S[number] :].tolist()
        whole = batch.response_ids_M[starts[response] :][: batch.lengths_S[response]].tolist()
        assert before[0] == 7 and (before[1:] + ids) == whole[: len(before) - 1 + len(ids)]
    heads = trained(task, "medusa")
    assert replay(heads, holdout, task.lm_head_VD).drafts > 0


@pytest.mark.parametrize("prompts", [1, 3, 40])
@pytest.mark.parametrize("rows", [5, 40, 4000])
def test_any_sample_of_any_batch_can_be_drawn_and_split(chain, prompts: int, rows: int) -> None:
    """A budget smaller than one block included; of few prompts nothing is held out."""
    batch = chain().batch(40, 30)
    batch = replace(batch, prompts_S=torch.arange(40) % prompts)
    some = EarlySample(rows, HOLDOUT_SHARE, 0, ahead=3).of(batch)
    training, holdout = hold_out(some, HOLDOUT_SHARE, 0)
    assert training.hidden_MD.shape[0] > 0 and (holdout is None) == (prompts < 40)
    assert some.left_out == batch.hidden_MD.shape[0] - some.hidden_MD.shape[0]
    judged = stretches(training, 0) if holdout is None else holdout
    assert judged.hidden_MD.shape[0] == int(judged.lengths_S.sum()) > 0


def test_of_long_responses_that_all_are_here_many_prompts_are_judged_on(chain) -> None:
    """Whole prompts were held out while HOLDOUT_TOKENS had room: of four answers of 8k tokens each
    one prompt, and the gate waited for six batches.
    """
    batch = chain().batch(1)
    lengths_S = torch.full((64,), 9000)
    count = int(lengths_S.sum())
    long = replace(
        batch,
        hidden_MD=torch.zeros(count, 2),
        response_ids_M=torch.zeros(count, dtype=torch.int64),
        logprobs_M=torch.zeros(count),
        lengths_S=lengths_S,
        prompts_S=torch.arange(64) // 2,
    )
    training, holdout = hold_out(long, HOLDOUT_SHARE, 0)
    assert holdout is not None and holdout.prompts_S.unique().numel() == 6
    assert holdout.lengths_S.numel() == 6 and int(holdout.lengths_S.sum()) <= HOLDOUT_TOKENS
    assert training.lengths_S.numel() == 52
    ahead = stretches(long, 0, AHEAD_TOKENS)
    assert ahead.prompts_S.unique().numel() == 32 and int(ahead.lengths_S.sum()) <= AHEAD_TOKENS


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
        some = EarlySample(batch.hidden_MD.shape[0] // 10, 0.0001, 0, ahead=3).of(
            replace(batch, policy_version=version)
        )
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


@pytest.mark.parametrize(("prompts", "held"), [(1, 0), (2, 0), (12, 0), (27, 0), (28, 6), (40, 8)])
def test_a_fifth_is_held_out_where_that_is_enough_to_decide_by(
    chain, prompts: int, held: int
) -> None:
    batch = replace(chain().batch(2 * prompts, 4), prompts_S=torch.arange(2 * prompts) // 2)
    training, holdout = hold_out(batch, HOLDOUT_SHARE, 0)
    assert (0 if holdout is None else holdout.prompts_S.unique().numel()) == held
    assert training.prompts_S.unique().numel() == prompts - held
