"""The layout of a Megatron actor: names of its tensors and those of a checkpoint, and how rows are
spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig

from heads.errors import ConfigError, DataError, ModelError
from medusa_ppo.actors.vision import TOWER

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SEEING_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Vision-language models: a language model of the kind of qwen2, beside a vision tower that is not
part of this layout. Qwen3-VL's tower adds features to several layers, which Megatron's stages have
no place for.
"""
INNER = "language_model."
"""Stands before the names of a vision-language model's language model in memory, and in a run's
checkpoint, but not in the files of such a model.
"""
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The values that megatron-core has built in for rope_type llama3."""
MROPE_SECTION = (16, 24, 24)
"""What a configuration means that does not say it."""
ROWS_MULTIPLE = 8
"""A rank's rows of the vocabulary are a multiple of this, for fast products on GPUs."""
How = Literal["qkv", "gate_up", "columns", "vocabulary", "whole"]
LM_HEAD = "lm_head.weight"
OUTPUT = "output_layer"
"""Megatron's name of the layer after the last norm."""


@dataclass(frozen=True)
class Top:
    """What a model has after its last norm, and its names in a checkpoint.

    Attributes:
        body: prefix of all names below it.
        layer: name of the layer with one output; empty: a table that gives logits.
        bias: whether the layer has one.
        from_body: prefix of the body's names in the checkpoint that it starts from, which lacks the
            layer: it starts at zero.
    """

    body: str = "model."
    layer: str = ""
    bias: bool = False
    from_body: str = ""

    @property
    def first_name(self) -> str:
        """Name of the embedding."""
        return f"{self.body}embed_tokens.weight"


LOGITS = Top()
VALUE = Top("backbone.", "value_head", True, "model.")
"""A critic in a run's checkpoint; it starts from a causal LM."""
SCORE = Top("model.", "score")
"""A reward model of transformers: a classifier with one output."""


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes in a checkpoint's configuration that the table and the model need. `rope_factor` 0:
    plain rotary positions. `mrope_section`: how many of a head's numbers turn with the positions in
    time, height and width, in a vision-language model; empty: a token has one position.
    """

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
    mrope_section: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, path: str | Path, who: str = "model", do: str = "Set actor.backend=transformers."
    ) -> LlamaSizes:
        """Sizes of the checkpoint in a folder or under a hub name.

        Args:
            who: its role, for the error; do: what to do if its family is not supported.

        Raises:
            ModelError: the table does not know its architecture.
        """
        whole: Any = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        family = whole.model_type
        # Models with several parts keep the sizes of their language model in a subsection.
        config: Any = whole.get_text_config()
        faults = _unknown(family, config)
        if faults:
            raise ModelError(
                f"This {who} can't be computed by Megatron here.",
                given=f"{path}: {'; '.join(faults)}",
                expected=(
                    f"a model of {', '.join((*FAMILIES, *SEEING_FAMILIES))} with full attention"
                    " and SiLU"
                ),
                do=do,
            )
        rope = config.rope_parameters
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            norm_epsilon=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            rope_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else 0.0,
            max_positions=config.max_position_embeddings,
            tied=bool(whole.tie_word_embeddings),
            qkv_bias=family in ("qwen2", *SEEING_FAMILIES),
            qk_norm=family == "qwen3",
            mrope_section=(
                tuple(rope.get("mrope_section", MROPE_SECTION)) if family in SEEING_FAMILIES else ()
            ),
        )

    def check_cut(self, tensor_parallel: int, pipeline_parallel: int, who: str = "actor") -> None:
        """Raise ConfigError if the model can't be sharded this way."""
        given = {"query groups": self.groups, "rows of the MLP": self.ffn}
        faults = [
            f"{count} {what} on {tensor_parallel} ranks"
            for what, count in given.items()
            if count % tensor_parallel
        ]
        if self.layers % pipeline_parallel:
            faults.append(f"{self.layers} layers in {pipeline_parallel} stages")
        if faults:
            raise ConfigError(
                f"The {who} can't be cut into equal parts.",
                given="; ".join(faults),
                expected="numbers that divide",
                do="Change actor.tensor_parallel or actor.pipeline_parallel.",
            )

    def vocab_rows(self, ranks: int) -> int:
        """Rows of the vocabulary's tables on each rank, padding included."""
        return -(-self.vocab // (ranks * ROWS_MULTIPLE)) * ROWS_MULTIPLE


def checkpoint_dtype(path: str | Path) -> str:
    """The dtype of a model that is not trained: bfloat16 if it was saved so, else float32."""
    config: Any = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    return "bfloat16" if config.dtype == torch.bfloat16 else "float32"


def _unknown(family: str, config: Any) -> list[str]:
    """The parts of a language model's configuration that the table does not support."""
    if family not in (*FAMILIES, *SEEING_FAMILIES):
        return [f"model_type {family}"]
    faults = [
        f"{key} is on"
        for key in ("attention_bias", "mlp_bias", "use_sliding_window")
        if getattr(config, key, False)
    ]
    if config.hidden_act != "silu":
        faults.append(f"hidden_act {config.hidden_act}")
    if family == "mistral" and config.sliding_window:
        faults.append(f"sliding_window {config.sliding_window}")
    rope = config.rope_parameters
    llama3 = rope["rope_type"] == "llama3" and all(
        rope.get(key) == value for key, value in LLAMA3_ROPE.items()
    )
    if rope["rope_type"] != "default" and not llama3:
        faults.append(f"rotary positions {rope}")
    return faults


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: the checkpoint's tensors that it consists of, their full shapes, and
    how it is sharded.
    """

    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    how: How


def key_table(sizes: LlamaSizes, top: Top = LOGITS) -> dict[str, Entry]:
    """Megatron's name of each parameter, layers counted over all pipeline stages -> its entry."""
    d = sizes.hidden
    q = sizes.heads * sizes.head_dim
    kv = sizes.groups * sizes.head_dim
    embedding = Entry((top.first_name,), ((sizes.vocab, d),), "vocabulary")
    table = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": Entry((f"{top.body}norm.weight",), ((d,),), "whole"),
    }
    if top.layer:
        table[f"{OUTPUT}.weight"] = Entry((f"{top.layer}.weight",), ((1, d),), "whole")
        if top.bias:
            table[f"{OUTPUT}.bias"] = Entry((f"{top.layer}.bias",), ((1,),), "whole")
    else:
        # For tied tables the checkpoint has only the embedding; Megatron's last stage has its own
        # copy.
        table[f"{OUTPUT}.weight"] = (
            embedding if sizes.tied else Entry((LM_HEAD,), ((sizes.vocab, d),), "vocabulary")
        )
    for i in range(sizes.layers):
        theirs = f"{top.body}layers.{i}."
        ours = f"decoder.layers.{i}."
        attention = tuple(f"{theirs}self_attn.{name}_proj." for name in "qkv")
        table |= {
            ours + "self_attention.linear_qkv.weight": Entry(
                tuple(n + "weight" for n in attention), ((q, d), (kv, d), (kv, d)), "qkv"
            ),
            ours + "self_attention.linear_proj.weight": Entry(
                (f"{theirs}self_attn.o_proj.weight",), ((d, q),), "columns"
            ),
            ours + "mlp.linear_fc1.weight": Entry(
                (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"),
                ((sizes.ffn, d),) * 2,
                "gate_up",
            ),
            ours + "mlp.linear_fc2.weight": Entry(
                (f"{theirs}mlp.down_proj.weight",), ((d, sizes.ffn),), "columns"
            ),
            ours + "input_layernorm.weight": Entry(
                (f"{theirs}input_layernorm.weight",), ((d,),), "whole"
            ),
            ours + "pre_mlp_layernorm.weight": Entry(
                (f"{theirs}post_attention_layernorm.weight",), ((d,),), "whole"
            ),
        }
        if sizes.qkv_bias:
            table[ours + "self_attention.linear_qkv.bias"] = Entry(
                tuple(n + "bias" for n in attention), ((q,), (kv,), (kv,)), "qkv"
            )
        if sizes.qk_norm:
            for name in "qk":
                norm = Entry(
                    (f"{theirs}self_attn.{name}_norm.weight",), ((sizes.head_dim,),), "whole"
                )
                table[f"{ours}self_attention.{name}_layernorm.weight"] = norm
    return table


def checkpoint_shapes(sizes: LlamaSizes, top: Top = LOGITS) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, once each."""
    return {
        name: shape
        for entry in key_table(sizes, top).values()
        for name, shape in zip(entry.sources, entry.shapes, strict=True)
    }


def saved_name(name: str, sizes: LlamaSizes, top: Top) -> str:
    """The name in a run's checkpoint, where models have transformers' names in memory, of a tensor
    in the checkpoint that it began with.
    """
    if name.startswith(TOWER):
        return top.body + name
    inside = bool(sizes.mrope_section) and name.startswith(top.body)
    return f"{top.body}{INNER}{name.removeprefix(top.body)}" if inside else name


@dataclass(frozen=True)
class Cutter:
    """Splits and joins tensors for one rank of `ranks`."""

    sizes: LlamaSizes
    rank: int
    ranks: int

    def own_slice(self, entry: Entry, index: int) -> tuple[slice, ...]:
        """The part of the entry's source `index` that this rank holds."""
        if entry.how == "whole":
            return ()
        shape = entry.shapes[index]
        dim = int(entry.how == "columns")
        held = (
            self.sizes.vocab_rows(self.ranks)
            if entry.how == "vocabulary"
            else shape[dim] // self.ranks
        )
        # The last rank's rows of the vocabulary may be padding.
        start, stop = (min(number * held, shape[dim]) for number in (self.rank, self.rank + 1))
        return (slice(None),) * dim + (slice(start, stop),)

    def merge(self, entry: Entry, pieces: list[torch.Tensor]) -> torch.Tensor:
        """This rank's shard from its slices of the entry's sources."""
        if entry.how == "qkv":
            # Megatron keeps each query group together: its queries, then its key, then its value.
            groups = self.sizes.groups // self.ranks
            return torch.cat([piece.unflatten(0, (groups, -1)) for piece in pieces], dim=1).flatten(
                0, 1
            )
        if entry.how == "vocabulary":
            # Padding is never sampled, and `own_rows` leaves its logits out.
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
        return {
            # Without the padding of the vocabulary.
            name: tensor[: shape[0]]
            for name, shape, tensor in zip(entry.sources, entry.shapes, joined, strict=True)
        }

    def _split(self, entry: Entry, shard: torch.Tensor) -> list[torch.Tensor]:
        if entry.how == "gate_up":
            return list(shard.chunk(2))
        if entry.how != "qkv":
            return [shard]
        groups = self.sizes.groups // self.ranks
        width = self.sizes.head_dim
        grouped = shard.unflatten(0, (groups, -1))
        return [
            piece.flatten(0, 1)
            for piece in grouped.split(
                [self.sizes.heads // self.sizes.groups * width, width, width], dim=1
            )
        ]


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank; None stands for a group of one."""

    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether it is first in its tensor and context groups: gathers end here."""
        return rank_of(self.tensor) == 0 and rank_of(self.context) == 0


@dataclass(frozen=True)
class Packing:
    """Which rows of a packed micro-batch belong to which sequence.

    bounds: where the sequences begin, including their padding; context parallelism splits
        between these.
    starts: first row of each sequence that has a token.
    lengths: tokens of each, without padding.
    """

    bounds: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def read(cls, parameters: Any) -> Packing | None:
        """From Megatron's `PackedSeqParams`; None when the micro-batch isn't packed."""
        if parameters is None or parameters.cu_seqlens_q is None:
            return None
        ends = [int(n) for n in parameters.cu_seqlens_q.tolist()]
        padded = parameters.cu_seqlens_q_padded
        bounds = ends if padded is None else [int(n) for n in padded.tolist()]
        lengths = [b - a for a, b in pairwise(ends)]
        # A last pseudo-sequence of padding has no token of its own.
        kept = [i for i, length in enumerate(lengths) if length]
        return cls(
            tuple(bounds[:-1]), tuple(bounds[i] for i in kept), tuple(lengths[i] for i in kept)
        )

    def unpack(self, hidden_T1D: torch.Tensor) -> torch.Tensor:
        """One row per sequence, with zeros after its end: `BTD`."""
        out_BTD = hidden_T1D.new_zeros(len(self.starts), max(self.lengths), hidden_T1D.shape[-1])
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            out_BTD[row, :length] = hidden_T1D[start : start + length, 0]
        return out_BTD


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def context_positions(
    rank: int, ranks: int, total: int, bounds: tuple[int, ...] = ()
) -> torch.Tensor:
    """Positions `P` (of T) of the rows that a context-parallel rank holds, in its own order.

    Args:
        rank, ranks: within the context-parallel group.
        total: T.
        bounds: where packed sequences begin (padded), the first at 0; empty: one sequence.

    Raises:
        DataError: a sequence that can't be split into 2 x ranks equal pieces.
    """
    if ranks == 1:
        return torch.arange(total)
    edges = [*(bounds or (0,)), total]
    pieces = []
    for start, end in pairwise(edges):
        piece, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise DataError(
                "A sequence can't be split for context parallelism.",
                given=f"{end - start} tokens",
                expected=f"a multiple of {2 * ranks} (twice the context-parallel ranks)",
                do="Pad each sequence to it.",
            )
        # One early and one late piece each, so that causal attention costs every rank the same.
        for index in (rank, 2 * ranks - 1 - rank):
            pieces.append(torch.arange(start + index * piece, start + (index + 1) * piece))
    return torch.cat(pieces)


class Gathering:
    """Sends one tensor from each rank of a group to the first rank; started at once, so that it
    runs in parallel with the forward pass.
    """

    def __init__(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        # Collectives need it contiguous, and holding it here keeps it alive during the transfer.
        self._values = values.contiguous()
        self._parts: list[torch.Tensor] = [self._values]
        self._work: Any = None
        if size_of(group) > 1:
            leads = rank_of(group) == 0
            self._parts = (
                [torch.empty_like(self._values) for _ in range(size_of(group))] if leads else []
            )
            self._work = dist.gather(
                self._values,
                self._parts if leads else None,
                group=group,
                group_dst=0,
                async_op=True,
            )

    def wait(self) -> list[torch.Tensor]:
        """All parts in the order of ranks; empty on ranks that are not the first."""
        if self._work is not None:
            self._work.wait()
        return self._parts


def gather_rows(
    rows_VD: torch.Tensor, group: dist.ProcessGroup | None, vocab_size: int
) -> torch.Tensor | None:
    """A whole table without its padding on the group's first rank, on the CPU; None elsewhere.
    Every rank of the group must call it.
    """
    parts = Gathering(rows_VD.detach(), group).wait()
    return torch.cat([part.cpu() for part in parts])[:vocab_size] if parts else None


def join_context(
    local_PBD: torch.Tensor, groups: Groups, packing: Packing | None
) -> torch.Tensor | None:
    """All tokens of a micro-batch `TBD` from context-parallel ranks that hold `PBD`, on the first
    rank; None elsewhere.
    """
    ranks = size_of(groups.context)
    parts = Gathering(local_PBD, groups.context).wait()
    if not parts:
        return None
    if ranks == 1:
        return parts[0]
    whole_TBD = local_PBD.new_empty(ranks * local_PBD.shape[0], *local_PBD.shape[1:])
    for rank, part in enumerate(parts):
        positions_P = context_positions(
            rank, ranks, whole_TBD.shape[0], packing.bounds if packing else ()
        )
        whole_TBD[positions_P.to(part.device)] = part
    return whole_TBD
