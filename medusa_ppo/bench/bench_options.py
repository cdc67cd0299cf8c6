"""Options of `medusa-ppo bench`, one class per command; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import ValidationError
from typer import Option

from heads.errors import ConfigError
from heads.heads_config import KINDS
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.offline.options import Data, Model, NewTokens, Seed, Template

Table = Sequence[Sequence[str]]
"""The header and rows of a result, as text."""

Heads = Annotated[str, Option(help="Native heads directory.")]


@dataclass(frozen=True)
class RolloutBench:
    """`bench rollout`: what is served, and how often."""

    model: Model
    heads: Heads
    data: Data
    template: Template
    stock_heads: Annotated[
        str, Option(help="Heads of kind medusa for vLLM's own Medusa; empty: leave that arm out.")
    ] = ""
    batches: Annotated[tuple[int, ...], Option(help="Numbers of running sequences.")] = (
        1,
        4,
        16,
        64,
    )
    rounds: Annotated[int, Option(min=1, help="Rounds; every arm takes part in each.")] = 6
    max_new_tokens: NewTokens = 96
    temperature: Annotated[float, Option(help="Sampling temperature.")] = 1.0
    draft_temperature: Annotated[
        float, Option(help="Draft temperature of our heads; 0: one-hot drafts.")
    ] = 1.0
    draft_vocab: Annotated[
        int,
        Option(
            min=-1,
            help="Draft from this many of the most frequent tokens; 0: from all; -1: decide as a "
            "run does.",
        ),
    ] = -1
    fixed: Annotated[
        tuple[int, ...],
        Option(
            min=0,
            help="Fixed numbers of drafts, each an arm; 0: our engine without drafts; default: as"
            " many as there are heads.",
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Dtype of the engines; auto: as a run's, bfloat16 on a GPU that has it."),
    ] = "auto"
    eager: Annotated[
        bool,
        Option("--eager", help="Skip torch.compile: starts sooner, but is not vLLM's default."),
    ] = False
    others: Annotated[
        tuple[str, ...],
        Option(
            help=(
                "More arms: ngram and suffix (needs arctic-inference), vLLM's own ways to draft;"
                " again, a second engine without speculation, which shows the noise; or none."
            )
        ),
    ] = ("ngram",)
    memory_bytes: Annotated[
        int, Option(min=0, help="Bytes of our memory of earlier responses; 0: heads alone.")
    ] = 0
    threads: Annotated[int, Option(min=1, help="CPU threads of each engine.")] = 2
    seed: Seed = 0


@dataclass(frozen=True)
class HeadsBench:
    """`bench heads`: which heads are compared, on which tokens."""

    model: Model
    data: Data
    template: Template
    train_tokens: Annotated[int, Option(min=1, help="Response tokens to train on.")] = 100_000
    epochs: Annotated[int, Option(min=1, help="Passes over the tokens.")] = 4
    num_heads: Annotated[int, Option(min=1, help="K, the number of heads.")] = 4
    kinds: Annotated[
        tuple[str, ...], Option(help="Kinds of heads to compare; hydra:N has a context of N pairs.")
    ] = ("medusa", "hydra:0", "hydra:16")
    losses: Annotated[tuple[str, ...], Option(help="Losses to compare.")] = (
        "ce",
        "tv",
        "ce_tv",
        "kl",
        "kl_tv",
    )
    max_new_tokens: NewTokens = 96
    learning_rate: float | None = None
    batch_positions: int = 512
    seed: Seed = 0

    def __post_init__(self) -> None:
        """Refuse an unknown kind or loss, which would show only when its turn to train comes.

        Raises:
            ConfigError: there is no such kind or loss.
        """
        for kind in self.kinds:
            self.section(kind)
        known = get_args(CompanionConfig.model_fields["loss"].annotation)
        for loss in self.losses:
            if loss not in known:
                raise ConfigError(
                    "The loss is unknown.",
                    given=f"--losses {','.join(self.losses)}: {loss}",
                    expected=" | ".join(known),
                    do="Correct --losses.",
                )

    def section(self, kind: str) -> HeadsSection:
        """The settings of heads of kind `medusa`, `hydra`, or `hydra:N` (a context of N pairs)."""
        name, _, pairs = kind.partition(":")
        given = {"kind": name, "num_heads": self.num_heads} | ({"context": pairs} if pairs else {})
        try:
            return HeadsSection.model_validate(given)
        except ValidationError as error:
            raise ConfigError(
                "The kind of heads is unknown.",
                given=f"--kinds {','.join(self.kinds)}: {kind}",
                expected=f"{', '.join(KINDS)}, or hydra:N with N pairs",
                do="Correct --kinds.",
            ) from error


@dataclass(frozen=True)
class SwapBench:
    """`bench swap`: which heads are put into a running engine, and how often."""

    model: Model
    heads: Heads
    repeats: Annotated[int, Option(min=1, help="Swaps to time.")] = 10
    seed: Seed = 0


@dataclass(frozen=True)
class CompanionBench:
    """`bench companion`: the PPO step that is timed, and how often."""

    model: Model
    data: Data
    template: Template
    kind: Annotated[Literal["medusa", "hydra"], Option(help="Kind of the heads.")] = "hydra"
    rounds: Annotated[
        int, Option(min=1, help="Pairs of PPO steps with and without the companion.")
    ] = 8
    prompts_per_step: Annotated[
        int, Option(min=1, help="Prompts per PPO step, with 4 responses each.")
    ] = 16
    max_new_tokens: NewTokens = 64
    seed: Seed = 0
