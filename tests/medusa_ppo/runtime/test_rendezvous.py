"""Processes that meet: at one address and no other, within the timeout, and noticed when they
go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_ppo.runtime.rendezvous import LOOPBACK, Meeting, PeerLostError, Place


def test_the_place_listens_on_loopback_only() -> None:
    meeting = Meeting.open(LOOPBACK, 2)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [
        row[1].split(":")[0]
        for row in rows
        if row[1].endswith(f":{meeting.place.port:04X}") and row[3] == "0A"
    ] == ["0100007F"]


def test_sums_the_largest_and_rows_in_the_order_of_ranks(
    in_a_team: Callable[..., list[Any]],
) -> None:
    def work(team: Meeting, rank: int) -> tuple[list[float], int, list[list[int]]]:
        total = torch.tensor([1.0, float(rank)])
        team.add_up(total)
        return (
            total.tolist(),
            team.most(rank * 3),
            team.gather(torch.full((rank, 2), rank)).tolist(),
        )

    assert in_a_team(work, 3) == [([3.0, 3.0], 6, [[1, 1], [2, 2], [2, 2]])] * 3


def test_who_leaves_is_noticed_at_once(in_a_team: Callable[..., list[Any]]) -> None:
    def work(team: Any, rank: int) -> str:
        team.add_up(torch.ones(3))
        if rank == 1:
            team.leave()
            return ""
        try:
            team.add_up(torch.ones(3))
        except PeerLostError as error:
            return str(error)
        return "nothing noticed"

    assert in_a_team(work)[0] not in ("", "nothing noticed")


def test_who_does_not_come_and_who_is_not_there_are_errors() -> None:
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="did not meet"):
        Meeting.open(LOOPBACK, 2, timeout_s=0.5).join()
    with pytest.raises(PeerLostError, match="Nobody answers"):
        Meeting(Place(LOOPBACK, 9, 2, 1, timeout_s=0.5))
    assert time.monotonic() - began < 20
