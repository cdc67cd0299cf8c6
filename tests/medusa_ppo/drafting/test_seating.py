"""Slots of requests: kept while they wait, given on when they must be, and nothing to do while a batch stays as it is."""

from __future__ import annotations

import torch

from medusa_ppo.drafting.noise import key_of
from medusa_ppo.drafting.seating import Seating, Traits

CPU = torch.device("cpu")


def plain(_: str) -> Traits:
    return Traits()


def test_a_request_keeps_its_slot_and_its_number_while_it_lives() -> None:
    seating, live = Seating(3, CPU), dict.fromkeys("abc")
    first = seating.seat(["a", "b"], plain, live)
    assert seating.seat(["a", "b"], plain, live) is first
    turned = seating.seat(["c", "b", "a"], plain, live)
    assert turned.slots_B[[2, 1]].tolist() == first.slots_B.tolist()
    assert turned.requests_B[[2, 1]].tolist() == first.requests_B.tolist()
    assert len(set(turned.slots_B.tolist())) == 3 and max(turned.slots_B.tolist()) < 3


def test_slots_of_the_ended_and_then_of_the_waiting_are_given_on_under_a_new_number() -> None:
    seating = Seating(2, CPU)
    before = seating.seat(["a", "b"], plain, dict.fromkeys("ab"))
    after = seating.seat(["b", "c"], plain, dict.fromkeys("bc"))
    assert after.slots_B[0] == before.slots_B[1] and after.slots_B[1] == before.slots_B[0]
    assert after.requests_B[1] not in before.requests_B
    full = seating.seat(["d", "e"], plain, dict.fromkeys("bcde"))
    assert sorted(full.slots_B.tolist()) == [0, 1]
    back = seating.seat(["b"], plain, dict.fromkeys("bde"))
    assert back.requests_B[0] not in [*before.requests_B, *after.requests_B, *full.requests_B]


def test_seeds_and_grammars_become_tensors_only_where_there_are_any() -> None:
    traits = {"a": Traits(), "b": Traits(seed=5), "c": Traits(seed=0, one_hot=True)}
    seating = Seating(3, CPU)
    none = seating.seat(["a"], traits.__getitem__, traits)
    assert none.keys_B is None and none.seeded_B is None and none.drawn_B is None
    mixed = seating.seat(["a", "b"], traits.__getitem__, traits)
    assert mixed.seeded_B.tolist() == [False, True] and mixed.keys_B[1] == key_of(5) and mixed.drawn_B is None
    all_seeded = seating.seat(["c", "b"], traits.__getitem__, traits)
    assert all_seeded.seeded_B is None and all_seeded.drawn_B.tolist() == [0.0, 1.0]
