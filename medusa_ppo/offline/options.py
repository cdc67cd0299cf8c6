"""Options of `medusa-ppo train` and `medusa-ppo eval`; imports no torch.

Each option is defined here once, with its default and `--help` text; the command line and Python
callers use the same class. A setting that a PPO run also has takes its default from the run's
configuration. Where a default differs from that, the docstring below it says why.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from heads.heads_config import HeadsConfig
from medusa_ppo.config.companion_section import LEAST_POSITIONS, CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.config.sampling_section import SamplingConfig

HUB_PREFIX = "hf://"
"""Heads of the hub are named so: hf://OWNER/NAME."""
WRITTEN_BY_MODEL = "written_by_model"
"""In train.jsonl and the heads' metadata: whether the model itself wrote the text that heads were
trained and judged on.
"""
NOT_IN_THE_HEADS = ("out", "max_minutes", "target_mal", "cache_bytes", "fresh")
"""Options that change when a training stops or how fast it is, but not the heads that it has after
a given number of tokens.
"""
LARGEST_STEP = 512
"""Positions of an optimizer step's micro-batch, unless there are few tokens."""
ENOUGH_STEPS = 700
"""Optimizer steps of a whole training, as far as they have LEAST_POSITIONS."""
# The sections of a run's configuration, at their defaults.
HEADS = HeadsSection()
COMPANION = CompanionConfig()
SAMPLING = SamplingConfig()


def line_breaks(text: str) -> str:
    """Turn the two characters `\\n` into a line break, because a shell passes them on as typed."""
    return text.replace("\\n", "\n")


Model = Annotated[str, Option(help="Folder or hub name of a transformers causal LM.")]
Data = Annotated[
    str,
    Option(
        help=(
            "JSONL, Parquet, CSV or text file, a folder of them (RUN/rollouts), or a hub name:"
            " owner/name, or owner/name@split for another split than train."
        )
    ),
]
Seed = Annotated[int, Option(help="Seed for everything random.")]
Template = Annotated[
    str, Option(help="Prompt template with the row's fields in braces.", callback=line_breaks)
]
NewTokens = Annotated[int, Option(min=1, help="Longest response, in tokens.")]
DraftVocab = Annotated[
    int,
    Option(
        min=-1,
        help="Draft from this many of the most frequent tokens; 0: from all; -1: as an engine"
        " decides (8,192 if the vocabulary has 32,768 or more).",
    ),
]


@dataclass(frozen=True)
class TrainOptions:
    """Options of `medusa-ppo train`. Pass by keyword."""

    model: Annotated[
        str,
        Option(
            help=(
                "Folder or hub name of a transformers causal LM, or folder of a Megatron"
                " distributed checkpoint."
            )
        ),
    ]
    data: Data
    out: Annotated[Path, Option(help="Folder for the heads (native checkpoint) and train.jsonl.")]
    kind: Annotated[Literal["medusa", "hydra"], Option(help="Kind of the heads.")] = HEADS.kind
    num_heads: Annotated[int, Option(min=1, help="K, the number of heads.")] = HEADS.num_heads
    context: Annotated[
        int,
        Option(
            min=0,
            help="Last positions of the response that heads of kind hydra attend to; 0: none.",
        ),
    ] = HEADS.context
    context_layers: Annotated[int, Option(min=1, help="Attention layers over these positions.")] = (
        HEADS.context_layers
    )
    feed_forward: Annotated[
        int,
        Option(
            min=0, help="Width of the layer after each attention, in hidden sizes; 0: no layer."
        ),
    ] = HEADS.feed_forward
    cell: Annotated[
        int, Option(min=1, help="Width of the state passed from draft to draft, in hidden sizes.")
    ] = HEADS.cell
    copy_parts: Annotated[
        int,
        Option(min=0, help="Parts of the attention that copies from prompt and response; 0: none."),
    ] = HEADS.copy_parts
    loss: Annotated[
        Literal["ce", "tv", "ce_tv", "kl", "kl_tv"], Option(help="Loss of the heads.")
    ] = COMPANION.loss
    draft_vocab: DraftVocab = -1
    template: Annotated[
        str,
        Option(
            help="Prompt template with the row's fields in braces; the model writes the responses.",
            callback=line_breaks,
        ),
    ] = ""
    column: Annotated[
        str,
        Option(
            help=(
                "Column with full texts, or chat messages (only the assistant's turns are trained"
                " on)."
            )
        ),
    ] = ""
    respond: Annotated[
        bool,
        Option(
            "--respond",
            help="Treat messages as prompts: the model replaces their last answer.",
        ),
    ] = False
    streaming: Annotated[
        bool, Option("--streaming", help="Read the data row by row, and no more than is needed.")
    ] = False
    max_train_tokens: Annotated[
        int,
        Option(
            min=1,
            help=(
                "Response tokens to write or read. A tenth of the prompts (at most 16,384 tokens)"
                " is held out; heads train on the rest."
            ),
        ),
    ] = 100_000
    max_minutes: Annotated[
        float, Option(min=0, help="Stop training after this many minutes; 0: no limit.")
    ] = 0.0
    target_mal: Annotated[
        float, Option(min=0, help="Stop at this mean acceptance length by replay; 0: never.")
    ] = 0.0
    epochs: Annotated[int, Option(min=1, help="Passes over the tokens.")] = 4
    """More than the companion's default: there are only these tokens, while the companion gets new
    ones with every step.
    """
    learning_rate: Annotated[
        float | None,
        Option(
            help=(
                "Peak learning rate of AdamW, which falls along a cosine to the end; default: 0.512"
                " / the model's hidden size, less with smaller steps."
            )
        ),
    ] = None
    batch_positions: Annotated[
        int | None,
        Option(
            min=1,
            help="Positions per micro-batch; default: 512, or fewer if there are few tokens and"
            " nothing is accumulated.",
        ),
    ] = None
    """Smaller than the companion's default: small batches are noisy, and the cosine lets them
    settle at the end. The companion has no cosine, because its policy keeps moving.
    """
    accumulate: Annotated[int, Option(min=1, help="Micro-batches per optimizer step.")] = 1
    workers: Annotated[
        int,
        Option(
            min=1,
            help="Ray processes that train together, each on its own sequences, with a GPU each.",
        ),
    ] = 1
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option(help="Dtype of the model, its hidden states and all products."),
    ] = "float32"
    cache_bytes: Annotated[
        int, Option(min=0, help="Maximum bytes of hidden states kept between epochs; 0: none.")
    ] = 4 * 1024**3
    temperature: Annotated[
        float, Option(help="Sampling temperature of the responses, above 0.")
    ] = SAMPLING.temperature
    max_new_tokens: NewTokens = 128
    """More than a run's default, which is meant for an engine with short contexts: here the engine
    is made large enough.
    """
    seed: Seed = 0
    fresh: Annotated[
        bool, Option("--fresh", help="Start over instead of continuing an interrupted training.")
    ] = False

    def sizes(self, hidden_size: int, vocab_size: int) -> HeadsConfig:
        """Sizes of the heads for a model of this width and vocabulary."""
        return HeadsSection(
            kind=self.kind,
            num_heads=self.num_heads,
            context=self.context,
            context_layers=self.context_layers,
            feed_forward=self.feed_forward,
            cell=self.cell,
            copy_parts=self.copy_parts,
        ).sizes(hidden_size, vocab_size)

    def for_text(self, tokens: int, hidden_size: int) -> TrainOptions:
        """These options with the step that suits so many tokens of such a model, if none was asked
        for: little text otherwise gives so few optimizer steps that heads learn less from it than
        they could (from 9,000 tokens 1.852 in the place of 1.953 tokens an engine step). To
        accumulate is to ask for larger steps, whatever the text.
        """
        rows = self.batch_positions
        if rows is None:
            rows = LARGEST_STEP
            if self.accumulate == 1:
                enough = max(LEAST_POSITIONS, tokens * self.epochs // ENOUGH_STEPS)
                rows = max(1, min(LARGEST_STEP, enough // self.workers))
        rate = self.learning_rate
        if rate is None:
            share = min(1.0, rows * self.workers * self.accumulate / LARGEST_STEP)
            rate = COMPANION.learning_rate_of(hidden_size) * math.sqrt(share)
        return replace(self, batch_positions=rows, learning_rate=rate)

    @property
    def step_positions(self) -> int:
        """Positions of one optimizer step, of all workers together."""
        return self.worker_positions * self.workers

    @property
    def worker_positions(self) -> int:
        """Positions of one optimizer step on one worker."""
        assert self.batch_positions is not None, "known once the text is (for_text)"
        return self.batch_positions * self.accumulate

    @property
    def draft_temperature(self) -> float:
        """Draft temperature at which heads are judged, to match their loss; 0: one-hot drafts."""
        return 0.0 if self.loss == "ce" else 1.0

    def settings(self) -> dict[str, Any]:
        """Settings that the trained heads depend on, as JSON values. A resumed training must have
        the same ones.
        """
        return {key: value for key, value in asdict(self).items() if key not in NOT_IN_THE_HEADS}


@dataclass(frozen=True)
class EvalOptions:
    """Options of `medusa-ppo eval`. Pass by keyword."""

    model: Model
    heads: Annotated[str, Option(help="Native heads directory, or hf://owner/name.")]
    data: Data
    template: Template = ""
    column: Annotated[
        str,
        Option(
            help="Column with prompts, or with chat messages whose last answer the model writes."
        ),
    ] = ""
    engine: Annotated[
        Literal["replay", "vllm"],
        Option(help="`replay`: from rollouts alone; `vllm`: the engine's own counters."),
    ] = "replay"
    draft: Annotated[Literal["one-hot", "sampled"], Option(help="How drafts are drawn.")] = (
        "sampled"
    )
    """As in a run, which samples its drafts."""
    draft_temperature: Annotated[float, Option(help="Temperature of sampled drafts.")] = 1.0
    draft_vocab: DraftVocab = -1
    temperature: Annotated[
        float, Option(help="Sampling temperature; 0: always the most likely token.")
    ] = 1.0
    temperatures: Annotated[
        tuple[float, ...],
        Option(help="Several sampling temperatures, e.g. 0.3,0.7,1.0; the headline has the first."),
    ] = ()
    top_p: Annotated[float, Option(help="Nucleus mass; 1: off.")] = 1.0
    top_k: Annotated[int, Option(help="Sample from the k most likely tokens; 0: off.")] = 0
    category: Annotated[str, Option(help="Column: also give figures for each of its values.")] = ""
    compare: Annotated[
        Path | None,
        Option(help="Other heads, measured on the same rollouts (vllm: on the same prompts)."),
    ] = None
    earlier_responses: Annotated[
        int,
        Option(
            min=0,
            help=(
                "Earlier responses per prompt in a memory; sampled drafts then come from the "
                "heads and the memory."
            ),
        ),
    ] = 0
    max_new_tokens: NewTokens = 128
    limit: Annotated[int, Option(min=0, help="Prompts to use; 0: all.")] = 256
    seed: Seed = 0

    @property
    def every_temperature(self) -> tuple[float, ...]:
        return self.temperatures or (self.temperature,)
