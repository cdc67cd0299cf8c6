"""What is on its way to the companion and back: tapped rows in their places, tensors as NumPy
arrays, arguments, answers, a signal.
"""

from __future__ import annotations

import mmap
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heads import HeadsConfig
from heads.errors import DataError
from medusa_ppo.companion.positions import EarlySample, with_states
from medusa_ppo.config import CompanionConfig
from medusa_ppo.types import PublishedHeads, RolloutBatch, Rollouts

HANG_S = 300.0
MAX_LAG = 2  # Policy versions.
GIVE_WAY_S = 0.005  # Between two looks at whether the loop still needs the cores.
AS_INT16 = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackedTensor:
    """One tensor on its way: the array, and the name of its torch dtype when NumPy can't say it."""

    array: np.ndarray
    dtype: str = ""


@dataclass(frozen=True)
class PackedRecord:
    """A dataclass with tensors on its way."""

    kind: type
    fields: dict[str, Any]


def pack(value: Any) -> Any:
    """The same with its tensors, in dataclasses, dictionaries and tuples too, as NumPy arrays,
    which Ray carries without a copy.

    Nothing is copied here either where a tensor is contiguous and on the CPU.
    """
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous()
        if plain.dtype in AS_INT16:
            return PackedTensor(
                plain.view(torch.int16).numpy(), str(plain.dtype).removeprefix("torch.")
            )
        return PackedTensor(plain.numpy())
    if isinstance(value, dict):
        return {name: pack(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(pack, value))
    if is_dataclass(value):
        return PackedRecord(
            type(value), {field.name: pack(getattr(value, field.name)) for field in fields(value)}
        )
    return value


def unpack(packed: Any) -> Any:
    """What was packed, on the same memory. Treat its tensors as read-only."""
    if isinstance(packed, PackedTensor):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(packed.array)
        return tensor.view(getattr(torch, packed.dtype)) if packed.dtype else tensor
    if isinstance(packed, dict):
        return {name: unpack(part) for name, part in packed.items()}
    if isinstance(packed, tuple):
        return tuple(map(unpack, packed))
    if isinstance(packed, PackedRecord):
        return packed.kind(**unpack(packed.fields))
    return packed


@dataclass(frozen=True)
class ServiceArguments:
    """What a companion is built from, and built again from after a crash.

    Attributes:
        heads: sizes and kind of the heads.
        companion: the companion's section of the configuration.
        seed: seed of everything random in it.
        initial_state: trainable tensors to start from, packed; None: zero start.
        run_dir: the run's folder (native checkpoints, state for a restart); empty: nothing is
            written there.
        publish_dir: folder in shared memory for published versions.
        resume_from: folder with a saved state to go on from; empty: begin anew.
        draft_temperature: of the drafts that heads are judged by, times the rollouts' own; 0:
            one-hot.
        hang_s: a worker that answers nothing for so long is ended and started again.
        num_drafts, draft_vocab: drafts of a step at most, and how many of the most frequent tokens
            they come from; None: all.
    """

    heads: HeadsConfig
    companion: CompanionConfig
    seed: int
    initial_state: dict[str, PackedTensor] | None
    run_dir: str
    publish_dir: str
    resume_from: str = ""
    draft_temperature: float = 0.0
    hang_s: float = HANG_S
    num_drafts: int | None = None
    draft_vocab: int | None = None


@dataclass(frozen=True)
class Answer:
    """Reply to a poll.

    Attributes:
        published: a newer version, if there is one.
        error: what failed last; a batch that was merely skipped is no failure.
        incarnation: which process answers.
        held_bytes: of the batches that wait or are in training.
        version: of its serving heads.
        stuck_s: seconds since the training thread was last seen at work, while it should be.
    """

    published: PublishedHeads | None
    error: str
    incarnation: str
    held_bytes: int = 0
    version: int = 0
    stuck_s: float = 0.0


class BatchQueue:
    """First in, first out, for any number of threads that put and one that gets. Nobody ever waits
    to put something in.

    It is bounded in bytes and in age: the oldest batch (whatever knows its `nbytes` and
    `policy_version`) goes, and is counted. One that was taken out is in use until `done`, or until
    the next one is asked for; so long its bytes count.

    Attributes:
        dropped: batches dropped so far.
        nbytes: bytes waiting now.
    """

    def __init__(self, max_bytes: int, max_lag: int = MAX_LAG) -> None:
        """
        Args:
            max_bytes: most bytes of all batches that wait or are in use together.
            max_lag: policy versions that a waiting batch may be behind the newest. Who is slow
                would learn an ever older policy.
        """
        self.max_bytes, self.max_lag = max_bytes, max_lag
        self.nbytes = self.dropped = self._in_use = 0
        self._batches: deque[Any] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, batch: Any, room: int = 0) -> int:
        """Append a batch; the oldest ones go until it fits. One that does not fit beside the batch
        in use is dropped itself.

        Args:
            batch: what comes.
            room: bytes to keep free for what may be on its way, as long as older batches can go for
                it.

        Returns:
            Number of batches dropped by this call.
        """
        with self._changed:
            if self._closed or self._in_use + batch.nbytes > self.max_bytes:
                self.dropped += 1
                return 1
            dropped, oldest = 0, batch.policy_version - self.max_lag
            while self._batches and (
                self._batches[0].policy_version < oldest
                or self.held_nbytes + batch.nbytes + room > self.max_bytes
            ):
                self.nbytes -= self._batches.popleft().nbytes
                dropped += 1
            self._batches.append(batch)
            self.nbytes += batch.nbytes
            self.dropped += dropped
            self._changed.notify()
            return dropped

    def get(self, timeout_s: float | None = None) -> Any | None:
        """Take the oldest batch; None when the time is up or the queue is closed and empty. Without
        a timeout it waits for either.
        """
        with self._changed:
            self._in_use = 0
            self._changed.wait_for(lambda: self._batches or self._closed, timeout_s)
            if not self._batches:
                return None
            batch = self._batches.popleft()
            self.nbytes -= batch.nbytes
            self._in_use = batch.nbytes
            return batch

    def done(self) -> None:
        """The batch in use is let go."""
        with self._changed:
            self._in_use = 0

    def close(self) -> None:
        """Wake everybody who waits; later batches are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def held_nbytes(self) -> int:
        """Bytes waiting and in use now."""
        return self.nbytes + self._in_use


class Pace:
    """A byte in shared memory by which the loop says that it needs the cores now, and the companion
    lets it have them.

    Where the companion runs on another node it has a byte of its own, which nobody sets.

    Attributes:
        waited_s: seconds for which way was given since they were taken last.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "pace", "ab") as file:
            if not file.tell():
                file.write(b"\0")
        with open(folder / "pace", "r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)
        self.waited_s = 0.0

    def hold(self, wanted: bool) -> None:
        """The loop's end: from now on, the companion shall (not) wait."""
        self._byte[0] = int(wanted)

    @property
    def held(self) -> bool:
        """The loop wants the companion to wait."""
        return bool(self._byte[0])

    def give_way(self) -> None:
        """The companion's end, between two pieces of work: wait as long as the loop wants."""
        while self.held:
            time.sleep(GIVE_WAY_S)
            self.waited_s += GIVE_WAY_S

    def take_waited_s(self) -> float:
        """Seconds for which way was given; counting begins anew."""
        waited_s, self.waited_s = self.waited_s, 0.0
        return waited_s


class BatchCollector:
    """Collects the final hidden states of every response of one `Rollouts`.

    One CPU tensor is filled in place, so a state is copied once here. With a sample only the states
    of its rows leave the actor's device.

    Attributes:
        empty_responses: responses without a token.
        left_out: response tokens whose states the `sample` leaves out.
    """

    def __init__(self, rollouts: Rollouts, sample: EarlySample | None = None) -> None:
        """
        Args:
            rollouts: whose states are coming.
            sample: which of them are wanted; None: all.
        """
        self._rollouts, self.sample = rollouts, sample
        self._lengths = [len(response.token_ids) for response in rollouts.responses]
        self._seen = [length == 0 for length in self._lengths]
        self._weights_M: torch.Tensor | None = None
        self._held_S: torch.Tensor | None = None
        if sample is not None and any(self._lengths):
            self._weights_M, self._held_S = sample.draw(*self._filled(), rollouts.policy_version)
        wanted_M = (
            torch.ones(sum(self._lengths), dtype=torch.bool)
            if self._weights_M is None
            else self._weights_M >= 0
        )
        self._wanted = wanted_M.split(
            self._lengths
        )  # Rows of each response whose states are wanted.
        self._counts = [int(wanted.sum()) for wanted in self._wanted]
        self._hidden_MD: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self.empty_responses = sum(self._seen)
        self.left_out = sum(self._lengths) - sum(self._counts)

    @property
    def complete(self) -> bool:
        """True when every response with at least one token has its states."""
        return all(self._seen)

    @property
    def seen(self) -> int:
        """Responses that have their states."""
        return sum(self._seen) - self.empty_responses

    def add(
        self,
        hidden_BTD: torch.Tensor,
        response_mask_BT: torch.Tensor,
        sequences: Sequence[int | None] | torch.Tensor,
    ) -> int:
        """Take the rows of one micro-batch. Responses that were taken before are passed over.

        Args:
            hidden_BTD: final hidden states, on any device; T may be one less than the mask's (a
                forward without the last token).
            response_mask_BT: true where token t of the row is a response token.
            sequences: for each row, the index of its response in `rollouts.responses`, or None: it
                is none of them and is passed over.

        Returns:
            Number of responses taken.

        Raises:
            DataError: shapes, indices or token counts that do not fit the rollouts.
        """
        mask_BT = response_mask_BT.to(device="cpu", dtype=torch.bool)
        order = [None if s is None else int(s) for s in sequences]
        self._check(hidden_BTD, mask_BT, order)
        taken: dict[int, int] = {}  # Response -> its row; the first one where there are several.
        for row, s in enumerate(order):
            if s is not None and not self._seen[s]:
                taken.setdefault(s, row)
        if not taken:
            return 0
        rows = torch.tensor(list(taken.values()))
        row_M, token_M = mask_BT[rows].nonzero(as_tuple=True)
        # Token t is predicted from the state one position before it.
        index_M = rows[row_M] * hidden_BTD.shape[1] + token_M - 1
        index_M = index_M[torch.cat([self._wanted[s] for s in taken])].to(hidden_BTD.device)
        states_MD = hidden_BTD.detach().flatten(0, 1).index_select(0, index_M)
        on_gpu = states_MD.is_cuda
        if self._hidden_MD is None:
            self._hidden_MD = torch.empty(
                sum(self._counts), hidden_BTD.shape[-1], dtype=hidden_BTD.dtype, pin_memory=on_gpu
            )
        places = self._hidden_MD.split(self._counts)
        for s, states in zip(taken, states_MD.split([self._counts[s] for s in taken]), strict=True):
            places[s].copy_(states, non_blocking=on_gpu)
            self._seen[s] = True
        if on_gpu:  # The loop goes on while they are copied.
            self._copied = torch.cuda.Event()
            self._copied.record()
        return len(taken)

    def batch(self) -> RolloutBatch:
        """The packed batch of all responses whose states were taken.

        Raises:
            DataError: there is not one state.
        """
        if self._hidden_MD is None:
            raise DataError(
                "No response of the rollout batch has a hidden state.",
                given=(
                    f"{len(self._lengths)} responses, {self.empty_responses} of them empty,"
                    f" {self.seen} scored inside the tap"
                ),
                expected="at least one response with a token, scored inside plugin.actor_forward",
                do=(
                    "Check the rollouts' end tokens, and wrap the actor's log-prob forward in"
                    " plugin.actor_forward."
                ),
            )
        if self._copied is not None:
            self._copied.synchronize()
        responses = self._rollouts.responses
        ids_M = torch.tensor([t for r in responses for t in r.token_ids], dtype=torch.int64)
        logprobs_M = torch.tensor([p for r in responses for p in r.logprobs], dtype=torch.float32)
        lengths_S, prompts_S = self._filled()
        sampling = self._rollouts.sampling
        whole = RolloutBatch(
            self._hidden_MD,
            ids_M,
            logprobs_M,
            lengths_S,
            self._rollouts.policy_version,
            sampling.temperature,
            prompts_S,
            sampling.top_k,
            sampling.top_p,
            self._weights_M,
            self._held_S,
        )
        seen_S = torch.tensor(
            [seen for seen, length in zip(self._seen, self._lengths, strict=True) if length]
        )
        return with_states(whole if seen_S.all() else whole.select(seen_S.nonzero()[:, 0]))

    def _filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and prompts of the responses with a token."""
        filled = [
            (len(r.token_ids), r.prompt_index) for r in self._rollouts.responses if r.token_ids
        ]
        lengths, prompts = zip(*filled, strict=True) if filled else ((), ())
        return torch.tensor(lengths, dtype=torch.int64), torch.tensor(prompts, dtype=torch.int64)

    def _check(
        self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, order: list[int | None]
    ) -> None:
        rows, tokens = mask_BT.shape if mask_BT.dim() == 2 else (-1, -1)
        if (
            hidden_BTD.shape[0] != rows
            or len(order) != rows
            or hidden_BTD.shape[1] not in (tokens, tokens - 1)
        ):
            raise DataError(
                "The tapped forward pass and its response mask do not fit together.",
                given=(
                    f"hidden {tuple(hidden_BTD.shape)}, mask {tuple(mask_BT.shape)}, {len(order)}"
                    " sequences"
                ),
                expected="hidden [B, T or T - 1, D], mask [B, T], B sequences",
                do="Pass the mask of exactly the tokens that go through the actor.",
            )
        outside = [s for s in order if s is not None and not 0 <= s < len(self._lengths)]
        if outside:
            raise DataError(
                "A row names a response that does not exist.",
                given=outside[:4],
                expected=f"0 to {len(self._lengths) - 1}",
                do="Pass indices into rollouts.responses.",
            )
        counts = mask_BT.sum(1).tolist()
        spans = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).sum(1).tolist()
        for row, s in enumerate(order):
            if s is not None and (
                counts[row] != self._lengths[s] or spans[row] > 1 or bool(mask_BT[row, 0])
            ):
                raise DataError(
                    "The response mask of a row does not cover its response.",
                    given=(
                        f"row {row} (response {s}): {counts[row]} tokens in"
                        f" {spans[row] + int(mask_BT[row, 0])} stretches"
                    ),
                    expected=(
                        f"{self._lengths[s]} tokens in one stretch that follows at least one prompt"
                        " token"
                    ),
                    do=(
                        "Mark every sampled token of the response, the end token included, and"
                        " nothing else."
                    ),
                )
