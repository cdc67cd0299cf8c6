"""Finds the actor's embedding and lm_head in an engine."""

from __future__ import annotations

from typing import Any

import torch

from heads.errors import ConfigError, UnsupportedVersionError


def embedding_module(target_model: Any) -> Any:
    """The engine's own embedding layer, to be called with ids: it follows every sync, and its table
    may be sharded by tensor parallelism.
    """
    for name, module in target_model.named_modules():
        if name.split(".")[-1] in ("embed_tokens", "wte", "word_embeddings") and hasattr(
            module, "weight"
        ):
            return module
    raise UnsupportedVersionError(
        "The actor's embedding table was not found in vLLM's model.",
        given=type(target_model).__name__,
        expected="a module named embed_tokens",
        do="Use heads of kind medusa with this actor.",
    )


def lm_head_module(target_model: Any) -> Any:
    """The engine's lm_head; None if it is another module too, as a tied one may be."""
    return next(
        (m for name, m in target_model.named_modules() if name.split(".")[-1] == "lm_head"), None
    )


def refuse_quantised_lm_head(target_model: Any) -> None:
    """Raise ConfigError if lm_head is quantised, whoever started the engine: heads multiply by it,
    and the checks of a swap and of a sync were made for its own rows. Layers below it may be.
    """
    module = lm_head_module(target_model)
    if module is None:
        return
    weight = getattr(module, "weight", None)
    # Other methods have integers or 8-bit floats there, or parameters of other names.
    if (
        isinstance(weight, torch.Tensor)
        and weight.is_floating_point()
        and weight.element_size() > 1
    ):
        return
    method = type(getattr(module, "quant_method", module)).__name__
    kind = weight.dtype if isinstance(weight, torch.Tensor) else "no plain weight"
    raise ConfigError(
        "Draft heads multiply by the actor's lm_head, and were never tested with a quantised one.",
        given=f"{type(target_model).__name__} with an lm_head of {method} ({kind})",
        expected="an lm_head of 16 or 32 bits",
        do="Leave lm_head out of the checkpoint's quantization, or leave the heads out.",
    )


def lm_head_weight(target_model: Any, vocab_size: int) -> torch.Tensor | None:
    """lm_head's own rows `[V or more, D]`, if this process has all of them and they are not packed.
    The caller must compare their product with the engine's.
    """
    weight = getattr(lm_head_module(target_model), "weight", None)
    return (
        weight.detach()
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] >= vocab_size
        else None
    )
