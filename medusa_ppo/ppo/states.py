"""Weights and AdamW moments of one torch module as named tensors, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.errors import CheckpointError

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Weights by name; of tied ones the first name only (safetensors holds no aliases). Buffers are rebuilt, not saved."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def load_weights(module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Fill a module from what `weights_of` gave. CheckpointError when it does not fit."""
    own = dict(module.named_parameters())
    wrong = [name for name in own.keys() | state.keys() if name not in own or name not in state or own[name].shape != state[name].shape]
    if wrong:
        given = f"{what}: {', '.join(sorted(wrong)[:3])}"
        raise CheckpointError(
            "The saved weights do not fit the model.", given=given, expected="the same names and shapes", do="Check model.path."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def moments_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments as `weight/moment`; empty before the first step."""
    found = {}
    for name, parameter in module.named_parameters():
        for key in MOMENTS:
            if parameter in optimizer.state:
                found[f"{name}/{key}"] = optimizer.state[parameter][key]
    return found


def load_moments(optimizer: torch.optim.Optimizer, module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Fill an optimizer from what `moments_of` gave. CheckpointError when it does not fit."""
    own = dict(module.named_parameters())
    optimizer.state.clear()
    for full, tensor in state.items():
        name, _, key = full.rpartition("/")
        if key not in MOMENTS or name not in own or (key != "step" and own[name].shape != tensor.shape):
            given = f"{what}: {full} {tuple(tensor.shape)}"
            raise CheckpointError(
                "The saved optimizer does not fit the model.", given=given, expected="moments of its weights", do="Check model.path."
            )
        # Without a dtype or device of its own: AdamW keeps moments beside the weight, and its step counter there too when fused.
        optimizer.state[own[name]][key] = tensor.to(own[name].device)
