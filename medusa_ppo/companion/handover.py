"""What is on its way to the companion and back: tapped rows put in their places, tensors as NumPy arrays, arguments, answers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from heads.errors import DataError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.config import CompanionConfig
from medusa_ppo.types import PublishedHeads, RolloutBatch, Rollouts

HANG_S = 300.0
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
    """The same with its tensors, in dataclasses, dictionaries and tuples too, as NumPy arrays, which Ray carries without a copy.

    Nothing is copied here either where a tensor is contiguous and on the CPU.
    """
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous()
        if plain.dtype in AS_INT16:
            return PackedTensor(plain.view(torch.int16).numpy(), str(plain.dtype).removeprefix("torch."))
        return PackedTensor(plain.numpy())
    if isinstance(value, dict):
        return {name: pack(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(pack, value))
    if is_dataclass(value):
        return PackedRecord(type(value), {field.name: pack(getattr(value, field.name)) for field in fields(value)})
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
        run_dir: the run's folder (native checkpoints, state for a restart); empty: nothing is written there.
        publish_dir: folder in shared memory for published versions.
        resume_from: folder with a saved state to go on from; empty: begin anew.
        draft_temperature: of the drafts that heads are judged by, times the rollouts' own; 0: one-hot.
        hang_s: a worker that answers nothing for so long is ended and started again.
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


@dataclass(frozen=True)
class Answer:
    """Reply to a poll: a newer version if there is one, what failed last (a batch that was merely skipped is no failure), and how many
    bytes of batches are held."""

    published: PublishedHeads | None
    error: str
    incarnation: str
    held_bytes: int = 0


class BatchCollector:
    """Collects the final hidden states of every response of one `Rollouts`.

    One CPU tensor is allocated for the whole batch and filled in place, so a state is copied once here. With a sample only the
    states of its rows leave the actor's device.
    """

    def __init__(self, rollouts: Rollouts, sample: EarlySample | None = None) -> None:
        """
        Args:
            rollouts: whose states are coming.
            sample: which of them are wanted; None: all.
        """
        self._rollouts = rollouts
        self._lengths = [len(response.token_ids) for response in rollouts.responses]
        self._seen = [length == 0 for length in self._lengths]
        self._weights_M: torch.Tensor | None = None
        self._held_S: torch.Tensor | None = None
        if sample is not None and any(self._lengths):
            self._weights_M, self._held_S = sample.draw(*self._filled(), rollouts.policy_version)
        wanted_M = torch.ones(sum(self._lengths), dtype=torch.bool) if self._weights_M is None else self._weights_M > 0
        self._wanted = wanted_M.split(self._lengths)  # Rows of each response whose states are wanted.
        self._counts = [int(wanted.sum()) for wanted in self._wanted]
        self._hidden_MD: torch.Tensor | None = None
        self.empty_responses = sum(self._seen)

    @property
    def complete(self) -> bool:
        """True when every response with at least one token has its states."""
        return all(self._seen)

    @property
    def seen(self) -> int:
        """Responses that have their states."""
        return sum(self._seen) - self.empty_responses

    def add(self, hidden_BTD: torch.Tensor, response_mask_BT: torch.Tensor, sequences: Sequence[int | None] | torch.Tensor) -> int:
        """Take the rows of one micro-batch. Responses that were taken before are passed over.

        Args:
            hidden_BTD: final hidden states, on any device; T may be one less than the mask's (a forward without the last token).
            response_mask_BT: true where token t of the row is a response token.
            sequences: for each row, the index of its response in `rollouts.responses`, or None: it is none of them and is passed over.

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
        states_MD = hidden_BTD.detach().flatten(0, 1).index_select(0, index_M).to("cpu")
        if self._hidden_MD is None:
            self._hidden_MD = torch.empty(sum(self._counts), hidden_BTD.shape[-1], dtype=hidden_BTD.dtype)
        places = self._hidden_MD.split(self._counts)
        for s, states in zip(taken, states_MD.split([self._counts[s] for s in taken]), strict=True):
            places[s].copy_(states)
            self._seen[s] = True
        return len(taken)

    def batch(self) -> RolloutBatch:
        """The packed batch of all responses whose states were taken.

        Raises:
            DataError: there is not one state.
        """
        if self._hidden_MD is None:
            raise DataError(
                "No response of the rollout batch has a hidden state.",
                given=f"{len(self._lengths)} responses, {self.empty_responses} of them empty, {self.seen} scored inside the tap",
                expected="at least one response with a token, scored inside plugin.actor_forward",
                do="Check the rollouts' end tokens, and wrap the actor's log-prob forward in plugin.actor_forward.",
            )
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
        seen_S = torch.tensor([seen for seen, length in zip(self._seen, self._lengths, strict=True) if length])
        return whole if seen_S.all() else whole.select(seen_S.nonzero()[:, 0])

    def _filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and prompts of the responses with a token."""
        filled = [(len(r.token_ids), r.prompt_index) for r in self._rollouts.responses if r.token_ids]
        lengths, prompts = zip(*filled, strict=True) if filled else ((), ())
        return torch.tensor(lengths, dtype=torch.int64), torch.tensor(prompts, dtype=torch.int64)

    def _check(self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, order: list[int | None]) -> None:
        rows, tokens = mask_BT.shape if mask_BT.dim() == 2 else (-1, -1)
        if hidden_BTD.shape[0] != rows or len(order) != rows or hidden_BTD.shape[1] not in (tokens, tokens - 1):
            raise DataError(
                "The tapped forward pass and its response mask do not fit together.",
                given=f"hidden {tuple(hidden_BTD.shape)}, mask {tuple(mask_BT.shape)}, {len(order)} sequences",
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
            if s is not None and (counts[row] != self._lengths[s] or spans[row] > 1 or bool(mask_BT[row, 0])):
                raise DataError(
                    "The response mask of a row does not cover its response.",
                    given=f"row {row} (response {s}): {counts[row]} tokens in {spans[row] + int(mask_BT[row, 0])} stretches",
                    expected=f"{self._lengths[s]} tokens in one stretch that follows at least one prompt token",
                    do="Mark every sampled token of the response, the end token included, and nothing else.",
                )
