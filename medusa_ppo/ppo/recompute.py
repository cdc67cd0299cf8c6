"""Recomputed activations (`ppo.recompute`): only the input of each layer is kept, and the backward
pass runs the layer again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from heads.errors import ModelError

CHECKPOINT_OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""For torch's checkpoint. No random state is kept, since nothing here draws."""


def recompute_layers(model: nn.Module) -> None:
    """Make every layer of the model recompute its activations; values and gradients stay.

    transformers' own switch does nothing in eval mode, which all networks of PPO use.

    Raises:
        ModelError: the model has no transformers layers.
    """
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            "The model's layers are unknown.",
            given=type(model).__name__,
            expected="a model of transformers",
            do="Set ppo.recompute=false.",
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **kwargs, **CHECKPOINT_OPTIONS)

    return run
