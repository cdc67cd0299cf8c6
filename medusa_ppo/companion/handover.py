"""A rollout batch on its way to the companion: tapped rows put in their places, and tensors as NumPy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from heads.errors import DataError
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.types import RolloutBatch, Rollouts, Whole

_AS_INT16 = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class PackedTensor:
    """One tensor on its way: the array, and the name of its torch dtype when NumPy can't say it."""

    array: np.ndarray
    dtype: str = ""


@dataclass(frozen=True)
class PackedWhole:
    """A Whole on its way."""

    lengths: PackedTensor
    prompts: PackedTensor | None
    first: int


@dataclass(frozen=True)
class PackedBatch:
    """A RolloutBatch on its way."""

    hidden: PackedTensor
    response_ids: PackedTensor
    logprobs: PackedTensor
    lengths: PackedTensor
    policy_version: int
    temperature: float
    prompts: PackedTensor | None = None
    top_k: int = 0
    top_p: float = 1.0
    weights: PackedTensor | None = None
    held: PackedTensor | None = None
    whole: PackedWhole | None = None


def pack_tensor(tensor: torch.Tensor) -> PackedTensor:
    """Wrap a tensor; nothing is copied when it is a contiguous CPU tensor."""
    plain = tensor.detach().to("cpu").contiguous()
    if plain.dtype in _AS_INT16:
        return PackedTensor(plain.view(torch.int16).numpy(), _AS_INT16[plain.dtype])
    return PackedTensor(plain.numpy())


def unpack_tensor(packed: PackedTensor) -> torch.Tensor:
    """The tensor again, on the same memory. Treat it as read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(packed.array)
    return tensor.view(getattr(torch, packed.dtype)) if packed.dtype else tensor


def pack_batch(batch: RolloutBatch) -> PackedBatch:
    """Wrap a batch without copying."""
    whole = batch.whole
    return PackedBatch(
        pack_tensor(batch.hidden_MD),
        pack_tensor(batch.response_ids_M),
        pack_tensor(batch.logprobs_M),
        pack_tensor(batch.lengths_S),
        batch.policy_version,
        batch.temperature,
        _pack(batch.prompts_S),
        batch.top_k,
        batch.top_p,
        _pack(batch.weights_M),
        _pack(batch.held_S),
        None if whole is None else PackedWhole(pack_tensor(whole.lengths_S), _pack(whole.prompts_S), whole.first),
    )


def unpack_batch(packed: PackedBatch) -> RolloutBatch:
    """The batch again, on the same memory. Treat its tensors as read-only."""
    whole = packed.whole
    return RolloutBatch(
        unpack_tensor(packed.hidden),
        unpack_tensor(packed.response_ids),
        unpack_tensor(packed.logprobs),
        unpack_tensor(packed.lengths),
        packed.policy_version,
        packed.temperature,
        _unpack(packed.prompts),
        packed.top_k,
        packed.top_p,
        _unpack(packed.weights),
        _unpack(packed.held),
        None if whole is None else Whole(unpack_tensor(whole.lengths), _unpack(whole.prompts), whole.first),
    )


def _pack(tensor: torch.Tensor | None) -> PackedTensor | None:
    return None if tensor is None else pack_tensor(tensor)


def _unpack(packed: PackedTensor | None) -> torch.Tensor | None:
    return None if packed is None else unpack_tensor(packed)


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
        self._starts = _starts([int(wanted.sum()) for wanted in self._wanted])
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
        rows, taken = [], []
        for row, s in enumerate(order):
            if s is not None and not self._seen[s] and s not in taken:
                rows.append(row)
                taken.append(s)
        if not rows:
            return 0
        picked_BT = mask_BT[rows]
        row_M, token_M = picked_BT.nonzero(as_tuple=True)
        # Token t is predicted from the state one position before it.
        index_M = torch.tensor(rows)[row_M] * hidden_BTD.shape[1] + token_M - 1
        index_M = index_M[torch.cat([self._wanted[s] for s in taken])].to(hidden_BTD.device)
        states_MD = hidden_BTD.detach().flatten(0, 1).index_select(0, index_M).to("cpu")
        if self._hidden_MD is None:
            wanted = sum(int(rows_M.sum()) for rows_M in self._wanted)
            self._hidden_MD = torch.empty(wanted, hidden_BTD.shape[-1], dtype=hidden_BTD.dtype)
        at = 0
        for s in taken:
            start, length = self._starts[s], int(self._wanted[s].sum())
            self._hidden_MD[start : start + length] = states_MD[at : at + length]
            self._seen[s] = True
            at += length
        return len(rows)

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
        taken = [s for s, length in enumerate(self._lengths) if length and self._seen[s]]
        lengths_S, prompts_S = self._filled()
        version, sampling = self._rollouts.policy_version, self._rollouts.sampling
        whole = RolloutBatch(
            self._hidden_MD,
            ids_M,
            logprobs_M,
            lengths_S,
            version,
            sampling.temperature,
            prompts_S,
            sampling.top_k,
            sampling.top_p,
            self._weights_M,
            self._held_S,
        )
        if len(taken) == lengths_S.numel():
            return whole
        rank = {s: i for i, s in enumerate(s for s, length in enumerate(self._lengths) if length)}
        return whole.select(torch.tensor([rank[s] for s in taken], dtype=torch.int64))

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


def _starts(lengths: list[int]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts
