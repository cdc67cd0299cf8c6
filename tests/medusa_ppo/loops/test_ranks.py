"""Several processes of one training, for real: they agree or are told why not, the first one leads,
and nothing waits for the dead.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import operator
import os
import queue
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from heads.checkpoint import checksum, load_heads, load_state, save_state
from heads.errors import ConfigError, DataError, EngineError, MedusaError
from medusa_ppo.actors.hf import HFActor, load_actor
from medusa_ppo.companion.wire import WantedRows
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.contract.status import PublishedHeads
from medusa_ppo.loops import attachment as attachment_module
from medusa_ppo.loops import ranks as module
from medusa_ppo.loops.attachment import Attachment
from medusa_ppo.loops.passes import Generated
from medusa_ppo.loops.ranks import Ranks
from medusa_ppo.loops.remote import WorkerTables
from medusa_ppo.plugin import MedusaPlugin
from medusa_ppo.plugin import medusa_plugin as plugin_module
from medusa_ppo.reports.store import read_run
from tests.medusa_ppo.conftest import RecordingCompanion

ROOT = Path(__file__).resolve().parents[3]
Work = Callable[[int], Any]
# The processes come from a server without threads: a fork of pytest's own, where Ray and OpenMP
# have run, may hang.
STARTS = multiprocessing.get_context("forkserver")
STARTS.set_forkserver_preload(["medusa_ppo.loops.attachment", "torch.distributed.fsdp"])
for known in (__name__, RecordingCompanion.__module__):  # The processes can't import tests.
    cloudpickle.register_pickle_by_value(sys.modules[known])


class ByValue:
    """A closure on its way to another process."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (cloudpickle.dumps(self.work),)


def _rank(rank: int, size: int, port: int, work: Work, box: Any) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.monotonic()
    try:
        box.put((rank, work(rank), time.monotonic() - began))
    except MedusaError as error:
        box.put((rank, error, time.monotonic() - began))
    except Exception as error:  # torch's own RuntimeError, when another process is gone
        box.put(
            (rank, RuntimeError(f"{error}\n{traceback.format_exc()}"), time.monotonic() - began)
        )
    box.close()
    box.join_thread()
    os._exit(0)


def _answer(box: Any, started: list[Any]) -> Any:
    """The next answer; an error as soon as a process is gone without one."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        gone = [process.exitcode for process in started]
        try:
            return box.get(timeout=1)
        except queue.Empty:
            assert None in gone or time.monotonic() > until, (
                f"all processes are gone: exit codes {gone}"
            )
    raise TimeoutError("no answer in 300 s")


def together(work: Work, size: int = 2, answers: int | None = None) -> dict[int, Any]:
    """`work(rank)` in processes of their own; what each gave or raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    box = STARTS.Queue()
    started = [
        STARTS.Process(
            target=operator.call, args=(ByValue(_rank), rank, size, port, ByValue(work), box)
        )
        for rank in range(size)
    ]
    for process in started:
        process.start()
    try:
        found = [_answer(box, started) for _ in range(answers or size)]
    finally:
        for process in started:
            process.kill()
            process.join()
    return {rank: (answer, seconds) for rank, answer, seconds in found}


def test_the_first_process_calls_all_and_gets_every_answer():
    def work(rank: int) -> Any:
        ranks = Ranks.here({"heads": 2})
        calls: list[Any] = []

        def serve(method: str, arguments: tuple[Any, ...]) -> list[Any]:
            calls.append((method, *arguments))
            return [rank * 10 + arguments[0]]

        answer = ranks.led(
            lambda: [ranks.call("swap", (1,), serve), ranks.call("swap", (2,), serve)], serve
        )
        return (
            answer,
            calls,
            ranks.share(rank),
            ranks.all(rank),
            ranks.first_gets(rank),
            ranks.leads,
        )

    found = together(work)
    calls = [("swap", 1), ("swap", 2)]
    assert found[0][0] == ([[[1], [11]], [[2], [12]]], calls, 0, [0, 1], [0, 1], True)
    assert found[1][0] == (None, calls, 0, [0, 1], None, False)


def test_other_settings_in_one_process_are_told_to_all():
    found = together(lambda rank: Ranks.here(None if rank else {"heads": 2}))
    for answer, _ in found.values():
        assert isinstance(answer, ConfigError) and "do not have the same medusa settings" in str(
            answer
        )


@pytest.mark.parametrize("what", [None, {"heads": 2}])
def test_only_heads_need_one_node(what: Any):
    """A trainer without heads is TRL's, and may have several."""

    def work(rank: int) -> Any:
        module.socket.gethostname = lambda: f"node-{rank}"  # type: ignore[attr-defined]
        module.AGREE_S = 60.0
        return Ranks.here(what).size

    for answer, _ in together(work).values():
        if what is None:
            assert answer == 2
        else:
            assert "do not have the same node" in str(answer)


def test_a_trainer_without_heads_waits_as_long_as_trl_would():
    def work(rank: int) -> Any:
        module.AGREE_S = 1.0
        if rank == 1:
            time.sleep(5)
        return Ranks.here(None, 120.0).size

    assert [answer for answer, _ in together(work).values()] == [2, 2]


def test_a_process_that_never_comes_is_waited_for_in_vain_but_not_long():
    def work(rank: int) -> Any:
        module.AGREE_S = 3.0
        return Ranks.here({}) if rank == 0 else time.sleep(400)

    found = together(work, answers=1)
    answer, seconds = found[0]
    assert isinstance(answer, ConfigError) and "Not every process" in str(answer) and seconds < 300


@pytest.mark.parametrize(("timeout_s", "waits"), [(60.0, True), (0.0, False)])
def test_processes_wait_for_each_other_as_long_as_the_trainer_allows(timeout_s: float, waits: bool):
    """The second one arrives late, as one that writes a checkpoint alone."""

    def work(rank: int) -> Any:
        module.LED_S = 2.0
        ranks = Ranks.here({}, timeout_s)
        if rank == 1:
            time.sleep(6)
        return ranks.all(rank)

    found = together(work)
    assert (found[0][0] == [0, 1]) == waits
    assert isinstance(found[0][0], RuntimeError) != waits


def test_a_failure_on_either_side_ends_both():
    def fails(where: int) -> Work:
        def work(rank: int) -> Any:
            ranks = Ranks.here({})

            def serve(method: str, arguments: tuple[Any, ...]) -> list[Any]:
                if rank == where == 1:
                    raise EngineError("The engine is gone.", given=1, expected=1, do="x")
                return []

            def action() -> None:
                ranks.call("swap", (), serve)
                if where == 0:
                    raise ConfigError("The companion is gone.", given=1, expected=1, do="x")

            return ranks.led(action, serve)

        return work

    first = together(fails(0))
    assert "companion is gone" in str(
        first[0][0]
    ) and "first process of the training failed" in str(first[1][0])
    second = together(fails(1))
    assert "process 1: EngineError: The engine is gone" in str(second[0][0])


@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_dies_is_an_error_for_the_other_at_once(dies: int):
    def work(rank: int) -> Any:
        ranks = Ranks.here({})
        if rank == dies:
            os._exit(1)
        return ranks.led(lambda: ranks.call("swap", (), lambda *_: []), lambda *_: [])

    found = together(work, answers=1)
    answer, seconds = found[1 - dies]
    assert isinstance(answer, Exception) and seconds < 60


class RankEngine:
    """In the place of the vLLM in each process (tests/medusa_ppo/loops/test_trl_grpo_ranks.py has
    the real ones): what it holds.
    """

    def __init__(self) -> None:
        self.version = 0
        self.heads = ""
        self.drafts = 0

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        if method == "medusa_swap_heads":
            self.version = int(args[1])
            self.heads = checksum(load_state(args[0]))
        facts = {
            "kind": "medusa",
            "drafter": "MedusaProposer",
            "max_drafts": 2,
            "rows": [],
            "key": {"what": "times of nobody's machine"},
            "choices": [0, 1, 2],
            "seconds": 0.0,
        }
        return [
            facts | {"heads_version": self.version, "version": self.version, "checksum": self.heads}
        ]

    def get_metrics(self) -> list[Any]:
        values = {
            "drafts": self.drafts,
            "draft_tokens": 2 * self.drafts,
            "accepted_tokens": self.drafts,
        }
        found = [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=value)
            for name, value in values.items()
        ]
        return [
            *found,
            SimpleNamespace(
                name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.drafts, 0]
            ),
        ]

    def reset_prefix_cache(self) -> bool:
        return True


class RankCompanion(RecordingCompanion):
    """In the place of the companion: keeps what it is given, and has newer heads after the first
    batch.
    """

    made: ClassVar[list[RankCompanion]] = []

    def __init__(
        self, heads: Any, *args: Any, initial_state: dict[str, torch.Tensor], **kwargs: Any
    ) -> None:
        super().__init__()
        self.state = initial_state
        self.made_tables = 0
        self.shared = False
        RankCompanion.made.append(self)

    def update_lm_head(self, *args: Any, **kwargs: Any) -> None:
        self.made_tables += 1

    def newest(self, after_version: int, timeout_s: float = 0.0) -> PublishedHeads | None:
        if not self.batches or after_version >= 1:
            return None
        path = Path(tempfile.mkdtemp(dir=os.environ["OUT"])) / "heads.safetensors"
        save_state(path, {name: tensor + 0.1 for name, tensor in self.state.items()})
        return PublishedHeads(1, str(path), checksum(load_state(path)), 0, 2.0)


GATHERS = ((Ranks, "all"), (Ranks, "first_gets"), (HFActor, "refresh"))


def _by_made_up_seconds(plugin: MedusaPlugin) -> None:
    """From now on each gather of a step takes a second on the plugin's clock, all else nothing."""
    now = [0.0]

    def slower(gather: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            now[0] += 1.0
            return gather(*args)

        return slow

    plugin._clock = lambda: now[0]
    for owner, name in GATHERS:
        setattr(owner, name, slower(getattr(owner, name)))


def _train(
    rank: int, actor_path: str, out: Path, form: str, updates: tuple[bool, ...] = (True, True)
) -> dict[str, Any]:
    """A trainer under DDP or FSDP2; each process has its own engine and its own rows.

    Args:
        updates: for each generation, whether an update follows.
    """
    warnings: list[str] = []
    monitor = logging.Handler(logging.WARNING)
    monitor.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(plugin_module.__name__).addHandler(monitor)
    os.environ["OUT"] = str(out)
    offered: list[tuple[str, ...] | None] = []

    def local_ray(*, gpus: Any = None, **_: Any) -> contextlib.AbstractContextManager[None]:
        offered.append(gpus)
        return contextlib.nullcontext()

    attachment_module.local_ray = local_ray  # type: ignore[assignment]
    # No test machine has GPUs: their names are made up.
    attachment_module.visible_gpus = lambda: tuple("0123")
    attachment_module.own_gpu = lambda: str(2 * rank)
    plugin_module.CompanionClient = RankCompanion  # type: ignore[assignment,misc]
    config = build_config({"heads": {"num_heads": 2}})
    attachment = Attachment(config, Ranks.here(config.model_dump(mode="json")))
    attachment.folder = out / "medusa"
    model = load_actor(actor_path)
    engine = RankEngine()
    attachment.engine_arguments(model)
    attachment.attach_llm(engine)
    table = model.lm_head.weight.nbytes
    wrapped: torch.nn.Module = model
    if form == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attachment.begin(model)
    if isinstance(attachment.plugin, MedusaPlugin):
        _by_made_up_seconds(attachment.plugin)
    seen: list[tuple[int, int]] = []
    for step, update in enumerate(updates):
        prompts = [[5 + rank, 6], [9 + rank, 7]]
        prompts[1] = [9, 7]  # This row is the same in both processes, and each scores its own.
        answers = [[10 + rank, 11 + step, 12, 13], [14, 15 + step]]
        with attachment.generation(Sampling()) as generated:
            engine.drafts += 3 + rank
            generated.append(
                Generated(prompts, answers, [[-0.5] * len(answer) for answer in answers])
            )
        seen.append(
            (engine.version, attachment._rollouts.counters.drafts if attachment._rollouts else -1)
        )
        ids = torch.tensor([[*prompts[0], *answers[0]], [*prompts[1], *answers[1], 0, 0]])
        with torch.no_grad():
            wrapped(
                input_ids=ids, attention_mask=(ids > 0).long()
            )  # Once more than it must: no row counts twice.
        wrapped(input_ids=ids, attention_mask=(ids > 0).long()).logits.float().mean().backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
            attachment.updated(step + 1)
    attachment.end()
    attachment._home.close()  # This process ends by _exit, which runs nothing.
    made = RankCompanion.made
    batches = [batch.lengths_S.tolist() for companion in made for batch in companion.batches]
    return {
        "seen": seen,
        "companions": len(made),
        "batches": batches,
        "heads": engine.heads,
        "figures": attachment.figures(),
        "table": table,
        "offered": offered,
        "warnings": warnings,
    }


@pytest.mark.parametrize("form", ["ddp", "fsdp2"])
def test_one_companion_learns_from_all_rows_and_feeds_all_engines(
    form: str, chain_actor: Path, tmp_path: Path
):
    found = together(lambda rank: _train(rank, str(chain_actor), tmp_path, form))
    first = found[0][0]
    second = found[1][0]
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    assert (first["companions"], second["companions"]) == (1, 0)
    assert [sorted(lengths) for lengths in first["batches"]] == [[2, 2, 4, 4]] * 2
    assert (
        [version for version, _ in first["seen"]]
        == [version for version, _ in second["seen"]]
        == [0, 1]
    )
    assert first["seen"][0][1] == 7 and first["seen"][1][1] == 7, (
        "the counters of both engines, of this call only"
    )
    assert first["heads"] == second["heads"] != ""
    assert first["figures"]["medusa/table_bytes"] == (
        2 * first["table"] if form == "fsdp2" else 0
    ), "lm_head and the embedding"
    assert not second["figures"]
    assert first["offered"] == [("1", "3")] and not second["offered"], "those of neither process"
    steps = read_run(tmp_path / "medusa").steps
    assert [step[names.PLUGIN_EXPOSED_S] for step in steps] == [len(GATHERS)] * 2
    load_heads(tmp_path / "medusa" / "heads-final")


def test_every_generation_before_an_update_is_learned_from_and_reported(
    chain_actor: Path, tmp_path: Path
):
    """As in TRL, if `steps_per_generation` is less than `gradient_accumulation_steps`. Only the
    last one's states came, and the log said that nothing had been scored.
    """
    found = together(lambda rank: _train(rank, str(chain_actor), tmp_path, "ddp", (False, True)))
    first = found[0][0]
    assert isinstance(first, dict), first
    assert [sorted(lengths) for lengths in first["batches"]] == [[2, 2, 4, 4]] * 2
    assert first["warnings"] == []
    assert [version for version, _ in first["seen"]] == [0, 1]
    steps = read_run(tmp_path / "medusa").steps
    assert [step[names.DRAFTS] for step in steps] == [7, 7], "each one's own"


def test_an_embedding_that_nobody_reads_is_not_gathered(chain_actor: Path):
    """It was, after each update: 2.5 GB to one process's host at the size of an 8B actor."""

    def work(rank: int) -> Any:
        model = load_actor(chain_actor)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        actor = HFActor(model, reports=rank == 0)
        tables = WorkerTables(actor)
        found = [0]
        refused = []
        for reads in (True, False, False, True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            tables.taken(None, WantedRows(torch.tensor([1]), embedding=reads))
            found.append(actor.gathered_bytes)
            if not reads and rank == 0:
                with pytest.raises(DataError) as error:
                    _ = actor.embedding_VD
                refused.append(str(error.value))
        # Nothing changes any more, and still what was left out has to come.
        model.requires_grad_(False)
        actor.refresh(embedding=False)
        changed = actor.refresh()
        found.append(actor.gathered_bytes)
        whole_VD = model.get_input_embeddings().weight.full_tensor()
        equal = torch.equal(actor.embedding_VD, whole_VD) if rank == 0 else None
        gathered = [after - before for before, after in itertools.pairwise(found)]
        return [each / whole_VD.nbytes for each in gathered], changed, equal, len(refused)

    found = together(work)
    assert found[0][0] == ([2, 1, 1, 2, 2], True, True, 2)
    assert found[1][0] == ([2, 1, 1, 2, 2], True, None, 0)


def test_a_process_knows_its_gpu_by_the_name_that_others_know(monkeypatch: pytest.MonkeyPatch):
    """Doubles: no test machine has several GPUs."""
    monkeypatch.setattr(attachment_module, "visible_gpus", lambda: ("5", "GPU-1c"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert attachment_module.own_gpu() is None, "it computes on the CPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for place, name in ((0, "5"), (1, "GPU-1c"), (2, None)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda place=place: place)
        assert attachment_module.own_gpu() == name


def test_one_process_needs_no_group_and_an_engine_for_one_is_refused_in_several():
    alone = Ranks.here({})
    assert alone.led(
        lambda: alone.call("swap", (3,), lambda _, arguments: [arguments[0]]), lambda *_: []
    ) == [[3]]
    assert (alone.share(1), alone.all(1), alone.first_gets(1)) == (1, [1], [1])
    Ranks.refuse_several("DraftingEngine")
    found = together(lambda rank: Ranks.refuse_several("DraftingEngine"))
    assert all("is for a training of one process" in str(answer) for answer, _ in found.values())
    # Each process is refused, so none is told to make one after all.
    advised = {str(answer).rpartition("do this:")[2] for answer, _ in found.values()}
    assert all("process" not in advice and "CompanionTap" in advice for advice in advised)
    page = (ROOT / "docs" / "feeds.md").read_text(encoding="utf-8")
    assert "docs/feeds.md#a-stand-alone-companion" in advised.pop()
    assert "\n## A stand-alone companion\n" in page and "CompanionTap" in page
