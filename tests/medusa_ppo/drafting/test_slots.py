"""What is kept by slot: slots kept and given on, and q found by who drafted and where."""

from __future__ import annotations

import torch

from medusa_ppo.drafting.noise import cumulate, keys_of
from medusa_ppo.drafting.slots import NOTHING, DraftSlots, Seating, Traits, stamps

S, K, W = 4, 3, 5


def plain(_: str) -> Traits:
    return Traits()


def test_a_request_keeps_its_slot_and_its_number_while_it_lives(device: torch.device) -> None:
    seating = Seating(3, device)
    live = dict.fromkeys("abc")
    first = seating.seat(["a", "b"], plain, live)
    assert seating.seat(["a", "b"], plain, live) is first
    turned = seating.seat(["c", "b", "a"], plain, live)
    assert turned.slots_B[[2, 1]].tolist() == first.slots_B.tolist()
    assert turned.requests_B[[2, 1]].tolist() == first.requests_B.tolist()
    assert len(set(turned.slots_B.tolist())) == 3 and max(turned.slots_B.tolist()) < 3


def test_slots_of_the_ended_and_then_of_the_waiting_are_given_on_under_a_new_number(
    device: torch.device,
) -> None:
    seating = Seating(2, device)
    before = seating.seat(["a", "b"], plain, dict.fromkeys("ab"))
    after = seating.seat(["b", "c"], plain, dict.fromkeys("bc"))
    assert after.slots_B[0] == before.slots_B[1] and after.slots_B[1] == before.slots_B[0]
    assert int(after.requests_B[1]) not in before.requests_B.tolist()
    full = seating.seat(["d", "e"], plain, dict.fromkeys("bcde"))
    assert sorted(full.slots_B.tolist()) == [0, 1]
    back = seating.seat(["b"], plain, dict.fromkeys("bde"))
    seen = {number for seats in (before, after, full) for number in seats.requests_B.tolist()}
    assert int(back.requests_B[0]) not in seen


def test_seeds_and_grammars_become_tensors_only_where_there_are_any(device: torch.device) -> None:
    traits = {"a": Traits(), "b": Traits(seed=5), "c": Traits(seed=0, one_hot=True)}
    seating = Seating(3, device)
    none = seating.seat(["a"], traits.__getitem__, traits)
    assert none.keys_B is None and none.seeded_B is None and none.drawn_B is None
    mixed = seating.seat(["a", "b"], traits.__getitem__, traits)
    assert (
        mixed.seeded_B.tolist() == [False, True]
        and int(mixed.keys_B[1]) == int(keys_of([5])[0])
        and mixed.drawn_B is None
    )
    all_seeded = seating.seat(["c", "b"], traits.__getitem__, traits)
    assert all_seeded.seeded_B is None and all_seeded.drawn_B.tolist() == [0.0, 1.0]


def draw(slots: DraftSlots, q: list[torch.Tensor], columns_BK: torch.Tensor) -> None:
    """As the drafting call leaves it, had the uniforms fallen so."""
    places = slots.places(len(q), len(columns_BK))
    for k, q_BW in enumerate(q):
        cumulate(q_BW, places.cumulative[k])
        places.columns[k].copy_(columns_BK[:, k : k + 1])


def filled(
    device: torch.device,
) -> tuple[DraftSlots, torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Requests 10, 11, 12 drafted at positions 7, 8, 9 into slots 2, 0, 3; the last of them
    one-hot.
    """
    torch.manual_seed(0)
    slots = DraftSlots(S, K, W, device)
    slots_B = torch.tensor([2, 0, 3], device=device)
    stamps_B = stamps(torch.tensor([10, 11, 12]), torch.tensor([7, 8, 9])).to(device)
    q = [torch.rand(3, W).softmax(-1).to(device) for _ in range(K)]
    columns_BK = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1]], device=device)
    draw(slots, q, columns_BK)
    slots.stamp(
        slots_B, torch.where(torch.tensor([True, True, False], device=device), stamps_B, NOTHING), K
    )
    return slots, slots_B, stamps_B, q, columns_BK


def test_q_is_found_whatever_the_order_of_the_batch(device: torch.device) -> None:
    slots, slots_B, stamps_B, q, columns_BK = filled(device)
    turned = torch.tensor([1, 0], device=device)
    kept = slots.look_up(slots_B[turned], stamps_B[turned], K)
    assert kept.sampled_BK.all()
    expected_BK = torch.stack(
        [q_BW.gather(1, columns_BK[:, k : k + 1]).squeeze(1) for k, q_BW in enumerate(q)], dim=1
    )
    torch.testing.assert_close(kept.q_BK, expected_BK[turned])
    torch.testing.assert_close(
        slots.q(kept.rows_B, torch.tensor([2, 0], device=device)), torch.stack([q[2][1], q[0][0]])
    )


def test_one_hot_drafts_stale_ones_and_those_of_others_have_no_q(device: torch.device) -> None:
    slots, slots_B, stamps_B, _, _ = filled(device)
    one_hot = slots.look_up(slots_B[2:], stamps_B[2:], K)
    moved_on = slots.look_up(slots_B[:2], stamps_B[:2] + 1, K)
    another = slots.look_up(
        slots_B[:2], stamps(torch.tensor([11, 10]), torch.tensor([7, 8])).to(device), K
    )
    unknown = slots.look_up(
        torch.tensor([1, slots.spare], device=device), torch.full((2,), NOTHING, device=device), K
    )
    for kept in (one_hot, moved_on, another, unknown):
        assert not kept.sampled_BK.any() and bool((kept.q_BK == 1).all())
    slots.forget()
    assert not slots.look_up(slots_B, stamps_B, K).sampled_BK.any()


def test_who_sat_out_a_step_finds_nothing(device: torch.device) -> None:
    """Its row is another's by then."""
    slots, slots_B, stamps_B, q, columns_BK = filled(device)
    draw(slots, [q_BW[:1] for q_BW in q], columns_BK[:1])
    slots.stamp(slots_B[1:2], stamps_B[1:2] + 1, K)
    assert not slots.look_up(slots_B[:1], stamps_B[:1], K).sampled_BK.any()


def test_places_beyond_what_was_drafted_have_no_q(device: torch.device) -> None:
    slots, slots_B, stamps_B, q, columns_BK = filled(device)
    later_B = stamps_B + 2
    draw(slots, q[:1], columns_BK[:, :1])
    slots.stamp(slots_B, later_B, 1)
    assert slots.look_up(slots_B, later_B, K).sampled_BK.tolist() == [[True, False, False]] * 3
    assert not slots.look_up(slots_B, stamps_B, K).sampled_BK.any()


def test_logits_are_written_of_what_drafts_were_drawn_from(device: torch.device) -> None:
    """Before the temperature, to the bit of q; a draft without a stamp, and one that has no q, is
    one-hot. With a draft vocabulary they lie on its tokens.
    """
    slots, slots_B, stamps_B, _, columns_BK = filled(device)
    request_N = torch.tensor([0, 0, 1, 2, 1], device=device)
    drafts_N = torch.tensor([0, 2, 1, 0, 0], device=device)
    stamps_N = stamps_B[request_N]
    stamps_N[4] += 1  # Drafted at another position.
    temperature_N = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.0], device=device)
    for ids_W in (None, torch.tensor([1, 4, 5, 7, 8], device=device)):
        slots.ids_W = ids_W
        columns_N = columns_BK[request_N, drafts_N]
        ids_N = columns_N if ids_W is None else ids_W[columns_N]
        out_NV = torch.full((5, W if ids_W is None else 9), 7.0, device=device)
        slots.write_logits(slots_B[request_N], stamps_N, drafts_N, ids_N, temperature_N, out_NV)
        written_NW = out_NV if ids_W is None else out_NV[:, ids_W]
        q_NW = slots.q(slots.rows_S[slots_B[request_N]], drafts_N)
        expected_NW = q_NW.log() * temperature_N.unsqueeze(1)
        assert torch.equal(written_NW[:3], expected_NW[:3])
        assert out_NV.isfinite().sum(1).tolist() == [5, 5, 5, 1, 1]
        assert out_NV[3:].argmax(1).tolist() == ids_N[3:].tolist()
        assert out_NV[3:].amax(1).tolist() == [0.0, 0.0]


def test_a_request_with_the_id_of_an_ended_one_is_another_request(device: torch.device) -> None:
    """vLLM's ids are the caller's own if it is told not to add random ones."""
    seating = Seating(2, device)
    traits = {"0": Traits(seed=5), "1": Traits()}
    before = seating.seat(["0", "1"], traits.__getitem__, traits)
    traits["0"] = Traits(seed=6, one_hot=True)
    seating.arrive(["0"])
    after = seating.seat(["0", "1"], traits.__getitem__, traits)
    assert after.keys_B is not None and int(after.keys_B[0]) == int(keys_of([6])[0])
    assert after.drawn_B is not None and after.drawn_B.tolist() == [0.0, 1.0]
    assert int(after.requests_B[0]) not in before.requests_B.tolist()
    assert after.requests_B[1] == before.requests_B[1]
