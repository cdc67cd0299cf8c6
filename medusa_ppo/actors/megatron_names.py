"""The key table between checkpoints of Llama's family and Megatron's GPTModel, and how each tensor is cut over tensor-parallel ranks.

    q, k, v      by groups of query heads, interleaved: a rank has the queries, keys and values of its groups, group after group
    gate, up     each by rows; a rank has its rows of both, gate first
    columns      by columns (along the input)
    vocabulary   by rows, padded at the end
    whole        the same on every rank

Every shard is made of contiguous slices of the checkpoint's tensors, so that a rank reads what is its own and nothing else.
No megatron import. Shape letters: V vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from heads.errors import ConfigError, ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core has built in for rope_type llama3."""
ROWS_MULTIPLE = 8
"""A rank's rows of the vocabulary are a multiple of it, as fast products on GPUs want them."""
How = Literal["qkv", "gate_up", "columns", "vocabulary", "whole"]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LlamaSizes:
    """What the table and the model need of a checkpoint's configuration. `rope_factor` 0: plain rotary positions."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    norm_epsilon: float
    rope_theta: float
    rope_factor: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def read(cls, path: str | Path) -> LlamaSizes:
        """Sizes of the checkpoint in a folder or under a hub name.

        Raises:
            ModelError: its architecture is none that the table knows.
        """
        config: Any = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        faults = _unknown(config)
        if faults:
            raise ModelError(
                "This model can't be trained by Megatron here.",
                given=f"{path}: {'; '.join(faults)}",
                expected=f"a model of {', '.join(FAMILIES)} with full attention and SiLU",
                do="Set actor.backend=transformers.",
            )
        rope = config.rope_parameters
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            norm_epsilon=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            rope_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else 0.0,
            max_positions=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=config.model_type == "qwen2",
            qk_norm=config.model_type == "qwen3",
        )

    def check_cut(self, tensor_parallel: int, pipeline_parallel: int) -> None:
        """ConfigError where the model can't be cut so."""
        given = {"query groups": self.groups, "rows of the MLP": self.ffn}
        faults = [f"{count} {what} on {tensor_parallel} ranks" for what, count in given.items() if count % tensor_parallel]
        if self.layers % pipeline_parallel:
            faults.append(f"{self.layers} layers in {pipeline_parallel} stages")
        if faults:
            raise ConfigError(
                "The actor can't be cut into equal parts.",
                given="; ".join(faults),
                expected="numbers that divide",
                do="Change actor.tensor_parallel or actor.pipeline_parallel.",
            )

    def vocab_rows(self, ranks: int) -> int:
        """Rows of the vocabulary's tables on each rank, padding included."""
        return -(-self.vocab // (ranks * ROWS_MULTIPLE)) * ROWS_MULTIPLE


def _unknown(config: Any) -> list[str]:
    """What the table does not know of a configuration."""
    if config.model_type not in FAMILIES:
        return [f"model_type {config.model_type}"]
    faults = [f"{key} is on" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if getattr(config, key, False)]
    if config.hidden_act != "silu":
        faults.append(f"hidden_act {config.hidden_act}")
    if config.model_type == "mistral" and config.sliding_window:
        faults.append(f"sliding_window {config.sliding_window}")
    rope = config.rope_parameters
    llama3 = rope["rope_type"] == "llama3" and all(rope.get(key) == value for key, value in LLAMA3_ROPE.items())
    if rope["rope_type"] != "default" and not llama3:
        faults.append(f"rotary positions {rope}")
    return faults


@dataclass(frozen=True)
class Entry:
    """One parameter of Megatron's: the checkpoint's tensors that it is made of, their whole shapes, and how it is cut."""

    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    how: How


def key_table(sizes: LlamaSizes) -> dict[str, Entry]:
    """Megatron's name of each parameter, layers counted over all pipeline stages -> its entry."""
    d, q, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    table = {
        "embedding.word_embeddings.weight": Entry((EMBEDDING,), ((sizes.vocab, d),), "vocabulary"),
        "decoder.final_layernorm.weight": Entry(("model.norm.weight",), ((d,),), "whole"),
        # Of tied tables the checkpoint has the embedding only; Megatron's last stage has a copy of its own.
        "output_layer.weight": Entry((EMBEDDING if sizes.tied else LM_HEAD,), ((sizes.vocab, d),), "vocabulary"),
    }
    for i in range(sizes.layers):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        attention = tuple(f"{theirs}self_attn.{name}_proj." for name in "qkv")
        table |= {
            ours + "self_attention.linear_qkv.weight": Entry(tuple(n + "weight" for n in attention), ((q, d), (kv, d), (kv, d)), "qkv"),
            ours + "self_attention.linear_proj.weight": Entry((f"{theirs}self_attn.o_proj.weight",), ((d, q),), "columns"),
            ours + "mlp.linear_fc1.weight": Entry(
                (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"), ((sizes.ffn, d),) * 2, "gate_up"
            ),
            ours + "mlp.linear_fc2.weight": Entry((f"{theirs}mlp.down_proj.weight",), ((d, sizes.ffn),), "columns"),
            ours + "input_layernorm.weight": Entry((f"{theirs}input_layernorm.weight",), ((d,),), "whole"),
            ours + "pre_mlp_layernorm.weight": Entry((f"{theirs}post_attention_layernorm.weight",), ((d,),), "whole"),
        }
        if sizes.qkv_bias:
            table[ours + "self_attention.linear_qkv.bias"] = Entry(tuple(n + "bias" for n in attention), ((q,), (kv,), (kv,)), "qkv")
        if sizes.qk_norm:
            for name in "qk":
                norm = Entry((f"{theirs}self_attn.{name}_norm.weight",), ((sizes.head_dim,),), "whole")
                table[f"{ours}self_attention.{name}_layernorm.weight"] = norm
    return table


def checkpoint_shapes(sizes: LlamaSizes) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, once each."""
    return {name: shape for entry in key_table(sizes).values() for name, shape in zip(entry.sources, entry.shapes, strict=True)}


@dataclass(frozen=True)
class Cutter:
    """Cuts and joins tensors for one rank of `ranks`."""

    sizes: LlamaSizes
    rank: int
    ranks: int

    def own_slice(self, entry: Entry, index: int) -> tuple[slice, ...]:
        """Which part of the entry's source `index` this rank holds."""
        if entry.how == "whole":
            return ()
        shape, dim = entry.shapes[index], int(entry.how == "columns")
        held = self.sizes.vocab_rows(self.ranks) if entry.how == "vocabulary" else shape[dim] // self.ranks
        # The last rank's rows of the vocabulary may be padding.
        start, stop = (min(number * held, shape[dim]) for number in (self.rank, self.rank + 1))
        return (slice(None),) * dim + (slice(start, stop),)

    def merge(self, entry: Entry, pieces: list[torch.Tensor]) -> torch.Tensor:
        """This rank's shard from its slices of the entry's sources."""
        if entry.how == "qkv":
            groups = self.sizes.groups // self.ranks
            return torch.cat([piece.unflatten(0, (groups, -1)) for piece in pieces], dim=1).flatten(0, 1)
        if entry.how == "vocabulary":
            missing = self.sizes.vocab_rows(self.ranks) - pieces[0].shape[0]
            return F.pad(pieces[0], (0, 0, 0, missing))
        return torch.cat(pieces)

    def join(self, entry: Entry, shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors from the shards of all ranks, in the order of ranks."""
        if entry.how == "whole":
            return {entry.sources[0]: shards[0]}
        parts = [self._split(entry, shard) for shard in shards]
        dim = int(entry.how == "columns")
        joined = [torch.cat(pieces, dim=dim) for pieces in zip(*parts, strict=True)]
        return {name: tensor[: shape[0]] for name, shape, tensor in zip(entry.sources, entry.shapes, joined, strict=True)}

    def _split(self, entry: Entry, shard: torch.Tensor) -> list[torch.Tensor]:
        if entry.how == "gate_up":
            return list(shard.chunk(2))
        if entry.how != "qkv":
            return [shard]
        groups, width = self.sizes.groups // self.ranks, self.sizes.head_dim
        grouped = shard.unflatten(0, (groups, -1))
        return [piece.flatten(0, 1) for piece in grouped.split([self.sizes.heads // self.sizes.groups * width, width, width], dim=1)]
