"""q by slot: found by who drafted and where, taken for one-hot whenever that is not so."""

from __future__ import annotations

import torch

from medusa_ppo.drafting.slots import NOTHING, DraftSlots, stamps

S, K, W = 4, 3, 5


def filled() -> tuple[DraftSlots, torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Requests 10, 11, 12 drafted at positions 7, 8, 9 into slots 2, 0, 3; the last of them one-hot."""
    torch.manual_seed(0)
    slots = DraftSlots(S, K, W, torch.device("cpu"))
    slots_B = torch.tensor([2, 0, 3])
    stamps_B = stamps(torch.tensor([10, 11, 12]), torch.tensor([7, 8, 9]))
    q = [torch.rand(3, W).softmax(-1) for _ in range(K)]
    columns_BK = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1]])
    slots.keep(slots_B, torch.where(torch.tensor([True, True, False]), stamps_B, NOTHING), columns_BK, q)
    return slots, slots_B, stamps_B, q, columns_BK


def test_q_is_found_whatever_the_order_of_the_batch() -> None:
    slots, slots_B, stamps_B, q, columns_BK = filled()
    turned = torch.tensor([1, 0])
    kept = slots.look_up(slots_B[turned], stamps_B[turned], K)
    assert kept.sampled_BK.all()
    expected_BK = torch.stack([q_BW.gather(1, columns_BK[:, k : k + 1]).squeeze(1) for k, q_BW in enumerate(q)], dim=1)
    assert torch.equal(kept.q_BK, expected_BK[turned])
    at_B1 = torch.tensor([[2], [0]])
    assert torch.equal(kept.rows(at_B1), torch.stack([q[2][1], q[0][0]]))


def test_one_hot_drafts_stale_ones_and_those_of_others_have_no_q() -> None:
    slots, slots_B, stamps_B, _, _ = filled()
    one_hot = slots.look_up(slots_B[2:], stamps_B[2:], K)
    moved_on = slots.look_up(slots_B[:2], stamps_B[:2] + 1, K)
    another = slots.look_up(slots_B[:2], stamps(torch.tensor([11, 10]), torch.tensor([7, 8])), K)
    unknown = slots.look_up(torch.tensor([1, slots.spare]), torch.full((2,), NOTHING), K)
    for kept in (one_hot, moved_on, another, unknown):
        assert not kept.sampled_BK.any() and bool((kept.q_BK == 1).all())
    slots.forget()
    assert not slots.look_up(slots_B, stamps_B, K).sampled_BK.any()


def test_places_beyond_what_was_drafted_have_no_q() -> None:
    slots, slots_B, stamps_B, q, columns_BK = filled()
    later_B = stamps_B + 2
    slots.keep(slots_B, later_B, columns_BK[:, :1], q[:1])
    assert slots.look_up(slots_B, later_B, K).sampled_BK.tolist() == [[True, False, False]] * 3
    assert not slots.look_up(slots_B, stamps_B, K).sampled_BK.any()


def test_whole_rows_are_spread_one_hot_or_empty() -> None:
    torch.manual_seed(0)
    slots = DraftSlots(S, K, 3, torch.device("cpu"), torch.tensor([1, 4, 6]))
    slots_B, stamps_B = torch.tensor([1, 2]), stamps(torch.tensor([1, 2]), torch.tensor([3, 3]))
    q = [torch.rand(2, 3).softmax(-1) for _ in range(2)]
    slots.keep(slots_B, stamps_B, torch.tensor([[0, 2], [1, 1]]), q)
    stale_B = torch.stack([stamps_B[0], stamps_B[1] + 1])
    kept = slots.look_up(slots_B, stale_B, 2)
    rows_TV = slots.whole_rows(kept, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([1, -1, 4, -1]), 8)
    expected_TV = torch.zeros(4, 8)
    expected_TV[0, [1, 4, 6]] = q[0][0]
    expected_TV[2, 4] = 1
    assert torch.equal(rows_TV, expected_TV)
