"""Padding, packing and sorting: what goes into a micro batch comes back to its place."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heads.errors import DataError
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.ppo.batch import PPOBatch, chosen_texts, minibatches, text_batch


def rollouts() -> Rollouts:
    prompts = ((5, 6, 7), (8,))
    responses = (
        Response(0, (1, 2), (-0.1, -0.2), "stop"),
        Response(1, (3, 4, 9), (-0.3, -0.4, -0.5), "length"),
    )
    return Rollouts(prompts, responses, Counters(), 1.0, Sampling())


def test_a_micro_batch_by_hand():
    (micro,) = PPOBatch(rollouts()).micro_batches([0, 1], 2)
    assert micro.sequences == (1, 0), "the shorter one comes first"
    assert micro.input_ids_BT.tolist() == [[8, 3, 4, 9, 0], [5, 6, 7, 1, 2]]
    assert micro.response_mask_BT.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert micro.predict_mask_BT.int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 0]], (
        "the output before a token predicts it"
    )
    assert micro.response_ids_M.tolist() == [3, 4, 9, 1, 2]
    assert micro.first_predicting == 0


def test_response_coordinates():
    batch = PPOBatch(rollouts())
    assert batch.mask_SR.tolist() == [[True, True, False], [True, True, True]]
    torch.testing.assert_close(
        batch.behaviour_SR, torch.tensor([[-0.1, -0.2, 0.0], [-0.3, -0.4, -0.5]])
    )
    assert int(batch.lengths_S.sum()) == 5


def test_pack_and_unpack_are_inverse_whatever_the_order(make_rollouts):
    batch = PPOBatch(make_rollouts(10))
    values = torch.where(batch.mask_SR, torch.randn(batch.mask_SR.shape), 0.0)
    back = torch.zeros_like(values)
    for micro in batch.micro_batches([3, 1, 9, 0, 2, 8, 7, 4, 6, 5], 3):
        assert len(micro.sequences) <= 3
        batch.unpack(batch.pack(values, micro), micro, back)
    torch.testing.assert_close(back, values, rtol=0, atol=0)


def test_packed_order_is_the_models_order(make_rollouts):
    batch = PPOBatch(make_rollouts(6))
    ids = torch.zeros(batch.mask_SR.shape)
    for micro in batch.micro_batches(list(range(6)), 4):
        batch.unpack(micro.response_ids_M.float(), micro, ids)
        torch.testing.assert_close(batch.pack(ids, micro).long(), micro.response_ids_M)
        torch.testing.assert_close(
            micro.input_ids_BT[:, 1:][micro.predict_mask_BT[:, :-1]], micro.response_ids_M
        )


def test_sorting_saves_padding(make_rollouts):
    batch = PPOBatch(make_rollouts(32))
    padded = sum(micro.input_ids_BT.numel() for micro in batch.micro_batches(list(range(32)), 8))
    assert padded < 32 * max(batch.total_lengths)
    assert padded >= sum(batch.total_lengths)


def _without(change: str) -> Rollouts:
    good = rollouts()
    first = good.responses[0]
    changes = {
        "no responses": {"responses": ()},
        "an empty response": {
            "responses": (dataclasses.replace(first, token_ids=(), logprobs=()),)
        },
        "a log-prob too few": {"responses": (dataclasses.replace(first, logprobs=(-1.0,)),)},
        "an empty prompt": {"prompts": ((), (8,))},
    }
    return dataclasses.replace(good, **changes[change])


@pytest.mark.parametrize(
    "change", ["no responses", "an empty response", "a log-prob too few", "an empty prompt"]
)
def test_unusable_rollouts_are_refused(change: str):
    with pytest.raises(DataError):
        PPOBatch(_without(change))


def test_micro_batches_by_tokens_hold_no_more_than_asked_for(make_rollouts):
    batch = PPOBatch(make_rollouts(24))
    for most in (1, 12, 30, 1000):
        micros = list(batch.micro_batches(list(range(24)), 6, most))
        assert sorted(s for micro in micros for s in micro.sequences) == list(range(24))
        assert all(
            micro.input_ids_BT.numel() <= most or len(micro.sequences) == 1 for micro in micros
        )
        assert all(len(micro.sequences) <= 6 for micro in micros)
    assert len(list(batch.micro_batches(list(range(24)), 6, 1))) == 24
    rows = [micro.sequences for micro in batch.micro_batches(list(range(24)), 6, 1000)]
    assert rows == [micro.sequences for micro in batch.micro_batches(list(range(24)), 6)]


@pytest.mark.parametrize(
    ("count", "sizes"), [(64, [32, 32]), (33, [17, 16]), (70, [24, 23, 23]), (5, [5]), (0, [])]
)
def test_no_optimizer_step_is_made_of_a_small_rest(count: int, sizes: list[int]):
    trained = list(range(100, 100 + count))
    found = list(minibatches(trained, PPOConfig(minibatch_size=32, epochs=2), seed=1, step=3))
    assert [len(part) for part in found] == 2 * sizes
    for epoch in (found[: len(sizes)], found[len(sizes) :]):
        assert sorted(s for part in epoch for s in part) == trained


def test_minibatches_of_whole_batches_are_what_they_were():
    """Those of runs that were stopped before rests were spread."""
    order = torch.Generator().manual_seed(1_000_003 + 3)
    expected = torch.randperm(12, generator=order).split(4)
    found = minibatches(range(12), PPOConfig(minibatch_size=4, epochs=1), seed=1, step=3)
    assert list(found) == [part.tolist() for part in expected]


def test_an_update_passes_over_no_text_while_others_come_twice():
    texts = text_batch([(1, 2)] * 33, torch.device("cpu"), 0)
    assert chosen_texts(texts, 0, 17) + chosen_texts(texts, 17, 16) == list(range(33))
    assert chosen_texts(texts, 33, 2) == [0, 1], "and begins again"
