"""A loop of its own that knows nothing of us but the class of its engine: heads are fed, and
switched off it learns the same to the bit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.checkpoint import load_heads
from heads.errors import ConfigError, EngineError, RunError, SavedStateError
from heads.tensorfile import checksum, load_state
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.companion.service import STATE_FILE
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines import ray_engine
from medusa_ppo.engines.actor_sync import ActorStream, ActorSync, BroadcastPool
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.loops import attachment
from medusa_ppo.loops.attachment import Attachment, DraftingEngine
from medusa_ppo.plugin import MedusaPlugin, NoPlugin
from medusa_ppo.reports.store import RunWriter, read_run
from medusa_ppo.runtime.files import only_one_in
from medusa_ppo.runtime.processes import local_ray
from tests.medusa_ppo.conftest import RecordingCompanion, eager_on_a_gpu
from tests.medusa_ppo.loops.conftest import FullDisk

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [
    [5, 6, 7],
    [8, 9],
    [10, 11, 12],
    [13],
    [14, 15],
    [16],
    [17, 18, 19],
    [20, 21],
    [22],
    [23, 24],
    [25],
    [26, 27],
]
"""A dozen: of two batches the gate has the six held-out prompts that it asks for."""
ENGINE = {
    "max_num_seqs": 32,
    "threads": 1,
    "enforce_eager": True,
    "num_drafts": 2,
    # So that on a GPU vLLM does not measure what other tests' processes free.
    "extra": {"kv_cache_memory_bytes": 1 << 28},
}


def scored(actor: Any, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop's own pass: log-probs of all tokens, and which of them are the responses'."""
    rows = [(*rollouts.prompts[r.prompt_index], *r.token_ids) for r in rollouts.responses]
    width = max(map(len, rows))
    ids_BT, attention_BT, mask_BT = (
        torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3)
    )
    for row, (tokens, response) in enumerate(zip(rows, rollouts.responses, strict=True)):
        ids_BT[row, : len(tokens)] = torch.tensor(tokens)
        attention_BT[row, : len(tokens)] = 1
        mask_BT[row, len(tokens) - len(response.token_ids) : len(tokens)] = 1
    logits_BTV = actor(input_ids=ids_BT, attention_mask=attention_BT).logits
    return logits_BTV[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0], mask_BT[:, 1:]


def loop(engine: Any, actor: Any, steps: int) -> list[dict[str, Any]]:
    """A policy-gradient loop. Nothing in it names the plugin, but for the figures at the end."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    figures = []
    with ActorSync(engine) as sync:
        for step in range(steps):
            rollouts = engine.generate(
                PROMPTS, Sampling(max_new_tokens=24, responses_per_prompt=8, seed=step)
            )
            logprobs_BT, mask_BT = scored(actor, rollouts)
            rewards_B = torch.tensor(
                [float(len(r.token_ids) % 2) + r.token_ids[0] % 3 for r in rollouts.responses]
            )
            loss = (
                -((rewards_B - rewards_B.mean())[:, None] * logprobs_BT * mask_BT).sum()
                / mask_BT.sum()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sync(actor, step + 1)
            figures.append(
                {"reward": rewards_B.mean().item()}
                | (engine.metrics() if hasattr(engine, "metrics") else {})
            )
    return figures


@eager_on_a_gpu
@pytest.mark.slow
@pytest.mark.engine
def test_a_loop_that_was_changed_as_the_page_says_runs(
    chain_actor: Path,
    serving: str,
    tmp_path: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/hooks.md's first change, with a reader's own names: the actor is read and synced."""
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    shown = re.search(r"\n## Any loop\n.*?```diff\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    script = "\n".join(line[1:] for line in shown[1].splitlines() if not line.startswith("-"))
    # An engine for these actors, and a companion that has trained on step 0 when step 1 begins.
    here = {"engine": ENGINE, "companion": {"wait": True, "batch_positions": 256}}
    monkeypatch.setattr(attachment, "build_config", lambda values: build_config(values | here))
    actor = load_actor(chain_actor)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    trained_s: list[float] = []

    def update(model: Any, rollouts: Rollouts) -> None:
        trained_s.append(scope["engine"].metrics()[names.COMPANION_TRAIN_S])
        logprobs_BT, mask_BT = scored(model, rollouts)
        loss = -(logprobs_BT * mask_BT).sum() / mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    scope: dict[str, Any] = {
        "actor": actor,
        "actor_path": str(chain_actor),
        "prompts": PROMPTS,
        "run_dir": tmp_path / "run",
        "steps": 2,
        "update": update,
    }
    exec(compile(script, "docs/hooks.md", "exec"), scope)

    # The first call comes before a batch has been read.
    assert len(trained_s) == 2 and trained_s[1] > 0 and scope["engine"].engine.policy_version == 2
    assert load_heads(tmp_path / "run" / "heads-final")[0].config.num_heads == 4


@eager_on_a_gpu
@pytest.mark.slow
@pytest.mark.engine
def test_heads_are_fed_while_the_loop_runs(
    chain_actor: Path, serving: str, tmp_path: Path, ray_session: None
):
    companion = {"learning_rate": 1e-2, "epochs": 8, "batch_positions": 256, "wait": True}
    config = build_config({"heads": {"num_heads": 2}, "companion": companion, "engine": ENGINE})
    with DraftingEngine(config, load_actor(chain_actor), chain_actor, tmp_path / "run") as engine:
        figures = loop(engine, engine._actor, 5)

    assert figures[0][names.HEADS_VERSION] == 0 and figures[-1][names.HEADS_VERSION] >= 1, (
        "a second one would have to be surely better"
    )
    assert figures[-1][names.MAL_SERVING] > figures[0][names.MAL_SERVING] + 0.2
    saved, metadata = load_heads(tmp_path / "run" / "heads-final")
    assert saved.config.num_heads == 2 and metadata.version >= 1
    assert not engine._actor._forward_hooks and not engine._actor._forward_pre_hooks

    # Started again, as after a kill: what was learned is there, and drafts from its first step on.
    with DraftingEngine(
        config, load_actor(chain_actor), chain_actor, tmp_path / "run", step=5
    ) as again:
        (first,) = loop(again, again._actor, 1)
    assert first[names.HEADS_VERSION] >= metadata.version
    assert first[names.MAL_SERVING] > figures[0][names.MAL_SERVING] + 0.2


@pytest.mark.slow
@pytest.mark.engine
def test_switched_off_it_is_the_plain_engine_to_the_bit(
    chain_actor: Path, tmp_path: Path, ray_session: None
):
    config = build_config({"companion": {"enabled": False}, "engine": {**ENGINE, "num_drafts": 0}})
    learned = []
    rewards = []
    for arm in ("off", "plain"):
        actor = load_actor(chain_actor)
        with local_ray():
            if arm == "off":
                engine: Any = DraftingEngine(config, actor, chain_actor, tmp_path / "off")
                assert isinstance(engine.plugin, NoPlugin) and engine.engine.max_drafts == 0
            else:
                engine = make_engine(chain_actor, None, config.engine, config.seed)
            with engine:
                rewards.append([step["reward"] for step in loop(engine, actor, 3)])
        learned.append({name: value.clone() for name, value in actor.state_dict().items()})
    start = load_actor(chain_actor).state_dict()
    assert rewards[0] == rewards[1]
    assert all(torch.equal(value, learned[1][name]) for name, value in learned[0].items())
    assert not all(torch.equal(value, learned[0][name]) for name, value in start.items()), (
        "nothing was learned"
    )


class Pool(BroadcastPool):
    """A pool without engines: what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[str], int]] = []

    def stream_actor(self, stream: ActorStream, version: int) -> SwapReceipt:
        self.sent.append((sorted(stream.entries), version))
        return SwapReceipt(version, "", 0.0)


def test_the_warm_up_reads_the_actor_itself_and_leaves_it_as_it_was(
    chain_actor: Path, tmp_path: Path
) -> None:
    """In the engine's place the actor's own log-probs: those of the states that were tapped."""

    class Echo:
        policy_version = heads_version = num_drafts = 0

        def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
            responses = tuple(
                Response(n, tuple(range(5, 8 + n % 4)), (-1.0,) * (3 + n % 4), "stop")
                for n in range(len(prompts))
            )
            return Rollouts(tuple(map(tuple, prompts)), responses, Counters(), 1.0, sampling)

        def choices(self) -> list[Any]:
            return []

    prompts = [(1 + n, *range(2, 4 + n % 3)) for n in range(20)]
    companion = RecordingCompanion()
    engine: Any = DraftingEngine.__new__(DraftingEngine)
    actor = engine._actor = load_actor(chain_actor).train()
    engine._config = build_config({"heads": {"warm_up_tokens": 100}})
    engine._folder = tmp_path
    engine.plugin = MedusaPlugin(Echo(), companion)  # type: ignore[arg-type]
    engine.warm_up(prompts, Sampling(max_new_tokens=24))
    (batch,) = companion.batches
    assert batch.response_ids_M.numel() >= 100 and actor.training
    first = torch.tensor([[*prompts[0], 5, 6, 7]])
    with torch.no_grad():
        hidden_TD = actor.eval().model(first).last_hidden_state[0]
    states_MD = hidden_TD[len(prompts[0]) - 1 : -1]
    torch.testing.assert_close(batch.hidden_MD[:3], states_MD, rtol=1e-4, atol=1e-5)
    trained = build_config({"heads": {"path": "heads"}})
    engine._config = trained
    assert "heads.path" in engine.warm_up(prompts, Sampling()).problem


def test_a_broadcast_actor_reaches_the_pool_behind_it_and_other_loops_refuse_one(chain_actor: Path):
    told: list[int] = []
    engine: Any = DraftingEngine.__new__(DraftingEngine)
    engine.engine = Pool()
    engine._actor = load_actor(chain_actor)
    engine.plugin = SimpleNamespace(policy_updated=lambda actor, version: told.append(version))
    with ActorSync(engine) as sync:
        assert sync(engine._actor, 3).version == 3
    entries, version = engine.engine.sent[0]
    assert version == 3 and "model.embed_tokens.weight" in entries and told == [3]

    with pytest.raises(ConfigError, match="sends the actor to it by itself"):
        Attachment(build_config({"engine": {"transfer": "broadcast"}}))


def test_an_actor_s_file_reaches_the_engine_behind_it_with_its_checksum(chain_actor: Path):
    told: list[int] = []

    def take(path: str, version: int, checked: Checked) -> SwapReceipt:
        assert checksum(load_state(path)) == checked.checksum
        return SwapReceipt(version, checked.checksum, 0.0)

    engine: Any = DraftingEngine.__new__(DraftingEngine)
    engine.engine = SimpleNamespace(streams=False, sync_actor=take)
    engine._actor = load_actor(chain_actor)
    engine.plugin = SimpleNamespace(policy_updated=lambda actor, version: told.append(version))
    with ActorSync(engine) as sync:
        assert sync(engine._actor, 3).version == 3
    assert told == [3]


@pytest.mark.parametrize(
    ("visible", "offered"), [((), None), (("0",), ("0",)), (("0", "1", "2"), ("1", "2"))]
)
def test_the_loops_own_gpu_is_nobody_elses(
    visible: tuple[str, ...],
    offered: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless it is the only one. With GPUs that are not there: Ray is asked, and not started."""
    asked: list[Any] = []

    def no_ray(**arguments: Any) -> Any:
        asked.append(arguments["gpus"])
        raise ConnectionError

    monkeypatch.setattr(attachment, "visible_gpus", lambda: visible)
    monkeypatch.setattr(attachment, "local_ray", no_ray)
    with pytest.raises(ConnectionError):
        DraftingEngine(build_config({}), torch.nn.Module(), "actor", tmp_path)
    assert asked == [offered]


class Answering:
    """An engine that answers with one token."""

    max_drafts = num_drafts = heads_version = policy_version = 0
    note = ""

    def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
        responses = tuple(Response(n, (5,), (-1.0,), "stop") for n in range(len(prompts)))
        return Rollouts(tuple(map(tuple, prompts)), responses, Counters(), 1.0, sampling)

    def __getattr__(self, name: str) -> Any:
        """What else a pool asks an engine."""
        return lambda *given, **more: None

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Dying(Answering):
    """The first one of them dies in its first call."""

    started = 0

    def __init__(self, *given: Any, **more: Any) -> None:
        Dying.started += 1
        self._dies = Dying.started == 1

    def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
        if self._dies:
            raise EngineError("The engine's process, generating, ended.", given="SIGKILL")
        return super().generate(prompts, sampling)


def test_the_engine_of_a_resumed_loop_draws_other_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without a seed draw from the engine's."""
    seeds: list[int] = []
    monkeypatch.setattr(attachment, "local_ray", lambda **_: contextlib.nullcontext())

    def serve(model: Any, heads: Any, config: Any, seed: int, **more: Any) -> Answering:
        seeds.append(seed)
        return Answering()

    monkeypatch.setattr(ray_engine, "ServerEngine", serve)
    monkeypatch.setattr(ray_engine, "reading_s", lambda model: 0.0)
    config = build_config(
        {
            "seed": 7,
            "engine": {"backend": "http://127.0.0.1:1", "num_drafts": 0},
            "companion": {"enabled": False},
        }
    )
    for step in (0, 20):
        DraftingEngine(config, torch.nn.Module(), "actor", tmp_path, step=step).close()
    assert seeds[0] == 7 and seeds[1] != 7


class Started:
    """Stands in for Ray, the engine and the plugin of a `DraftingEngine`.

    Attributes:
        heads: the folder with which each engine was started.
        given: further arguments of each engine.
        resumed: what each companion was to go on from.
        refuses: a companion's state is not what these settings need.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heads: list[Path] = []
        self.given: list[dict[str, Any]] = []
        self.resumed: list[str] = []
        self.refuses = False
        monkeypatch.setattr(attachment, "local_ray", lambda **_: contextlib.nullcontext())
        monkeypatch.setattr(attachment, "make_engine", self.make_engine)
        monkeypatch.setattr(MedusaPlugin, "start", self.start)

    def make_engine(self, model: Any, heads: Path, *given: Any, **more: Any) -> Any:
        assert load_heads(heads)[0].untrained
        self.heads.append(heads)
        self.given.append(more)
        return contextlib.nullcontext()

    def start(self, *given: Any, resume_from: str | Path = "") -> NoPlugin:
        self.resumed.append(str(resume_from))
        if resume_from and self.refuses:
            raise SavedStateError("Another shape.", given="2", expected="3", do="Begin anew.")
        return NoPlugin()


def earlier_loop(folder: Path, actor: Any) -> RunConfig:
    """What a loop that was killed has left in its folder, and the settings that it had."""
    config = build_config({"heads": {"num_heads": 2}})
    # Up to 0.3.0 the engine's first heads were in the folder of the versions.
    MedusaPlugin.prepare_heads(config, actor, folder / "heads")
    MedusaPlugin.prepare_heads(config, actor, folder / "heads" / "v000007")
    (folder / "companion").mkdir()
    (folder / "companion" / STATE_FILE).write_bytes(b"a state")
    return config


def test_a_loop_that_goes_on_keeps_what_its_heads_have_learned(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start replaced the folder of the versions, and its companion removed the state."""
    started = Started(monkeypatch)
    actor = load_actor(chain_actor)
    config = earlier_loop(tmp_path, actor)
    state = tmp_path / "companion" / STATE_FILE
    with DraftingEngine(config, actor, chain_actor, tmp_path, step=20) as engine:
        assert started.resumed == [str(state.parent)] and state.read_bytes() == b"a state"
        assert load_heads(tmp_path / "heads" / "v000007")[0].config.num_heads == 2
        # A killed engine reads its first heads again.
        assert tmp_path not in started.heads[0].parents and started.heads[0].is_dir()
        assert "of an earlier loop" in engine.warm_up([[1], [2]], Sampling()).problem
    assert not started.heads[0].exists()

    started.refuses = True
    with DraftingEngine(config, actor, chain_actor, tmp_path, step=20) as engine:
        assert started.resumed[-2:] == [str(state.parent), ""]
        assert state.with_name(f"{STATE_FILE}.unused-1").read_bytes() == b"a state"
        assert "of an earlier loop" not in engine.warm_up([[1], [2]], Sampling()).problem


def test_a_loop_does_not_begin_with_heads_that_its_companion_removes(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three versions later it could not be started again."""
    started = Started(monkeypatch)
    actor = load_actor(chain_actor)
    earlier_loop(tmp_path, actor)
    version = tmp_path / "heads" / "v000007"
    named = {"heads": {"path": str(version)}}
    with pytest.raises(ConfigError, match="heads-start"):
        DraftingEngine(named, actor, chain_actor, tmp_path, step=20)
    assert not started.heads and load_heads(version)
    # Nobody removes these.
    shutil.copytree(version, tmp_path / "heads-start")
    copied = {"heads": {"path": str(tmp_path / "heads-start")}}
    frozen = named | {"companion": {"enabled": False}}
    for settings in (copied, frozen):
        DraftingEngine(settings, actor, chain_actor, tmp_path, step=20).close()
    assert len(started.heads) == 2


@pytest.mark.parametrize("step", [0, 20])
def test_a_loop_without_a_companion_leaves_the_state_of_an_earlier_one(
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: int,
) -> None:
    """It said that heads go on from it, or begin anew, and set it aside."""
    started = Started(monkeypatch)
    actor = load_actor(chain_actor)
    earlier_loop(tmp_path, actor)
    settings = {"heads": {"num_heads": 2}, "companion": {"enabled": False}}
    with DraftingEngine(settings, actor, chain_actor, tmp_path, step=step) as engine:
        assert started.resumed == [""] and not engine._goes_on
    assert (tmp_path / "companion" / STATE_FILE).read_bytes() == b"a state" and not caplog.records
    (tmp_path / "companion" / STATE_FILE).unlink()
    DraftingEngine(settings, actor, chain_actor, tmp_path, step=step).close()
    assert not caplog.records


def test_a_loop_that_begins_anew_in_a_folder_says_so_and_keeps_the_state(
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`step` may have been forgotten; a companion that begins anew removes what it finds."""
    started = Started(monkeypatch)
    actor = load_actor(chain_actor)
    config = earlier_loop(tmp_path, actor)
    kept = tmp_path / "companion" / f"{STATE_FILE}.earlier"
    with DraftingEngine(config, actor, chain_actor, tmp_path):
        assert started.resumed == [""] and kept.read_bytes() == b"a state"
    (told,) = [record.getMessage() for record in caplog.records]
    assert "step=" in told and str(kept) in told
    caplog.clear()
    with DraftingEngine(config, actor, chain_actor, tmp_path):
        assert kept.read_bytes() == b"a state" and not caplog.records


def test_an_engine_that_dies_is_started_again_for_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/faults.md says of a loop of one's own."""
    monkeypatch.setattr(attachment, "local_ray", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(ray_engine, "ServerEngine", Dying)
    monkeypatch.setattr(ray_engine, "reading_s", lambda model: 0.0)
    monkeypatch.setattr(Dying, "started", 0)
    config = build_config(
        {
            "engine": {"backend": "http://127.0.0.1:1", "num_drafts": 0},
            "companion": {"enabled": False},
        }
    )
    with DraftingEngine(config, torch.nn.Module(), "actor", tmp_path) as engine:
        rollouts = engine.generate([[1], [2]], Sampling())
    assert len(rollouts.responses) == 2 and Dying.started == 2


@pytest.mark.parametrize("form", ["mapping", "file"])
def test_settings_are_given_as_a_trainer_of_trl_takes_them(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def make(model: Any, heads: Any, engine: Any, seed: int, **more: Any) -> Answering:
        given.append((heads, engine.max_num_seqs, seed))
        return Answering()

    monkeypatch.setattr(attachment, "local_ray", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(attachment, "make_engine", make)
    settings: Any = {
        "seed": 5,
        "engine": {"max_num_seqs": 256, "num_drafts": 0},
        "companion": {"enabled": False},
    }
    if form == "file":
        (tmp_path / "heads.yaml").write_text(json.dumps(settings))
        settings = tmp_path / "heads.yaml"
    DraftingEngine(settings, torch.nn.Module(), "actor", tmp_path / "run").close()
    assert given == [(None, 256, 5)]


def test_an_engine_that_nobody_made_as_wide_as_the_loop_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """512 responses in 16 rounds look like slow drafts."""
    monkeypatch.setattr(attachment, "local_ray", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(attachment, "make_engine", lambda *_, **__: Answering())
    off = {"companion": {"enabled": False}}
    for section, warns in (({}, True), ({"max_num_seqs": 32}, False)):
        caplog.clear()
        settings = off | {"engine": {"num_drafts": 0} | section}
        with DraftingEngine(settings, torch.nn.Module(), "actor", tmp_path) as engine:
            engine.generate([[1]] * 32, Sampling())
            assert not caplog.records
            for _ in range(2):
                engine.generate([[1]] * 64, Sampling(responses_per_prompt=8))
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == warns
        assert all("512 responses" in text and "engine.max_num_seqs" in text for text in told)


def test_a_second_engine_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """Its companion removed the state of the first one's."""
    with (
        only_one_in(tmp_path, "DraftingEngine", "run_dir"),
        pytest.raises(RunError, match="Another DraftingEngine writes"),
    ):
        DraftingEngine(build_config({}), torch.nn.Module(), "actor", tmp_path)


def test_a_training_whose_heads_do_not_fit_on_the_disk_ends_what_it_started(tmp_path: Path) -> None:
    """Its companion went on, and its report said "running"."""
    config = build_config({"name": "run", "out": str(tmp_path), "heads": {"num_heads": 2}})
    loop: Any = Attachment(config)
    loop.plugin = plugin = FullDisk()
    loop._stack.callback(plugin.close)
    atexit.register(loop._stack.close)
    loop._tap = object()
    loop._writer = RunWriter(loop.folder, {})
    with pytest.raises(OSError, match="No space"):
        loop.end()
    assert plugin.closed
    run = read_run(loop.folder)
    assert run.status == "failed" and "No space" in run.meta["extras"]["error"]
    loop.end()  # There is nothing left to end.


def test_an_engine_whose_heads_do_not_fit_on_the_disk_is_ended_all_the_same(tmp_path: Path) -> None:
    """vLLM, companion and Ray went on."""
    engine: Any = DraftingEngine.__new__(DraftingEngine)
    engine._folder = tmp_path
    engine._stack = contextlib.ExitStack()
    engine.plugin = plugin = FullDisk()
    engine._stack.callback(plugin.close)
    with pytest.raises(OSError, match="No space"), engine:
        pass
    assert plugin.closed
    engine.close()
