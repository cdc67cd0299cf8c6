"""What a set of draft heads is: its kind and its sizes (no torch). The rest of the package is what
is done with them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from heads.errors import ConfigError

KINDS = ("medusa", "markov", "hydra")
LM_HEADS = ("shared", "own")
MOST_HEADS = 31
"""What random numbers are laid out for: as many for drafts as for their acceptance, at each
position (`medusa_ppo/drafting`).
"""
TEMPERATURES = "temperatures"
"""File key of what each head's logits are divided by when drafts are sampled; left out where all
are 1.
"""
PART_WIDTH = 64
CPU_CHUNK = 1 << 22  # Float32 logits of one chunk (16 MiB): about what the caches of a CPU hold.
GPU_CHUNK = (
    1 << 26
)  # 256 MiB. A chunk reads the whole lm_head: it takes some hundred rows until that is hidden by the products.


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes and kind of the draft heads.

    Attributes:
        hidden_size: D, width of the actor's final hidden state.
        vocab_size: V, rows of the actor's lm_head (not the tokenizer's length).
        num_heads: K; head k (1..K) reads h_t and predicts x_{t+1+k}.
        kind: `medusa` (h_t only), `markov` (plus a low-rank logit bias from the token before) or
            `hydra` (plus the embeddings of all tokens drafted since h_t).
        num_layers: residual blocks per head, each with weights of its own.
        lm_head: `shared` (the actor's, frozen) or `own` (one trainable lm_head per head).
        rank: rank of the markov bias; unused by the other kinds.
        mlp_ratio: width of the hydra MLP's inner layer, or of the cell's state, in multiples of D;
            unused by the other kinds.
        context: pairs (h_j, x_{j+1}) up to (h_t, x_{t+1}) that heads of kind hydra attend to; 0:
            none. Heads with a context share one gated cell, the others have an MLP each.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    kind: str = "medusa"
    num_layers: int = 1
    lm_head: str = "shared"
    rank: int = 64
    mlp_ratio: int = 2
    context: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                "Unknown kind of heads.",
                given=self.kind,
                expected=" | ".join(KINDS),
                do="Set kind to one of these.",
            )
        if self.lm_head not in LM_HEADS:
            raise ConfigError(
                "Unknown lm_head mode.",
                given=self.lm_head,
                expected=" | ".join(LM_HEADS),
                do="Set lm_head to one of these.",
            )
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers", "rank", "mlp_ratio"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} must be a positive whole number.",
                    given=repr(value),
                    expected=">= 1",
                    do=f"Correct {name}.",
                )
        if self.num_heads > MOST_HEADS:
            raise ConfigError(
                "So many heads can't draft.",
                given=self.num_heads,
                expected=f"num_heads <= {MOST_HEADS}",
                do="Train fewer.",
            )
        if not isinstance(self.context, int) or isinstance(self.context, bool) or self.context < 0:
            raise ConfigError(
                "context must be a whole number.",
                given=repr(self.context),
                expected=">= 0",
                do="Correct context.",
            )
        if self.context and self.kind != "hydra":
            given = f"kind={self.kind}, context={self.context}"
            raise ConfigError(
                "Only heads of kind hydra have a context.",
                given=given,
                expected="context=0",
                do="Correct one of them.",
            )

    @property
    def conditioned(self) -> bool:
        """Whether the heads read the tokens that were sampled or drafted since h_t."""
        return self.kind != "medusa"

    @property
    def needs_embedding(self) -> bool:
        """Whether the heads read the actor's embedding table."""
        return self.kind == "hydra"

    @property
    def context_parts(self) -> int:
        """A, parts of the attention, which is as wide as the hidden state; each PART_WIDTH wide, or
        wider where that does not go out.
        """
        return max(
            part
            for part in range(1, max(1, self.hidden_size // PART_WIDTH) + 1)
            if self.hidden_size % part == 0
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """File key -> shape of every trainable tensor (heads/FORMAT.md); the order is head by head.

        In a key, head indices count from 0: index k-1 belongs to head k.
        """
        D = self.hidden_size
        V = self.vocab_size
        H = self.hidden_size * self.mlp_ratio
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"blocks.{k}.layers.{layer}.weight"] = (D, D)
            if self.lm_head == "own":
                shapes[f"lm_heads.{k}.weight"] = (V, D)
            if self.kind == "markov":
                shapes[f"markov.{k}.in.weight"] = (V, self.rank)
                shapes[f"markov.{k}.out.weight"] = (V, self.rank)
            if self.kind == "hydra" and not self.context:
                shapes[f"mlps.{k}.in.weight"] = (H, D * (k + 2))
                shapes[f"mlps.{k}.out.weight"] = (D, H)
        if self.context:
            shapes |= {"context.in.weight": (3 * D, 2 * D), "context.out.weight": (D, D)}
            shapes |= {
                "cell.start.weight": (H, D),
                "cell.token.weight": (H, D),
                "cell.step.weight": (H, H),
                "cell.out.weight": (D, H),
            }
        return shapes

    def shapes_among(self, names: Container[str]) -> dict[str, tuple[int, ...]]:
        """`tensor_shapes`, and that of the draft temperatures where `names` hold them."""
        return self.tensor_shapes() | (
            {TEMPERATURES: (self.num_heads,)} if TEMPERATURES in names else {}
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for `from_dict` and for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadsConfig:
        """Build from a mapping; an unknown key is an error that names the nearest valid one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                raise ConfigError(
                    "Unknown key in the heads configuration.",
                    given=key,
                    expected=", ".join(names),
                    do=f"Did you mean {near[0]}?" if near else "Remove the key.",
                )
        missing = [n for n in ("hidden_size", "vocab_size") if n not in values]
        if missing:
            raise ConfigError(
                "The heads configuration lacks a size.",
                given=sorted(values),
                expected=missing,
                do="Add the missing keys.",
            )
        return cls(**values)
