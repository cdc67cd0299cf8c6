"""How large a dense decoder-only model is, and what it keeps of a token, from its config.json (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads.errors import ModelError

FLOAT32, BFLOAT16 = 4, 2
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

    def layer_bytes(self, bfloat16: bool) -> int:
        """What a layer keeps of a token for its backward pass: what norms, attention, products and the MLP's gate read. With products in
        bfloat16 each of them has a copy of its own."""
        inner = 2 * (self.heads + self.kv_heads) * self.head_dim + (4 if self.gated else 3) * self.intermediate
        if bfloat16:
            return FLOAT32 * 4 * self.hidden + BFLOAT16 * (5 * self.hidden + inner)
        return FLOAT32 * (6 * self.hidden + inner)

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def _first(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if values.get(name):
            return int(values[name])
    raise ModelError(
        "The model's config.json lacks a size.", given=sorted(values)[:8], expected=" or ".join(names), do="Use a decoder-only model."
    )
