"""The scene of `train` and `eval`: model, prompts, and an engine that fits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.actors.hf import load_tokenizer
from medusa_ppo.config import EngineConfig
from medusa_ppo.data import load_rows, render_prompts
from medusa_ppo.runtime import local_ray
from medusa_ppo.serving.engine import RolloutEngine
from medusa_ppo.serving.make import make_engine

MAX_PROMPT_TOKENS = 1024
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Setting:
    """What both commands need before they start anything heavy."""

    tokenizer: PreTrainedTokenizerBase
    rows: list[dict[str, Any]]
    prompts: list[tuple[int, ...]]
    context: int
    skipped: int


def read_setting(model: str, data: str, template: str, max_new_tokens: int, limit: int = 0) -> Setting:
    """Load tokenizer and rows, render and tokenize the prompts (none without a template).

    Raises:
        ModelError, DataError: see `load_tokenizer` and `load_rows`.
    """
    tokenizer = load_tokenizer(model)
    context = int(getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None) or DEFAULT_CONTEXT)
    rows = load_rows(data, limit=limit)
    prompts: list[tuple[int, ...]] = []
    longest = min(MAX_PROMPT_TOKENS, context - max_new_tokens)
    if longest < 1:
        raise DataError(
            "No room for a prompt.", given=f"--max-new-tokens {max_new_tokens}", expected=f"less than {context}", do="Ask for fewer tokens."
        )
    if template:
        every = [tuple(tokenizer(text).input_ids) for text in render_prompts(rows, template=template)]
        prompts = [ids for ids in every if 0 < len(ids) <= longest]
        if not prompts:
            raise DataError(
                "No prompt is usable.",
                given=f"{len(every)} prompts",
                expected=f"1 to {longest} tokens each",
                do="Check --template and --data.",
            )
        return Setting(tokenizer, rows, prompts, context, len(every) - len(prompts))
    return Setting(tokenizer, rows, prompts, context, 0)


def engine_config(prompts: Sequence[Sequence[int]], max_new_tokens: int, sequences: int = 64) -> EngineConfig:
    """An engine just large enough for these prompts."""
    longest = max(len(ids) for ids in prompts) + max_new_tokens
    return EngineConfig(
        dtype="auto" if torch.cuda.is_available() else "float32",
        max_num_seqs=sequences,
        max_model_len=max(64, longest),
        memory_fraction=0.6 if torch.cuda.is_available() else 0.1,
        threads=max(1, torch.get_num_threads()),
    )


@contextmanager
def running_engine(model: str, heads_path: str, config: EngineConfig, seed: int) -> Iterator[RolloutEngine]:
    """An engine in a Ray actor of a local Ray, for the time of the block. Both are gone afterwards, come what may."""
    with local_ray(cpus=config.threads), make_engine(model, heads_path, config, seed) as engine:
        yield engine


def texts_of(rows: Sequence[dict[str, Any]], column: str) -> list[str]:
    """The full texts of a column. DataError names the columns there are."""
    if column not in rows[0]:
        raise DataError("The data has no such column.", given=column, expected=", ".join(rows[0]), do="Name one of these with --column.")
    return [str(row[column]) for row in rows if row[column]]


def out_folder(out: Path) -> Path:
    """Make the output folder now, so that a path that can't be written fails before the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            "The output folder can't be made.", given=f"{out}: {error.strerror}", expected="a writable folder", do="Choose another --out."
        ) from None
    return out
