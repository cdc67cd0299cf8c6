"""How tensors cross from the PPO process to the companion: as NumPy arrays, which Ray shares through memory without a copy.

Ray pickles a torch tensor into bytes and copies it again on arrival; a NumPy array it maps. NumPy has no bfloat16, so 16-bit floats
travel as int16 with their dtype's name. Arrays that come out of Ray's store are read-only, and so are the tensors made from them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

from medusa_ppo.types import RolloutBatch, Whole

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
