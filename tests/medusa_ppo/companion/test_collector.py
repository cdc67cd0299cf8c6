"""Tapped rows reach their place: any micro-batch, any order, any padding."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from heads.errors import DataError
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.holdout import hold_out
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling

HIDDEN = 3


def rollouts_of(lengths: list[int], policy_version: int = 4, temperature: float = 0.7) -> Rollouts:
    responses = tuple(
        Response(
            0,
            tuple(100 * s + i for i in range(n)),
            tuple(-0.5 * s - 0.01 * i for i in range(n)),
            "stop",
        )
        for s, n in enumerate(lengths)
    )
    return Rollouts(
        ((1, 2),),
        responses,
        Counters(),
        1.0,
        Sampling(temperature=temperature),
        policy_version=policy_version,
    )


def micro_batch(
    device: torch.device,
    lengths: list[int],
    order: list[int],
    rng: random.Random,
    width: int = 12,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with prompts and responses at random offsets, on the actor's device; the state that
    predicts token i of response s is (s, i, 7).
    """
    hidden_BTD = torch.full((len(order), width, HIDDEN), -1.0)
    mask_BT = torch.zeros(len(order), width, dtype=torch.int64)
    for row, s in enumerate(order):
        first = rng.randint(1, width - max(lengths[s], 1))
        for i in range(lengths[s]):
            mask_BT[row, first + i] = 1
            hidden_BTD[row, first + i - 1] = torch.tensor([s, i, 7.0])
    return hidden_BTD.to(device), mask_BT.to(device)


def expected_states(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([[s, i, 7.0] for s, n in enumerate(lengths) for i in range(n)])


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_micro_batches_gives_the_same_batch(device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 6) for _ in range(9)] + [1]
    order = list(range(10))
    rng.shuffle(order)
    collector = BatchCollector(rollouts_of(lengths))
    for start in range(0, 10, 3):
        assert not collector.complete or all(lengths[s] == 0 for s in order[start:])
        part = order[start : start + 3]
        hidden_BTD, mask_BT = micro_batch(device, lengths, part, rng)
        collector.add(hidden_BTD, mask_BT, torch.tensor(part, device=device) if seed % 2 else part)
    assert collector.complete and collector.empty_responses == lengths.count(0)
    batch = collector.batch()
    assert torch.equal(batch.hidden_MD, expected_states(lengths))
    assert batch.response_ids_M.tolist() == [
        100 * s + i for s, n in enumerate(lengths) for i in range(n)
    ]
    assert torch.allclose(
        batch.logprobs_M,
        torch.tensor([-0.5 * s - 0.01 * i for s, n in enumerate(lengths) for i in range(n)]),
    )
    assert batch.lengths_S.tolist() == [n for n in lengths if n]
    assert batch.policy_version == 4 and batch.temperature == 0.7


def test_forward_without_the_last_token(device: torch.device) -> None:
    hidden_BTD, mask_BT = micro_batch(device, [3], [0], random.Random(1), width=4)
    collector = BatchCollector(rollouts_of([3]))
    assert collector.add(hidden_BTD[:, :3], mask_BT, [0]) == 1
    assert torch.equal(collector.batch().hidden_MD, expected_states([3]))


def test_responses_never_scored_are_left_out(device: torch.device) -> None:
    lengths = [2, 0, 3, 4]
    collector = BatchCollector(rollouts_of(lengths))
    collector.add(*micro_batch(device, lengths, [3, 0], random.Random(2)), [3, 0])
    assert not collector.complete and collector.seen == 2
    batch = collector.batch()
    assert batch.lengths_S.tolist() == [2, 4]
    assert batch.hidden_MD[:, 0].tolist() == [
        0,
        0,
        3,
        3,
        3,
        3,
    ] and batch.response_ids_M.tolist() == [0, 1, 300, 301, 302, 303]


def test_a_response_counts_once(device: torch.device) -> None:
    lengths = [2, 2]
    collector = BatchCollector(rollouts_of(lengths))
    hidden_BTD, mask_BT = micro_batch(device, lengths, [0, 0], random.Random(3))
    assert collector.add(hidden_BTD, mask_BT, [0, 0]) == 1
    assert collector.add(hidden_BTD + 5, mask_BT, [0, 0]) == 0
    assert torch.equal(collector.batch().hidden_MD, expected_states([2]))


def test_dtype_is_kept_and_states_are_detached_copies(device: torch.device) -> None:
    hidden_BTD, mask_BT = micro_batch(device, [2], [0], random.Random(4))
    source = hidden_BTD.to(torch.bfloat16).requires_grad_()
    collector = BatchCollector(rollouts_of([2]))
    collector.add(source * 1, mask_BT, [0])
    batch = collector.batch()
    assert batch.hidden_MD.dtype == torch.bfloat16 and not batch.hidden_MD.requires_grad
    assert torch.equal(batch.hidden_MD.float(), expected_states([2]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scored", [12, 9])
def test_a_sample_is_the_same_rows_of_the_whole_batch(
    device: torch.device, seed: int, scored: int
) -> None:
    """In any order, and also when some responses were never scored: only states that are trained on
    or judged were copied.
    """
    rng = random.Random(seed)
    lengths = [rng.randint(0, 6) for _ in range(11)] + [4]
    rollouts = rollouts_of(lengths)
    rollouts = dataclasses.replace(
        rollouts,
        responses=tuple(
            dataclasses.replace(r, prompt_index=i // 2) for i, r in enumerate(rollouts.responses)
        ),
    )
    whole = BatchCollector(rollouts)
    sampled = BatchCollector(rollouts, EarlySample(sum(lengths) // 2, 0.3, seed, ahead=3))
    order = list(range(12))
    rng.shuffle(order)
    for start in range(0, scored, 3):
        part = order[start : min(start + 3, scored)]
        hidden_BTD, mask_BT = micro_batch(device, lengths, part, rng)
        assert whole.add(hidden_BTD, mask_BT, part) == sampled.add(hidden_BTD, mask_BT, part)
    full = whole.batch()
    some = sampled.batch()
    weights = dict(
        zip(
            [i for i in range(12) if lengths[i]],
            sampled._weights_M.split([n for n in lengths if n]),
            strict=True,
        )
    )
    seen = [weights[i] for i in sorted(order[:scored]) if i in weights]
    kept_M = torch.cat(seen) >= 0
    assert torch.equal(some.hidden_MD, full.hidden_MD[kept_M])
    assert torch.equal(some.response_ids_M, full.response_ids_M[kept_M])
    assert torch.equal(some.logprobs_M, full.logprobs_M[kept_M])
    assert int(some.lengths_S.sum()) == int(kept_M.sum()) == len(kept_M) - some.left_out
    assert torch.equal(some.weights_M, torch.cat(seen)[kept_M])
    training, holdout = hold_out(some, 0.3, seed=99)
    assert 0 < kept_M.sum() < full.hidden_MD.shape[0] and training.weights_M is not None
    assert holdout is None or holdout.hidden_MD.shape[0] == int(holdout.lengths_S.sum())
    assert sampled.left_out == sum(int((weight < 0).sum()) for weight in weights.values())


def test_rows_that_are_none_of_the_rollouts_are_passed_over(device: torch.device) -> None:
    lengths = [2, 3]
    hidden_BTD, mask_BT = micro_batch(device, lengths, [1, 0, 1], random.Random(0))
    # padding of the trainer's own
    hidden_BTD[2] = 99.0
    mask_BT[2] = 0
    collector = BatchCollector(rollouts_of(lengths))
    assert collector.add(hidden_BTD, mask_BT, [1, None, None]) == 1 and not collector.complete
    assert collector.add(hidden_BTD, mask_BT, [None, 0, None]) == 1
    assert torch.equal(collector.batch().hidden_MD, expected_states(lengths))


def test_nothing_at_all_is_an_error() -> None:
    for lengths in ([0, 0], [3]):
        with pytest.raises(DataError, match="No response of the rollout batch"):
            BatchCollector(rollouts_of(lengths)).batch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, m: (h[:, :-2], m, [0]), "do not fit together"),
        (lambda h, m: (h, m, [0, 1]), "do not fit together"),
        (lambda h, m: (h, m[0], [0]), "do not fit together"),
        (lambda h, m: (h, m, [2]), "does not exist"),
        (lambda h, m: (h, m, [-1]), "does not exist"),
        (lambda h, m: (h, m.flip(1) | m, [0]), "does not cover"),
        (lambda h, m: (h, m * 0, [0]), "does not cover"),
        (lambda h, m: (h, torch.tensor([[1, 1, 0, 0, 0, 0]]), [0]), "following|follows"),
        (lambda h, m: (h, torch.tensor([[0, 1, 0, 1, 0, 0]]), [0]), "2 stretches"),
    ],
)
def test_rows_that_do_not_fit_are_refused(device: torch.device, change, message: str) -> None:
    hidden_BTD = torch.zeros(1, 6, HIDDEN, device=device)
    mask_BT = torch.tensor([[0, 1, 1, 0, 0, 0]], device=device)
    collector = BatchCollector(rollouts_of([2, 2]))
    with pytest.raises(DataError, match=message):
        collector.add(*change(hidden_BTD, mask_BT))
    assert collector.add(hidden_BTD, mask_BT, [0]) == 1
