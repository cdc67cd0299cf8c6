"""The prompts of a PPO run: rows, rendered and tokenized once, handed out in an order that only the seed decides."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.config import DataConfig
from medusa_ppo.data import Row, load_rows, render_prompts, require_column
from medusa_ppo.demo import demo_rows

logger = logging.getLogger(__name__)

DEMO = "demo"
ANSWER = "answer"
DEMO_ROWS = 2048
FIRST_ROWS = re.compile(r"(?P<split>\w+)\[:(?P<limit>\d+)\]")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text, its tokens, and the row it came from (the reference answer under `answer`)."""

    text: str
    token_ids: tuple[int, ...]
    row: Row


class PromptStream:
    """Usable prompts in passes over the data, each pass in an order of its own.

    Attributes:
        prompts: all usable prompts, in the order of the data.
        left_out: rows whose prompt is longer than allowed.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, left_out: int = 0) -> None:
        if not prompts:
            raise DataError(
                "No prompt is usable.", given=f"0 prompts, {left_out} left out", expected="at least one", do="Raise data.max_prompt_tokens."
            )
        self.prompts = list(prompts)
        self.left_out = left_out
        self._seed = seed

    @classmethod
    def load(cls, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PromptStream:
        """Read, render and tokenize the data of a run.

        Raises:
            DataError: see medusa_ppo.data; also when the answer column is missing or every prompt is too long.
        """
        rows = _rows(config)
        texts = render_prompts(rows, template=config.template)
        if config.answer_column:
            require_column(rows, config.answer_column)
            rows = [{**row, ANSWER: row[config.answer_column]} for row in rows]
        every = [Prompt(text, tuple(ids), row) for text, ids, row in zip(texts, tokenizer(texts)["input_ids"], rows, strict=True)]
        usable = [prompt for prompt in every if 0 < len(prompt.token_ids) <= config.max_prompt_tokens]
        if len(usable) < len(every):
            logger.warning(
                "%d of %d prompts are longer than %d tokens and left out", len(every) - len(usable), len(every), config.max_prompt_tokens
            )
        return cls(usable, seed=seed, left_out=len(every) - len(usable))

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of a step: positions step * size ... of the endless stream. A function of seed and step alone."""
        total = len(self.prompts)
        chosen: list[Prompt] = []
        while len(chosen) < size:
            turn, offset = divmod(step * size + len(chosen), total)
            order = self._order(turn)[offset : offset + size - len(chosen)]
            chosen += [self.prompts[i] for i in order]
        return chosen

    def _order(self, turn: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + turn) % 2**63)
        return torch.randperm(len(self.prompts), generator=generator).tolist()


def _rows(config: DataConfig) -> list[dict[str, Any]]:
    """The rows; `SPLIT[:N]` are the first N of any source, and what else stands in brackets is the hub's to read."""
    first = FIRST_ROWS.fullmatch(config.split)
    split, limit = (first["split"], int(first["limit"])) if first else (config.split, 0)
    if config.path == DEMO:
        return list(demo_rows(limit=limit or DEMO_ROWS))
    return load_rows(config.path, split=split, limit=limit)
