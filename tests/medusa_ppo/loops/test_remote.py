"""The driver's half for verl and OpenRLHF, without either: real actor, tap and companion; only the
foreign engine is stood in for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import ObjectStoreFullError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from heads.checkpoint import (
    LM_HEAD_KEY,
    WEIGHTS_NAME,
    checksum,
    load_heads,
    load_state,
    save_heads,
    save_state,
)
from heads.errors import (
    CheckpointError,
    CompanionError,
    ConfigError,
    NoRoomError,
    RunError,
    SavedStateError,
)
from medusa_ppo.actors import hf
from medusa_ppo.actors.hf import HFActor, load_actor
from medusa_ppo.companion.positions import ROW_BYTES
from medusa_ppo.companion.service import STATE_FILE
from medusa_ppo.companion.wire import WantedRows
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Rollouts, Sampling
from medusa_ppo.contract.status import PublishedHeads
from medusa_ppo.engines import ray_engine
from medusa_ppo.engines.colocated import AttachedEngine
from medusa_ppo.loops import remote
from medusa_ppo.loops.attachment import COUNT, Attachment, start_or_resume
from medusa_ppo.loops.passes import PassTap
from medusa_ppo.loops.remote import (
    START,
    EngineCalls,
    RemoteAttachment,
    SentFile,
    Taken,
    WorkerTables,
    arrived,
    call_all,
    read_tables,
    refuse,
    serve,
)
from medusa_ppo.plugin.installer import HeadsInstaller
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.reports.run_files import HEADS_FOLDER, META_FILE
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.control_guard import TOKEN
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.loops.conftest import FullDisk


class RemoteWorkers:
    """In the place of a vLLM that needs CUDA to be started as verl starts it: answers as our worker
    extension does.
    """

    def __init__(self) -> None:
        self.version = 0
        self.heads = ""
        self.calls: list[str] = []

    def __call__(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append(method)
        if method == "medusa_swap_heads":
            self.version = int(args[1])
            self.heads = checksum(load_state(args[0]))
        return [
            {
                "kind": "medusa",
                "drafter": "MedusaProposer",
                "max_drafts": 2,
                "heads_version": self.version,
                "version": self.version,
                "checksum": self.heads,
                "seconds": 0.0,
                "rows": [],
                "key": {},
                "choices": [],
            }
        ]


@torch.no_grad()
def rows_of(actor: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """Responses of the actor's own, to prompts of one token."""
    torch.manual_seed(1)
    prompts = torch.randint(1, 400, (count, 1))
    answers = actor.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=True,
    )
    return [(row[:1].tolist(), row[1:].tolist()) for row in answers]


def test_only_the_rows_that_a_batch_needs_leave_the_workers(chain_actor: Path):
    """Both whole tables went to the driver after each update: 2.5 GB at the size of an 8B actor."""
    actor = load_actor(chain_actor)
    tap = PassTap(actor, Sampling(), 2**30, 2)
    reports, other = (WorkerTables(HFActor(actor, reports=there)) for there in (True, False))
    wanted = WantedRows(torch.tensor([3, 1]), embedding=True)
    for factor in (1.0, 2.0):  # Before an update, and after one.
        with torch.no_grad():
            actor.lm_head.weight.mul_(factor)
            with tap.watch([([5], [7, 9])]):
                actor(input_ids=torch.tensor([[5, 7, 9]]))
        tap.add_logprobs([torch.zeros(2)])
        batch = tap.take(0)
        assert batch is not None and other.taken(batch, wanted) is None
        found = reports.taken(batch, wanted)
        assert found is not None and found.batch is batch and found.rows is not None
        rows = found.rows
        assert rows.lm_head_ids_R is not None and rows.lm_head_ids_R.tolist() == [1, 3, 5, 7, 9]
        assert torch.equal(rows.lm_head_RD, actor.lm_head.weight[rows.lm_head_ids_R])
        embedding_VD = actor.get_input_embeddings().weight
        if not rows.tied:
            assert rows.embedding_ids_E is not None and rows.embedding_ED is not None
            assert rows.embedding_ids_E.tolist() == [5, 7, 9]
            assert torch.equal(rows.embedding_ED, embedding_VD[[5, 7, 9]])
        kept = rows.lm_head_RD.clone()
    with torch.no_grad():
        actor.lm_head.weight.zero_()
    assert torch.equal(rows.lm_head_RD, kept)  # Copies: the actor goes on.
    assert reports.taken(batch, None) == Taken(batch, None)  # Heads that read neither table.
    assert reports.taken(None, wanted) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_batches_in_heads_out(kind: str, chain_actor: Path, tmp_path: Path, ray_session: None):
    settings = {"learning_rate": 1e-2, "epochs": 8, "batch_positions": 256, "wait": True}
    config = build_config({"heads": {"num_heads": 2, "kind": kind}, "companion": settings})
    attachment = RemoteAttachment(config, str(chain_actor), tmp_path / "medusa")
    arguments = attachment.arguments("some.Worker")
    assert (
        arguments["worker_extension_cls"] == "some.Worker"
        and arguments["logprobs_mode"] == "processed_logprobs"
    )
    load_heads(arguments["speculative_config"]["model"])

    actor = load_actor(chain_actor)
    workers = RemoteWorkers()
    totals = iter([Counters(), Counters(10, 20, 5, (4, 1)), Counters(30, 60, 25, (16, 9))])
    attachment.attach(workers, lambda: next(totals))
    attachment.start()
    tap = PassTap(actor, Sampling(), 2**30, 2)
    tables = WorkerTables(HFActor(actor))
    rows = rows_of(actor, 64)
    for step in range(2):
        row_bytes = actor.config.hidden_size * 4 + ROW_BYTES
        assert attachment.generated(Sampling()) == config.companion.queue_bytes // 2 // row_bytes
        with torch.no_grad(), tap.watch(rows):
            ids = torch.tensor([prompt + answer for prompt, answer in rows])
            logits = actor(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        tap.add_logprobs(
            [
                v[[*range(24)], answer]
                for v, (_, answer) in zip(logits[:, :-1].log_softmax(-1), rows, strict=True)
            ]
        )
        taken = tables.taken(tap.take(step), attachment.plugin.wanted_rows())
        attachment.scored([None, taken])
        with torch.no_grad():
            actor.lm_head.weight.mul_(1.01)
        attachment.updated(step + 1)
        attachment.synced(lost_heads=True)
    attachment.end([None, tables.whole()])

    assert workers.version >= 1
    saved, metadata = load_heads(tmp_path / "medusa" / "heads-final")
    assert (
        metadata.version == workers.version and checksum(saved.trainable_state()) == workers.heads
    )
    run = read_run(tmp_path / "medusa")
    assert [step[names.POLICY_VERSION] for step in run.steps] == [0, 1]
    assert [step[names.MAL_SERVING] for step in run.steps] == [
        1.5,
        2.0,
    ]  # of the differences of the totals
    assert run.steps[-1][names.COMPANION_TRAINED_TOKENS] > 1000
    # Stock vLLM finds the lm_head of the trained actor beside the heads, if it can serve them.
    final = load_file(tmp_path / "medusa" / "heads-final" / WEIGHTS_NAME)
    assert (LM_HEAD_KEY in final) == (kind == "medusa")
    if kind == "medusa":
        written = final[LM_HEAD_KEY]
        assert torch.equal(written, actor.lm_head.weight.detach().to(written.dtype))
    sent = [step[names.TABLE_BYTES] for step in run.steps]
    assert sent[0] > 0 and sent[-1] <= 2 * 2 * actor.lm_head.weight.nbytes
    assert workers.calls.count("medusa_target_changed") == 2

    # A run that goes on from a checkpoint drafts with what the earlier one had, not with its first
    # heads; its version is the loop's.
    again = RemoteAttachment(config, str(chain_actor), tmp_path / "medusa")
    later = RemoteWorkers()
    again.attach(later, Counters)
    again.start(2)
    again.synced(lost_heads=False)
    assert (later.version, later.heads) == (workers.version, workers.heads)
    assert again.generated(Sampling())
    again.scored([None])  # No rank had a row of the sample.
    again.updated(3)
    again.end()
    (step,) = read_run(tmp_path / "medusa").steps
    assert step[names.POLICY_VERSION] == 2


def test_heads_go_on_from_the_companions_state_if_the_loop_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else they begin anew, and the log says why; a new training takes nothing from an old one."""
    asked: list[str] = []
    fits = learns = True
    plugin = cast(MedusaPlugin, object())

    def start(state: str) -> MedusaPlugin:
        asked.append(state)
        if state and not fits:
            raise SavedStateError("Another shape.", given="2", expected="3", do="Begin anew.")
        return plugin

    def started(version: int) -> list[str]:
        asked.clear()
        caplog.clear()
        config = build_config({"companion": {"enabled": learns}})
        with caplog.at_level(logging.WARNING, logger="medusa_ppo"):
            assert start_or_resume(start, config, tmp_path, version) is plugin
        return [record.getMessage() for record in caplog.records]

    assert not started(0)
    (told,) = started(7)
    assert "version 7" in told and "there is none" in told and asked == [""]
    state = tmp_path / "companion"
    state.mkdir()
    (state / STATE_FILE).write_bytes(b"a state")
    assert not started(7) and asked == [str(state)]
    assert not started(0) and asked == [""]
    learns = False
    assert not started(7) and asked == [""], "nothing would read the state, or begin anew"
    assert (state / STATE_FILE).read_bytes() == b"a state"
    (state / STATE_FILE).unlink()
    assert not started(7) and asked == [""]
    learns = True
    fits = False
    for number in (1, 2):
        (state / STATE_FILE).write_bytes(b"state %d" % number)
        (told,) = started(7)
        assert "Another shape." in told and asked == [str(state), ""]
        # A companion that starts anew removes the file that it finds.
        unused = f"{STATE_FILE}.unused-{number}"
        assert unused in told and not (state / STATE_FILE).exists()
        assert (state / unused).read_bytes() == b"state %d" % number


def test_a_start_that_fails_once_does_not_cost_the_heads(tmp_path: Path) -> None:
    """A start that took too long, or a death for memory, is no fault of the state."""
    (tmp_path / "companion").mkdir()
    file = tmp_path / "companion" / STATE_FILE
    file.write_bytes(b"a state")
    asked: list[str] = []

    def start(state: str) -> MedusaPlugin:
        asked.append(state)
        if state:
            raise CompanionError("The companion did not start.", given="no answer in time")
        file.unlink()  # As a companion that starts anew does.
        return cast(MedusaPlugin, object())

    with pytest.raises(CompanionError, match="no answer in time"):
        start_or_resume(start, build_config({}), tmp_path, 7)
    assert asked == [str(file.parent)] and file.read_bytes() == b"a state"


def test_a_second_start_is_refused_before_it_touches_the_first_ones_companion(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its companion removed the living one's state, and only then was the run refused."""
    config = build_config({"heads": {"num_heads": 2}})
    folder = tmp_path / "medusa"
    early = RemoteAttachment(config, str(chain_actor), folder, several_nodes=True)
    early.attach(RemoteWorkers(), Counters)
    same_process = Attachment(config.model_copy(update={"out": str(tmp_path), "name": "medusa"}))
    same_process.engine = early.engine
    assert same_process.folder == folder
    started: list[Any] = []
    for method in ("start", "start_from_tables"):
        monkeypatch.setattr(MedusaPlugin, method, lambda *args, **more: started.append(args))
    monkeypatch.setattr(
        "medusa_ppo.loops.attachment.local_ray", lambda **more: contextlib.nullcontext()
    )
    start = folder / START / "config.json"
    written = start.stat().st_mtime_ns
    living = {"status": "running", "process": {"pid": 1, "host": "elsewhere"}}
    (folder / META_FILE).write_text(json.dumps(living))
    for begin in (
        early.start,
        lambda: same_process._start(cast(HFActor, None), []),
        lambda: RemoteAttachment(config, str(chain_actor), folder, several_nodes=True),
    ):
        with pytest.raises(RunError, match="Another process writes"):
            begin()
    assert not started and start.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("no reward"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_training_that_fails_is_recorded_as_failed_and_its_own_error_is_seen(
    error: BaseException,
    status: str,
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The report said "finished", and heads that could not be saved hid the error."""
    plugin = FullDisk()
    monkeypatch.setattr(MedusaPlugin, "start_from_tables", lambda *args, **more: plugin)
    config = build_config({"heads": {"num_heads": 2}})
    loop = RemoteAttachment(config, str(chain_actor), tmp_path)
    loop.attach(RemoteWorkers(), Counters)
    loop.start()
    with pytest.raises(type(error)) as raised, loop.training():
        raise error
    assert raised.value is error and plugin.closed
    assert "No space left on device" in caplog.text
    meta = read_run(tmp_path).meta
    assert meta["status"] == status
    assert meta.get("extras") == ({"error": "no reward"} if status == "failed" else None)
    loop.start()  # It may begin again.
    loop.plugin = cast(Any, plugin)
    plugin.closed = False
    with pytest.raises(OSError, match="No space"), loop.training():
        pass  # Here it is the only error.
    meta = read_run(tmp_path).meta
    assert meta["status"] == "failed" and "No space" in meta["extras"]["error"]
    assert plugin.closed, "no companion goes on"


def test_heads_that_begin_untrained_say_so_and_those_that_go_on_do_not(
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(MedusaPlugin, "start_from_tables", lambda *args, **more: FullDisk())
    config = build_config({"heads": {"num_heads": 2}})
    loop = RemoteAttachment(config, str(chain_actor), tmp_path)
    loop.attach(RemoteWorkers(), Counters)
    loop.start()
    assert "begin untrained" in caplog.text
    caplog.clear()
    state = tmp_path / "companion" / STATE_FILE
    state.parent.mkdir()
    state.write_bytes(b"a state")
    loop.start(7)
    assert "begin untrained" not in caplog.text


class RestingPlugin:
    """Wants states of every second batch: 1,000."""

    def __init__(self) -> None:
        self.seen: list[Rollouts] = []
        self.exposed = contextlib.nullcontext

    def most_states(self) -> int:
        return 1000

    def rollout_ready(self, rollouts: Rollouts) -> object | None:
        self.seen.append(rollouts)
        return object() if len(self.seen) % 2 else None


def test_a_loop_is_told_when_the_companion_wants_no_states(chain_actor: Path, tmp_path: Path):
    """Acceptance is counted all the same: it is what wakes the companion."""
    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 2}}), str(chain_actor), tmp_path / "medusa"
    )
    assert not attachment.generated(Sampling()), "no engine yet"
    totals = iter([Counters(10, 20, 5, (4, 1)), Counters(30, 60, 25, (16, 9))])
    attachment.attach(RemoteWorkers(), lambda: next(totals))
    plugin = RestingPlugin()
    attachment.plugin = cast(Any, plugin)
    assert [attachment.generated(Sampling()) for _ in range(2)] == [1000, 0]
    assert [rollouts.counters for rollouts in plugin.seen] == [
        Counters(10, 20, 5, (4, 1)),
        Counters(20, 40, 20, (12, 8)),
    ]


def test_what_the_engines_are_asked_counts_as_waiting(chain_actor: Path, tmp_path: Path) -> None:
    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 2}}), str(chain_actor), tmp_path / "medusa"
    )
    now = 0.0

    def answer() -> Counters:
        nonlocal now
        now += 5.0
        return Counters()

    attachment.attach(RemoteWorkers(), answer)
    assert attachment.engine is not None
    attachment.plugin = plugin = MedusaPlugin(attachment.engine, None, clock=lambda: now)
    attachment.generated(Sampling())
    assert plugin.metrics()[names.PLUGIN_EXPOSED_S] == 5.0
    attachment.forget_generated()
    with plugin.exposed(), plugin.exposed():
        now += 2.0
    now += 100.0
    assert plugin.metrics()[names.PLUGIN_EXPOSED_S] == 7.0, "contexts inside one count once"


def test_what_a_validation_drafts_is_no_rollout(chain_actor: Path, tmp_path: Path) -> None:
    """The engines' counters grow by 1,000 drafts between a sync and the next rollouts."""
    attachment = RemoteAttachment(
        build_config({"heads": {"num_heads": 2}}), str(chain_actor), tmp_path / "medusa"
    )
    attachment.forget_generated()  # Not attached yet, as before verl's engines have started.
    rollouts, validation = Counters(10, 20, 5, (4, 1)), Counters(1000, 2000, 1500, (900, 600))
    totals = iter([rollouts, rollouts + validation, rollouts + validation + rollouts])
    workers = RemoteWorkers()
    attachment.attach(workers, lambda: next(totals))
    plugin = RestingPlugin()
    attachment.plugin = cast(Any, plugin)
    attachment.generated(Sampling())
    workers.calls.clear()
    attachment.forget_generated()
    # What the engines chose in it is no choice of the next step either.
    assert workers.calls == ["medusa_choices"]
    attachment.generated(Sampling())
    assert [seen.counters for seen in plugin.seen] == [rollouts, rollouts]


def test_a_step_without_a_usable_row_does_not_end_the_training(chain_actor: Path, tmp_path: Path):
    """Tools' answers in every response of the tapped replica, for example."""
    config = build_config({"heads": {"num_heads": 2}})
    attachment = RemoteAttachment(config, str(chain_actor), tmp_path / "medusa")
    attachment.attach(RemoteWorkers(), Counters)
    assert attachment.engine is not None
    companion = RecordingCompanion()
    attachment.plugin = MedusaPlugin(attachment.engine, cast(Any, companion))
    for version in (1, 2):
        assert attachment.generated(Sampling())
        attachment.scored([None])
        attachment.updated(version)
    assert companion.batches == []


@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_read_from_the_files_and_are_those_of_the_model(tied: bool, tmp_path: Path):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    lm_head, embedding = read_tables(str(tmp_path))
    assert torch.equal(lm_head, model.lm_head.weight) and torch.equal(
        embedding, model.model.embed_tokens.weight
    )
    assert torch.equal(lm_head, embedding) == tied


def test_tables_of_other_names_are_the_models_own(tmp_path: Path):
    """A Pythia's lm_head is `embed_out` in its files; it was its input embedding for us once."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=32, **sizes))
    model.save_pretrained(tmp_path)
    lm_head, embedding = read_tables(str(tmp_path))
    assert torch.equal(lm_head, model.get_output_embeddings().weight) and torch.equal(
        embedding, model.gpt_neox.embed_in.weight
    )
    assert not torch.equal(lm_head, embedding)


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_hub_name_only_the_files_with_the_tables_are_fetched(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The whole actor was loaded for two tables. The hub is a double: no test has a network."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    asked: list[str] = []

    def fetched(name: str, file: str, **_: object) -> str | None:
        assert name == "someone/actor"
        asked.append(file)
        return str(tmp_path / file) if (tmp_path / file).is_file() else None

    monkeypatch.setattr(hf, "cached_file", fetched)
    monkeypatch.setattr(hf, "actor_config", lambda path: model.config)
    monkeypatch.setattr(remote, "load_actor", lambda path: pytest.fail("the whole actor"))
    lm_head, embedding = read_tables("someone/actor")
    assert torch.equal(lm_head, model.lm_head.weight)
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    assert len(asked) - 1 <= 2 < len(list(tmp_path.glob("*.safetensors")))


def test_settings_are_refused_by_name():
    refuse("a loop", {"--one": False})
    with pytest.raises(ConfigError, match="a loop") as error:
        refuse("a loop", {"--one": False, "--two": True, "--three": True})
    assert "--two, --three" in str(error.value) and "--one" not in str(error.value)


def test_a_server_does_not_replace_a_folder_of_something_else(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are made in a folder without any, which replaces it whole: in a checkout `heads/` is
    this package's source.
    """
    monkeypatch.setattr(os, "execvpe", lambda *arguments: pytest.fail("the server started"))
    precious = tmp_path / "precious" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("a year of work")
    with pytest.raises(CheckpointError, match="holds no heads"):
        serve(str(chain_actor), str(precious.parent), build_config({}), "127.0.0.1", [])
    assert precious.read_text() == "a year of work"


def test_a_server_gets_the_further_arguments_of_its_file(
    chain_actor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They were lost, though every other engine of a loop gets them."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, arguments, __: started.append(arguments))
    extra = {"max_logprobs": 3, "compilation_config": {"cudagraph_capture_sizes": [5, 10]}}
    config = build_config({"engine": {"extra": extra, "num_drafts": 2, "max_num_seqs": 16}})
    serve(str(chain_actor), str(tmp_path / "heads"), config, "127.0.0.1", ["--max-logprobs", "-1"])
    (flags,) = started
    assert flags[flags.index("--max-logprobs") + 1] == "3"
    assert flags[-4:-2] == ["--max-logprobs", "-1"], "flags come after, so that vLLM follows them"
    assert json.loads(flags[flags.index("--compilation-config") + 1]) == extra["compilation_config"]
    assert "engine.max_num_seqs" in caplog.text and "engine.num_drafts" not in caplog.text


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"max_num_seqs": 256, "dtype": "bfloat16"}, ["engine.dtype", "engine.max_num_seqs"]),
        ({"extra": {"max_num_seqs": 256}, "num_drafts": 2, "transfer": "file"}, []),
        (
            {
                "draft_temperature": 0.5,
                "draft_vocab": 0,
                "memory_bytes": 1 << 20,
                "num_drafts": 2,
                "runner": "v1",
                "stop_below": 0.05,
            },
            [],
        ),
    ],
)
def test_settings_that_a_loop_s_own_engine_does_not_read_are_named(
    engine: dict[str, Any], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They were checked and then ignored."""
    attachment = Attachment(build_config({"engine": engine}))
    assert attachment.config.engine.model_fields_set == engine.keys()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(named)
    assert all(", ".join(named) in text and "engine.extra" in text for text in told)


def test_every_setting_of_engine_counts_in_other_loops_or_is_named() -> None:
    """Whoever adds one decides which."""
    own = {"backend", "replicas", "resource", "dtype", "max_num_seqs", "max_model_len"}
    own |= {"memory_fraction", "enforce_eager", "sleep_level", "threads"}
    assert not own & COUNT and own | COUNT == set(EngineConfig.model_fields)


def test_a_server_is_started_with_heads_that_are_made_once(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[list[str]] = []
    monkeypatch.setattr(
        os, "execvpe", lambda file, arguments, environment: started.append(arguments)
    )
    serve(
        str(chain_actor),
        str(tmp_path / "heads"),
        build_config({"heads": {"num_heads": 2}}),
        "127.0.0.1",
        ["--port", "8000"],
    )
    heads, metadata = load_heads(tmp_path / "heads")
    assert heads.config.num_heads == 2

    serve(
        str(chain_actor),
        str(tmp_path / "heads"),
        build_config({"heads": {"num_heads": 4}, "engine": {"num_drafts": 2}}),
        "localhost",
        [],
    )
    assert load_heads(tmp_path / "heads")[1].checksum == metadata.checksum, (
        "heads that are there are left alone"
    )

    flags = started[0][3:]
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    assert json.loads(named["--speculative-config"]) == {
        "method": "medusa",
        "model": str(tmp_path / "heads"),
        "num_speculative_tokens": 2,
    }
    assert (
        named["--worker-extension-cls"].endswith("MedusaWorker")
        and named["--logprobs-mode"] == "processed_logprobs"
    )
    assert "--disable-log-stats" not in named and named["--port"] == "8000"
    assert named["--host"] == "127.0.0.1" and named["--middleware"].endswith("ControlGuard")

    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, match=TOKEN):
        serve(
            str(chain_actor),
            str(tmp_path / "heads"),
            build_config({"engine": {"num_drafts": 2}}),
            "0.0.0.0",
            [],
        )
    monkeypatch.setenv(TOKEN, "secret")
    serve(
        str(chain_actor),
        str(tmp_path / "heads"),
        build_config({"engine": {"num_drafts": 2}}),
        "0.0.0.0",
        [],
    )
    assert started[-1][-2:] == ["--host", "0.0.0.0"] and len(started) == 3
    monkeypatch.delenv(TOKEN)
    more = ["--", "--host", "0.0.0.0", "--hos=0.0.0.0"]
    serve(
        str(chain_actor),
        str(tmp_path / "heads"),
        build_config({"engine": {"num_drafts": 2}}),
        "127.0.0.1",
        more,
    )
    assert started[-1][-2:] == ["--host", "127.0.0.1"] and "--" not in started[-1], (
        "of several vLLM takes the last"
    )


@pytest.fixture
def two_nodes() -> Iterator[None]:
    """A Ray of two nodes on this machine; the second one has the resource `engines`."""
    assert not ray.is_initialized()
    memory = 100 * 1024**2
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=1, resources={"engines": 1}, object_store_memory=memory)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


class OtherNode(EngineCalls):
    """An engine's actor on another node than the driver's, whose workers take what they get."""

    medusa_engine = "engine"

    def __init__(self, full: str) -> None:
        self.engine = self
        self.full = full
        self.workers = RemoteWorkers()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        return self.workers(method, args)

    def asked(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        """As by `call_all`, with Ray's part left out."""
        sent = None
        if args and isinstance(args[0], str):
            content = np.fromfile(args[0], np.uint8)

            class Content(np.ndarray):
                def tofile(content, path: Any, *_: Any) -> None:
                    if self.full == "file":
                        raise OSError(errno.ENOSPC, "No space left on device")
                    np.asarray(content).tofile(path)

            async def fetched() -> np.ndarray:
                return content.view(Content)

            sent = SentFile("the driver's", [fetched()])
        return asyncio.run(self.medusa_call(method, args, sent))


@pytest.mark.parametrize("full", ["", "folder", "file"])
def test_an_engines_node_without_room_for_newer_heads_ends_no_training(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raised its OSError in the driver, and the training of verl or OpenRLHF ended."""
    node = SimpleNamespace(get_node_id=lambda: "its own")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: node)
    if full == "folder":

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(ray_engine, "OwnedFolder", refuse)
    state = {"w": torch.ones(2)}
    for name in ("kept", "published"):
        save_state(tmp_path / name, state)
    actor = OtherNode(full)
    engine = AttachedEngine(actor.asked, tmp_path / "kept")
    installer = HeadsInstaller(engine, None, "disable")
    installer.install(PublishedHeads(4, str(tmp_path / "published"), checksum(state), 0, 1.0))
    assert (installer.installed is None) == bool(full)
    assert engine.heads_version == actor.workers.version == (0 if full else 4)
    if full:
        with pytest.raises(NoRoomError, match="No space left"):
            engine.swap_heads(tmp_path / "published", 5)


def test_an_object_store_without_room_for_newer_heads_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(content: np.ndarray) -> None:
        raise ObjectStoreFullError("The object store is full.")

    monkeypatch.setattr(ray, "put", full)
    monkeypatch.setattr(remote, "on_one_node", lambda: False)
    path = tmp_path / "state"
    path.write_bytes(b"heads")
    with pytest.raises(NoRoomError, match="The object store is full"):
        call_all([], "medusa_swap_heads", (str(path), 4))


def test_heads_of_the_trainings_own_folder_are_refused_before_its_engines_start(
    chain_actor: Path, tmp_path: Path
) -> None:
    """The companion removes versions, the report moves `heads-final`: started again with the same
    settings, the training would not find them.
    """
    config = build_config({"heads": {"num_heads": 2}})
    first = RemoteAttachment(config, str(chain_actor), tmp_path)
    for place in ("heads/v000123", HEADS_FOLDER):
        save_heads(tmp_path / place, first._heads)
        named = build_config({"heads": {"path": str(tmp_path / place)}})
        with pytest.raises(ConfigError, match="heads-start"):
            RemoteAttachment(named, str(chain_actor), tmp_path)
        assert load_heads(tmp_path / place)
        RemoteAttachment(named, str(chain_actor), tmp_path / "another")


@pytest.mark.slow
def test_engines_of_other_nodes_read_a_copy_of_the_file(two_nodes: None, tmp_path: Path) -> None:
    class Engine:
        async def medusa_call(
            self, method: str, args: tuple[Any, ...], sent: Any = None
        ) -> list[dict[str, Any]]:
            async with arrived(args, sent) as found:
                path = Path(found[0])
                seen = {"path": str(path), "content": path.read_bytes(), "rest": found[1:]}
            return [{**seen, "left": path.exists()}]

    path = tmp_path / "state"
    path.write_bytes(bytes(range(256)) * 1000)
    here = ray.remote(num_cpus=0)(Engine).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
    )
    there = ray.remote(num_cpus=0, resources={"engines": 0.1})(Engine)
    engines = [here.remote(), there.remote()]
    own, copied = call_all(engines, "medusa_swap_heads", (str(path), 3, ["checksum"]))
    assert own["path"] == str(path) and own["left"], "no copy where the file is"
    assert copied["path"] != str(path) and not copied["left"], "a copy ends with the call"
    for seen in (own, copied):
        assert seen["content"] == path.read_bytes() and seen["rest"] == (3, ["checksum"])
