"""How large things are before they exist: parameters, memory and messages of a run, from a model's config.json alone (no torch).

Letters: D hidden, V vocabulary, K heads, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads.config import HeadsConfig
from heads.errors import ModelError

FLOAT32, BFLOAT16 = 4, 2
ADAM_COPIES = 4  # Weights, gradients and two moments, all float32.
HEADS_COPIES = 4  # The companion keeps the running mean, the serving heads and the frozen control beside those that it trains.
TOKEN_BYTES = 8 + 4  # An id (int64) and a log-prob (float32).
HEADS = ("num_attention_heads", "n_head")
WITHOUT_GATE = ("gpt2", "gpt_neox", "gpt_neo", "opt", "phi")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a dense decoder-only model.

    Attributes:
        hidden: D.
        layers, heads, kv_heads, head_dim: of the attention.
        intermediate: width of the MLP's inner layer.
        vocab: V.
        gated: the MLP has a gate beside its up projection.
        tied: lm_head is the embedding.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> ModelSizes:
        """From a transformers config.json. ModelError when a size is missing, or the model is a mixture of experts."""
        text = {**raw, **(raw.get("text_config") or {})}
        if any(text.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
            raise ModelError(
                "Mixtures of experts can't be planned.", given=text.get("model_type"), expected="a dense model", do="Measure a short run."
            )
        hidden, layers, heads = (_first(text, *names) for names in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), HEADS))
        return cls(
            hidden,
            layers,
            heads,
            int(text.get("num_key_value_heads") or heads),
            int(text.get("head_dim") or hidden // heads),
            int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
            _first(text, "vocab_size"),
            text.get("model_type") not in WITHOUT_GATE,
            bool(text.get("tie_word_embeddings", text.get("model_type") == "gpt2")),
        )

    @property
    def parameters(self) -> int:
        """Weights of matrices and RMS norms; biases and learned positions (older families) are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * (attention + mlp + 2 * self.hidden) + self.hidden + tables

    @property
    def product_parameters(self) -> int:
        """Weights that a token is multiplied with in a forward pass: all but the embedding."""
        return self.parameters - (0 if self.tied else self.vocab * self.hidden)

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def heads_parameters(config: HeadsConfig) -> int:
    """Trainable tensors of a set of heads."""
    return sum(math.prod(shape) for shape in config.tensor_shapes().values())


def companion_bytes(config: HeadsConfig, model: ModelSizes) -> int:
    """Memory of the companion without its queue: heads with their optimizer, the versions beside them, and the actor's tables."""
    tables = (1 + int(config.needs_embedding)) * model.vocab * model.hidden
    return FLOAT32 * ((ADAM_COPIES + HEADS_COPIES - 1) * heads_parameters(config) + tables)


def hidden_bytes(model: ModelSizes, tokens: int, element: int = FLOAT32) -> int:
    """Final hidden states, token ids and log-probs of so many response tokens, as they go to the companion."""
    return tokens * (model.hidden * element + TOKEN_BYTES)


def _first(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if values.get(name):
            return int(values[name])
    raise ModelError(
        "The model's config.json lacks a size.", given=sorted(values)[:8], expected=" or ".join(names), do="Use a decoder-only model."
    )
