"""Beginning and end of a run: cheap mistakes are found before anything starts; whatever was started
is closed, however the run ends.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from heads.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    MedusaError,
    ModelError,
    RunError,
)
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.demo.task import build_tokenizer
from medusa_ppo.engines.pieces import SharedMemory
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.plugin import MedusaPlugin
from medusa_ppo.ppo import run_state, session
from medusa_ppo.ppo.loop import run_ppo
from medusa_ppo.ppo.run_progress import LineProgress, ProgressSink
from medusa_ppo.ppo.run_state import saved_memory
from medusa_ppo.reports import store
from medusa_ppo.reports import trackers as make
from medusa_ppo.reports.run_files import ROLLOUTS_FOLDER
from medusa_ppo.reports.store import read_run

STEPS = 3


class SessionScene:
    """What was started and closed, in order; Ray and vLLM are left out here."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.starts: list[int] = []
        """Of engines: the step that comes next."""

    @contextlib.contextmanager
    def local_ray(self, **_: object) -> Iterator[None]:
        self.events.append("ray up")
        try:
            yield
        finally:
            self.events.append("ray down")


@pytest.fixture(scope="module")
def actor_folder(tmp_path_factory: pytest.TempPathFactory, tiny_actor) -> Path:
    tokenizer = build_tokenizer()
    folder = tmp_path_factory.mktemp("tiny")
    tiny_actor(vocab=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, sampling_engine) -> SessionScene:
    scene = SessionScene()

    def make_engine(model_path, heads_path, config, seed, supervised, places, step):
        scene.starts.append(step)
        assert not places, "no ranks, whose devices it could share"
        assert supervised, "a run survives the loss of its engine"
        scene.events.append("engine up")
        assert not heads_path, "no drafting and no companion: no heads"
        engine = sampling_engine(AutoModelForCausalLM.from_pretrained(model_path))
        monkeypatch.setattr(engine, "close", lambda: scene.events.append("engine down"))
        scene.engine = engine
        return engine

    monkeypatch.setattr(session, "local_ray", scene.local_ray)
    monkeypatch.setattr(session, "make_engine", make_engine)
    return scene


def settings(tmp_path: Path, actor: Path, **changes) -> RunConfig:
    values = {
        "name": "run",
        "out": str(tmp_path / "runs"),
        "model": {"path": str(actor)},
        "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:8]"},
        "sampling": {"max_new_tokens": 3, "responses_per_prompt": 2},
        "engine": {"num_drafts": 0},
        "companion": {"enabled": False},
        "ppo": {"steps": STEPS, "prompts_per_step": 2, "threads": 1, "checkpoint_every": 1},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return build_config(values)


class StopAt(ProgressSink):
    """Raises when the given step has ended."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step = step
        self.error = error

    def step_finished(self, values) -> None:
        if values["step"] == self.step:
            raise self.error


def test_ppo_runs_without_the_plugin(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the plugin must not be used")

    for name in ("start", "prepare_heads", "__init__"):
        monkeypatch.setattr(session.MedusaPlugin, name, never)
    summary = run_ppo(settings(tmp_path, actor_folder))
    assert summary["steps"] == STEPS and summary["status"] == "finished"
    assert scene.events == ["ray up", "engine up", "engine down", "ray down"]
    run_dir = tmp_path / "runs" / "run"
    assert (run_dir / "actor" / "model.safetensors").is_file() and not (
        run_dir / "heads-final"
    ).exists()
    assert not [p.name for p in run_dir.iterdir() if p.name.startswith(".")]


def test_embedded_actor_and_critic_are_prepared_under_their_own_names(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    """A line that appears twice in a log looks like a step that was repeated."""
    monkeypatch.setattr(session, "ensure_demo_actor", lambda progress, recipe: actor_folder)
    monkeypatch.setattr(session, "actor_note", lambda folder: None)
    out = Console(file=io.StringIO(), width=100)
    config = settings(tmp_path, actor_folder, model={"path": "demo", "critic_path": "demo"})
    run_ppo(config, LineProgress(out))
    lines = out.file.getvalue().splitlines()
    begun = [line for line in lines if line.endswith(" ...") and not line.startswith(" ")]
    assert begun[:2] == ["prepare the actor ...", "prepare the critic ..."]
    assert len(lines) == len(set(lines)) and max(map(len, lines)) <= 100


def test_trackers_see_every_step_and_are_closed(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[int, dict[str, float]]] = []

    class SessionRecorder:
        def log(self, step: int, values: dict[str, float]) -> None:
            seen.append((step, dict(values)))
            raise OSError("a tracker that fails stops nothing")

        def close(self) -> None:
            scene.events.append("tracker closed")

    monkeypatch.setitem(make.STARTS, "ray", lambda *_: SessionRecorder())
    config = settings(tmp_path, actor_folder)
    config = config.model_copy(
        update={"report": config.report.model_copy(update={"trackers": ("ray",)})}
    )
    assert run_ppo(config)["steps"] == STEPS
    lines = read_run(config.run_dir).steps
    assert [step for step, _ in seen] == [0, 1, 2] and seen[1][1]["reward_mean"] == lines[1][
        "reward_mean"
    ]
    assert scene.events == ["ray up", "engine up", "engine down", "tracker closed", "ray down"]


def test_a_missing_tracker_is_told_before_anything_starts(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(make.PACKAGES, "wandb", "no_such_package")
    config = settings(tmp_path, actor_folder)
    config = config.model_copy(
        update={"report": config.report.model_copy(update={"trackers": ("wandb",)})}
    )
    with pytest.raises(ConfigError, match="no_such_package"):
        run_ppo(config)
    assert scene.events == [] and not config.run_dir.exists()


@pytest.mark.parametrize("place", ["heads/v000123", "heads-final"])
def test_a_run_that_would_move_its_own_heads_is_refused_before_anything_starts(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, place: str
) -> None:
    """It moved an earlier run's files away, started the engine, and did not find the heads."""
    config = settings(tmp_path, actor_folder)
    heads = config.run_dir / place
    actor = AutoModelForCausalLM.from_pretrained(actor_folder)
    MedusaPlugin.prepare_heads(config, actor, heads)
    with pytest.raises(ConfigError, match="would replace the heads"):
        run_ppo(settings(tmp_path, actor_folder, heads={"path": str(heads)}))
    assert scene.events == [] and (heads / "config.json").is_file()


def test_stopped_runs_close_everything_and_report(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    config = settings(tmp_path, actor_folder)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config, StopAt(1, KeyboardInterrupt()))
    assert scene.events[-2:] == ["engine down", "ray down"]
    assert read_run(config.run_dir).status == "interrupted"
    assert json.loads((config.run_dir / "summary.json").read_text())["steps"] == 2
    assert not (config.run_dir / "actor").exists()


def test_failed_runs_close_everything_and_keep_what_was_finished(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    config = settings(tmp_path, actor_folder)
    with pytest.raises(EngineError, match="gone"):
        run_ppo(config, StopAt(0, EngineError("The engine is gone.")))
    assert scene.events[-2:] == ["engine down", "ray down"]
    run = read_run(config.run_dir)
    assert run.status == "failed" and len(run.steps) == 1
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert "gone" in summary["extras"]["error"] and (config.run_dir / "report.html").is_file()


class FileForFolder(ProgressSink):
    """In the second step there is a file in the place of the rollouts' folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step_finished(self, values) -> None:
        if values["step"] == 0:
            shutil.rmtree(self.folder)
            self.folder.touch()
        if values["step"] == 1:
            self.folder.unlink()


def test_rollouts_that_can_not_be_kept_end_nothing(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, caplog: pytest.LogCaptureFixture
):
    config = settings(tmp_path, actor_folder, report={"keep_rollouts": STEPS})
    folder = config.run_dir / ROLLOUTS_FOLDER
    assert run_ppo(config, FileForFolder(folder))["steps"] == STEPS
    assert [path.name for path in folder.iterdir()] == ["step-000002.jsonl"]
    assert caplog.text.count("The rollouts of step 1 could not be kept") == 1


def test_a_report_that_fails_does_not_bury_the_runs_own_error(
    tmp_path: Path,
    actor_folder: Path,
    scene: SessionScene,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def write_files(run: Any) -> Any:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(store, "write_files", write_files)
    with pytest.raises(EngineError, match="gone"):
        run_ppo(settings(tmp_path, actor_folder), StopAt(0, EngineError("The engine is gone.")))
    assert "int too large" in caplog.text and scene.events[-1] == "ray down"


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    whole = settings(tmp_path / "whole", actor_folder)
    run_ppo(whole)
    config = settings(tmp_path / "cut", actor_folder)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config, StopAt(1, KeyboardInterrupt()))
    summary = run_ppo(config, resume=True)
    assert summary["steps"] == STEPS and scene.engine.policy_version == STEPS
    assert scene.starts == [0, 0, 1], "a resumed run draws other random numbers than step 0"
    names = ("reward_mean", "entropy", "policy_loss", "kl_reference", "actor_grad_norm")
    expected, found = (
        [[s[n] for n in names] for s in read_run(c.run_dir).steps] for c in (whole, config)
    )
    assert found == expected


def test_what_a_living_run_is_writing_is_not_removed_by_a_second_one(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    config = settings(tmp_path, actor_folder)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config, StopAt(1, KeyboardInterrupt()))
    half = config.run_dir / ".checkpoint.new-abc" / "actor.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")
    file = config.run_dir / "run.json"
    stopped = json.loads(file.read_text())
    # Whether a process of another machine still lives can't be told from here, so it does.
    living = {"status": "running", "process": {"pid": 1, "host": "elsewhere"}}
    file.write_text(json.dumps(stopped | living))
    with pytest.raises(RunError, match="Another process writes"):
        run_ppo(config, resume=True)
    assert half.read_bytes() == b"half"
    file.write_text(json.dumps(stopped))
    run_ppo(config, resume=True)
    assert not half.exists(), "a run that is alone removes what a killed one left"


def test_a_run_that_was_started_anew_does_not_go_on_as_the_one_before_it(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    """The earlier one can be resumed where it is now."""
    config = settings(tmp_path, actor_folder)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config, StopAt(1, KeyboardInterrupt()))
    for folder in ("companion", "heads"):
        (config.run_dir / folder).mkdir()
    anew = settings(tmp_path, actor_folder, ppo={"checkpoint_every": None})
    with pytest.raises(KeyboardInterrupt):
        run_ppo(anew, StopAt(0, KeyboardInterrupt()))
    with pytest.raises(CheckpointError, match="nothing to resume"):
        run_ppo(config, resume=True)
    (earlier,) = (config.run_dir / "earlier").iterdir()
    assert (earlier / "companion").is_dir() and (earlier / "heads").is_dir()
    place = {"out": str(earlier.parent), "name": earlier.name}
    assert run_ppo(config.model_copy(update=place), resume=True)["steps"] == STEPS


def test_a_run_may_begin_with_the_actor_that_it_replaces(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    """The engine reads it after the files of the earlier run have moved."""
    config = settings(tmp_path, actor_folder)
    run_ppo(config)
    again = settings(tmp_path, config.run_dir / "actor")
    assert run_ppo(again)["steps"] == STEPS and (again.run_dir / "actor").is_dir()


def test_a_running_server_gets_the_runs_own_actor_before_its_first_answer(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    """It may hold that of whoever used it last, here of version 16."""
    own = settings(tmp_path / "own", actor_folder)
    run_ppo(own)
    made = session.make_engine
    held = []

    def attached(*args, **how):
        engine = made(*args, **how)
        for parameter in engine.actor.parameters():
            parameter.data.zero_()
        held.append(16)
        sync, generate = engine.sync_actor, engine.generate

        def sync_actor(path, version, checked=None):
            held.append(version)
            return sync(path, version, checked)

        def answer(prompts, sampling):
            assert held[-1] == engine.policy_version != 16, "somebody else's actor"
            return generate(prompts, sampling)

        monkeypatch.setattr(engine, "sync_actor", sync_actor)
        monkeypatch.setattr(engine, "generate", answer)
        return engine

    monkeypatch.setattr(session, "make_engine", attached)
    config = settings(tmp_path, actor_folder, engine={"backend": "http://127.0.0.1:1"})
    run_ppo(config)
    assert held == [16, 0, 1, 2, 3]
    names = ("reward_mean", "entropy", "policy_loss", "engine_kl")
    expected, found = (
        [[s[n] for n in names] for s in read_run(c.run_dir).steps] for c in (own, config)
    )
    assert found == expected


@pytest.mark.parametrize("backend", ["http://127.0.0.1:1", "colocated"])
def test_a_running_server_drafts_with_the_runs_own_heads_before_its_first_answer(
    tmp_path: Path,
    actor_folder: Path,
    scene: SessionScene,
    sampling_engine,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
):
    """It may hold those of whoever used it last, here of version 16. An engine that the run starts
    has them from its start.
    """
    actor = AutoModelForCausalLM.from_pretrained(actor_folder)
    heads = build_config({"heads": {"num_heads": 2, "kind": "medusa"}})
    MedusaPlugin.prepare_heads(heads, actor, tmp_path / "heads")
    events = []
    attached = backend != "colocated"

    def seen(name, call, *given):
        events.append(name)
        return call(*given)

    def make_engine(*args, **how):
        engine = sampling_engine(actor)
        engine.max_drafts = engine.num_drafts = 2
        engine.heads_version = 16 if attached else 0
        for name in ("sync_actor", "swap_heads", "generate"):
            monkeypatch.setattr(engine, name, functools.partial(seen, name, getattr(engine, name)))
        scene.engine = engine
        return engine

    monkeypatch.setattr(session, "make_engine", make_engine)
    config = settings(
        tmp_path,
        actor_folder,
        engine={"backend": backend, "num_drafts": 2},
        heads={"path": str(tmp_path / "heads")},
    )
    run_ppo(config)
    begins = ["sync_actor", "swap_heads"] if attached else []
    assert events[: len(begins) + 2] == [*begins, "generate", "sync_actor"]
    assert scene.engine.heads_version == 0


@pytest.mark.parametrize(("every", "saved"), [(1, [1, 2, 3]), (2, [2, 3]), (3, [3])])
def test_each_position_is_saved_once(
    tmp_path: Path,
    actor_folder: Path,
    scene: SessionScene,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    saved: list[int],
):
    """A checkpoint of a large actor takes minutes; the one after the last step may be there."""
    found: list[int] = []
    save = run_state.save_checkpoint

    def counted(run_dir: Path, learner: Any, position: Any, *rest: Any) -> Path:
        found.append(position.next_step)
        return save(run_dir, learner, position, *rest)

    monkeypatch.setattr(run_state, "save_checkpoint", counted)
    config = settings(tmp_path, actor_folder, ppo={"checkpoint_every": every})
    run_ppo(config)
    assert found == saved
    # What was resumed and had nothing left to do is not written again either; in another
    # configuration it is.
    run_ppo(config, resume=True)
    assert found == saved
    run_ppo(
        settings(tmp_path, actor_folder, ppo={"checkpoint_every": every, "clip_norm": 0.5}),
        resume=True,
        allow=["ppo.clip_norm"],
    )
    assert found == [*saved, STEPS]


def test_the_last_checkpoint_is_written_again_if_the_loop_could_not(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    save, tried = session.Learner.save, []

    def full_at_first(learner: Any, folder: Path) -> None:
        tried.append(folder)
        if len(tried) == 1:
            raise OSError(28, "No space left on device")
        save(learner, folder)

    monkeypatch.setattr(session.Learner, "save", full_at_first)
    config = settings(tmp_path, actor_folder, ppo={"checkpoint_every": STEPS})
    run_ppo(config)
    state = json.loads((config.run_dir / "checkpoint" / "state.json").read_text())
    assert len(tried) == 2 and state["next_step"] == STEPS


def test_an_actor_is_saved_even_if_the_last_checkpoint_does_not_fit_on_the_disk(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.Learner, "save", full)
    config = settings(tmp_path, actor_folder)
    with pytest.raises(OSError, match="No space left"):
        run_ppo(config)
    assert AutoModelForCausalLM.from_pretrained(config.run_dir / "actor")
    run = read_run(config.run_dir)
    assert (run.status, len(run.steps)) == ("failed", STEPS)
    assert "No space left" in run.meta["extras"]["error"]


def test_a_checkpoint_is_saved_even_if_the_actor_can_not_be(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(session.Learner, "save_actor", fail)
    config = settings(tmp_path, actor_folder, ppo={"checkpoint_every": 100})
    with pytest.raises(OSError, match="Input/output"):
        run_ppo(config)
    state = json.loads((config.run_dir / "checkpoint" / "state.json").read_text())
    assert state["next_step"] == STEPS


def test_a_resumed_run_gives_its_engines_what_they_remembered(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch
):
    made = session.make_engine
    told = []

    def pool_of_one(*args, **how) -> EnginePool:
        pool = EnginePool(lambda _: made(*args, **how), 1)
        pool.memory = SharedMemory(1 << 16)
        monkeypatch.setattr(
            type(scene.engine),
            "remember",
            lambda _, rows: told.append(list(rows)) or len(rows),
            raising=False,
        )
        return pool

    monkeypatch.setattr(session, "make_engine", pool_of_one)
    config = settings(tmp_path, actor_folder)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config, StopAt(1, KeyboardInterrupt()))
    assert not told, "a single engine has heard everything itself"
    run_ppo(config, resume=True)
    saved = saved_memory(config.run_dir)
    assert len(told) == 1 and [len(told[0]), len(saved["table"])] == [4, 12], (
        "a step's four until it was stopped, twelve at the end"
    )
    assert sorted({age for _, age, _, _ in told[0]}) == [1] and saved["version"] == STEPS
    monkeypatch.setattr(session.run_state, "ACTOR_SIZES", ("model_type",))
    with pytest.raises(CheckpointError, match="another actor"):
        run_ppo(
            config.model_copy(update={"ppo": config.ppo.model_copy(update={"steps": STEPS + 1})}),
            resume=True,
            allow=["ppo.steps"],
        )


def test_an_engine_that_does_not_start_ends_the_run_cleanly(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, monkeypatch
):
    def fail(*args: object, **kwargs: object) -> None:
        raise EngineError("No engine today.")

    monkeypatch.setattr(session, "make_engine", fail)
    with pytest.raises(EngineError, match="No engine today"):
        run_ppo(settings(tmp_path, actor_folder))
    assert scene.events == ["ray up", "ray down"]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": {"path": "/nowhere"}}, ModelError, "no such model folder"),
        ({"data": {"path": "nothing.jsonl"}}, DataError, "no such data file"),
        ({"data": {"path": "demo", "template": "{questoin}"}}, DataError, "Did you mean question"),
        ({"data": {"path": "demo", "max_prompt_tokens": 1}}, DataError, "No prompt is usable"),
        ({"ppo": {"reward": "nowhere:f"}}, ConfigError, "can't be imported"),
        ({"ppo": {"reward": "/nowhere"}}, ModelError, "reward model"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    tmp_path: Path, actor_folder: Path, scene: SessionScene, changes, error, says
):
    config = settings(tmp_path, actor_folder, **changes)
    with pytest.raises(error, match=says) as caught:
        run_ppo(config)
    assert isinstance(caught.value, MedusaError) and caught.value.exit_code == 2
    assert not scene.events and not config.run_dir.exists()


def test_nothing_to_resume_is_said_before_anything_starts(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    with pytest.raises(MedusaError, match="nothing to resume"):
        run_ppo(settings(tmp_path, actor_folder), resume=True)
    assert not scene.events


def test_a_run_that_was_stopped_in_its_warm_up_begins_anew_with_what_is_there(
    tmp_path: Path, actor_folder: Path, scene: SessionScene
):
    config = settings(tmp_path, actor_folder)
    with pytest.raises(CheckpointError):
        run_ppo(config, resume=True)
    kept = config.run_dir / "warm-up" / "round-0000.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")

    class Notes(ProgressSink):
        said = ""

        def note(self, text: str) -> None:
            self.said += text

    progress = Notes()
    assert run_ppo(config, progress, resume=True)["steps"] == STEPS
    assert "starts again" in progress.said and kept.is_file()
    assert run_ppo(config)["steps"] == STEPS and not kept.parent.exists(), "of an earlier run"
