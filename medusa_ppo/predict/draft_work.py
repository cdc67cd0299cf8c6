"""What drafting does on the device, counted from sizes: matrix products, passes over memory, and
kernel launches.

For our heads this is the drafting call of `medusa_ppo/drafting/core.py`; a test compares these
formulas with the operations that it dispatches. Drafters that run pass by pass (EAGLE, MTP) are
here because the published measurements that validate the prediction use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from heads.heads_config import COPY_WINDOW, HeadsConfig
from medusa_ppo.runtime.hardware import BFLOAT16, FLOAT32, ModelSizes

LAUNCHES = {"medusa": (15, 4), "hydra": (19, 14)}
"""Operations per call and per head, by kind: matrix products, norms, the draw."""
CONTEXT_LAUNCHES = (11, 3)
"""The same for the first attention over the context, and for the cell that reads it."""
LAYER_LAUNCHES, FEED_LAUNCHES = 13, 9
"""For each further attention, and for the feed-forward layer after an attention."""
OWN_LM_HEADS = "lm_heads."
"""Prefix of the weights of heads that have an lm_head of their own."""
RING_LAUNCHES = 26
"""For storing the context's pairs and reading them back, which an engine does outside the call."""
COPY_LAUNCHES, COPIED_LAUNCHES = 45, 3
"""For finding what to copy, once per call, and for using it in each head."""


@dataclass(frozen=True)
class HeadsDrafter:
    """Our heads.

    Attributes:
        config: kind and sizes.
        width: number of tokens that drafts come from: the draft vocabulary, or all.
    """

    config: HeadsConfig
    width: int

    @property
    def most_drafts(self) -> int:
        return self.config.num_heads

    @property
    def parameters(self) -> int:
        """Number of the heads' own parameters; lm_head belongs to the actor."""
        return sum(_size(shape) for shape in self.config.tensor_shapes().values())

    def kept_bytes(self, sequences: int) -> float:
        """Device memory that drafting takes from the KV cache, on each rank of an engine: the
        heads, each draft's running sums, the keys and values of the context, the texts that may be
        copied, and the draft vocabulary's rows of lm_head.
        """
        config = self.config
        sums = FLOAT32 * (config.num_heads + 2) * self.width * sequences
        pairs = 2 * BFLOAT16 * config.context * config.hidden_size * sequences
        texts = BFLOAT16 * COPY_WINDOW * config.copy_width * sequences * config.copies
        rows = BFLOAT16 * self.width * config.hidden_size * (self.width < config.vocab_size)
        kept = BFLOAT16 * self.parameters + sums + pairs * config.context_layers
        return kept + texts + rows

    def products(self, sequences: float, drafts: int) -> Iterator[tuple[float, int, int]]:
        """(rows, inputs, outputs) of each matrix product of a call."""
        yield from self.own_products(sequences, drafts)
        yield from self.logit_products(sequences, drafts)

    def own_products(self, sequences: float, drafts: int) -> Iterator[tuple[float, int, int]]:
        """Those of the heads alone. Each rank of an engine has all heads and computes all of
        these.
        """
        config = self.config
        for name, shape in config.tensor_shapes().items():
            if len(shape) < 2 or name.startswith(OWN_LM_HEADS):
                continue
            outputs, inputs = shape
            part, _, rest = name.partition(".")
            index = rest.partition(".")[0]
            if index.isdigit() and part != "context" and int(index) >= drafts:
                # This head doesn't draft.
                continue
            # The cell's products run once per head, except its start: once per call.
            times = drafts if name.startswith(("cell.", "copy.out")) else 1
            if name == "cell.start.weight":
                times = 1
            for _ in range(times):
                yield sequences, inputs, outputs

    def logit_products(self, sequences: float, drafts: int) -> Iterator[tuple[float, int, int]]:
        """Those that logits come from. The ranks of an engine share the rows of their weights."""
        config = self.config
        if config.lm_head == "own":
            for _ in range(drafts):
                yield sequences, config.hidden_size, config.vocab_size
        elif config.kind == "medusa":
            # Heads of this kind don't wait for each other, so one matrix product does all rows.
            yield sequences * drafts, config.hidden_size, self.width
        else:
            for _ in range(drafts):
                yield sequences, config.hidden_size, self.width

    def drawn_rows(self, sequences: float, drafts: int) -> float:
        """Rows of logits `[N, width]` that drafts are drawn from."""
        return sequences * drafts

    def launches(self, drafts: int) -> int:
        """Number of operations that a call dispatches, however many sequences there are."""
        config = self.config
        once, head = LAUNCHES[config.kind]
        if config.context:
            once += CONTEXT_LAUNCHES[0] + LAYER_LAUNCHES * (config.context_layers - 1)
            once += FEED_LAUNCHES * bool(config.feed_forward) * config.context_layers
            head += CONTEXT_LAUNCHES[1]
        return once + self.beside(drafts) + drafts * head

    def beside(self, drafts: int) -> int:
        """Operations that an engine dispatches around the call: for the context and for copying."""
        config = self.config
        copied = (COPY_LAUNCHES + COPIED_LAUNCHES * drafts) * config.copies
        return RING_LAUNCHES * bool(config.context) + copied


@dataclass(frozen=True)
class LayeredDrafter:
    """A drafter of whole layers: EAGLE and MTP (one pass a draft), DFlash (one pass for all).

    Attributes:
        model: sizes of the actor; the drafter's layers have the same.
        layers: number of layers.
        width: rows of its lm_head.
        one_pass: all drafts come from one pass over drafts + 1 places.
    """

    model: ModelSizes
    layers: int
    width: int
    one_pass: bool = False

    def passes(self, drafts: int) -> int:
        return 1 if self.one_pass else drafts

    def rows(self, sequences: float, drafts: int) -> float:
        """Rows of one pass."""
        return sequences * (drafts + 1 if self.one_pass else 1)

    def products(self, sequences: float, drafts: int) -> Iterator[tuple[float, int, int]]:
        """(rows, inputs, outputs) of each matrix product of one pass."""
        model = self.model
        rows = self.rows(sequences, drafts)
        yield rows, 2 * model.hidden, model.hidden
        for _ in range(self.layers):
            yield from layer_products(model, rows, 1)
        yield sequences * (drafts if self.one_pass else 1), model.hidden, self.width


def layer_products(model: ModelSizes, rows: float, ranks: int) -> Iterator[tuple[float, int, int]]:
    """(rows, inputs, outputs) of each matrix product of one of the actor's layers on one rank."""
    inner = model.intermediate // ranks
    attended = model.heads * model.head_dim // ranks
    key_value = 2 * max(1, model.kv_heads // ranks) * model.head_dim
    yield rows, model.hidden, attended + key_value
    yield rows, attended, model.hidden
    yield rows, model.hidden, (2 if model.gated else 1) * inner
    yield rows, inner, model.hidden


def _size(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found
