"""A saved run goes on as if it had never stopped; a damaged or foreign one is refused in one
sentence.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heads.checkpoint import load_state
from heads.errors import CheckpointError, ConfigError
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.drafting.memory import ResponseMemory, prompt_key
from medusa_ppo.ppo import run_state as checkpoint
from medusa_ppo.ppo import trained_files
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.run_state import (
    RunPosition,
    companion_state,
    keep_best,
    memory_of,
    read_position,
    save_checkpoint,
    saved_folder,
    saved_memory,
)
from medusa_ppo.reports.store import RunWriter
from medusa_ppo.runtime.files import remove_unfinished


def learner(actor) -> Learner:
    actor = copy.deepcopy(actor)
    return Learner(
        actor,
        Critic(actor),
        PPOConfig(actor_learning_rate=1e-2, critic_learning_rate=1e-2, minibatch_size=4),
    )


def train(one: Learner, batch: PPOBatch, steps: range) -> None:
    for step in steps:
        scores, _ = one.score(batch, torch.arange(float(len(batch))), Sampling())
        one.update(batch, scores, Sampling(), step)


def weights(one: Learner) -> torch.Tensor:
    return torch.cat(
        [p.detach().flatten() for m in (one.actor, one.critic) for p in m.parameters()]
    )


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return build_config({"name": "run", "out": str(tmp_path)})


@pytest.mark.parametrize("tied", [False, True])
def test_resumed_is_bit_identical_to_never_stopped(
    tiny_actor, make_rollouts, config: RunConfig, tied: bool
):
    actor = tiny_actor(tied=tied)
    batch = PPOBatch(make_rollouts(8))
    whole = learner(actor)
    train(whole, batch, range(4))
    first = learner(actor)
    train(first, batch, range(2))
    save_checkpoint(config.run_dir, first, RunPosition(2, 2, 1.5), config)
    second = learner(actor)
    assert read_position(config.run_dir, config) == RunPosition(2, 2, 1.5)
    second.load(saved_folder(config.run_dir))
    train(second, batch, range(2, 4))
    assert torch.equal(weights(second), weights(whole))
    assert torch.equal(second.reference.lm_head.weight, actor.lm_head.weight), (
        "the reference is the first actor, not the saved one"
    )


def test_saving_again_replaces_and_leaves_nothing_else(tiny_actor, config: RunConfig):
    one = learner(tiny_actor())
    for step in (1, 2):
        save_checkpoint(config.run_dir, one, RunPosition(step, step, 0.0), config)
    assert read_position(config.run_dir, config).next_step == 2
    assert [p.name for p in config.run_dir.iterdir()] == ["checkpoint"]


def test_a_link_in_the_place_of_a_checkpoint_is_replaced_and_not_followed(
    tiny_actor, config: RunConfig, tmp_path: Path
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    kept = config.run_dir / "checkpoints" / "step-000000"
    kept.parent.mkdir(parents=True)
    for link in (config.run_dir / "checkpoint", config.run_dir / ".checkpoint.old", kept):
        link.symlink_to(outside)
    config = build_config({"name": "run", "out": str(tmp_path), "ppo": {"keep_checkpoints": 1}})
    for step in (1, 2, 3):
        save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(step, step, 0.0), config)
    assert read_position(config.run_dir, config).next_step == 3 and [
        p.name for p in outside.iterdir()
    ] == ["precious"]
    assert sorted(p.name for p in config.run_dir.iterdir()) == ["checkpoint", "checkpoints"]
    assert [p.name for p in kept.parent.iterdir()] == ["step-000003"]


def test_who_goes_back_to_an_earlier_checkpoint_keeps_the_saves_from_there_on(
    tiny_actor, config: RunConfig, tmp_path: Path
):
    """And a damaged checkpoint is not replaced with one of the steps that were given up."""
    config = build_config({"name": "run", "out": str(tmp_path), "ppo": {"keep_checkpoints": 2}})
    one = learner(tiny_actor())
    kept = config.run_dir / "checkpoints"
    for step in (4, 8, 10, 12):
        save_checkpoint(config.run_dir, one, RunPosition(step, step, 0.0), config)
        if step == 4:
            shutil.copytree(kept / "step-000004", tmp_path / "elsewhere")
    shutil.copytree(kept / "step-000010", kept / "step-000010-my-own")
    shutil.rmtree(config.run_dir / "checkpoint")
    shutil.copytree(tmp_path / "elsewhere", config.run_dir / "checkpoint")
    assert read_position(config.run_dir, config).next_step == 4
    for step, expected in ((6, ["000006"]), (8, ["000006", "000008"])):
        save_checkpoint(config.run_dir, one, RunPosition(step, step, 0.0), config)
        found = sorted(folder.name for folder in kept.iterdir())
        assert found == [*(f"step-{name}" for name in expected), "step-000010-my-own"]
    shutil.rmtree(kept / "step-000010-my-own")
    (config.run_dir / "checkpoint" / "actor.safetensors").unlink()  # A link to the kept one.
    assert read_position(config.run_dir, config).next_step == 8


def test_a_crash_between_the_renames_loses_nothing(
    tiny_actor, config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    one = learner(tiny_actor())
    save_checkpoint(config.run_dir, one, RunPosition(1, 1, 0.0), config)
    rename = checkpoint.os.rename

    def crash(source, target):
        if Path(target).name == "checkpoint":
            raise OSError("power cut")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", crash)
    with pytest.raises(OSError, match="power cut"):
        save_checkpoint(config.run_dir, one, RunPosition(2, 2, 0.0), config)
    assert read_position(config.run_dir, config).next_step == 1
    one.load(saved_folder(config.run_dir))


@pytest.mark.parametrize("crashed", [False, True])
def test_nothing_is_resumed_from_what_was_there_before_a_new_run(
    tiny_actor, config: RunConfig, crashed: bool
):
    config = config.model_copy(
        update={"ppo": config.ppo.model_copy(update={"keep_checkpoints": 1})}
    )
    save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(16, 16, 0.0), config)
    if crashed:  # Between the two renames.
        (config.run_dir / "checkpoint").rename(config.run_dir / ".checkpoint.old")
    assert read_position(config.run_dir, config).next_step == 16
    RunWriter(config.run_dir, {}).close()
    with pytest.raises(CheckpointError, match="There is nothing to resume from"):
        read_position(config.run_dir, config)
    (earlier,) = (config.run_dir / "earlier").iterdir()
    assert read_position(earlier, config).next_step == 16


def test_what_a_killed_run_had_begun_to_write_is_removed(
    tiny_actor, config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    one = learner(tiny_actor())
    run_dir = config.run_dir
    outside = tmp_path / "outside"
    save_checkpoint(run_dir, one, RunPosition(1, 1, 1.0), config)
    outside.mkdir()
    (outside / ".theirs.new-1").write_text("kept")
    (run_dir / ".away.new-1").symlink_to(outside)
    (run_dir / "heads").mkdir()
    (run_dir / "heads" / ".v000001.new-1").write_text("half")
    (run_dir / ".notes").write_text("kept")
    with monkeypatch.context() as killed:  # As by SIGKILL: no handler runs.
        killed.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        killed.setattr(checkpoint, "write_json", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_checkpoint(run_dir, one, RunPosition(2, 2, 2.0), config)
    assert len(list(run_dir.glob(".checkpoint.new-*/actor.safetensors"))) == 1
    remove_unfinished(run_dir)
    assert (
        sorted(path.name for path in run_dir.rglob(".*")) == [".notes"]
        and read_position(run_dir, config).next_step == 1
    )
    assert (outside / ".theirs.new-1").is_file()


def test_the_companions_state_goes_along(tiny_actor, config: RunConfig):
    one = learner(tiny_actor())
    save_checkpoint(config.run_dir, one, RunPosition(1, 1, 0.0), config)
    assert companion_state(config.run_dir) == ""
    state = config.run_dir / "companion" / "companion.safetensors"
    state.parent.mkdir()  # As at the companion's start.
    save_checkpoint(config.run_dir, one, RunPosition(1, 1, 0.0), config)
    assert companion_state(config.run_dir) == "", "it has saved nothing yet"
    state.write_bytes(b"first")
    save_checkpoint(config.run_dir, one, RunPosition(2, 2, 0.0), config)
    (new := state.with_name("new")).write_bytes(b"second")
    new.replace(state)  # how the companion writes
    assert (Path(companion_state(config.run_dir)) / state.name).read_bytes() == b"first"


def test_the_engines_memory_goes_along(tiny_actor, config: RunConfig):
    one = learner(tiny_actor())
    memory = ResponseMemory(1000)
    of = {"tokenizer": b"t" * 32}
    memory.remember(prompt_key([1]), [2, 3], version=5)
    save_checkpoint(config.run_dir, one, RunPosition(1, 5, 0.0), config, memory.state_dict(of))
    again = ResponseMemory(1000)
    again.load_state_dict(saved_memory(config.run_dir), of)
    assert again.rows() == memory.rows()
    save_checkpoint(config.run_dir, one, RunPosition(2, 6, 0.0), config, {})
    assert saved_memory(config.run_dir) is None


def test_another_tokenizer_or_actor_has_another_digest(tmp_path):
    class Words:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: index for index, word in enumerate(self.words)}

    sizes = {"model_type": "llama", "hidden_size": 32, "rope_theta": 1.0}
    first = memory_of(Words("a", "b"), sizes)
    assert first == memory_of(
        Words("a", "b"), {**sizes, "rope_theta": 2.0, "torch_dtype": "bfloat16"}
    )
    other = memory_of(Words("b", "a"), {**sizes, "hidden_size": 64})
    assert all(
        first[name] != other[name] and len(first[name]) == 32 for name in ("tokenizer", "actor")
    )


def test_nothing_saved_is_said(config: RunConfig):
    with pytest.raises(CheckpointError, match="nothing to resume"):
        read_position(config.run_dir, config)


def test_another_configuration_is_refused_by_name(tiny_actor, config: RunConfig):
    save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    with pytest.raises(ConfigError, match="seed was 0"):
        read_position(config.run_dir, config.model_copy(update={"seed": 1}))


def test_a_key_may_differ_if_it_is_named(tiny_actor, config: RunConfig):
    save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    changed = config.model_copy(
        update={
            "ppo": config.ppo.model_copy(update={"steps": 99, "clip_range": 0.3}),
            "name": "run",
        }
    )
    with pytest.raises(ConfigError) as error:
        read_position(config.run_dir, changed)
    assert (
        "ppo.steps was" in str(error.value)
        and "--allow ppo.steps --allow ppo.clip_range" in error.value.do
    )
    with pytest.raises(ConfigError, match=r"ppo\.clip_range was"):
        read_position(config.run_dir, changed, ["ppo.steps"])
    assert read_position(config.run_dir, changed, ["ppo.steps", "ppo.clip_range"]).next_step == 1
    assert read_position(config.run_dir, changed, ["ppo"]).next_step == 1
    with pytest.raises(ConfigError, match="Did you mean"):
        read_position(config.run_dir, changed, ["ppo.stepps"])


def test_a_moved_folder_and_a_key_that_the_state_does_not_know_are_no_change(
    tiny_actor, config: RunConfig, tmp_path: Path
):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    state = json.loads((folder / "state.json").read_text())
    del state["config"]["ppo"]["clip_range"], state["config"]["report"]
    (folder / "state.json").write_text(json.dumps(state))
    assert (
        read_position(
            config.run_dir,
            config.model_copy(update={"name": "other", "out": str(tmp_path / "moved")}),
        ).next_step
        == 1
    )


def test_a_run_of_0_3_0_names_the_sizes_that_its_heads_had(tiny_actor, config: RunConfig):
    """Its state lacks their keys, and a companion with today's defaults could not go on from it."""
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    state = json.loads((folder / "state.json").read_text())
    sizes = {"feed_forward": 0, "cell": 2, "copy_parts": 0}
    for key in sizes:
        del state["config"]["heads"][key]

    def position(**heads: object) -> RunPosition:
        changed = build_config({"name": "run", "out": config.out, "heads": heads})
        return read_position(config.run_dir, changed)

    for kind, context, had_them in (
        ("hydra", 16, True),
        ("hydra", 0, False),
        ("medusa", 16, False),
    ):
        state["config"]["heads"] |= {"kind": kind, "context": context}
        (folder / "state.json").write_text(json.dumps(state))
        assert position(kind=kind, context=context, **(sizes if had_them else {})).next_step == 1
        if had_them:
            with pytest.raises(ConfigError, match=r"heads\.cell was 2 and is 3") as error:
                position(kind=kind, context=context)
            assert all(f"--allow heads.{key}" in str(error.value.do) for key in sizes)


def test_no_secret_is_saved(tiny_actor, config: RunConfig):
    engine = config.engine.model_copy(
        update={"backend": "http://me:s3cret@host:1", "extra": {"api_key": "s3cret"}}
    )
    config = config.model_copy(update={"engine": engine})
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    assert "s3cret" not in (folder / "state.json").read_text()
    assert read_position(config.run_dir, config).next_step == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format_version": 9}', '{"format_version": 1, "next_step": "x"}']
)
def test_damaged_state_is_refused(tiny_actor, config: RunConfig, content: str):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    (folder / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        read_position(config.run_dir, config)


def test_another_models_weights_are_refused(tiny_actor, config: RunConfig):
    save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    before = learner(tiny_actor(hidden=16))
    with pytest.raises(CheckpointError, match="do not fit"):
        before.load(saved_folder(config.run_dir))


def test_a_stop_does_not_wait_for_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of a large actor's files take minutes, and after a signal a cluster kills soon."""
    began = threading.Event()
    read: list[str] = []

    class Endless:
        """A file of which each read takes a while."""

        def __init__(self, name: str) -> None:
            self._name = name

        def read(self, size: int) -> bytes:
            read.append(self._name)
            if len(read) > 1000:
                return b""
            began.set()
            time.sleep(0.01)
            return b"x"

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

    for name in ("first", "second", "third", "fourth", "fifth"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(Path, "open", lambda path, mode: Endless(path.name))

    def stop(_: int, __: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_to_disk", lambda path: None)
    before = signal.signal(signal.SIGUSR1, stop)

    def stops() -> None:
        began.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    told = threading.Thread(target=stops)
    told.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoint._sums(tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
        told.join()
    assert len(read) < 500


def test_torn_file_is_refused(tiny_actor, config: RunConfig):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    data = (folder / "actor.safetensors").read_bytes()
    (folder / "actor.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        learner(tiny_actor()).load(saved_folder(config.run_dir))


def test_a_full_disk_does_not_end_the_run(
    tiny_actor, config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog
):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trained_files, "save_state", full)
    checkpoint.try_save(config.run_dir, learner(tiny_actor()), RunPosition(3, 3, 0.0), config)
    assert "step 3" in caplog.text and "No space" in caplog.text
    assert not list(config.run_dir.iterdir())


def test_state_names_its_configuration(tiny_actor, config: RunConfig):
    folder = save_checkpoint(config.run_dir, learner(tiny_actor()), RunPosition(1, 1, 0.0), config)
    assert json.loads((folder / "state.json").read_text())["config"]["name"] == "run"


# ---- disks: full, read-only, and files that are half there or have other bytes


@pytest.fixture
def saved_twice(tiny_actor, config: RunConfig) -> RunConfig:
    """A run that keeps two checkpoints, of steps 1 and 2."""
    config = config.model_copy(
        update={"ppo": config.ppo.model_copy(update={"keep_checkpoints": 2})}
    )
    one = learner(tiny_actor())
    for step in (1, 2):
        save_checkpoint(config.run_dir, one, RunPosition(step, step, 0.0), config)
    return config


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.unlink()  # A kept checkpoint is a link to the same bytes.
    if how != "gone":
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data)


@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
@pytest.mark.parametrize(
    "name", ["actor.safetensors", "critic_optimizer.safetensors", "shaping.json"]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(
    saved_twice: RunConfig, how: str, name: str, caplog
):
    run_dir = saved_twice.run_dir
    spoil(run_dir / "checkpoint" / name, how)
    assert read_position(run_dir, saved_twice).next_step == 2, "its kept twin is whole"
    spoil(run_dir / "checkpoints" / "step-000002" / name, how)
    assert read_position(run_dir, saved_twice).next_step == 1 and name in caplog.text
    assert saved_folder(run_dir).name == "step-000001"
    spoil(run_dir / "checkpoints" / "step-000001" / name, how)
    with pytest.raises(CheckpointError, match="damaged") as error:
        read_position(run_dir, saved_twice)
    assert str(error.value).count(name) == 3 and "keep_checkpoints" in error.value.do


@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_state_file_too(saved_twice: RunConfig, how: str):
    for folder in ("checkpoint", "checkpoints/step-000002"):
        path = saved_twice.run_dir / folder / "state.json"
        spoil(path, how if how != "flip" else "cut")
    assert read_position(saved_twice.run_dir, saved_twice).next_step == 1


@pytest.mark.parametrize("limit", [100, 3000, 20_000])
def test_a_really_full_disk_leaves_the_checkpoint_before(
    tiny_actor, config: RunConfig, limit: int, caplog
):
    one = learner(tiny_actor())
    save_checkpoint(config.run_dir, one, RunPosition(1, 1, 0.0), config)
    with no_file_beyond(limit):
        checkpoint.try_save(config.run_dir, one, RunPosition(2, 2, 0.0), config)
    assert "step 2" in caplog.text and "stays" in caplog.text
    assert read_position(config.run_dir, config).next_step == 1 and [
        p.name for p in config.run_dir.iterdir()
    ] == ["checkpoint"]
    checkpoint.try_save(config.run_dir, one, RunPosition(3, 3, 0.0), config)
    assert read_position(config.run_dir, config).next_step == 3


def test_a_really_full_disk_at_an_evaluation_leaves_the_best_actor_before(
    tiny_actor, config: RunConfig, caplog: pytest.LogCaptureFixture
):
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    one = learner(tiny_actor())
    keep_best(config.run_dir, {names.EVAL_REWARD: 1.0}, one, tokenizer)
    best = config.run_dir / "best" / "evaluation.json"
    size = (config.run_dir / "best" / "model.safetensors").stat().st_size // 2
    with no_file_beyond(size):
        keep_best(config.run_dir, {names.EVAL_REWARD: 2.0}, one, tokenizer)
    assert "could not be saved" in caplog.text
    assert json.loads(best.read_text()) == {names.EVAL_REWARD: 1.0}
    assert load_state(best.with_name("model.safetensors")).keys()


def test_a_tokenizer_that_does_not_fit_on_the_disk_leaves_the_best_actor_before(
    tiny_actor, config: RunConfig, caplog: pytest.LogCaptureFixture
):
    """A fast one raises an error of no kind."""
    one = learner(tiny_actor())
    keep_best(config.run_dir, {names.EVAL_REWARD: 1.0}, one, words(10))
    best = config.run_dir / "best" / "evaluation.json"
    size = (config.run_dir / "best" / "model.safetensors").stat().st_size + 4096
    with no_file_beyond(size):
        keep_best(config.run_dir, {names.EVAL_REWARD: 2.0}, one, words(size // 8))
    assert "could not be saved" in caplog.text
    assert json.loads(best.read_text()) == {names.EVAL_REWARD: 1.0}
    assert len(AutoTokenizer.from_pretrained(best.parent)) == 10


def words(count: int) -> PreTrainedTokenizerFast:
    model = WordLevel({f"word-{number}": number for number in range(count)}, unk_token="word-0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


@contextlib.contextmanager
def no_file_beyond(size: int):
    """The kernel refuses to write further; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
