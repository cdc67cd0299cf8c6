"""A trained model on disk: its weights, and the moments of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from heads.checkpoint import load_state, save_state
from heads.errors import CheckpointError

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight."""


def save_trained(
    folder: Path, name: str, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write `NAME.safetensors`, the weights, and `NAME_optimizer.safetensors`, AdamW's moments.

    A moment's name is `weight/moment`; before the first optimizer step there are none. Tied weights
    are written once, under their first name (safetensors holds no aliases). Buffers are rebuilt,
    not saved.
    """
    own = dict(module.named_parameters())
    weights = {weight: parameter.detach() for weight, parameter in own.items()}
    moments = {
        f"{weight}/{key}": optimizer.state[parameter][key]
        for weight, parameter in own.items()
        if parameter in optimizer.state
        for key in MOMENTS
    }
    save_state(folder / f"{name}.safetensors", weights)
    save_state(folder / f"{name}_optimizer.safetensors", moments)


def load_trained(
    folder: Path, name: str, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Fill both from what `save_trained` wrote.

    Raises:
        CheckpointError: a file is missing, damaged, or from a different model.
    """
    own = dict(module.named_parameters())
    weights = load_state(folder / f"{name}.safetensors")
    moments = load_state(folder / f"{name}_optimizer.safetensors")
    misfits = [*_misfit_weights(own, weights), *_misfit_moments(own, moments)]
    if misfits:
        raise CheckpointError(
            "The saved weights do not fit the model.",
            given=f"{name}: {', '.join(sorted(misfits)[:3])}",
            expected="the same names and shapes",
            do="Check model.path.",
        )
    with torch.no_grad():
        for weight, parameter in own.items():
            parameter.copy_(weights[weight])
    optimizer.state.clear()
    for full_name, moment in moments.items():
        weight, key = _split(full_name)
        # AdamW keeps moments with the weight; if fused, its step counter too.
        optimizer.state[own[weight]][key] = moment.to(own[weight].device)


def _misfit_weights(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """Names that only one of them has, or whose shapes differ."""
    one_sided = own.keys() ^ saved.keys()
    reshaped = [name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape]
    return [*one_sided, *reshaped]


def _misfit_moments(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    misfits = []
    for full_name, moment in saved.items():
        weight, key = _split(full_name)
        known = key in MOMENTS and weight in own
        # The step counter is a scalar, the other moments are shaped like their weight.
        if not known or (key != "step" and own[weight].shape != moment.shape):
            misfits.append(full_name)
    return misfits


def _split(full_name: str) -> tuple[str, str]:
    """Weight and moment of `weight/moment`."""
    weight, _, key = full_name.rpartition("/")
    return weight, key
