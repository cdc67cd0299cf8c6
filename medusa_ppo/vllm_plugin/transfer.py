"""Sends an actor from its trainer to all ranks of all engines: buckets of tensors, broadcast in a
separate group.

    rank 0, the trainer     numbers | frame | numbers | frame | ... | numbers | last frame
    all other ranks         receive the same

A frame is a bucket's tensors as bytes, each starting at a multiple of `PAGE`, followed by JSON: the
tensors' names, or in the last frame the checksum of all tensors. The numbers before a frame are the
bytes of both parts and the sum of the first part's words. The header sent beforehand
(`ActorStream.header`) holds dtypes and shapes.

Tensors start at pages, so that a frame's page sums are those of its tensors: one pass over the
frame, in place, gives the numbers and the checksum.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.errors import SwapError
from heads.tensorfile import (
    CODES,
    PAGE,
    STATE_DTYPES,
    Header,
    digest_of_sums,
    joint_checksum,
    page_sums,
    require_finite,
)
from medusa_ppo.runtime.rendezvous import Meeting, Place

TIMEOUT_S = 120.0

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class ActorStream:
    """An actor to be sent, with its present weights.

    Attributes:
        entries: dtype and shape of every tensor, by its name in the checkpoint.
        tensors: starts a pass over them, in any order, of any dtype and device.
        write: writes them to a file, for engines that start late, over another one if there is
            one (`heads.tensorfile.write_summed`); returns the `checksum` that it must have.
        bucket_bytes: bytes sent at a time, but at least one tensor.
        changes: the weights may change while engines write, and `write` then comes too late.
    """

    entries: Entries
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    write: Callable[[Path, Path | None], str]
    bucket_bytes: int
    changes: bool = False

    def header(self) -> Header:
        """The entries in a form that JSON can hold."""
        return {name: (CODES[dtype], shape) for name, (dtype, shape) in self.entries.items()}


def read_entries(header: Mapping[str, Sequence[Any]]) -> Entries:
    """Read what `ActorStream.header` returned. Raises SwapError for an unknown dtype."""
    unknown = [f"{name} {code}" for name, (code, _) in header.items() if code not in STATE_DTYPES]
    if unknown:
        raise SwapError(
            "A tensor has an unknown dtype.",
            given=unknown[:3],
            expected=" | ".join(STATE_DTYPES),
            do="Convert it.",
        )
    return {name: (STATE_DTYPES[code], tuple(shape)) for name, (code, shape) in header.items()}


# ---- the group


class Group(Meeting):
    """The group in which rank 0, the trainer, sends to all other ranks."""

    @staticmethod
    def lost(place: Place, problem: str, error: Exception) -> SwapError:
        return SwapError(
            problem,
            given=(
                f"rank {place.rank} of {place.size}, {place.backend}, {place.host}:"
                f" {str(error).splitlines()[0]}"
            ),
            expected=f"all ranks within {place.timeout_s:g} s",
            do="Read the engines' logs, or set engine.transfer=file.",
        )


class Frames:
    """Memory for frames. On the host it is used again as soon as nothing refers to a frame any
    more: fresh memory, page by page, takes longer than the transfer. (torch does this for GPUs.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[np.ndarray] = []

    def take(self, size: int) -> Tensor:
        """`size` bytes with any content."""
        if self._device.type != "cpu" or not size:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        fitting = [place for place, memory in enumerate(self._free) if len(memory) >= size]
        memory = self._free.pop(fitting[0]) if fitting else np.empty(size, dtype=np.uint8)
        part = memory[:size]
        # torch holds on to this view, not to what it is a view of.
        weakref.finalize(part, self._free.append, memory)
        return torch.from_numpy(part)


# ---- sending


def send(group: Group, stream: ActorStream) -> str:
    """Rank 0's part. Returns the checksum of all tensors, as `heads.tensorfile.checksum`.

    Raises:
        CheckpointError: NaN or infinity; earlier buckets have already reached the engines.
        SwapError: a rank is lost, or the tensors differ from those in the header.
    """
    digests: dict[str, str] = {}
    frames = Frames(group.device)
    for bucket in _buckets(stream):
        frame = _frame(bucket, stream.entries, frames)
        require_finite(dict(_views(frame, list(bucket), stream.entries)), "the actor's weights")
        sums_P = page_sums(frame)
        _share_frame(group, frame, sums_P, {"names": list(bucket)})
        del frame
        digests |= _digests(sums_P.cpu(), list(bucket), stream.entries)
    if digests.keys() != stream.entries.keys():
        raise _not_announced(f"{len(digests)} tensors", f"{len(stream.entries)}")
    checksum = joint_checksum(digests)
    nothing = torch.empty(0, dtype=torch.uint8, device=group.device)
    _share_frame(group, nothing, page_sums(nothing), {"checksum": checksum})
    return checksum


def _digests(sums_P: Tensor, names: Sequence[str], entries: Entries) -> dict[str, str]:
    """Digests of a frame's tensors, from its page sums on the host."""
    pages = [_room(name, entries) // PAGE for name in names]
    return {
        name: digest_of_sums(name, *entries[name], part_P)
        for name, part_P in zip(names, sums_P.split(pages), strict=True)
    }


def _buckets(stream: ActorStream) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in stream.tensors():
        dtype, shape = stream.entries.get(name, (None, None))
        if dtype is None or tuple(tensor.shape) != shape:
            raise _not_announced(f"{name} {tuple(tensor.shape)}", f"shape {shape}")
        size = dtype.itemsize * tensor.numel()
        if bucket and filled + size > stream.bucket_bytes:
            yield bucket
            bucket = {}
            filled = 0
        bucket[name], filled = tensor, filled + size
    if bucket:
        yield bucket


def _frame(bucket: Mapping[str, Tensor], entries: Entries, frames: Frames) -> Tensor:
    frame = frames.take(sum(_room(name, entries) for name in bucket))
    start = 0
    for name, place in _views(frame, list(bucket), entries):
        place.copy_(bucket[name])
        end = start + _room(name, entries)
        frame[start + place.nbytes : end].zero_()
        start = end
    return frame


def _share_frame(group: Group, tensors: Tensor, sums_P: Tensor, note: dict[str, Any]) -> None:
    text = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8).to(
        tensors.device
    )
    numbers = [len(tensors), len(text), int(sums_P.sum())]
    group.share(torch.tensor(numbers, device=tensors.device))
    if len(tensors):
        group.share(tensors)
    group.share(text)


def _not_announced(given: str, expected: str) -> SwapError:
    return SwapError(
        "The actor's tensors are not those of the header.",
        given=given,
        expected=expected,
        do="Report this.",
    )


# ---- receiving


class Incoming:
    """The tensors of one `send`, in the order of their arrival. They stay valid for as long as
    something refers to them.

    Attributes:
        checksum: the sender's, once all have arrived; empty before.
    """

    def __init__(self, group: Group, entries: Entries) -> None:
        self._group = group
        self._entries = entries
        self.checksum = ""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Raises SwapError if the sender is lost, or if other bytes arrive than were sent."""
        group = self._group
        waiting = set(self._entries)
        frames = Frames(group.device)
        while not self.checksum:
            size, length, words = group.share(
                torch.empty(3, dtype=torch.int64, device=group.device)
            ).tolist()
            frame = frames.take(size)
            if size:
                group.share(frame)
            text = group.share(torch.empty(length, dtype=torch.uint8, device=group.device))
            note = json.loads(bytes(text.cpu().numpy()))
            if int(page_sums(frame).sum()) != words:
                raise _not_announced(
                    "a bucket whose bytes are not those that were sent",
                    "the checksum that the sender announced",
                )
            names = note.get("names", [])
            waiting -= set(names)
            views = _views(frame, names, self._entries)
            del frame
            yield from views
            if waiting and "checksum" in note:
                raise _not_announced(f"an end, {len(waiting)} tensors too early", "all of them")
            self.checksum = note.get("checksum", "")


def _room(name: str, entries: Entries) -> int:
    dtype, shape = entries[name]
    return -(-dtype.itemsize * math.prod(shape) // PAGE) * PAGE


def _views(frame: Tensor, names: Sequence[str], entries: Entries) -> Iterator[tuple[str, Tensor]]:
    """A frame's tensors; they share its memory."""
    start = 0
    for name in names:
        dtype, shape = entries[name]
        yield name, frame[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        start += _room(name, entries)
