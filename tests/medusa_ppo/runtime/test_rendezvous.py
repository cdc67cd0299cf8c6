"""Processes that meet: at one address and no other, within the timeout, and noticed when they
go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_ppo.runtime import rendezvous
from medusa_ppo.runtime.rendezvous import (
    LOOPBACK,
    Meeting,
    PeerLostError,
    Place,
    choose_backend,
)


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


def test_the_interface_that_gloo_is_told_to_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "127.0.0.2"  # As of a node: not LOOPBACK, at which all processes are on this machine.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    Meeting.open(here, 1, timeout_s=5).join().leave()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    Meeting.open(here, 1, timeout_s=5).join().leave()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-cable")
    with pytest.raises(PeerLostError, match="did not meet"):
        Meeting.open(here, 1, timeout_s=5).join()
    Meeting.open(LOOPBACK, 1, timeout_s=5).join().leave()


def test_nccl_is_for_ranks_with_gpus_of_their_own() -> None:
    assert choose_backend(["GPU-1", "GPU-2"]) == "nccl"
    assert (
        choose_backend(["GPU-1", "GPU-1"])
        == choose_backend(["GPU-1", "cpu"])
        == choose_backend(["cpu", "cpu"])
        == "gloo"
    )


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpus", "asked"), [(["GPU-1", "GPU-2"], "nccl"), (["GPU-1", "GPU-1"], "gloo")]
)
def test_torch_is_given_a_backend_for_the_device_that_is_trained_on(
    in_a_team: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    asked: str,
) -> None:
    """DDP over CUDA parameters asks the group for CUDA's backend, and ends the process where there
    is none. No test machine has GPUs: their ids and NCCL itself are doubles.
    """
    made = []

    def nccl(store: Any, place: Place) -> Any:
        made.append(place.rank)
        return rendezvous._gloo(store, place)

    here = threading.local()
    monkeypatch.setattr(rendezvous, "_nccl", nccl)
    monkeypatch.setattr(rendezvous, "device_id", lambda device: here.gpu)

    def work(team: Meeting, rank: int) -> tuple[bool, bool]:
        here.gpu = gpus[rank]
        group = team.process_group(GPU)
        return (
            group._get_backend(GPU) is not None,
            group._get_backend(torch.device("cpu")) is not None,
        )

    assert in_a_team(work, 2) == [(True, True)] * 2
    assert sorted(made) == ([0, 1] if asked == "nccl" else [])
