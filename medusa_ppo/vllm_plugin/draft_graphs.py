"""V2's drafting call as CUDA graphs: some hundreds of small kernels become one launch.

One step of drafting is the same kernels whatever the requests are, as long as there are as many of
them. So a step is recorded for a few sizes, into which smaller batches are padded, and replayed on
tensors whose addresses never change. What a recording reads besides (heads, rings, slots, tables)
keeps its addresses until a swap, a sync or a new setting; then all recordings are thrown away.
V2's table of last tokens keeps its own, too, and is read in place. Its temperatures don't: they are
in one of several buffers, in turn (`UvaBackedTensor`), so the speculator has its own.

Shape letters: B requests of the recorded size, T rows of a step, S slots (the last one is spare),
D hidden, K drafts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

EAGER_USES = 1
"""A size is recorded when it comes up again after this many steps: recording one takes about as
long as three steps without. The two steps before `engines.calibration` times any are enough.
"""
FINEST = 8
"""Sizes above this are multiples of it."""


@dataclass(frozen=True)
class DraftStep:
    """What V2 tells its speculator about a step.

    Attributes:
        hidden_TD, ids_T, positions_T: the model's outputs and inputs.
        ends_B: row after the last one of each request.
        rejected_B, sampled_B: drafts refused, and tokens sampled.
        slots_B: slot of each request.
        last_S1: V2's own table, without a spare slot: the token sampled last.
        top_k_B, top_p_B: None if no request of the batch has one.
    """

    hidden_TD: torch.Tensor
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    ends_B: torch.Tensor
    rejected_B: torch.Tensor
    sampled_B: torch.Tensor
    slots_B: torch.Tensor
    last_S1: torch.Tensor
    top_k_B: torch.Tensor | None
    top_p_B: torch.Tensor | None

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """What differs from step to step."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in found.items()
            if value is not None and _first(name) != "S"
        }


class Recording(Protocol):
    """A recorded call."""

    def replay(self) -> None: ...


RECORD = Callable[[Callable[[], torch.Tensor]], tuple[Recording, torch.Tensor]]
"""Runs a call and records it: the recording, and the tensor that each replay writes."""


class CudaRecorder:
    """Records calls as CUDA graphs, which share one pool of memory, since they never run at the
    same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # Other threads (one reads new heads) may go on using the device.
        how: dict[str, Any] = {"pool": self._pool, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.stream(self._stream):
                # What a first call allocates for good, as cuBLAS does, is not part of the
                # recording.
                call()
            with torch.cuda.graph(graph, stream=self._stream, **how):
                result = call()
        finally:
            # A capture that fails leaves its own stream as the current one.
            torch.cuda.set_stream(current)
            current.wait_stream(self._stream)
        return graph, result


@dataclass(frozen=True)
class _Recorded:
    recording: Recording
    places: Mapping[str, torch.Tensor]
    ids_BK: torch.Tensor


class DraftGraphs:
    """Recordings of one drafting call.

    Attributes:
        broken: why nothing is recorded any more; empty: all is well.
        recorded_now: whether the last call made a recording.
    """

    def __init__(self, requests: int, drafts: int, record: RECORD) -> None:
        """
        Args:
            requests: most of them in a step; this is also the number of the spare slot.
            drafts: most drafts that a step verifies.
        """
        self._spare = requests
        self._rows = drafts + 1
        self._record = record
        self._sizes = padded_sizes(requests)
        self._uses: Counter[tuple[Any, ...]] = Counter()
        self._found: dict[tuple[Any, ...], _Recorded] = {}
        self._places: dict[str, torch.Tensor] = {}
        self._reads: tuple[object, ...] = ()
        self.broken = ""
        self.recorded_now = False

    def reads(self, *what: object) -> None:
        """What the next calls read besides their step. If any of it is another object (or another
        number) than before, recordings are of no use.
        """
        same = len(what) == len(self._reads) and all(
            new is old or (isinstance(new, int) and new == old)
            for new, old in zip(what, self._reads, strict=True)
        )
        if not same:
            self._found.clear()
            self._uses.clear()
            self._reads = what

    def drafts(
        self, step: DraftStep, rows: int, count: int, call: Callable[[DraftStep], torch.Tensor]
    ) -> torch.Tensor | None:
        """`call(step)`, int64 `[B, count]`, by a replay; None: call it yourself.

        Args:
            rows: of the step, all its requests' together.
            call: does the same if it is called twice for a step, except that it counts the step's
                tokens twice.
        """
        batch = len(step.slots_B)
        size = next((size for size in self._sizes if size >= batch), None)
        if self.broken or size is None or rows > size * self._rows:
            return None
        self.recorded_now = False
        given = step.parts
        key = (size, count, step.top_k_B is not None, step.top_p_B is not None)
        found = self._found.get(key)
        if found is None:
            self._uses[key] += 1
            if self._uses[key] <= EAGER_USES:
                return None
            places = self._still(given, size)
            _fill(places, given, rows, self._spare)
            still = replace(step, **places)
            try:
                recording, ids_BK = self._record(lambda: call(still))
            except Exception as error:
                # Drafts come as before, only slower.
                self.broken = f"{type(error).__name__}: {error}"
                logger.warning(
                    "From here on drafting is not recorded as CUDA graphs, and takes longer. %s",
                    self.broken,
                )
                return None
            self._found[key] = found = _Recorded(recording, places, ids_BK)
            self.recorded_now = True
        else:
            _fill(found.places, given, rows, self._spare)
        found.recording.replay()
        return found.ids_BK[:batch]

    def _still(self, given: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
        """Tensors for the parts of steps of this size, at addresses that stay. All recordings share
        them: each has its step copied there before it is replayed.
        """
        found = {}
        for name, value in given.items():
            each = {"B": 1, "T": self._rows}[_first(name)]
            most, count = self._sizes[-1] * each, size * each
            if name not in self._places:
                self._places[name] = value.new_zeros(most, *value.shape[1:])
            found[name] = self._places[name][:count]
        return found


def _first(name: str) -> str:
    """The first shape letter of a tensor's name."""
    return name.rpartition("_")[2][0]


def _fill(
    still: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], rows: int, spare: int
) -> None:
    """Copy a step's parts. Requests beyond its own have the spare slot and no token: what they
    draft is written where nobody reads.
    """
    batch = len(given["slots_B"])
    # Copies of one type are launched together.
    pairs: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, place in still.items():
        value = given[name]
        count = min({"B": batch, "T": rows}[_first(name)], len(value))
        places, values = pairs.setdefault((place.dtype, value.dtype), ([], []))
        places.append(place[:count])
        values.append(value[:count])
    for places, values in pairs.values():
        torch._foreach_copy_(places, values)
    if batch < len(still["slots_B"]):
        still["slots_B"][batch:].fill_(spare)
        still["ends_B"][batch:].fill_(1)
        still["rejected_B"][batch:].zero_()
        still["sampled_B"][batch:].zero_()


def padded_sizes(most: int) -> Sequence[int]:
    """The sizes that are recorded for up to `most` requests: at most a quarter of a batch is
    padding, from 32 requests on.
    """
    sizes = [size for size in (1, 2, 4, FINEST) if size < most]
    while sizes and FINEST <= sizes[-1] < most:
        step = max(FINEST, sizes[-1] // 4 // FINEST * FINEST)
        sizes.append(min(sizes[-1] + step, most))
    return sizes if sizes and sizes[-1] == most else [*sizes, most]
