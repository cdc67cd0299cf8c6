"""Finds the actor's embedding and lm_head in an engine."""

from __future__ import annotations

from typing import Any

import torch

from heads.errors import UnsupportedVersionError


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


def lm_head_weight(target_model: Any, vocab_size: int) -> torch.Tensor | None:
    """lm_head's own rows `[V or more, D]`, if this process has all of them and they are not packed.
    The caller must compare their product with the engine's.
    """
    module = next(
        (m for name, m in target_model.named_modules() if name.split(".")[-1] == "lm_head"), None
    )
    weight = getattr(module, "weight", None)
    return (
        weight.detach()
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] >= vocab_size
        else None
    )
