"""Describes a set of draft heads: its kind and its sizes (no torch)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from heads.errors import ConfigError

KINDS = ("medusa", "hydra")
GONE_KINDS = {
    "markov": "Train heads of kind hydra: they also read the previous token, and all since h_t."
}
"""Removed kinds -> what to do instead."""
GONE_FIELDS = ("rank",)
"""Fields of removed kinds. Older files have them, but they meant nothing for other kinds."""
LM_HEADS = ("shared", "own")
MOST_HEADS = 31
"""Random numbers are arranged for this many drafts at each position (`medusa_ppo/drafting`)."""
TEMPERATURES = "temperatures"
"""File key of the draft temperatures, the divisors of each head's logits; left out if all are 1.
"""
PART_WIDTH = 64
"""Width of one part of an attention."""
CPU_CHUNK = 1 << 22
"""Float32 logits of one chunk (16 MiB): about the size of a CPU's caches."""
GPU_CHUNK = 1 << 26
"""256 MiB: each chunk reads the whole lm_head, and only products of hundreds of rows hide that
time.
"""
GAP = -1
"""Token id between two parts of a text that copying searches."""
COPY_WINDOW = 1024
"""Number of tokens of a request's prompt and response that copying searches, counted back from the
newest. It limits what an engine stores per request and reads per step.
"""
KEY_TOKENS = 16
"""Maximum number of tokens in a key of the copying attention."""
LEAST_COPY_RANK = 256
"""Copied tokens enter the cell through at least this many numbers (fewer if D is smaller)."""
LARGE_VOCABULARY = 32_768
DRAFT_VOCABULARY = 8_192
"""Vocabulary size from which drafts by default come only from the most frequent tokens, and the
number of these.
"""

SINCE_COPYING = ("context_layers", "feed_forward", "copy_parts", "copy_tokens")
"""Fields added by format version 3. With these defaults heads equal those of earlier versions."""


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes and kind of the draft heads.

    Attributes:
        hidden_size: D, width of the actor's final hidden state.
        vocab_size: V, rows of the actor's lm_head (not the tokenizer's length).
        num_heads: K; head k (1..K) reads h_t and predicts x_{t+1+k}.
        kind: `medusa` (h_t only) or `hydra` (plus the embeddings of all tokens drafted since h_t).
        num_layers: residual blocks per head, each with its own weights.
        lm_head: `shared` (the actor's, frozen) or `own` (one trainable lm_head per head).
        mlp_ratio: width of the hydra MLP's inner layer, or of the cell's state, in multiples of D.
        context: pairs (h_j, x_{j+1}) up to (h_t, x_{t+1}) that heads of kind hydra attend to; 0:
            none. Heads with a context share one gated cell, the others have an MLP each.
        context_layers: attentions over these pairs, one after the other.
        feed_forward: inner width of the feed-forward layer after each attention, in multiples of D;
            0: none.
        copy_parts: A, parts of the attention that copies from the text (`heads/copying.py`); 0:
            nothing is copied. Needs a context, whose cell receives what was copied.
        copy_tokens: M, tokens per key of this attention.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    kind: str = "medusa"
    num_layers: int = 1
    lm_head: str = "shared"
    mlp_ratio: int = 2
    context: int = 0
    context_layers: int = 1
    feed_forward: int = 0
    copy_parts: int = 0
    copy_tokens: int = 3

    def __post_init__(self) -> None:
        if self.kind in GONE_KINDS:
            raise ConfigError(
                f"Heads of kind {self.kind} were removed in 0.4.0.",
                given=self.kind,
                expected=" | ".join(KINDS),
                do=GONE_KINDS[self.kind],
            )
        if self.kind not in KINDS:
            raise ConfigError(
                "The kind of heads is unknown.",
                given=self.kind,
                expected=" | ".join(KINDS),
                do="Set kind to one of these.",
            )
        if self.lm_head not in LM_HEADS:
            raise ConfigError(
                "The lm_head mode is unknown.",
                given=self.lm_head,
                expected=" | ".join(LM_HEADS),
                do="Set lm_head to one of these.",
            )
        at_least_one = (
            "hidden_size",
            "vocab_size",
            "num_heads",
            "num_layers",
            "mlp_ratio",
            "context_layers",
            "copy_tokens",
        )
        for name in at_least_one:
            self._check_whole(name, least=1)
        for name in ("context", "feed_forward", "copy_parts"):
            self._check_whole(name, least=0)
        if self.copy_tokens > KEY_TOKENS:
            raise ConfigError(
                "A key with this many tokens is not supported.",
                given=f"copy_tokens={self.copy_tokens}",
                expected=f"<= {KEY_TOKENS}",
                do="Make copy_tokens smaller.",
            )
        if self.num_heads > MOST_HEADS:
            raise ConfigError(
                "This number of heads is not supported.",
                given=self.num_heads,
                expected=f"num_heads <= {MOST_HEADS}",
                do="Train fewer.",
            )
        if self.context and self.kind != "hydra":
            raise ConfigError(
                "Only heads of kind hydra have a context.",
                given=f"kind={self.kind}, context={self.context}",
                expected="context=0",
                do="Correct one of them.",
            )
        needs_context = self.context_layers > 1 or self.feed_forward or self.copy_parts
        if needs_context and not self.context:
            raise ConfigError(
                "Only heads with a context can have further layers, or copy.",
                given=(
                    f"context=0, context_layers={self.context_layers},"
                    f" feed_forward={self.feed_forward}, copy_parts={self.copy_parts}"
                ),
                expected="context > 0, or context_layers=1, feed_forward=0, copy_parts=0",
                do="Give the heads a context.",
            )

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        # `true` is an int to isinstance.
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{name} must be a whole number.",
                given=repr(value),
                expected=f">= {least}",
                do=f"Correct {name}.",
            )

    @property
    def needs_embedding(self) -> bool:
        """Whether the heads read the tokens that were sampled or drafted since h_t, and so the
        actor's embedding table.
        """
        return self.kind == "hydra"

    @property
    def draft_vocabulary(self) -> int:
        """Number of tokens, the most frequent ones, that drafts come from and heads are trained
        for unless a setting says otherwise; 0: all.
        """
        # It is taken from the actor's lm_head, which heads with their own lm_head don't read.
        large = self.vocab_size >= LARGE_VOCABULARY and self.lm_head == "shared"
        return DRAFT_VOCABULARY if large else 0

    @property
    def copies(self) -> bool:
        """Whether the heads search the text for what followed tokens like its last ones."""
        return self.copy_parts > 0

    @property
    def context_parts(self) -> int:
        """Number of parts of the attention over pairs: the most that divide the hidden size at
        PART_WIDTH or wider.
        """
        most = max(1, self.hidden_size // PART_WIDTH)
        return max(part for part in range(1, most + 1) if self.hidden_size % part == 0)

    @property
    def inner_size(self) -> int:
        """H, inner width of the hydra MLP, or width of the cell's state."""
        return self.hidden_size * self.mlp_ratio

    @property
    def copy_width(self) -> int:
        """Width of all keys of the copying attention at one place of the text."""
        return self.copy_parts * PART_WIDTH

    @property
    def copy_rank(self) -> int:
        """Width through which copied tokens enter the cell. A quarter of D keeps copying below 4
        D^2 parameters for large D.
        """
        return min(self.hidden_size, max(LEAST_COPY_RANK, self.hidden_size // 4))

    @property
    def has_new_parts(self) -> bool:
        """Whether a reader must support format version 3."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        return any(getattr(self, name) != fields[name] for name in SINCE_COPYING)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """File key -> shape of every trainable tensor (heads/FORMAT.md); head by head first, then
        what all heads share.

        In a key, head indices count from 0: index k-1 belongs to head k.
        """
        D = self.hidden_size
        V = self.vocab_size
        H = self.inner_size
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"blocks.{k}.layers.{layer}.weight"] = (D, D)
            if self.lm_head == "own":
                shapes[f"lm_heads.{k}.weight"] = (V, D)
            if self.kind == "hydra" and not self.context:
                shapes[f"mlps.{k}.in.weight"] = (H, D * (k + 2))
                shapes[f"mlps.{k}.out.weight"] = (D, H)
        # Without a context heads share nothing.
        if not self.context:
            return shapes
        F = D * self.feed_forward
        for layer in range(self.context_layers):
            prefix = context_prefix(layer)
            shapes[f"{prefix}.in.weight"] = (3 * D, 2 * D)
            shapes[f"{prefix}.out.weight"] = (D, D)
            if F:
                shapes[f"{prefix}.feed_in.weight"] = (F, D)
                shapes[f"{prefix}.feed_out.weight"] = (D, F)
        if self.copies:
            shapes["copy.query.weight"] = (self.copy_width, self.copy_tokens * D)
            shapes["copy.key.weight"] = (self.copy_width, self.copy_tokens * D)
            shapes["copy.none.weight"] = (self.copy_parts,)
            shapes["copy.value.weight"] = (self.copy_rank, self.copy_parts * D)
            shapes["copy.out.weight"] = (H, self.copy_rank)
        shapes["cell.start.weight"] = (H, D)
        shapes["cell.token.weight"] = (H, D)
        shapes["cell.step.weight"] = (H, H)
        shapes["cell.out.weight"] = (D, H)
        return shapes

    def shapes_among(self, names: Container[str]) -> dict[str, tuple[int, ...]]:
        """`tensor_shapes`, plus the draft temperatures if `names` contains them."""
        temperatures = {TEMPERATURES: (self.num_heads,)} if TEMPERATURES in names else {}
        return self.tensor_shapes() | temperatures

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for `from_dict` and for JSON. Fields that earlier readers do
        not know are left out if they are at their defaults.
        """
        values = dataclasses.asdict(self)
        if not self.has_new_parts:
            for name in SINCE_COPYING:
                # Earlier releases refuse keys that they don't know.
                del values[name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadsConfig:
        """Build from a mapping; an unknown key is an error that names the closest valid one."""
        names = [field.name for field in dataclasses.fields(cls)]
        values = {key: value for key, value in values.items() if key not in GONE_FIELDS}
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                raise ConfigError(
                    "Unknown key in the heads configuration.",
                    given=key,
                    expected=", ".join(names),
                    do=f"Did you mean {near[0]}?" if near else "Remove the key.",
                )
        missing = [name for name in ("hidden_size", "vocab_size") if name not in values]
        if missing:
            raise ConfigError(
                "The heads configuration lacks a size.",
                given=sorted(values),
                expected=missing,
                do="Add the missing keys.",
            )
        return cls(**values)


def context_prefix(layer: int) -> str:
    """Prefix of the file keys of an attention over pairs. That of the first has no number, as in
    format versions that had only one attention.
    """
    return "context" if layer == 0 else f"context.{layer}"
