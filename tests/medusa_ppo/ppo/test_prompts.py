"""The order of prompts, the rows behind them, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.errors import DataError
from medusa_ppo.config import DataConfig
from medusa_ppo.ppo.prompts import Prompt, PromptStream


def stream(count: int, seed: int = 0) -> PromptStream:
    return PromptStream([Prompt(str(i), (i,), {}) for i in range(count)], seed=seed)


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


class Letters:
    """A tokenizer that makes one token of each letter."""

    def __call__(self, batch: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in text] for text in batch]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": "x" * n, "solution": str(n)}) + "\n" for n in (2, 9, 3)))
    return path


def test_one_pass_shows_every_prompt_once():
    seen = [text for step in range(5) for text in texts(stream(10).batch(step, 2))]
    assert sorted(seen, key=int) == [str(i) for i in range(10)]


def test_a_batch_may_cross_passes_and_be_larger_than_the_data():
    assert len(stream(3).batch(0, 8)) == 8
    whole = [t for step in range(6) for t in texts(stream(7).batch(step, 7))]
    cut = [t for step in range(14) for t in texts(stream(7).batch(step, 3))]
    assert whole == cut, "the stream must not depend on the size of its batches"


def test_order_is_the_seeds_alone():
    assert texts(stream(50).batch(3, 8)) == texts(stream(50).batch(3, 8))
    assert texts(stream(50).batch(3, 8)) != texts(stream(50, seed=1).batch(3, 8))
    assert texts(stream(8).batch(0, 8)) != texts(stream(8).batch(1, 8)), "each pass has an order of its own"


def test_long_prompts_are_left_out_and_counted(file: Path):
    found = PromptStream.load(DataConfig(path=str(file), template="{q}", answer_column="solution", max_prompt_tokens=4), Letters(), seed=0)
    assert found.left_out == 1
    assert [(p.text, p.row["answer"]) for p in found.prompts] == [("xx", "2"), ("xxx", "3")]


def test_nothing_usable_is_an_error(file: Path):
    with pytest.raises(DataError, match="No prompt is usable"):
        PromptStream.load(DataConfig(path=str(file), template="{q}", answer_column=None, max_prompt_tokens=1), Letters(), seed=0)


def test_missing_answer_column_is_named(file: Path):
    with pytest.raises(DataError, match="solution"):
        PromptStream.load(DataConfig(path=str(file), template="{q}", answer_column="answer"), Letters(), seed=0)


def test_the_demo_task_needs_no_file():
    found = PromptStream.load(DataConfig(path="demo", split="train[:5]"), Letters(), seed=0)
    assert len(found.prompts) == 5 and all(p.row["answer"] for p in found.prompts)
