"""The driver's half for loops whose actor and engines live in other processes. Imports no
framework.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import ray
import torch
from safetensors import safe_open

from heads.checkpoint import refuse_foreign_folder, save_heads, save_state
from heads.errors import ConfigError, NoRoomError
from medusa_ppo.actors.hf import (
    embedding_weight,
    lm_head_weight,
    load_actor,
    table_files,
    table_names,
)
from medusa_ppo.companion.wire import TableRows, WantedRows, batch_token_ids, copied_tables
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Rollouts, Sampling
from medusa_ppo.engines.colocated import AttachedEngine, Call, process_counters
from medusa_ppo.engines.launch import HOST, SERVER_MODULE, engine_flags, plan_launch
from medusa_ppo.engines.ray_engine import put_file, received_file
from medusa_ppo.loops.attachment import (
    OURS,
    Attachment,
    own_heads,
    refuse_broadcast,
    start_or_resume,
    warn_of_idle_settings,
)
from medusa_ppo.loops.passes import RowTap
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin, heads_for_table, refuse_own_heads
from medusa_ppo.reports.store import refuse_second_writer
from medusa_ppo.runtime.control_guard import GUARD, TOKEN, secret_of
from medusa_ppo.runtime.processes import on_one_node
from medusa_ppo.runtime.state_receiver import RECEIVER
from medusa_ppo.vllm_plugin.worker_calls import as_data

logger = logging.getLogger(__name__)

START = "heads-start"
"""Folder within the run's, with the heads that engines on several nodes start with."""


@dataclass(frozen=True)
class SentFile:
    """A file on the driver's node, for engines that can't see it.

    Attributes:
        node: the driver's node in Ray.
        content: reference to its bytes; in a list, so that Ray fetches them only where they are
            read.
    """

    node: str
    content: list[Any]


def call_all(engines: list[Any], method: str, args: tuple[Any, ...]) -> list[Any]:
    """Call a worker method on every worker of every engine. If the first argument is a file, it
    also reaches engines on other nodes (`arrived`).

    Raises:
        NoRoomError: Ray's object store did not take the file.
    """
    path = args[0] if args else None
    sent = None
    if isinstance(path, str) and os.path.isfile(path) and not on_one_node():
        content = put_file(path)
        sent = SentFile(ray.get_runtime_context().get_node_id(), [content])
    calls = [engine.medusa_call.remote(method, args, sent) for engine in engines]
    return [answer for answers in ray.get(calls) for answer in answers]


@contextlib.asynccontextmanager
async def arrived(args: tuple[Any, ...], sent: SentFile | None) -> AsyncIterator[tuple[Any, ...]]:
    """In an engine's process: the arguments of a call. If the driver is on another node, they name
    a copy of the file in this node's shared memory.

    Raises:
        NoRoomError: there is no room for the copy.
    """
    if sent is None or sent.node == ray.get_runtime_context().get_node_id():
        yield args
        return
    content = await sent.content[0]
    with received_file(content) as path:
        yield (path, *args[1:])


def sum_counters(engines: list[Any]) -> Counters:
    """vLLM's acceptance counters over all engines."""
    return sum(ray.get([engine.medusa_counters.remote() for engine in engines]), Counters())


Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Taken:
    """What a worker hands to the driver after the log-prob pass: the tapped batch, and those rows
    of its actor's tables that the companion wants (None: none).
    """

    batch: RolloutBatch
    rows: TableRows | None


class RemoteAttachment(Attachment):
    """An `Attachment` whose actor and engines are in other processes: only batches with the rows of
    the tables that they need, named calls and heads pass between them.
    """

    def __init__(
        self, config: RunConfig, model_path: str, folder: Path, *, several_nodes: bool = False
    ) -> None:
        """Read the actor's tables from its files and write the heads that the engines start with.

        Args:
            folder: the run's folder.
            several_nodes: engines may be on other nodes. They start with heads in this folder,
                which all nodes have to see; later heads are sent to them.

        Raises:
            UnsupportedVersionError, ModelError, CheckpointError, ConfigError, LossyError: as
            `plan_launch`.
            RunError: another process writes into the folder.
        """
        super().__init__(config)
        # Before heads are written there: the other one's engines start with those.
        refuse_second_writer(folder)
        refuse_own_heads(config.heads.path, *own_heads(folder))
        self.folder = folder
        # Tables are read from files: the actor is in other processes, which start only after the
        # engines.
        self._tables = read_tables(model_path)
        self._heads = heads_for_table(config, self._tables[0])
        if several_nodes:
            logger.warning(
                "Engines on other nodes start with the heads in %s: all nodes have to see it. Newer"
                " ones are sent to them.",
                folder,
            )
        start = (folder / START).resolve() if several_nodes else self._home.path / "heads"
        save_heads(
            start,
            self._heads,
            lm_head_VD=self._tables[0],
            metadata={"start": config.heads.path or "zero"},
        )
        save_state(self._kept_state, self._heads.trainable_state())
        self._plan = plan_launch(model_path, start, config.engine, config.seed, others_start=True)
        self._before = Counters()

    def arguments(self, worker_extension: str) -> dict[str, Any]:
        """The arguments of vLLM besides the loop's own.

        Args:
            worker_extension: name of a class that joins our worker extension with the loop's.
        """
        assert self._plan is not None, "planned in __init__"
        ours = {name: self._plan.engine_args[name] for name in (*OURS, "logprobs_mode")}
        return {**ours, "worker_extension_cls": worker_extension, **self.config.engine.extra}

    def attach(self, call: Call, counters: Callable[[], Counters]) -> None:
        """Call this when the engines run and are awake."""
        assert self._plan is not None, "planned in __init__"
        self.engine = AttachedEngine(
            call, self._kept_state, counters=counters, drafting=self._plan.drafting
        )

    def start(self, version: int = 0) -> None:
        """Call this when training begins. Starts the companion, the plugin and the run folder; Ray
        is started by the loop.

        Args:
            version: the actor's version; above 0 if the loop goes on from a checkpoint.
        """
        self._policy_version = version
        assert self.engine is not None, "attach() comes first"
        engine, folder = self.engine, self.folder
        # Once more, because engines have started since.
        refuse_second_writer(folder)

        def begin(state: str) -> MedusaPlugin:
            self._goes_on = bool(state)
            return MedusaPlugin.start_from_tables(
                self.config, self._heads, self._tables, engine, folder, resume_from=state
            )

        self.plugin = start_or_resume(begin, self.config, folder, version)
        self._stack.callback(self.plugin.close)
        self._open_folder(untrained=self._heads.untrained)
        # What engines have generated so far (warm-up, validation) is no rollout of this training.
        self._before = self.engine.counters()

    @contextlib.contextmanager
    def scoring(
        self,
        sampling: Sampling,
        version: int,
        expect: Callable[[int], object],
        take: Callable[[int, WantedRows | None], Sequence[Taken | None]],
    ) -> Iterator[None]:
        """Context around the loop's log-prob pass over a rollout batch that was just generated. A
        pass that fails leaves nothing behind.

        Args:
            version: of the actor in this pass.
            expect: tells the workers how many states are wanted of it (`generated`).
            take: what each worker tapped, of this version, with the rows of the tables that are
                named. Called after the pass if states are wanted.
        """
        wanted = self.generated(sampling)
        with self.plugin.exposed():
            expect(wanted)
        yield
        if wanted:
            with self.plugin.exposed():
                self.scored(take(version, self.plugin.wanted_rows()))

    def generated(self, sampling: Sampling) -> int:
        """Call this when a rollout batch was generated, before the log-prob pass over it.

        Returns:
            How many states to take from that pass, for `scored`. 0 while the companion rests: then
            neither states nor tables have to be gathered.
        """
        engine = self.engine
        if engine is None:
            return 0
        with self.plugin.exposed():
            now = engine.counters()
            # Tokens stay with the workers that score them; the driver only knows the generation's
            # counters.
            self._rollouts = Rollouts(
                (),
                (),
                now - self._before,
                0.0,
                sampling,
                self._policy_version,
                engine.serving_version(),
                engine.num_drafts,
            )
            self._before = now
            wanted = self.plugin.rollout_ready(self._rollouts) is not None
            return self.plugin.most_states() if wanted else 0

    def forget_generated(self) -> None:
        """Call this when the engines have generated for the loop's validation: its drafts are not
        those of the next rollouts.
        """
        engine = self.engine
        if engine is None:
            return
        with self.plugin.exposed():
            self._before = engine.counters()
            if self.config.engine.chooses_drafts:
                engine.choices()

    def scored(self, taken: Sequence[Taken | None]) -> None:
        """Call this after the log-prob pass with what each worker took, if `generated` said so."""
        found = next((part for part in taken if part is not None), None)
        if found is None:
            logger.warning("No worker tapped the last rollouts; the companion gets nothing.")
            return
        self._more[names.TABLE_BYTES] = 0 if found.rows is None else found.rows.nbytes
        self.plugin.batch_ready(found.batch, found.rows)

    def updated(self, version: int) -> None:
        self._policy_version = version
        self.plugin.tables_updated(None, version)
        self._write_step()

    def synced(self, *, lost_heads: bool) -> None:
        """Call this when the loop has put the actor's weights into its engines, which are awake and
        idle. Installs newer heads, if there are any.
        """
        with self.plugin.exposed():
            self.weights_synced(lost_heads=lost_heads)
        self.plugin.before_generation()

    def end(self, tables: Sequence[Tables | None] = ()) -> None:
        """As in Attachment.

        Args:
            tables: the actor's at the end, of the worker that has them: stock vLLM needs its
                lm_head beside the saved heads.
        """
        found = next((part for part in tables if part is not None), None)
        if found is not None:
            self.plugin.tables_updated(found, self._policy_version)
        super().end()

    @contextlib.contextmanager
    def training(self) -> Iterator[list[Tables | None]]:
        """Context around the loop's training, after which it ends as by `end`; the block adds what
        that needs to the list. A training that fails is recorded as such.
        """
        tables: list[Tables | None] = []
        with self.recording_failure():
            yield tables
            self.end(tables)


class GatheredActor(Protocol):
    """An actor whose tables `refresh` gathers from all ranks (`HFActor`, `MegatronActor`), whole on
    the rank that reports.
    """

    reports: bool

    def refresh(self, *, embedding: bool = True) -> object: ...

    @property
    def lm_head_VD(self) -> torch.Tensor: ...

    @property
    def embedding_VD(self) -> torch.Tensor: ...


class WorkerTables:
    """The actor's two tables in its own processes. Every rank has one, and calls it when the others
    do, because sharded tables are gathered.

    Only the rows that a batch needs leave the workers: at 152,000 tokens both tables of an 8B actor
    have 2.5 GB.
    """

    def __init__(self, actor: GatheredActor) -> None:
        self._actor = actor

    def taken(self, batch: RolloutBatch | None, wanted: WantedRows | None) -> Taken | None:
        """A tapped batch and the rows that go with it, which the actor must not have changed since
        its pass; only on the rank that reports.
        """
        if wanted is not None:
            self._actor.refresh(embedding=wanted.embedding)
        if batch is None or not self._actor.reports:
            return None
        if wanted is None:
            return Taken(batch, None)
        ids = batch_token_ids(batch.response_ids_M, batch.before_ids_X)
        actor = self._actor
        embedding_VD = actor.embedding_VD if wanted.embedding else None
        return Taken(batch, wanted.of(actor.lm_head_VD, embedding_VD, ids))

    def whole(self) -> Tables | None:
        """Both tables, copied; only on the rank that reports."""
        self._actor.refresh()
        if not self._actor.reports:
            return None
        return copied_tables(self._actor.lm_head_VD, self._actor.embedding_VD)


class TappedRank:
    """A worker's tap and its actor's tables, for a loop whose driver has the plugin. Every rank has
    one, and makes each call when the others do.
    """

    def __init__(
        self,
        tap: RowTap,
        actor: GatheredActor,
        reading: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """
        Args:
            reading: a context in which the actor's tables can be gathered.
        """
        self.tap = tap
        self._tables = WorkerTables(actor)
        self._reading = reading

    def take(self, version: int, wanted: WantedRows | None) -> Taken | None:
        """What was tapped since the last call, and the rows that go with it; only on the rank that
        reports.
        """
        batch = self.tap.take(version)
        with self._reading():
            return self._tables.taken(batch, wanted)

    def whole(self) -> Tables | None:
        """lm_head and embedding, whole; only on the rank that reports."""
        with self._reading():
            return self._tables.whole()


class EngineCalls:
    """Mix-in to put before a loop's engine actor in a class's bases: two more methods, through
    which the driver reaches the engine's workers.
    """

    medusa_engine: ClassVar[str]
    """The attribute that holds vLLM's engine."""

    async def medusa_call(
        self, method: str, args: tuple[Any, ...], sent: SentFile | None = None
    ) -> list[Any]:
        """Call a method of the worker extension on all workers of this engine."""
        try:
            async with arrived(args, sent) as found:
                answers: list[Any] = await getattr(self, self.medusa_engine).collective_rpc(
                    method, args=found
                )
                return answers
        except NoRoomError as error:
            # Raised, it would be Ray's error for the driver, and end the loop.
            return [as_data(error)]

    async def medusa_counters(self) -> Counters:
        """vLLM's counters since the start."""
        return process_counters()


def read_tables(model_path: str) -> Tables:
    """An actor's lm_head and embedding, found by the model's own names in the files of a folder or
    hub name. The actor is only loaded if these are not safetensors. Raises as `load_actor`.
    """
    # Only two tensors of the checkpoint are read; loading the actor would take its whole size in
    # memory.
    names = table_names(model_path)
    found: dict[str, torch.Tensor] = {}
    for path in table_files(model_path, names):
        with safe_open(path, "pt") as file:
            here = set(names) & set(file.keys())
            found |= {name: file.get_tensor(name) for name in here}
    if found.keys() >= set(names):
        return found[names[0]], found[names[1]]
    actor = load_actor(model_path)
    return lm_head_weight(actor).detach(), embedding_weight(actor).detach()


def serve(model: str, heads: str, config: RunConfig, host: str, more: list[str]) -> None:
    """Become vLLM's own server, for a loop's server mode. The heads are created if their folder
    does not exist.

    Raises:
        ConfigError: the address is not loopback and there is no token in the environment, so anyone
            who reaches it could replace the actor.
        CheckpointError: the folder of the heads holds something else.
    """
    if host not in (HOST, "localhost", "::1") and not secret_of(TOKEN):
        raise ConfigError(
            "A server that other machines reach needs a token: its control routes replace the"
            " actor's weights.",
            given=f"--host {host}, no {TOKEN}",
            expected=f"{TOKEN}, the same for the server and the trainer",
            do=f"export {TOKEN}=$(openssl rand -hex 32) for both, or leave --host out.",
        )
    refuse_foreign_folder(heads)
    refuse_broadcast(config.engine)
    warn_of_idle_settings(config.engine)
    # Existing heads are served as they are: a restart must not begin with new ones.
    if not (Path(heads) / "config.json").is_file():
        lm_head_VD, _ = read_tables(model)
        save_heads(
            heads,
            heads_for_table(config, lm_head_VD),
            lm_head_VD=lm_head_VD,
            metadata={"start": config.heads.path or "zero"},
        )
    # The address that was checked comes last: vLLM uses the last one given, and it accepts
    # abbreviated options, so we can't find all that were given.
    flags = [
        *server_flags(model, str(Path(heads).resolve()), config),
        *(word for word in more if word != "--"),
        "--host",
        host,
    ]
    # The server keeps its API in one process and the model in another; the route to our workers
    # exists only in development mode.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
    }
    # vLLM replaces this process, so that it gets the signals, and its exit code is ours.
    os.execvpe(
        sys.executable,
        [sys.executable, "-m", SERVER_MODULE, *flags],
        environment | {"VLLM_SERVER_DEV_MODE": "1"},
    )


def server_flags(model: str, heads: str, config: RunConfig) -> list[str]:
    """vLLM's flags for drafting and swapping. Raises as `plan_launch`."""
    plan = plan_launch(model, heads, config.engine, config.seed, others_start=True)
    ours = {name: plan.engine_args[name] for name in (*OURS, "logprobs_mode")}
    return [
        "--model",
        model,
        # vLLM applies the last middleware first.
        *("--middleware", RECEIVER, "--middleware", GUARD),
        *engine_flags(ours | config.engine.extra),
    ]


def refuse(loop: str, reasons: dict[str, bool]) -> None:
    """Raise ConfigError naming every setting of a loop that can't be combined with draft heads.

    Args:
        reasons: setting -> whether it is on.
    """
    given = [name for name, on in reasons.items() if on]
    if given:
        raise ConfigError(
            f"These settings of {loop} can't be combined with draft heads in this version.",
            given=", ".join(given),
            expected="unset",
            do="Change them, or leave medusa out (docs/hooks.md, what is supported).",
        )
