"""Prompts: their order, the rows behind them, what is left out. Paired steps: which, in which
order, what becomes of the extra rollouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.errors import DataError
from medusa_ppo.cli.input_checks import check_run
from medusa_ppo.config.data_section import DataConfig
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo.generation import Prompt, PromptStream, SpeedPairs, num_drafts, sampling_of


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
    path.write_text(
        "".join(json.dumps({"q": "x" * n, "solution": str(n)}) + "\n" for n in (2, 9, 3))
    )
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
    assert texts(stream(8).batch(0, 8)) != texts(stream(8).batch(1, 8)), (
        "each pass has an order of its own"
    )


def test_long_prompts_are_left_out_and_counted(file: Path):
    found = PromptStream.load(
        DataConfig(path=str(file), template="{q}", answer_column="solution", max_prompt_tokens=4),
        Letters(),
        seed=0,
    )
    assert found.left_out == 1
    assert [(p.text, p.row["answer"]) for p in found.prompts] == [("xx", "2"), ("xxx", "3")]


def test_nothing_usable_is_an_error(file: Path):
    with pytest.raises(DataError, match="No prompt is usable"):
        PromptStream.load(
            DataConfig(path=str(file), template="{q}", answer_column=None, max_prompt_tokens=1),
            Letters(),
            seed=0,
        )


def test_missing_answer_column_is_named(file: Path):
    with pytest.raises(DataError, match="solution"):
        PromptStream.load(
            DataConfig(path=str(file), template="{q}", answer_column="answer"), Letters(), seed=0
        )


def test_no_answer_is_asked_for_where_a_reward_model_judges(file: Path):
    found = PromptStream.load(
        DataConfig(path=str(file), template="{q}"), Letters(), seed=0, needs_answer=False
    )
    assert len(found.prompts) == 3
    named = PromptStream.load(
        DataConfig(path=str(file), template="{q}", answer_column="solution"),
        Letters(),
        seed=0,
        needs_answer=False,
    )
    assert named.prompts[0].row["answer"], "one that is there is read"


def test_the_evaluation_has_other_prompts(file: Path):
    with pytest.raises(DataError, match="no splits"):
        PromptStream.load_evaluation(
            DataConfig(path=str(file), template="{q}", answer_column="solution"), Letters()
        )
    both = [
        PromptStream.load(DataConfig(), Letters(), seed=0),
        PromptStream.load_evaluation(DataConfig(), Letters()),
    ]
    train, evaluation = ({prompt.text for prompt in stream.prompts} for stream in both)
    assert evaluation and not train & evaluation


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_a_run_does_not_evaluate_on_the_split_that_a_name_gives_both(key: str) -> None:
    """The evaluation takes the name of data.path, too: its split would be the training prompts'."""
    names = {"path": "owner/name", key: "owner/name@train_sft"}
    config = build_config({"data": {**names, "eval_split": "test_sft"}})
    with pytest.raises(DataError, match=r"data\.split=train_sft(.|\n)*data\.eval_split=train_sft"):
        check_run(config)
    with pytest.raises(DataError, match="without a split"):
        PromptStream.load_evaluation(config.data, Letters())


def test_a_path_may_hold_the_sign_of_a_split(file: Path) -> None:
    other = file.rename(file.with_name("rows@2.jsonl"))
    config = build_config({"data": {"path": str(other), "template": "{q}", "answer_column": None}})
    check_run(config)
    assert len(PromptStream.load(config.data, Letters(), seed=0).prompts) == 3


def test_texts_are_cut_and_too_short_ones_left_out(tmp_path: Path):
    (tmp_path / "texts.txt").write_text("abcdef\nx\nyz\n")
    found = PromptStream.load_texts(str(tmp_path / "texts.txt"), Letters(), seed=0, longest=4)
    assert [len(prompt.token_ids) for prompt in found.prompts] == [4, 2]
    with pytest.raises(DataError, match="text"):
        (tmp_path / "rows.jsonl").write_text('{"words": "abc"}\n')
        PromptStream.load_texts(str(tmp_path / "rows.jsonl"), Letters(), seed=0, longest=4)


def test_the_demo_task_needs_no_file():
    found = PromptStream.load(DataConfig(path="demo", split="train[:5]"), Letters(), seed=0)
    assert len(found.prompts) == 5 and all(p.row["answer"] for p in found.prompts)


def config(every: int | None = 2, drafts: int | None = None) -> RunConfig:
    sampling = {"max_new_tokens": 3, "responses_per_prompt": 1}
    values = {
        "report": {"speed_every": every},
        "engine": {"num_drafts": drafts},
        "sampling": sampling,
    }
    return build_config(values)


@pytest.fixture
def engine(tiny_actor, sampling_engine):
    engine = sampling_engine(tiny_actor())
    engine.num_drafts = 4
    return engine


PROMPTS = [(1, 2), (3,), (4, 5)]


def test_order_alternates_and_the_run_keeps_the_drafting_rollouts(engine):
    settings = config(every=2)
    pairs = SpeedPairs(engine, settings)
    kept = [pairs.generate(PROMPTS, sampling_of(settings, step), step) for step in range(4)]
    assert engine.drafts == [4, 0, 4, 4, 4, 0], (
        "steps 0 and 2 alone, step 1 plain first, step 3 plain last"
    )
    assert [rollouts.num_drafts for rollouts, _ in kept] == [4] * 4
    assert [bool(figures) for _, figures in kept] == [False, True, False, True]
    assert engine.num_drafts == 4
    figures = kept[1][1]
    assert figures[names.PAIR_SPEEDUP] == pytest.approx(
        figures[names.PAIR_DRAFTING_TOKENS_PER_S] / figures[names.PAIR_PLAIN_TOKENS_PER_S]
    )


@pytest.mark.parametrize(("memory", "known"), [(None, [True, False]), (1 << 16, [False, False])])
def test_an_engine_with_a_memory_does_not_draft_from_the_plain_run_of_a_pair(
    engine, monkeypatch: pytest.MonkeyPatch, memory: int | None, known: list[bool]
):
    """With a memory the drafting run of each pair comes first; otherwise that of every second."""
    sample = engine.generate
    remembered = set[tuple[int, ...]]()
    found = list[bool]()

    def generate(prompts, sampling):
        if engine.num_drafts:
            found.append(bool(remembered & set(prompts)))
        remembered.update(prompts)
        return sample(prompts, sampling)

    monkeypatch.setattr(engine, "generate", generate)
    settings = config(every=1)
    section = settings.engine.model_copy(update={"memory_bytes": memory})
    settings = settings.model_copy(update={"engine": section})
    pairs = SpeedPairs(engine, settings)
    for step in range(2):
        _, figures = pairs.generate([(step + 1, 2), (3 + step,)], sampling_of(settings, step), step)
        assert figures, "each step is a pair"
    assert found == known


@pytest.mark.parametrize(
    ("heads", "drafts", "found"), [(3, None, 3), (8, None, 8), (8, "auto", 8), (8, 6, 6), (2, 2, 2)]
)
def test_an_engine_with_heads_of_its_own_drafts_after_a_pair_as_before(
    engine, monkeypatch: pytest.MonkeyPatch, heads: int, drafts: int | str | None, found: int
):
    """Heads from a folder may be more or fewer than `heads.num_heads`, which is 4 here."""

    def configure(**asked: Any) -> None:
        engine.num_drafts = engine._possible(asked)

    monkeypatch.setattr(engine, "configure", configure)
    engine.max_drafts = heads
    engine.num_drafts = found
    values = {
        "report": {"speed_every": 1},
        "heads": {"path": "heads"},
        "engine": {"num_drafts": drafts},
        "sampling": {"max_new_tokens": 3, "responses_per_prompt": 1},
    }
    settings = build_config(values)
    pairs = SpeedPairs(engine, settings)
    for step in range(2):
        pairs.generate(PROMPTS, sampling_of(settings, step), step)
    assert engine.drafts == [0, found, found, 0] and engine.num_drafts == found


@pytest.mark.parametrize("settings", [config(every=None), config(drafts=0)])
def test_no_pairs_when_there_is_nothing_to_compare(engine, settings: RunConfig):
    pairs = SpeedPairs(engine, settings)
    assert not any(pairs.due(step) for step in range(20))


def test_drafting_comes_back_even_when_the_plain_run_fails(engine, monkeypatch: pytest.MonkeyPatch):
    pairs = SpeedPairs(engine, config(every=1))

    def fail(prompts, sampling):
        raise RuntimeError("engine died")

    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(RuntimeError):
        pairs.generate(PROMPTS, sampling_of(config(), 0), 0)
    assert engine.num_drafts == 4


REPEATED = {"engine": {"num_drafts": 2}, "companion": {"wait": True}}


def test_sampling_seed_is_the_runs_and_the_steps():
    run = build_config(REPEATED)
    assert sampling_of(run, 3) == sampling_of(run, 3)
    assert len({sampling_of(run, step).seed for step in range(50)}) == 50


@pytest.mark.parametrize(
    ("given", "seeded"),
    [
        ({}, False),
        (REPEATED, True),
        ({"engine": {"num_drafts": 0}, "companion": {"enabled": False}}, True),
        ({"engine": {"num_drafts": 2}}, False),
        ({"companion": {"wait": True}}, False),
        ({"sampling": {"seeded": True}}, True),
        (REPEATED | {"sampling": {"seeded": False}}, False),
    ],
)
def test_requests_have_seeds_where_a_run_can_repeat_itself_or_says_so(
    given: dict[str, Any], seeded: bool
):
    """Drafts and heads that follow the clock repeat nothing, seeds or not."""
    assert (sampling_of(build_config(given), 0).seed is not None) is seeded


def test_number_of_drafts():
    assert (num_drafts(config()), num_drafts(config(drafts=0)), num_drafts(config(drafts=2))) == (
        4,
        0,
        2,
    )
