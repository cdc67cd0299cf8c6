"""What an `Attachment` leaves behind, and writes, where a trainer does not go from step to step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from heads.checkpoint import load_heads, save_heads, save_state
from heads.errors import ConfigError, NoRoomError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.companion.service import STATE_FILE
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import AttachedEngine
from medusa_ppo.engines.rollout_engine import NoEngine
from medusa_ppo.loops import attachment as attachment_module
from medusa_ppo.loops.attachment import Attachment
from medusa_ppo.loops.passes import Generated
from medusa_ppo.plugin import MedusaPlugin, NoPlugin
from medusa_ppo.plugin.medusa_plugin import initial_heads
from medusa_ppo.reports.run_files import HEADS_FOLDER
from medusa_ppo.reports.store import read_run


class OwnPlugin(NoPlugin):
    """Keeps what becomes of it."""

    closed = False
    saved = False
    begun_with: str | None = None
    """The heads that it started with; None: new ones."""

    def save_heads(self, folder: str | Path) -> Path:
        self.saved = True
        save_heads(folder, MedusaHeads(HeadsConfig(16, 40, 2)))
        return Path(folder)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[OwnPlugin]:
    """Those that were started, instead of ones with a companion."""
    found: list[OwnPlugin] = []

    def start(config: RunConfig, *args: Any, **more: Any) -> OwnPlugin:
        found.append(OwnPlugin())
        found[-1].begun_with = config.heads.path
        return found[-1]

    monkeypatch.setattr(MedusaPlugin, "start", start)
    monkeypatch.setattr(attachment_module, "local_ray", lambda **_: contextlib.nullcontext())
    return found


def attached(folder: Path, heads: Mapping[str, str] = MappingProxyType({})) -> Attachment:
    attachment = Attachment(build_config({"heads": {"num_heads": 2, **heads}}))
    attachment.engine = NoEngine()
    attachment.folder = folder / "medusa"
    return attachment


def hooks_of(model: nn.Module) -> int:
    return len(model._forward_pre_hooks) + len(model._forward_hooks)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("no reward"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_trl_training_that_fails_leaves_nothing_and_can_begin_again(
    error: BaseException,
    status: str,
    plugins: list[OwnPlugin],
    chain_actor: Path,
    tmp_path: Path,
) -> None:
    """Trainer calls no `on_train_end` then: hooks and companion stayed, and the next `train` had a
    second one.
    """
    model, medusa = load_actor(str(chain_actor)), attached(tmp_path)
    trainer = trainer_of(model, medusa, tmp_path, [error, None])
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    (plugin,) = plugins
    assert plugin.saved and plugin.closed and hooks_of(model) == 0
    meta = read_run(medusa.folder).meta
    assert meta["status"] == status
    assert meta.get("extras") == ({"error": "no reward"} if status == "failed" else None)
    trainer.train()
    # The engine drafts with the first one's: new ones would take their place.
    assert [plugin.begun_with for plugin in plugins] == [None, str(medusa.folder / HEADS_FOLDER)]
    assert [plugin.closed for plugin in plugins] == [True, True] and hooks_of(model) == 0
    assert read_run(medusa.folder).meta["status"] == "finished"


@pytest.mark.parametrize(("heads", "reads"), [({"kind": "medusa"}, False), ({}, True)])
def test_all_processes_gather_the_same_tables_after_a_failure(
    heads: dict[str, str], reads: bool, plugins: list[OwnPlugin], chain_actor: Path, tmp_path: Path
) -> None:
    """Only the first one has a path to go on from then, and gathering is done by all together."""
    model, medusa = load_actor(str(chain_actor)), attached(tmp_path, heads)
    medusa.begin(model)
    medusa._fail(RuntimeError("no reward"))
    assert medusa.config.heads.path
    assert ("input" in medusa._view(model)._bits) == reads


def test_a_training_that_begins_again_by_itself_has_one_companion(
    plugins: list[OwnPlugin], chain_actor: Path, tmp_path: Path
) -> None:
    """`auto_find_batch_size` runs the whole loop again, with `on_train_begin`, inside `train`."""
    model, medusa = load_actor(str(chain_actor)), attached(tmp_path)
    full = RuntimeError("CUDA out of memory.")
    trainer = trainer_of(model, medusa, tmp_path, [full, None], auto_find_batch_size=True)
    alive: list[list[bool]] = []
    begin = medusa.begin

    def begin_and_look(*args: Any) -> None:
        begin(*args)
        alive.append([not plugin.closed for plugin in plugins])

    medusa.begin = begin_and_look  # type: ignore[method-assign]
    trainer.train()
    assert alive == [[True], [False, True]] and plugins[0].saved
    assert hooks_of(model) == 0 and read_run(medusa.folder).meta["status"] == "finished"


def test_every_generation_before_an_update_has_a_line(
    plugins: list[OwnPlugin], chain_actor: Path, tmp_path: Path
) -> None:
    """Only the last one had."""
    model, medusa = load_actor(str(chain_actor)), attached(tmp_path)
    medusa.begin(model)
    for tokens in (2, 3, 5):
        with medusa.generation(Sampling()) as generated:
            generated.append(Generated([[5, 6]], [[7] * tokens], [[-0.5] * tokens]))
    medusa.updated(1)
    with medusa.generation(Sampling()) as generated:
        generated.append(Generated([[5, 6]], [[7] * 7], [[-0.5] * 7]))
    medusa.updated(2)
    medusa.end()
    steps = read_run(medusa.folder).steps
    assert [step[names.RESPONSE_LENGTH] for step in steps] == [2, 3, 5, 7]


def test_what_an_engine_chose_for_an_evaluation_is_forgotten(
    plugins: list[OwnPlugin], chain_actor: Path, tmp_path: Path
) -> None:
    """They counted as choices of the next rollouts."""
    asked: list[str] = []

    class Choosing(NoEngine):
        def choices(self) -> list[Any]:
            asked.append("choices")
            return []

    model, medusa = load_actor(str(chain_actor)), attached(tmp_path)
    medusa.engine = Choosing()
    medusa.begin(model)
    asked.clear()
    with medusa.generation(Sampling()):
        pass
    assert asked == ["choices"]
    with medusa.generation(Sampling()) as generated:
        generated.append(Generated([[5, 6]], [[7] * 2], [[-0.5] * 2]))
    assert asked == ["choices"], "these are the rollouts': the plugin reads them with its report"
    medusa.end()


@pytest.mark.parametrize("trained", [None, False, True])
def test_heads_that_begin_untrained_without_a_warm_up_say_so(
    trained: bool | None,
    plugins: list[OwnPlugin],
    chain_actor: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """docs/limits.md said that the log does. `trained`: of a folder; None: there is none."""
    medusa, actor = attached(tmp_path), load_actor(str(chain_actor))
    asked: dict[str, Any] = {"warm_up_tokens": 20_000}
    if trained is not None:
        heads = initial_heads(medusa.config, actor)
        if trained:
            next(iter(heads.blocks)).data.normal_()
        save_heads(tmp_path / "start", heads)
        asked = {"path": str(tmp_path / "start")}
    medusa.config = build_config({"heads": asked})
    medusa.begin(actor)
    medusa.end()
    events = read_run(medusa.folder).meta["events"]
    told = [text for text in caplog.messages if "begin untrained" in text]
    assert len(told) == (not trained) == len(events)
    assert all("name them in heads.path" in text for text in told)
    idle = ["heads.warm_up_tokens without effect" in text for text in told]
    assert idle == [trained is None] * len(told)


def test_heads_that_go_on_do_not_say_that_they_are_untrained(
    plugins: list[OwnPlugin],
    chain_actor: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    medusa = attached(tmp_path)
    state = medusa.folder / "companion" / STATE_FILE
    state.parent.mkdir(parents=True)
    state.write_bytes(b"a state")
    medusa.begin(load_actor(str(chain_actor)), 7)
    medusa.end()
    assert "begin untrained" not in caplog.text


def test_heads_that_the_training_itself_replaces_are_refused(
    plugins: list[OwnPlugin], chain_actor: Path, tmp_path: Path
) -> None:
    """Those that an earlier training of the same process has left are no setting."""
    actor = load_actor(str(chain_actor))
    first = attached(tmp_path)
    for _ in range(2):
        first.begin(actor)
        first.end()
    own = first.folder / HEADS_FOLDER
    again = attached(tmp_path, {"path": str(own)})
    with pytest.raises(ConfigError, match="heads-start"):
        again.begin(actor)
    assert len(plugins) == 2 and load_heads(own)


def test_an_engine_that_has_no_room_for_its_heads_after_a_sleep_gets_them_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop's sync raised, and ended its training."""
    full = True
    asked: list[str] = []

    def call(method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        asked.append(method)
        if method == "medusa_swap_heads" and full:
            raise NoRoomError("No room.", given="0 bytes")
        swapped = {"version": 0, "checksum": "", "seconds": 0.0}
        drafts = {"kind": "medusa", "drafter": "MedusaProposer", "max_drafts": 2}
        return [drafts | swapped | {"heads_version": 0}]

    medusa = attached(tmp_path)
    save_state(tmp_path / "kept", {"w": torch.zeros(2)})
    medusa.engine = engine = AttachedEngine(call, tmp_path / "kept")
    asked.clear()
    medusa.weights_synced(lost_heads=True)
    assert engine.heads_version == -1 and "No room." in caplog.text
    assert asked[-1] == "medusa_target_changed"
    full = False
    medusa.weights_synced(lost_heads=True)
    assert engine.heads_version == 0


def test_arguments_for_a_server_that_runs_already_are_not_lost_unsaid(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attachment_module, "ServerEngine", lambda *_: NoEngine())
    config = build_config({"heads": {"path": "heads"}, "engine": {"extra": {"max_logprobs": 3}}})
    Attachment(config).attach_server(
        SimpleNamespace(name_or_path="actor"), lambda: "http://127.0.0.1:1"
    )
    (told,) = [record.getMessage() for record in caplog.records]
    assert "engine.extra" in told and "medusa-ppo serve" in told


def trainer_of(
    model: nn.Module,
    medusa: Attachment,
    folder: Path,
    steps: list[BaseException | None],
    **settings: Any,
) -> Any:
    """A trainer of transformers with our mix-in. `steps`: what its losses raise, one after the
    other.
    """
    pytest.importorskip("trl")
    from transformers import Trainer, TrainingArguments

    from medusa_ppo.loops.trl import MedusaCallback, MedusaMixin

    class OwnTrainer(MedusaMixin, Trainer):
        def __init__(self, **arguments: Any) -> None:
            Trainer.__init__(self, **arguments)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            error = steps.pop(0)
            if error is not None:
                raise error
            return model(**inputs).loss

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        report_to="none",
        save_strategy="no",
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    ids = torch.arange(3, 9)
    rows: Any = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}] * 4
    trainer = OwnTrainer(model=model, args=arguments, train_dataset=rows)
    trainer.medusa = medusa
    trainer.add_callback(MedusaCallback(medusa))
    return trainer
