"""The tensor names and sizes of each Medusa format: key tables to and from format-independent
heads.

Shape letters: D hidden, V vocabulary. K heads, L residual layers; in names {k} and {l} count from
0, {n} is L.

All formats compute the same for head k: f = h; f = f + SiLU(W_l f + b_l) for each layer l; logits =
lm_head f. They differ in names, in whether there are biases, in whether each head has its own
lm_head, and in whether the layers of a head are all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from heads.checkpoint import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from heads.errors import CheckpointError, ConfigError
from heads.heads_config import MOST_HEADS, HeadsConfig
from heads.tensorfile import FLOAT_DTYPES, Header

# Format-independent names of the heads' tensors: those of stock vLLM, which our native format
# uses, too.
BLOCK = "blocks.{k}.layers.{l}.weight"
BIAS = "blocks.{k}.layers.{l}.bias"
OWN = "lm_heads.{k}.weight"
SHARED = "lm_head.weight"

INDEX = "(0|[1-9][0-9]{0,2})"
"""A number in a name, as a regular expression. It has at most three digits, so that a hostile file
can't ask for a head whose number has any length.
"""


@dataclass(frozen=True)
class KeyTable:
    """The names of one format, and what it can hold.

    Attributes:
        block, bias, own: templates of the three kinds of tensors: a layer's matrix and bias, and
            a head's own lm_head.
        shared: name of the copy of the actor's lm_head, if the format has one.
        biases: `optional`, `always` (zeros are written if there are none) or `never`.
        lm_heads: `any`, or `own` (a shared one is written once for each head).
        tied: the format's own loader builds one layer and repeats it, so layers that differ would
            be lost.
        needs_lm_head: whether the copy of a shared lm_head is required.
    """

    block: str
    bias: str
    own: str
    shared: str = ""
    biases: str = "always"
    lm_heads: str = "own"
    tied: bool = False
    needs_lm_head: bool = False

    def prefixed(self, prefix: str) -> KeyTable:
        return replace(
            self, block=prefix + self.block, bias=prefix + self.bias, own=prefix + self.own
        )


NUMBERED = KeyTable("{k}.{l}.linear.weight", "{k}.{l}.linear.bias", "{k}.{n}.weight")
TABLES: dict[str, KeyTable] = {
    "native": KeyTable(BLOCK, BIAS, OWN, SHARED, biases="never", lm_heads="any"),
    "vllm": KeyTable(
        BLOCK, BIAS, OWN, SHARED, biases="optional", lm_heads="any", needs_lm_head=True
    ),
    "fasterdecoding": replace(NUMBERED, tied=True),
    "medusa-1.0": replace(NUMBERED, tied=True).prefixed("medusa_head."),
    "modelopt": NUMBERED.prefixed("medusa_heads."),
}
FORMATS = tuple(TABLES)
TGI_FORMATS = ("tgi-v1", "tgi-v2")
"""Formats of text-generation-inference, which we read and wrote until 0.3.0. Their names are kept
so that whoever still uses one gets advice instead of "unknown".
"""


@dataclass(frozen=True)
class Claims:
    """What a configuration file says about the heads; None where it says nothing. Where tensors say
    something else, the tensors are right.
    """

    num_heads: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None


@dataclass(frozen=True)
class Layout:
    """Heads as a file's header describes them, checked before any tensor is read.

    Attributes:
        names: name in the file -> format-independent names; several for tied layers.
        hidden_size, num_heads, num_layers: sizes of the tensors.
        vocab_size: rows of the lm_heads, or None if no tensor shows it.
        own: whether every head has its own lm_head.
        dtype: dtype of the heads' tensors.
        notes: sentences for the user on what differed from the configuration.
    """

    names: dict[str, tuple[str, ...]]
    hidden_size: int
    num_heads: int
    num_layers: int
    vocab_size: int | None
    own: bool
    dtype: torch.dtype
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PlainHeads:
    """Format-independent heads of kind medusa: tensors under the names BLOCK, BIAS (all or none),
    OWN, and perhaps the actor's lm_head.
    """

    config: HeadsConfig
    tensors: dict[str, torch.Tensor]
    lm_head_VD: torch.Tensor | None = None

    @property
    def biased(self) -> bool:
        return BIAS.format(k=0, l=0) in self.tensors

    @property
    def tied(self) -> bool:
        """Whether the layers of each head are the same, to the bit."""
        for name in (BLOCK, BIAS) if self.biased else (BLOCK,):
            for k in range(self.config.num_heads):
                first = self.tensors[name.format(k=k, l=0)]
                for layer in range(1, self.config.num_layers):
                    if not torch.equal(self.tensors[name.format(k=k, l=layer)], first):
                        return False
        return True

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[BLOCK.format(k=0, l=0)].dtype


# ---- from a format


def read_layout(header: Header, table: KeyTable, claims: Claims, where: str) -> Layout:
    """Interpret the names of a file that holds only heads, and check their sizes.

    Raises:
        CheckpointError: a name that the format doesn't have, a missing name, or sizes that
            contradict each other.
    """
    blocks = _indices(table.block, header)
    biases = _indices(table.bias, header)
    own = _indices(table.own, header)
    if not blocks:
        raise _wrong(where, "no residual block", f"names like {table.block}")
    K = 1 + max(k for k, _ in blocks)
    present = 1 + max(layer for _, layer in blocks)
    # In a head that is a Sequential, the lm_head's number is the number of layers before it. Of
    # tied layers safetensors keeps only the first, so nothing else tells how many there were.
    L = max(n for _, n in own) if own and "{n}" in table.own else present
    notes = _check_counts(K, L, present, claims, bool(own), where)
    names: dict[str, tuple[str, ...]] = {}
    for k in range(K):
        for layer in range(present):
            copies = range(L) if present == 1 else (layer,)
            names[table.block.format(k=k, l=layer)] = tuple(
                BLOCK.format(k=k, l=copy) for copy in copies
            )
            if biases:
                names[table.bias.format(k=k, l=layer)] = tuple(
                    BIAS.format(k=k, l=copy) for copy in copies
                )
        if own:
            names[table.own.format(k=k, n=L)] = (OWN.format(k=k),)
    if table.shared and table.shared in header:
        names[table.shared] = (SHARED,)
    missing = sorted(set(names) - set(header))
    unknown = sorted(set(header) - set(names))
    if unknown:
        raise _wrong(
            where,
            f"unknown tensors {[name[:60] for name in unknown[:3]]}",
            f"names like {table.block}",
        )
    if missing:
        raise _wrong(
            where, f"{missing[0]} is missing", f"{K} heads of {L} layers with the same tensors"
        )
    return _sized(header, names, K, L, claims, notes, where)


def _indices(template: str, header: Header) -> list[tuple[int, int]]:
    """Head and layer (or 0) of every name that matches a template."""
    text = re.escape(template)
    for letter in "kln":
        text = text.replace(re.escape("{" + letter + "}"), INDEX)
    pattern = re.compile(text)
    found = []
    for name in header:
        # Names come from the file, so their length is bounded; ours are all far shorter.
        match = pattern.fullmatch(name) if len(name) < 100 else None
        if match:
            layer = int(match[2]) if pattern.groups > 1 else 0
            found.append((int(match[1]), layer))
    return found


def _check_counts(K: int, L: int, present: int, claims: Claims, own: bool, where: str) -> list[str]:
    """Refuse impossible counts, and note where the configuration contradicts the tensors."""
    notes = []
    if K > MOST_HEADS or L > MAX_LAYERS:
        raise _wrong(
            where, f"{K} heads of {L} layers", f"at most {MOST_HEADS} heads of {MAX_LAYERS} layers"
        )
    if L < 1 or present not in (1, L):
        expected = "as many layers as come before the lm_head, or one tied layer"
        raise _wrong(where, f"{present} layers, and lm_heads after layer {L}", expected)
    if L > 1 and present == 1:
        notes.append(
            f"Only the first of {L} layers is in the file: one layer was repeated (tied). It is"
            f" written {L} times."
        )
    # Without an lm_head's number, tied layers can't be told from a wrong configuration.
    elif claims.num_layers not in (None, L) and present == 1 and not own:
        given = f"1 layer in the tensors, {claims.num_layers} in the configuration"
        raise _wrong(where, given, "the same number: tied layers look like this")
    elif claims.num_layers not in (None, L):
        notes.append(
            f"The configuration says {claims.num_layers} layers, the tensors have {L}: {L} it is."
        )
    if claims.num_heads not in (None, K):
        notes.append(
            f"The configuration says {claims.num_heads} heads, the tensors have {K}: {K} it is."
        )
    return notes


def _sized(
    header: Header,
    names: dict[str, tuple[str, ...]],
    K: int,
    L: int,
    claims: Claims,
    notes: list[str],
    where: str,
) -> Layout:
    """Check all shapes and dtypes against each other and against the configuration."""
    by_target = {targets[0]: header[name] for name, targets in names.items()}
    # The first head's first layer sets the sizes for all others.
    code, first = by_target[BLOCK.format(k=0, l=0)]
    D = first[0] if len(first) == 2 else 0
    tables = {target: shape for target, (_, shape) in by_target.items() if "lm_head" in target}
    V = next((shape[0] for shape in tables.values() if shape), None)
    expected: tuple[int | None, ...]
    for target, (dtype, shape) in by_target.items():
        if target in tables:
            expected = (V, D)
        elif target.endswith("weight"):
            expected = (D, D)
        else:
            expected = (D,)
        if shape != expected or 0 in shape or D > MAX_WIDTH or (V or 0) > MAX_VOCAB:
            raise _wrong(
                where,
                f"{target} has shape {shape}",
                f"{expected}, as the others have, within {MAX_VOCAB} x {MAX_WIDTH}",
            )
        # The actor's lm_head may have a different dtype than the heads.
        if dtype not in FLOAT_DTYPES or (dtype != code and target != SHARED):
            raise _wrong(
                where,
                f"{target} has dtype {dtype[:20]}",
                f"one of {', '.join(FLOAT_DTYPES)}, the same for all heads",
            )
    if claims.hidden_size not in (None, D):
        raise _wrong(
            where,
            f"hidden size {D} in the tensors, {claims.hidden_size} in the configuration",
            "the same",
        )
    if V is not None and claims.vocab_size not in (None, V):
        notes.append(
            f"The configuration says a vocabulary of {claims.vocab_size}, the tensors have {V}:"
            f" {V} it is."
        )
    own = OWN.format(k=0) in by_target
    return Layout(names, D, K, L, V, own, FLOAT_DTYPES[code], tuple(notes))


def plain_heads(
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    lm_head_VD: torch.Tensor | None,
    vocab_size: int,
    where: str,
) -> tuple[PlainHeads, list[str]]:
    """Format-independent heads from a layout's tensors. If all heads' own lm_heads equal the
    actor's, they become one shared lm_head.

    Args:
        tensors: by their names in the file.
        lm_head_VD: the actor's lm_head, if it is known from elsewhere.
    """
    named = {target: tensors[name] for name, targets in layout.names.items() for target in targets}
    notes = list(layout.notes)
    inside = named.pop(SHARED, None)
    if (
        inside is not None
        and lm_head_VD is not None
        and not torch.equal(inside.to(layout.dtype), lm_head_VD.to(layout.dtype))
    ):
        notes.append(
            "The lm_head in the file is not the model's (a policy that moved on?): the model's is"
            " used."
        )
    # The model's own lm_head is preferred: the file's may be older than the policy.
    lm_head_VD = inside if lm_head_VD is None else lm_head_VD
    biases = [name for name in named if name.endswith(".bias")]
    if biases and not any(named[name].count_nonzero() for name in biases):
        notes.append("All biases are zero, so they are left out.")
        named = {name: tensor for name, tensor in named.items() if name not in biases}
    # Formats without a shared lm_head hold a copy of the model's for each head. Only a comparison
    # with the model proves that they are copies: heads trained with their own lm_heads may have
    # started out equal.
    own = [named[OWN.format(k=k)] for k in range(layout.num_heads)] if layout.own else []
    same = bool(own) and all(torch.equal(tensor, own[0]) for tensor in own[1:])
    if same and lm_head_VD is not None and torch.equal(own[0], lm_head_VD.to(layout.dtype)):
        notes.append("Every head's lm_head equals the model's, so it is now shared.")
        named = {name: tensor for name, tensor in named.items() if not name.startswith("lm_heads.")}
        own = []
    elif same and len(own) > 1:
        notes.append(
            "All heads have the same lm_head. Give --model to let it be compared with the model's"
            " and shared."
        )
    config = HeadsConfig(
        layout.hidden_size,
        vocab_size,
        layout.num_heads,
        "medusa",
        layout.num_layers,
        lm_head="own" if own else "shared",
    )
    if lm_head_VD is not None and tuple(lm_head_VD.shape) != (vocab_size, layout.hidden_size):
        raise _wrong(
            where,
            f"lm_head of shape {tuple(lm_head_VD.shape)}",
            f"{(vocab_size, layout.hidden_size)}",
        )
    return PlainHeads(config, named, lm_head_VD), notes


def _wrong(where: str, given: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "The heads in the file don't match their format.",
        given=f"{where}: {given}",
        expected=expected,
        do="See docs/formats.md.",
    )


# ---- to a format


def refuse_unrepresentable(plain: PlainHeads, target: str) -> None:
    """Raise ConfigError naming what the format can't hold; nothing is ever dropped silently."""
    reason = _obstacle(plain, target)
    if reason:
        others = ", ".join(representable_formats(plain)) or "none without the model's lm_head"
        do = (
            "Give the model's folder with --model."
            if reason is NO_LM_HEAD
            else "Choose one of these."
        )
        raise ConfigError(
            f"These heads can't be written as {target}.",
            given=reason,
            expected=f"a format that can hold them: {others}",
            do=do,
        )


def representable_formats(plain: PlainHeads) -> list[str]:
    """The formats that can hold these heads."""
    return [target for target in FORMATS if not _obstacle(plain, target)]


NO_LM_HEAD = "the format needs the model's lm_head in the file, and it is not here"


def _obstacle(plain: PlainHeads, target: str) -> str:
    """Why the format can't hold the heads; empty if it can."""
    table = TABLES[target]
    config = plain.config
    if plain.biased and table.biases == "never":
        return "the residual blocks have biases, and those of our format have none"
    if table.tied and config.num_layers > 1 and not plain.tied:
        return (
            f"the {config.num_layers} layers differ; the format's loader repeats one layer and "
            "would keep only the last"
        )
    if (
        config.lm_head == "shared"
        and plain.lm_head_VD is None
        and (table.needs_lm_head or table.lm_heads == "own")
    ):
        return NO_LM_HEAD
    return ""


def to_keys(plain: PlainHeads, target: str) -> dict[str, torch.Tensor]:
    """The tensors under a format's names, head by head. Call `refuse_unrepresentable` first."""
    table = TABLES[target]
    config = plain.config
    biased = plain.biased or table.biases == "always"
    out: dict[str, torch.Tensor] = {}
    for k in range(config.num_heads):
        for layer in range(config.num_layers):
            out[table.block.format(k=k, l=layer)] = plain.tensors[BLOCK.format(k=k, l=layer)]
            if biased:
                zeros_D = torch.zeros(config.hidden_size, dtype=plain.dtype)
                out[table.bias.format(k=k, l=layer)] = plain.tensors.get(
                    BIAS.format(k=k, l=layer), zeros_D
                )
        if config.lm_head == "own":
            out[table.own.format(k=k, n=config.num_layers)] = plain.tensors[OWN.format(k=k)]
        elif table.lm_heads == "own" and plain.lm_head_VD is not None:
            out[table.own.format(k=k, n=config.num_layers)] = plain.lm_head_VD.to(plain.dtype)
    if table.shared and config.lm_head == "shared" and plain.lm_head_VD is not None:
        out[table.shared] = plain.lm_head_VD.to(plain.dtype)
    # Each name gets its own copy: safetensors refuses tensors that share memory, as tied layers do
    # and a table that is written for each head.
    return {name: tensor.clone().contiguous() for name, tensor in out.items()}
