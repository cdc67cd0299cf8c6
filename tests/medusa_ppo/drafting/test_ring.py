"""The ring of pairs: the last n of each request, in order, with a mask for what is missing."""

from __future__ import annotations

import torch

from medusa_ppo.drafting.ring import PairRing

n, D = 4, 3


def written(ring: PairRing, slot: int, request: int, first: int, count: int) -> None:
    places_N = torch.arange(first, first + count)
    states_ND = places_N.unsqueeze(1).expand(count, D) + 100.0 * request
    ring.write(torch.full((count,), slot), torch.full((count,), request), places_N, states_ND, places_N + 1000 * request)


def read(ring: PairRing, slot: int, request: int, last: int) -> tuple[list[list[float]], list[int], list[bool]]:
    states_BnD, tokens_Bn, there_Bn = ring.read(torch.tensor([slot]), torch.tensor([request]), torch.tensor([last]))
    return states_BnD[0, :, 0].tolist(), tokens_Bn[0].tolist(), there_Bn[0].tolist()


def test_the_last_pairs_come_back_oldest_first() -> None:
    ring = PairRing(2, n, D, torch.float32, torch.device("cpu"))
    written(ring, 1, 5, 0, 4)
    written(ring, 1, 5, 4, 3)
    assert read(ring, 1, 5, 6) == ([503.0, 504.0, 505.0, 506.0], [5003, 5004, 5005, 5006], [True] * 4)


def test_missing_pairs_and_those_of_other_requests_are_masked() -> None:
    ring = PairRing(2, n, D, torch.float32, torch.device("cpu"))
    written(ring, 0, 5, 0, 2)
    assert read(ring, 0, 5, 1)[2] == [False, False, True, True]
    written(ring, 0, 6, 3, 1)  # The slot's next request; a prefix-cache hit left out its first three positions.
    assert read(ring, 0, 6, 3)[2] == [False, False, False, True]
    written(ring, 0, 6, 6, 1)  # Positions 4 and 5 are missing.
    assert read(ring, 0, 6, 6)[2] == [True, False, False, True]
    assert read(ring, 1, 6, 6)[2] == [False] * 4
