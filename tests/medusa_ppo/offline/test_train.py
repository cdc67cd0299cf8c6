"""Training from texts and chats, without an engine: it resumes to the bit, stops where it is told,
and says what is wrong.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from heads.checkpoint import load_heads
from heads.errors import CheckpointError, ConfigError, DataError, RunError
from heads.modules import MedusaHeads
from medusa_ppo.cli.app import app
from medusa_ppo.companion.trainer import COUNTERS, HeadsTrainer, TrainReport
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.data_parallel import TrainingWorker
from medusa_ppo.offline.hub import model_card
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.scene import find_source, plan_training, read_scene
from medusa_ppo.offline.schedule import TrainingPlan
from medusa_ppo.offline.train import ResumeFolder, TrainPosition, _keep_best, _Run, train_heads
from medusa_ppo.runtime.console import OfflineProgress

TIMES = ("tokens_per_s", "wall_s")


@pytest.fixture
def options(chain_actor: Path, questions: Path, tmp_path: Path) -> TrainOptions:
    return TrainOptions(
        model=str(chain_actor),
        data=str(questions),
        out=tmp_path / "heads",
        column="question",
        num_heads=2,
        epochs=3,
        batch_positions=32,
    )


def train(options: TrainOptions) -> dict[str, Any]:
    return train_heads(options, OfflineProgress(quiet=True))


def log(options: TrainOptions) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (options.out / "train.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def state(options: TrainOptions) -> dict[str, torch.Tensor]:
    return load_heads(options.out)[0].trainable_state()


def interrupt_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second optimizer step after so many parts."""
    real = HeadsTrainer._step
    seen = []

    def step(self: HeadsTrainer, *arguments: Any) -> torch.Tensor:
        seen.extend([True] if self.batches_trained == parts else [])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(HeadsTrainer, "_step", step)


def save_after_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_ppo.offline.train.SAVE_EVERY_S", -1.0)
    monkeypatch.setattr("medusa_ppo.offline.train.TIMES_A_SAVE", 0)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_an_interrupted_training_ends_with_the_same_bits(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    whole = replace(options, out=tmp_path / "whole")
    best = train(whole)
    assert len(log(whole)) == 12 and not (whole.out / "resume").exists()

    cut = replace(options, cache_bytes=cache_bytes)
    for parts in (5, 6):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(parts, patch)
            train(cut)
        assert len(log(cut)) == parts
    assert (options.out / "resume" / "trainer.safetensors").is_file()
    again = train(cut)
    assert {k: v for k, v in again.items() if k not in TIMES} == {
        k: v for k, v in best.items() if k not in TIMES
    }
    assert log(cut) == log(whole) and not (cut.out / "resume").exists()
    for name, value in state(whole).items():
        assert torch.equal(value, state(cut)[name]), name


def test_a_killed_training_goes_on_from_its_last_save(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ran when the process died: the log and the best heads may be further on than the
    state.
    """
    snapshot = tmp_path / "snapshot"
    real = ResumeFolder.save_trainer

    def save(self: ResumeFolder, state: dict[str, torch.Tensor], position: TrainPosition) -> None:
        real(self, state, position)
        if position.parts == 5:
            shutil.copytree(options.out / "resume", snapshot)

    save_after_each_part(monkeypatch)
    monkeypatch.setattr(ResumeFolder, "save_trainer", save)
    train(options)
    expected = log(options)
    heads = state(options)
    shutil.copytree(snapshot, options.out / "resume")
    train(options)
    assert log(options) == expected and len(expected) == 12
    for name, value in heads.items():
        assert torch.equal(value, state(options)[name]), name


def test_a_sigterm_saves_whatever_handler_a_library_has_left(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HeadsTrainer._step
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def step(self: HeadsTrainer, *arguments: Any) -> torch.Tensor:
        if self.batches_trained == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(HeadsTrainer, "_step", step)
            train(options)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "the handler of before is back"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(log(options)) == 2 and (options.out / "resume" / "trainer.safetensors").is_file()


def test_other_settings_are_refused_and_fresh_begins_anew(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        train(options)
    with pytest.raises(ConfigError, match="epochs 1 \\(was 3\\)"):
        train(replace(options, epochs=1))
    settings = options.out / "resume" / "settings.json"
    settings.write_text(settings.read_text().replace('"format_version": 3', '"format_version": 1'))
    with pytest.raises(ConfigError, match="format_version 3 \\(was 1\\)"):
        train(options)
    train(replace(options, epochs=1, fresh=True))
    assert len(log(options)) == 4


def test_it_stops_at_the_target_and_at_the_time_and_goes_on_when_told(
    options: TrainOptions,
) -> None:
    train(replace(options, target_mal=0.5))
    assert len(log(options)) == 1
    assert train(replace(options, target_mal=0.5)) and len(log(options)) == 1, (
        "the target is reached already"
    )
    train(replace(options, max_minutes=1e-9))
    assert len(log(options)) == 1, "so is the end of the time"
    train(options)
    assert len(log(options)) == 12


def test_the_time_counts_what_is_written(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only writing moves: 10 s for the best heads, 100 s for a save."""
    clock = SimpleNamespace(now=0.0)

    def slow(writes: Callable[..., None], takes_s: float) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            writes(*arguments)
            clock.now += takes_s

        return call

    module = "medusa_ppo.offline.train"
    stopped_clock = SimpleNamespace(monotonic=lambda: clock.now + 1e-6 * next(ticks))
    ticks = itertools.count()
    monkeypatch.setattr(f"{module}.time", stopped_clock)
    monkeypatch.setattr(f"{module}._keep_best", slow(_keep_best, 10.0))
    monkeypatch.setattr(ResumeFolder, "save_trainer", slow(ResumeFolder.save_trainer, 100.0))
    save_after_each_part(monkeypatch)
    train(replace(options, max_minutes=1.5))
    lines = (options.out / "train.jsonl").read_text().splitlines()
    assert [round(json.loads(line)["wall_s"]) for line in lines] == [10], "and then the time is up"


def test_saves_of_a_large_state_take_a_small_share_of_the_time(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only parts (5 s each) and saves (10 s each) move."""
    clock = SimpleNamespace(now=0.0)
    saved_at: list[float] = []

    def save(*_: object) -> None:
        clock.now += 10.0
        saved_at.append(clock.now)

    def train_part(worker: TrainingWorker, *_: object) -> tuple[TrainReport, int]:
        clock.now += 5.0
        worker._trainer.batches_trained += 1
        return TrainReport(), 1

    monkeypatch.setattr(
        "medusa_ppo.offline.train.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    monkeypatch.setattr(TrainingWorker, "train", train_part)
    monkeypatch.setattr(ResumeFolder, "save_trainer", save)
    train(replace(options, epochs=100))
    apart = [later - earlier for earlier, later in itertools.pairwise(saved_at)]
    assert len(apart) > 5 and saved_at[0] < 60
    assert all(10.0 / seconds <= 0.06 for seconds in apart)


def test_half_written_heads_of_a_killed_training_are_removed(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = options.out / ".best-a1b2c3" / "heads"
    left.mkdir(parents=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(2, patch)
        train(options)
    assert not left.parent.exists(), "at the beginning"
    left.mkdir(parents=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("medusa_ppo.offline.train._Run.train", interrupted)
        train(options)
    assert not left.parent.exists(), "and when it is resumed"


@pytest.mark.parametrize("file", ["modules.py", "train.jsonl", "config.json"])
def test_a_folder_of_something_else_is_refused(options: TrainOptions, file: str) -> None:
    """In a checkout `heads/` is this package's source. `train.jsonl` is also a name of data, and a
    model's folder has a config.json beside weights of the same name as the heads'.
    """
    options.out.mkdir()
    (options.out / file).write_text("{}")
    for start in (train, plan_training):
        with pytest.raises(CheckpointError, match="holds no heads"):
            start(options)
    assert [path.name for path in options.out.iterdir()] == [file]
    assert (options.out / file).read_text() == "{}"


def test_a_folder_where_a_log_is_written_is_none_of_something_else(options: TrainOptions) -> None:
    options.out.mkdir()
    (options.out / "train.log").write_text("")
    plan_training(options)


def test_a_second_training_in_the_same_folder_is_refused(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(options, epochs=1)
    half = options.out / ".best-a1b2c3"
    real = _Run.train

    def with_a_second(run: _Run, progress: OfflineProgress) -> None:
        monkeypatch.setattr(_Run, "train", real)
        half.mkdir()
        for second in (asked, replace(asked, fresh=True, seed=1)):
            with pytest.raises(RunError, match="Another training writes"):
                train(second)
        assert half.is_dir(), "what the first one is writing"
        real(run, progress)

    monkeypatch.setattr(_Run, "train", with_a_second)
    train(asked)
    train(asked)
    assert not half.exists(), "once it has ended, the next one may begin"


def test_where_there_are_no_locks_heads_are_trained_all_the_same(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    # Not fcntl's: the library that reads the data has locks of its own, and waits for them.
    monkeypatch.setattr("medusa_ppo.runtime.files.locked", no_locks)
    train(replace(options, epochs=1))
    assert "can't be locked (Function not implemented)" in caplog.text


def test_streamed_data_is_read_only_as_far_as_it_is_needed(
    options: TrainOptions, questions: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "train-0.jsonl").write_text(questions.read_text())
    (folder / "train-1.jsonl").write_text('{"question": broken\n')
    few = replace(options, data=str(folder), max_train_tokens=200, epochs=1)
    with pytest.raises(DataError):
        train(few)
    train(replace(few, streaming=True))
    reference = replace(options, max_train_tokens=200, epochs=1, out=tmp_path / "reference")
    train(reference)
    assert log(reference) == log(few)


def test_accumulated_micro_batches_make_the_step_of_one_large_batch(
    options: TrainOptions, tmp_path: Path
) -> None:
    large = replace(options, epochs=1, batch_positions=64)
    small = replace(large, batch_positions=16, accumulate=4, out=tmp_path / "small")
    train(large)
    train(small)
    for a, b in zip(log(large), log(small), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    for name, value in state(large).items():
        torch.testing.assert_close(value, state(small)[name], rtol=0, atol=2e-3)


def test_a_step_larger_than_a_part_makes_the_part_larger(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that held less than a step cut it short, and the step size fell to its end long
    before the last step.
    """
    save_after_each_part(monkeypatch)
    taken: list[int] = []
    planned: list[TrainingPlan] = []
    real_save, real_plan = ResumeFolder.save_trainer, TrainingPlan.of

    def save(self: ResumeFolder, state: dict[str, torch.Tensor], position: TrainPosition) -> None:
        taken.append(int(state["counters"][COUNTERS.index("optimizer_steps")]))
        real_save(self, state, position)

    def plan(*arguments: Any) -> TrainingPlan:
        planned.append(real_plan(*arguments))
        return planned[0]

    monkeypatch.setattr(ResumeFolder, "save_trainer", save)
    monkeypatch.setattr(TrainingPlan, "of", plan)
    asked = replace(options, epochs=2, accumulate=8)
    with monkeypatch.context() as patch:
        patch.setattr("medusa_ppo.offline.schedule.PART_TOKENS", 64)
        train(asked)
        [made] = planned
        steps = made.steps
    assert taken[-1] == steps
    # Groups can't be cut, so parts are not to the token what was asked for.
    mean = asked.epochs * sum(made.positions) / steps
    assert 0.9 * asked.step_positions < mean < 1.1 * asked.step_positions

    plain = replace(options, epochs=1, out=options.out.with_name("plain"))
    taken.clear()
    planned.clear()
    train(plain)
    assert taken[-1] == planned[0].steps, "nor do small steps go on after the end of the schedule"


def test_the_plan_of_large_steps_is_what_was_asked_for() -> None:
    """4 workers with 4,915 written tokens in each group."""
    groups = [4915] * 4096
    for accumulate, parts in ((1, 154), (64, 154), (128, 77)):
        options = TrainOptions(
            model="",
            data="",
            out=Path(),
            workers=4,
            batch_positions=512,
            accumulate=accumulate,
            epochs=4,
        )
        plan = TrainingPlan.of(options, groups, sum(groups))
        mean = options.epochs * sum(groups) / plan.steps
        assert mean == pytest.approx(options.step_positions, rel=0.03)
        assert plan.parts == parts


@pytest.mark.parametrize(
    ("step", "tokens", "steps"),
    [
        (24 * 4096, 100_000, 1),
        (16 * 4096, 70_000, 1),
        (16 * 4096, 100_000, 2),
        (8 * 4096, 100_000, 3),
        (24 * 4096, 30_000, 1),
        (512, 600, 1),
        (512, 2_100, 4),
        (512, 90_000, 176),
    ],
)
def test_little_text_is_cut_into_the_nearest_number_of_steps(
    step: int, tokens: int, steps: int
) -> None:
    """What had little more than one step got two of half the size, or four of a quarter."""
    rows = min(step, 4096)
    options = TrainOptions(
        model="", data="", out=Path(), batch_positions=rows, accumulate=step // rows, epochs=1
    )
    groups = [tokens // 100] * 100
    assert TrainingPlan.of(options, groups, tokens).steps == steps


def test_a_training_of_an_older_version_is_refused(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position counts parts, and it had others, cut into other steps."""
    large = replace(options, accumulate=128)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("medusa_ppo.offline.train._Run.train", interrupted)
        train(large)
    settings = large.out / "resume" / "settings.json"
    saved = json.loads(settings.read_text())
    settings.write_text(json.dumps(saved | {"format_version": 2}))
    with pytest.raises(ConfigError, match=r"format_version 3 \(was 2\)"):
        train(large)


@pytest.mark.parametrize(
    ("asked", "tokens", "positions", "rate"),
    [
        ({}, 2_000, 128, 1e-3),
        ({}, 49_000, 280, 1.479e-3),
        ({}, 100_000, 512, 2e-3),
        ({"workers": 8}, 1_000_000, 512, 2e-3),
        ({"workers": 8}, 8_000, 16, 1e-3),
        ({"batch_positions": 512}, 2_000, 512, 2e-3),
        ({"batch_positions": 128}, 100_000, 128, 1e-3),
        ({"learning_rate": 3e-3}, 2_000, 128, 3e-3),
        ({"accumulate": 8}, 8_100, 512, 2e-3),
        ({"accumulate": 64}, 90_000, 512, 2e-3),
        ({"accumulate": 8, "workers": 8}, 90_000, 512, 2e-3),
        ({"accumulate": 2, "batch_positions": 64}, 90_000, 64, 1e-3),
    ],
)
def test_little_text_is_learned_in_small_steps(
    options: TrainOptions, asked: dict[str, Any], tokens: int, positions: int, rate: float
) -> None:
    """From 9,000 tokens heads learned 1.852 tokens a step in few large steps, not 1.953. Who
    accumulates asks for a larger one: micro-batches had 16 positions, or 1, in the place of it.
    """
    defaults = TrainOptions(model="", data="", out=Path())
    found = replace(defaults, **asked).for_text(tokens, 256)
    assert found.batch_positions == positions
    assert found.learning_rate == pytest.approx(rate, rel=1e-3)
    wide = replace(defaults, **asked).for_text(tokens, 4096)
    expected = rate if "learning_rate" in asked else rate / 16
    assert wide.learning_rate == pytest.approx(expected, rel=1e-3)


def test_text_that_the_model_did_not_write_gives_no_draft_temperatures(
    options: TrainOptions, chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay of a text counts a draft as accepted where the text has it, while the model would
    seldom write it: temperatures fitted to that are worse than none. The figure says so as well,
    wherever it is shown.
    """

    def fit(heads: MedusaHeads, *_: Any, **__: Any) -> None:
        heads.temperatures_K.fill_(0.5)

    monkeypatch.setattr("medusa_ppo.offline.data_parallel.fit_temperatures", fit)
    few = replace(options, epochs=1)
    best = train(few)
    ids = AutoTokenizer.from_pretrained(chain_actor)("17 + 25 = 42; and so on").input_ids
    rollouts = tmp_path / "rollouts.jsonl"
    # Without log-probs, which are the actor's own then.
    rows = [{"prompt_ids": [1, i], "response_ids": ids} for i in range(2, 32)]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = replace(few, data=str(rollouts), column="", out=tmp_path / "own")
    train(own)
    for trained, by_model, temperature in ((few, False, 1.0), (own, True, 0.5)):
        assert {line["written_by_model"] for line in log(trained)} == {by_model}
        heads, saved = load_heads(trained.out)
        assert heads.temperatures_K.tolist() == [temperature] * 2
        assert saved.metadata["written_by_model"] is by_model
        card = model_card(trained.out, "me/heads")
        assert ("which the model did not write" in card) is not by_model
        assert ("by replay on responses" in card) is by_model
        assert "written_by_model" not in card

    actor = ["--model", few.model, "--data", few.data, "--column", "question", "--out", "x"]
    monkeypatch.setattr("medusa_ppo.offline.train.train_heads", lambda *_: best)
    shown = CliRunner().invoke(app, ["train", *actor])
    assert shown.exit_code == 0, shown.output
    last = " ".join(shown.output.split("The heads in ")[1].split())
    assert "that the model did not write" in last and "medusa-ppo eval" in last


def test_who_wrote_the_samples_is_kept_for_a_resumed_training(
    options: TrainOptions, tmp_path: Path
) -> None:
    options.out.mkdir()
    samples = [
        Sample((1, 2, 3), ((1, 3),), 0, by_model=False),
        Sample((1, 2, 3), ((1, 3),), 1),
        Sample((1, 2, 3), ((1, 3),), 2, (-1.0, -2.0)),
    ]
    resume = ResumeFolder(options.out, options)
    resume.begin()
    resume.save_samples(samples)
    assert ResumeFolder(options.out, options).samples() == samples
    file = options.out / "resume" / "samples.json"
    file.write_text(json.dumps([row[:4] for row in json.loads(file.read_text())]))
    older = ResumeFolder(options.out, options).samples()
    assert older is not None and [sample.by_model for sample in older] == [False, False, True]


@pytest.mark.parametrize(("kind", "stored"), [("hydra", False), ("medusa", True)])
def test_the_actors_lm_head_is_stored_only_for_stock_vllm(
    options: TrainOptions, kind: Literal["hydra", "medusa"], stored: bool
) -> None:
    """At a large vocabulary it is half of the folder, and nothing else reads it."""
    train(replace(options, kind=kind, epochs=1))
    assert load_heads(options.out)[1].has_lm_head is stored


def test_bfloat16_learns_like_float32(options: TrainOptions, tmp_path: Path) -> None:
    half = replace(options, dtype="bfloat16", out=tmp_path / "half")
    train(options)
    train(half)
    losses = [line["loss"] for line in log(options)]
    assert [line["loss"] for line in log(half)] == pytest.approx(losses, rel=0.05) and losses != [
        line["loss"] for line in log(half)
    ]


def test_chats_are_trained_on_and_found_by_their_column(
    options: TrainOptions, chat_model: Path, questions: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line)["question"] for line in questions.read_text().splitlines()]
    chats = [
        {"messages": [{"role": "user", "content": r}, {"role": "assistant", "content": r}]}
        for r in rows
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    chat = replace(options, model=str(chat_model), data=str(data), column="", epochs=1)
    train(chat)
    alone = replace(options, epochs=1, out=tmp_path / "alone")
    train(alone)
    # Of a chat the answers count, with their end token; of a text all but the first token.
    assert log(chat)[-1]["tokens"] == pytest.approx(log(alone)[-1]["tokens"], rel=0.2)
    assert ("chat", "messages") in [
        (str(v).split("(")[-1][:-1], str(v).split("'")[1])
        for k, v in plan_training(chat)
        if k == "source"
    ]


def test_where_the_text_comes_from() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert find_source({"prompt": "a", "x": "b"}, "", "").kind == "prompts"
    assert find_source({"prompt": "a", "x": "b"}, "", "x").kind == "texts"
    assert find_source({"messages": chat}, "", "") == find_source(
        {"messages": chat}, "", "messages"
    )
    assert find_source({"messages": chat}, "", "", respond=True).kind == "prompts"
    assert find_source({"x": "b"}, "{x}", "").kind == "prompts"
    for template, column in (("", ""), ("{x}", "x"), ("", "y")):
        with pytest.raises(DataError):
            find_source({"x": "b"}, template, column)


@pytest.mark.parametrize("streamed_rows", [0, 2])
@pytest.mark.parametrize("empty", [[], None])
def test_an_empty_first_conversation_makes_no_texts_of_the_others(
    chat_model: Path, tmp_path: Path, empty: list[Any] | None, streamed_rows: int
) -> None:
    """The lists of messages were written out as Python shows them, and learned so."""
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "it is 2"}]
    data = tmp_path / "rows.jsonl"
    rows = [{"messages": value} for value in (empty, chat, empty, chat)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setting = read_scene(str(chat_model), str(data), "", 16, streamed_rows=streamed_rows)
    assert setting.source.kind == "chat" and list(setting.texts) == [chat, chat]
    asked = read_scene(str(chat_model), str(data), "", 16, respond=True, streamed_rows=4)
    assert asked.kept == [1, 3] and asked.tokenizer.decode(asked.prompts[0]) == "u: 1 + 1 a: "


@pytest.mark.parametrize(
    "value",
    [
        {"role": ["user", "assistant"], "content": ["1 + 1", "2"]},  # A Sequence of `datasets`.
        [{"from": "human", "value": "1 + 1"}],
        [1, 2],
        7,
    ],
)
def test_only_texts_and_messages_are_learned(value: Any) -> None:
    for respond in (False, True):
        with pytest.raises(DataError, match="column messages"):
            find_source({"messages": value}, "", "", respond)


def test_messages_and_prompt_columns_become_prompts(chat_model: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "what is 1 + 2?"},
        {"role": "assistant", "content": "it is 3"},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": chat, "prompt": "1 + 1"}) + "\n")
    setting = read_scene(str(chat_model), str(data), "", 16, respond=True)
    assert [setting.tokenizer.decode(ids) for ids in setting.prompts] == ["u: what is 1 + 2? a: "]
    data.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("1 + 1", "2 + 2 " * 500, "3 + 3"))
    )
    setting = read_scene(str(chat_model), str(data), "", 16)
    assert [setting.tokenizer.decode(ids) for ids in setting.prompts] == ["1 + 1", "3 + 3"]
    assert setting.kept == [0, 2] and setting.skipped == 1
    assert read_scene(str(chat_model), str(data), "", 16, streamed_rows=1).kept == [0]


def test_the_plan_says_sizes_and_writes_nothing(options: TrainOptions) -> None:
    plan = dict(plan_training(options))
    assert (
        "2 x hydra" in plan["heads"]
        and "GFLOP/s" in plan["matrix rate here"]
        and "at least" in plan["training takes"]
    )
    assert not options.out.exists()


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_learning_rate_that_can_not_be_is_refused_before_any_work(
    options: TrainOptions, rate: float
) -> None:
    asked = replace(options, learning_rate=rate)
    for attempt in (plan_training, train):
        with pytest.raises(ConfigError, match="--learning-rate"):
            attempt(asked)
    assert not options.out.exists()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_heads_are_trained_for_a_temperature_above_0(
    options: TrainOptions, temperature: float
) -> None:
    asked = replace(options, temperature=temperature)
    with pytest.raises(ConfigError, match="above 0"):
        train(asked)
    with pytest.raises(ConfigError, match="above 0"):
        plan_training(asked)
    assert not options.out.exists()
