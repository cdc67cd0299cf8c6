"""The broadcast by itself: real gloo groups on loopback, a thread for each rank; no vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from heads.errors import CheckpointError, SwapError
from heads.tensorfile import checksum
from medusa_ppo.runtime.rendezvous import LOOPBACK
from medusa_ppo.vllm_plugin.transfer import (
    ActorStream,
    Frames,
    Group,
    Incoming,
    read_entries,
    send,
)

TIMEOUT_S = 5.0


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """Sizes that are no multiple of the alignment, types of every width, and a tensor that no
    bucket holds.
    """
    torch.manual_seed(seed)
    return {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        "large": torch.randn(40, 11),
        "steps": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "c": torch.randn(1, 1, 2),
    }


def stream_of(
    state: dict[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]] | None = None
) -> ActorStream:
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return ActorStream(
        entries,
        lambda: state.items() if tensors is None else tensors,
        lambda path, _: "",
        bucket_bytes=100,
    )


def in_a_group(
    work: Callable[[Group], Any], ranks: int = 3, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """What each rank's `work` gave or raised."""
    first = Group.open(LOOPBACK, ranks, timeout_s=timeout_s)

    def run(rank: int) -> Any:
        group = (Group(first.place.seen_by(rank)) if rank else first).join()
        try:
            return work(group)
        except Exception as error:
            return error
        finally:
            group.leave()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def receive(group: Group, stream: ActorStream) -> tuple[dict[str, torch.Tensor], str]:
    incoming = Incoming(group, read_entries(stream.header()))
    return dict(incoming), incoming.checksum


def is_trainer(group: Group) -> bool:
    return group.place.rank == 0


def test_all_ranks_get_all_tensors_and_one_checksum() -> None:
    state = state_of()
    stream = stream_of(state)
    sent, *received = in_a_group(
        lambda group: send(group, stream) if is_trainer(group) else receive(group, stream)
    )
    assert sent == checksum(state) != checksum(state_of(1))
    for tensors, found in received:
        assert found == sent and tensors.keys() == state.keys()
        assert all(
            torch.equal(tensors[name], state[name]) and tensors[name].dtype == state[name].dtype
            for name in state
        )


def test_the_order_of_tensors_does_not_matter_and_dtypes_are_those_announced() -> None:
    state = state_of()
    backwards = [
        (name, tensor.double() if tensor.is_floating_point() else tensor)
        for name, tensor in reversed(state.items())
    ]
    stream = stream_of(state, backwards)
    sent, (tensors, found) = in_a_group(
        lambda group: send(group, stream) if is_trainer(group) else receive(group, stream), 2
    )
    assert sent == found == checksum(state) == checksum(tensors)


def test_a_group_sends_again_and_again() -> None:
    states = [state_of(seed) for seed in range(3)]

    def work(group: Group) -> list[str]:
        return [
            send(group, stream_of(s)) if is_trainer(group) else receive(group, stream_of(s))[1]
            for s in states
        ]

    assert in_a_group(work) == [[checksum(state) for state in states]] * 3


def test_memory_of_a_frame_is_used_again_when_nobody_looks_at_it() -> None:
    frames = Frames(torch.device("cpu"))
    first = frames.take(1000)
    at = first.data_ptr()
    part = first[10:20].view(torch.int16)
    second = frames.take(500)
    assert second.data_ptr() != at
    del first
    third = frames.take(500)
    assert third.data_ptr() not in (at, second.data_ptr()), "a part of it is still there"
    del part
    assert frames.take(1001).data_ptr() != at, "it has too little room"
    assert frames.take(900).data_ptr() == at
    assert frames.take(0).shape == (0,)


def test_tensors_that_were_received_stay_when_others_follow() -> None:
    """As many buckets as tensors, in memory that is used again."""
    state = {f"tensor {i}": torch.full((30,), float(i)) for i in range(12)}
    stream = stream_of(state)

    def work(group: Group) -> Any:
        if is_trainer(group):
            return send(group, stream)
        incoming = Incoming(group, read_entries(stream.header()))
        kept = {}
        for place, (name, tensor) in enumerate(incoming):
            if place % 3 == 0:
                kept[name] = tensor
        return all(torch.equal(tensor, state[name]) for name, tensor in kept.items()) and len(kept)

    assert in_a_group(work, 2) == [checksum(state), 4]


@pytest.mark.parametrize("case", ["nan", "unknown", "shape", "missing", "source"])
def test_a_bad_stream_ends_for_all_and_nobody_waits(case: str) -> None:
    state = state_of()

    def tensors() -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            if name != "large":
                yield name, tensor
            elif case == "source":
                raise RuntimeError("a rank of the actor is gone")
            elif case != "missing":
                bad = {
                    "nan": torch.full_like(tensor, torch.nan),
                    "shape": tensor[:-1],
                    "unknown": tensor,
                }[case]
                yield ("other" if case == "unknown" else name), bad

    stream = stream_of(state, tensors())
    began = time.monotonic()
    sent, *received = in_a_group(
        lambda group: send(group, stream) if is_trainer(group) else receive(group, stream)
    )
    assert isinstance(sent, {"nan": CheckpointError, "source": RuntimeError}.get(case, SwapError))
    assert (
        all(isinstance(error, SwapError) for error in received)
        and time.monotonic() - began < TIMEOUT_S
    )


def test_a_rank_that_leaves_or_hangs_is_an_error_within_the_timeout() -> None:
    state = state_of()
    stay = threading.Event()

    def work(group: Group) -> Any:
        if group.place.rank == 2:
            stay.wait(3.0)
            return "silent"
        try:
            return (
                send(group, stream_of(state))
                if is_trainer(group)
                else receive(group, stream_of(state))
            )
        finally:
            group.leave()

    # What is small fits into the sockets: it is the end of a long stream that the trainer can't get
    # rid of.
    state["large"] = torch.randn(4000, 1000)
    began = time.monotonic()
    sent, _, silent = in_a_group(work, timeout_s=1.0)
    assert isinstance(sent, SwapError) and silent == "silent" and time.monotonic() - began < 10.0


def test_ranks_that_do_not_come_are_an_error() -> None:
    with pytest.raises(SwapError, match="did not meet"):
        Group.open(LOOPBACK, 2, timeout_s=0.5).join()


def test_an_unknown_dtype_is_refused() -> None:
    assert read_entries({"a": ["BF16", [2, 3]]}) == {"a": (torch.bfloat16, (2, 3))}
    with pytest.raises(SwapError, match="unknown dtype"):
        read_entries({"a": ["F8_E4M3", [2]]})
