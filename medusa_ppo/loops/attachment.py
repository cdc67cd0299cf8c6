"""Our parts in a loop that runs in this process: heads, companion, plugin, tap and run folder.
Imports no framework.

`Attachment` attaches to a foreign trainer that has its own vLLM. `DraftingEngine` replaces the
engine of your own loop and calls the plugin's hooks itself:

    generate       first puts newer heads into the engine; afterwards gives tokens and behaviour
                   log-probs to the plugin
    the actor      tapped by its hooks whenever the loop scores the last rollouts; rows are
                   recognised by their tokens
    sync_actor     tells the plugin that the actor has changed
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from heads.checkpoint import load_heads, save_state
from heads.errors import ConfigError, RunError, SavedStateError, SwapError
from medusa_ppo.actors.hf import HFActor
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.companion.service import STATE_FILE
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.config.run_config import RunConfig, build_config, load_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import logged, rollout_figures
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Rollouts, Sampling
from medusa_ppo.contract.status import Checked, SwapReceipt
from medusa_ppo.engines.actor_sync import ActorStream, BroadcastPool
from medusa_ppo.engines.colocated import AttachedEngine
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.launch import LaunchPlan, plan_launch
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import Prompts, RolloutEngine, WorkerEngine
from medusa_ppo.loops.passes import ForwardTap, Generated, RowShare, as_rollouts
from medusa_ppo.loops.ranks import Found, Ranks, Serve, no_engine, serve_llm
from medusa_ppo.plugin import AnyPlugin, MedusaPlugin, NoPlugin
from medusa_ppo.plugin.medusa_plugin import VERSIONS_FOLDER, initial_heads, refuse_own_heads
from medusa_ppo.plugin.warm_up import FOLDER as WARM_UP_FOLDER
from medusa_ppo.plugin.warm_up import WarmUpReport
from medusa_ppo.reports.run_files import COMPANION_FOLDER, HEADS_FOLDER
from medusa_ppo.reports.store import RunWriter, refuse_second_writer
from medusa_ppo.runtime.files import OwnedFolder, only_one_in
from medusa_ppo.runtime.hardware import gpu_places, gpus_beside, visible_gpus
from medusa_ppo.runtime.processes import local_ray

logger = logging.getLogger(__name__)

SPECULATION = ("speculative_config", "additional_config")
"""The arguments of our own engines without which no engine drafts with our heads."""
OURS = (*SPECULATION, "worker_extension_cls", "disable_log_stats")
"""Those that an engine needs so that a loop's process can call it."""
COUNT = frozenset(
    (
        "num_drafts",
        "draft_temperature",
        "draft_vocab",
        "memory_bytes",
        "stop_below",
        "runner",
        "transfer",
        "extra",
    )
)
"""The settings of `engine` that count where others start the engines: what can't be had of `runner`
and `transfer` is refused.
"""
WARM_UP = ("warm_up_tokens", "warm_up_s")
READ_ROWS = 8
"""Number of a warm-up's responses that the actor scores at once."""


Settings = RunConfig | Mapping[str, Any] | str | os.PathLike[str]
"""A run's settings: themselves, as a mapping of sections, or a preset or YAML file."""


def read_settings(settings: Settings) -> RunConfig:
    """The configuration from any accepted form. Raises ConfigError."""
    if isinstance(settings, Mapping):
        return build_config(settings)
    return settings if isinstance(settings, RunConfig) else load_config(settings)


def as_config(medusa: Settings | None) -> RunConfig | None:
    """The same; None if it asks for neither drafts nor a companion. Raises ConfigError."""
    if medusa is None:
        return None
    config = read_settings(medusa)
    return config if config.companion.enabled or config.engine.num_drafts != 0 else None


def refuse_broadcast(engine: EngineConfig) -> None:
    """Raise ConfigError if engines that others start are to get the actor by our broadcast."""
    if engine.transfer != "file":
        raise ConfigError(
            "A loop with its own engine sends the actor to it by itself.",
            given=f"engine.transfer={engine.transfer}",
            expected="engine.transfer=file",
            do="Leave engine.transfer out; its own settings decide how weights are sent.",
        )


def warn_of_idle_settings(engine: EngineConfig) -> None:
    """Name the settings of `engine` that have no effect because others start the engines."""
    idle = sorted(engine.model_fields_set - COUNT)
    if idle:
        logger.warning(
            "Without effect here, because the loop starts its engines itself: %s. Set them where"
            " the loop has its vLLM's settings, or by vLLM's own names in engine.extra.",
            ", ".join(f"engine.{name}" for name in idle),
        )


def warn_of_untrained(heads: HeadsSection) -> None:
    """Say that heads have learned nothing yet, where no warm-up teaches them before the first
    step.
    """
    asked = [f"heads.{name}" for name in WARM_UP if name in heads.model_fields_set]
    logger.warning(
        "The heads begin untrained, and this loop has no warm-up%s. To draft from the first step"
        " on, train heads beforehand (`medusa-ppo train`) and name them in heads.path.",
        f": {', '.join(asked)} without effect" if asked else "",
    )


def own_heads(folder: Path) -> tuple[Path, ...]:
    """Where a training's folder has heads that it replaces: its companion removes all versions but
    the last few, and its report moves the heads of an earlier training.
    """
    return folder / VERSIONS_FOLDER, folder / HEADS_FOLDER


def start_or_resume(
    start: Callable[[str], MedusaPlugin], config: RunConfig, folder: Path, version: int
) -> MedusaPlugin:
    """A plugin for a loop whose actor has this version. Above 0 the loop goes on from a checkpoint:
    then heads go on from what the companion last saved in the run's folder, if they can. Without a
    companion they are those of `heads.path`, and the state stays for a loop that has one.

    Args:
        start: starts the plugin, from a folder with a companion's state; empty: anew.
        config: the loop's settings.

    Raises:
        CompanionError: as `start`. A start that failed for another reason than the state may go
            well at the next try, and a new companion would write its own state over this one.
    """
    file = folder / COMPANION_FOLDER / STATE_FILE
    if not version or not config.companion.enabled:
        return start("")
    problem = "there is none"
    if file.is_file():
        try:
            return start(str(file.parent))
        except SavedStateError as error:
            unused = _set_aside(file)
            problem = f"it is now {unused.name}. {error}"
    logger.warning(
        "The loop goes on from version %d of its actor, but its heads begin anew: the companion's"
        " state of the earlier run can't be used (%s): %s",
        version,
        file,
        problem,
    )
    return start("")


def _set_aside(file: Path) -> Path:
    """Rename a companion's state that does not fit this run's settings: a companion that starts
    anew removes what it finds there, and with the earlier settings the state may be whole.
    """
    number = 1
    while (unused := file.with_name(f"{file.name}.unused-{number}")).exists():
        number += 1
    return file.rename(unused)


def _keep_earlier(folder: Path) -> None:
    """Rename the companion's state of an earlier loop, if the folder has one: this loop's would
    remove it, and whoever forgot `step` needs it. Only the last one is kept, since each may have
    gigabytes.
    """
    file = folder / COMPANION_FOLDER / STATE_FILE
    if not file.is_file():
        return
    kept = file.replace(file.with_name(f"{file.name}.earlier"))
    logger.warning(
        "The loop begins with step 0, and its heads anew; the companion's state of an earlier loop"
        " in this folder is now %s. If this loop goes on from a checkpoint, end it, rename the"
        " state to %s, and pass step=... to DraftingEngine.",
        kept,
        file.name,
    )


class Attachment:
    """All that one trainer needs: engine arguments before the engine is built, the plugin during
    training, a run folder at the end.

    In a training of several processes each process has one and makes every call. Only the first
    process has the plugin; each has its engine (or part of one), its tap and its rows.

    Attributes:
        folder: the run's folder, for `medusa-ppo report`.
        engine: the trainer's vLLM in all processes; None until it is attached, and on all
            processes but the first.
        plugin: a NoPlugin outside the training, and on all processes but the first.
        ranks: the training's processes.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        refuse_broadcast(config.engine)
        self.config = config
        self.ranks = ranks or Ranks()
        if self.ranks.leads:
            warn_of_idle_settings(config.engine)
        self.folder = config.run_dir
        # A folder's heads have to be read before their kind is known. So the embedding is gathered
        # even where it may not be needed. Decided once, by the user's settings: all processes
        # gather together, and only the first one has a path to go on from after a failure.
        self._needs_embedding = config.heads.kind == "hydra" or bool(config.heads.path)
        # By the user's settings, which a training that is started again has, too.
        self._named_heads = config.heads.path
        self.engine: RolloutEngine | None = None
        self.plugin: AnyPlugin = NoPlugin()
        self._home = OwnedFolder("medusa-ppo-loop-", shared_memory=True)
        self._kept_state = self._home.path / "heads.safetensors"
        self._stack = contextlib.ExitStack()
        self._plan: LaunchPlan | None = None
        self._actor: HFActor | None = None
        self._tap: ForwardTap | None = None
        self._share: RowShare | None = None
        self._writer: RunWriter | None = None
        self._rollouts: Rollouts | None = None
        self._more: dict[str, Any] = {}
        self._figures: dict[str, float] = {}
        self._serve: Serve = no_engine
        self._policy_version = self._steps = 0
        self._goes_on = False
        self._began = time.monotonic()

    # ---- the engine

    def engine_arguments(self, model: Any) -> dict[str, Any]:
        """The arguments of the trainer's vLLM besides the trainer's own. Writes the heads that it
        starts with. Raises as `plan_launch`.
        """
        actor = self._view(model)

        def write() -> str:
            save_state(self._kept_state, initial_heads(self.config, actor).trainable_state())
            return str(MedusaPlugin.prepare_heads(self.config, actor, self._home.path / "heads"))

        heads = self.ranks.share(self._led(write))
        self._plan = plan_launch(
            model.name_or_path, heads, self.config.engine, self.config.seed, others_start=True
        )
        # The trainer decides everything else: length, memory, dtype and sampling.
        return {name: self._plan.engine_args[name] for name in OURS} | self.config.engine.extra

    def attach_llm(self, llm: Any, *, counts: bool = True) -> None:
        """Attach to a `vllm.LLM` that was started with `engine_arguments`, one in each process.

        Args:
            counts: add up its counters. The processes of a tensor-parallel engine all have the same
                ones, which must count once.
        """
        assert self._plan is not None, "engine_arguments() comes first"
        self._serve = functools.partial(serve_llm, llm, counts)
        drafting = self._plan.drafting

        def every(method: str, *arguments: Any) -> list[Any]:
            return [
                answer
                for answers in self.ranks.call(method, arguments, self._serve)
                for answer in answers
            ]

        def attach() -> None:
            self.engine = AttachedEngine(
                lambda method, args: every("workers", method, args),
                self._kept_state,
                counters=lambda: sum(every("counters"), Counters()),
                # vLLM returns False if requests still hold cached blocks.
                forget_prompts=lambda: False not in every("forget"),
                drafting=drafting,
            )

        self._led(attach)

    def attach_server(self, model: Any, url: Callable[[], str]) -> None:
        """Attach to a running vLLM server with our heads (docs/hooks.md has the command). Only the
        first process does this.

        Raises:
            ConfigError: no heads are named; the server must have been started with the same heads.
            EngineError: the server does not answer, or does not draft with native heads.
        """
        # The server got its heads when it started; without a name we can't know which.
        if not self.config.heads.path:
            raise ConfigError(
                "A server is started before the trainer, so its heads must be named.",
                given="heads.path is empty",
                expected="the folder that the server drafts with",
                do="Set heads.path (docs/hooks.md says how to make it).",
            )

        if self.config.engine.extra and self.ranks.leads:
            logger.warning(
                "engine.extra has no effect on a server that runs already: give its arguments to"
                " `medusa-ppo serve`, as vLLM's flags or in the file of --medusa."
            )

        def attach() -> None:
            settings = self.config.engine.model_copy(update={"backend": url()})
            self.engine = ServerEngine(
                model.name_or_path, self.config.heads.path, settings, self.config.seed
            )

        self._led(attach)

    def sync_by_file(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the actor to the engine through a file, if the trainer's own way does not work.
        Every process iterates over its weights.
        """
        own: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            # Every process iterates to the end: a sharded tensor is gathered by all of them
            # together, and freed at the next step of the iteration.
            if self.ranks.leads:
                own[name] = tensor.detach().to("cpu", copy=True).contiguous()
        path = self._home.path / "actor.safetensors"

        def carry() -> None:
            assert self.engine is not None, "the engine is attached when the trainer is built"
            save_state(path, own)
            try:
                self.engine.sync_actor(path, self._policy_version)
            finally:
                # It takes as much shared memory as the actor's weights.
                path.unlink(missing_ok=True)

        self._led(carry)

    def weights_synced(self, *, lost_heads: bool) -> None:
        """The trainer has put the actor's weights into the engine by itself.

        Args:
            lost_heads: the engine slept and threw its weights away, including the heads.
        """

        def tell() -> None:
            # The heads first: what is reported about the new actor belongs to the heads that are
            # then loaded.
            if isinstance(self.engine, AttachedEngine) and lost_heads:
                try:
                    self.engine.feed_again()
                except SwapError as error:
                    # It drafts nothing until the plugin has fed it, before the next generation.
                    self.engine.heads_version = -1
                    logger.warning("The engine did not get its heads after its sleep. %s", error)
            if isinstance(self.engine, WorkerEngine):
                self.engine.target_changed(self._policy_version)

        self._led(tell)

    @contextlib.contextmanager
    def generation(self, sampling: Sampling) -> Iterator[list[Generated]]:
        """Context around one generate call of the trainer. Items that the block adds to the list go
        to the plugin.
        """
        generated: list[Generated] = []
        # Nothing is learned from rollouts outside the training, e.g. in an evaluation.
        if self._tap is None:
            yield generated
            return
        if self._rollouts is not None:
            # A trainer may generate several times for one update.
            parts = self._scored_rows()
            self._led(lambda: self._tell_earlier(parts))
            self._rollouts = None
        before = self._led(self._before_generation)
        began = time.perf_counter()
        yield generated
        seconds = time.perf_counter() - began
        # Every process builds the same rollouts, to find its own rows among them.
        facts = self.ranks.share(self._led(lambda: self._facts(before or Counters(), seconds)))
        # The gather is there only because of the plugin.
        with self.plugin.exposed():
            every = [Generated.join(own) for own in self.ranks.all(generated)]
            # The block adds nothing in an evaluation during the training, or with images in
            # prompts.
            if any(part.prompts for part in every) and facts is not None:
                self._expect(every, sampling, facts)
            elif self.config.engine.chooses_drafts:
                # What was chosen for these steps is none of the next rollouts'.
                self._led(self._forget_choices)

    def _expect(self, every: list[Generated], sampling: Sampling, facts: dict[str, Any]) -> None:
        """Report the rollouts of all processes to the plugin; the tap looks for this one's rows."""
        assert self._tap is not None, "generation() asks before"
        # Responses are numbered over all processes, in their order, without the rows left out.
        first = sum(part.known for part in every[: self.ranks.rank])
        self._rollouts = rollouts = replace(as_rollouts(Generated.join(every), sampling), **facts)
        wanted = self.ranks.share(self._led(lambda: self._sample_of(rollouts)))
        own = range(first, first + every[self.ranks.rank].known)
        if self._share is not None and wanted:
            self._share.expect(rollouts, wanted[0], own)
        self._tap.expect(rollouts, own)

    def _sample_of(self, rollouts: Rollouts) -> list[EarlySample | None]:
        """Report the rollouts to the plugin. Returns the sample of states that it wants (None:
        all); an empty list if it wants none.
        """
        collector = self.plugin.rollout_ready(rollouts)
        return [] if collector is None else [collector.sample]

    def _before_generation(self) -> Counters:
        assert self.engine is not None, "between begin() and end()"
        # Asked first: it shows whether a server was restarted and therefore needs its heads again.
        counters = self.engine.counters()
        self.plugin.before_generation()
        return counters

    def _forget_choices(self) -> None:
        assert self.engine is not None, "between begin() and end()"
        self.engine.choices()

    def _facts(self, before: Counters, seconds: float) -> dict[str, Any]:
        """The fields of the rollouts that only the first process knows."""
        engine = self.engine
        assert engine is not None, "the engine is attached when the trainer is built"
        versions = {
            "heads_version": engine.serving_version(),
            "policy_version": self._policy_version,
            "num_drafts": engine.num_drafts,
        }
        return {"counters": engine.counters() - before, "seconds": seconds, **versions}

    # ---- the trainer's events

    def begin(self, model: nn.Module, version: int = 0) -> None:
        """Call this when training begins. Starts Ray (if there is none), the companion, the plugin,
        the tap and the run folder.

        Args:
            version: the actor's version; above 0 if the trainer goes on from a checkpoint.
        """
        # One that never reached end() has left its hooks on the actor, and its companion.
        self._fail(
            RunError(
                "This training did not end.",
                given="another one began",
                expected="end(), or an error inside recording_failure()",
                do="Look in the trainer's log for what came before.",
            )
        )
        self._policy_version = version
        atexit.register(self._stack.close)  # The process may end before the training does.
        self._actor = actor = self._view(model)
        gpus = self.ranks.all(own_gpu())
        plugin = self._led(lambda: self._start(actor, gpus))
        self._share = RowShare() if self.ranks.size > 1 else None
        sink = self._share or plugin
        assert sink is not None, "a process alone has the plugin"
        self._tap = ForwardTap(model, sink)
        self._stack.callback(self._tap.close)
        self._steps = 0
        self._began = time.monotonic()

    def _start(self, actor: HFActor, taken: list[str | None]) -> MedusaPlugin:
        """`taken`: the GPU of each process of the training."""
        assert self.engine is not None, "the engine is attached when the trainer is built"
        companion = self.config.companion
        visible = visible_gpus()
        self._stack.enter_context(
            local_ray(
                cpus=1 + companion.workers,
                queue_bytes=companion.queue_bytes,
                gpus=gpus_beside(taken, visible, companion) if visible else None,
            )
        )
        engine, folder = self.engine, self.folder
        # The writer asks once more; but a companion removes the state that it finds.
        refuse_second_writer(folder)
        refuse_own_heads(self._named_heads, *own_heads(folder))

        def start(state: str) -> MedusaPlugin:
            self._goes_on = bool(state)
            return MedusaPlugin.start(self.config, actor, engine, folder, resume_from=state)

        plugin = start_or_resume(start, self.config, folder, self._policy_version)
        self._stack.callback(plugin.close)
        self.plugin = plugin
        path = self.config.heads.path
        # Those of a server may be untrained, and have a path all the same.
        self._open_folder(untrained=not path or load_heads(path)[0].untrained)
        return plugin

    def _open_folder(self, *, untrained: bool) -> None:
        """Begin the run's report; a warning says if its heads, which begin untrained, have learned
        nothing yet.
        """
        self._writer = RunWriter(self.folder, self.config.model_dump(mode="json"))
        if untrained and not self._goes_on:
            warn_of_untrained(self.config.heads)

    def updated(self, version: int) -> None:
        """Call this after the actor's optimizer step."""
        self._policy_version = version
        if self._actor is None or self._tap is None:
            return
        actor = self._actor
        before = actor.gathered_bytes
        with self.plugin.exposed():
            # On every process, because sharded tables are gathered.
            changed = actor.refresh()
        parts = self._scored_rows()
        gathered = actor.gathered_bytes - before
        self._more[names.TABLE_BYTES] = self._more.get(names.TABLE_BYTES, 0) + gathered
        self._led(lambda: self._tell(actor if changed else None, version, parts))
        self._rollouts = None  # In every process, as in the first one.

    def _scored_rows(self) -> list[RolloutBatch]:
        """What each process has scored of the last rollouts, on the first one; of a single process
        the plugin has it. Called on every process, and before `led`, in which all but the first
        only serve.
        """
        if self._share is None:
            return []
        with self.plugin.exposed():
            parts = self.ranks.first_gets(self._share.take())
        return [batch for batch in parts or [] if batch is not None]

    def _tell_earlier(self, parts: list[RolloutBatch]) -> None:
        """Report rollouts for which no update came before the next ones."""
        if parts:
            self.plugin.batch_ready(RolloutBatch.join(parts))
        self._write_step()

    def _tell(self, actor: HFActor | None, version: int, parts: list[RolloutBatch]) -> None:
        """Pass on the rows of all processes, and the tables if they have changed."""
        with self.plugin.exposed():
            if parts:
                self.plugin.batch_ready(RolloutBatch.join(parts))
            self.plugin.policy_updated(actor, version)
        self._write_step()

    def _write_step(self) -> None:
        """One line for each rollout batch: a loop may update more often than it generates."""
        rollouts = self._rollouts
        self._rollouts = None
        if rollouts is not None and self._writer is not None:
            values = {
                names.STEP: self._steps,
                **rollout_figures(rollouts),
                **self.plugin.metrics(),
                **self._more,
            }
            values[names.WALL_S] = time.monotonic() - self._began
            self._writer.step(values)
            self._steps += 1
            self._figures = logged(values)
            self._more = {}

    def figures(self) -> dict[str, float]:
        """The last step's figures for the trainer's own log, under separate names."""
        figures = self._figures
        self._figures = {}
        return figures

    def end(self) -> None:
        """Call this when training is over. Saves the heads, writes the report, and closes what
        `begin` started.
        """
        # `RemoteAttachment` has a writer but no tap; processes after the first have a tap but no
        # writer.
        if self._tap is None and self._writer is None:
            return
        try:
            # If there is another training, all processes continue with the first one's heads.
            heads = self.ranks.share(self._led(self._finish))
        except BaseException as error:
            self._fail(error)
            raise
        self._writer = None  # What fails now can't change a report that is written.
        try:
            self._stack.close()
        finally:
            self._forget()
        self._go_on_with(heads)

    def _go_on_with(self, heads: str | Path | None) -> None:
        """If the trainer trains again, it continues with these."""
        section = self.config.heads.model_copy(update={"path": heads and str(heads)})
        self.config = self.config.model_copy(update={"heads": section})

    @contextlib.contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Context around a whole training. One that fails is recorded as such, its heads are saved,
        and what `begin` started ends.
        """
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _finish(self) -> str:
        assert self._writer is not None, "begin() has made it"
        heads = self.plugin.save_heads(self.folder / HEADS_FOLDER)
        self._writer.finish()
        return str(heads)

    def _fail(self, error: BaseException) -> None:
        """End after this error, which is the one to be seen: what fails here is only logged. Safe
        to call again.
        """
        actions = dict[str, Callable[[], object]]()
        if self._writer is not None:
            # Saved first: the companion has the newest heads, and the stack ends it. The engine
            # drafts with them, and the next training's first version must not be worse.
            actions["The heads could not be saved"] = lambda: self._go_on_with(
                self.plugin.save_heads(self.folder / HEADS_FOLDER)
            )
            # Ray turns a signal into SystemExit.
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            actions["The report could not be written"] = functools.partial(
                self._writer.finish,
                "interrupted" if stopped else "failed",
                None if stopped else {"error": str(error)},
            )
        actions["The companion could not be ended"] = self._stack.close
        for problem, action in actions.items():
            try:
                action()
            except Exception:
                logger.exception("%s after a training that failed.", problem)
        self._writer = None
        self._forget()

    def _forget(self) -> None:
        atexit.unregister(self._stack.close)
        self.plugin = NoPlugin()
        self._tap = None
        self._share = None
        # Those of a step that failed; another training has its own.
        self._rollouts = None
        self._more = {}

    def _view(self, model: nn.Module) -> HFActor:
        """The actor with its tables gathered, if they are sharded."""
        actor = HFActor(model, reports=self.ranks.leads, with_embedding=self._needs_embedding)
        actor.refresh()
        return actor

    def _led(self, action: Callable[[], Found]) -> Found | None:
        return self.ranks.led(action, self._serve)


def own_gpu() -> str | None:
    """The GPU on which this process computes, as CUDA_VISIBLE_DEVICES names it; None: the CPU."""
    if not torch.cuda.is_initialized():
        return None
    visible = visible_gpus()
    place = torch.cuda.current_device()
    return visible[place] if place < len(visible) else None


class DraftingEngine:
    """Our engine; its methods call the plugin's hooks. Without drafts and companion it is the plain
    engine.

    Attributes:
        engine: the engine itself.
        plugin: a NoPlugin if the settings ask for neither drafts nor a companion.
    """

    _goes_on = False
    """Whether the heads go on from those of an earlier loop."""
    _told_width = False

    def __init__(
        self,
        config: Settings,
        actor: nn.Module,
        model_path: str | Path,
        run_dir: str | Path,
        *,
        step: int = 0,
    ) -> None:
        """Start Ray (if there is none), the engine and the companion.

        Args:
            config: only `heads`, `companion`, `engine` and `seed` are read. Set
                `engine.max_num_seqs` and `engine.max_model_len` to the loop's own.
            actor: a transformers causal LM; the loop scores with `actor(input_ids=...,
                attention_mask=...)`.
            model_path: the actor's folder, for vLLM.
            run_dir: folder for what the plugin measures and publishes; the last heads end up in its
                `heads-final`.
            step: the step that a resumed loop goes on with. Above 0 heads go on from the
                companion's state in `run_dir`, and requests without a seed draw other random
                numbers than in the loop's first steps.

        Raises:
            UnsupportedVersionError, ModelError, CheckpointError, ConfigError, LossyError,
            EngineError: what can't be started.
            RunError: another process's engine writes into the folder.
        """
        Ranks.refuse_several("DraftingEngine")
        self.plugin: AnyPlugin = NoPlugin()
        self._config = config = read_settings(config)
        self._actor = actor
        self._folder = Path(run_dir)
        self._tap: ForwardTap | None = None
        # If anything fails here, the stack ends what was started before; once nothing has failed,
        # `pop_all` keeps it all.
        with contextlib.ExitStack() as stack:
            wanted = as_config(config) is not None
            if config.companion.enabled:
                # Before the engine, whose start takes minutes.
                refuse_own_heads(config.heads.path, self._folder / VERSIONS_FOLDER)
            if wanted:
                # A second companion would remove the first one's state.
                stack.enter_context(only_one_in(self._folder, "DraftingEngine", "run_dir"))
            visible = visible_gpus()
            stack.enter_context(
                local_ray(
                    queue_bytes=config.companion.queue_bytes,
                    gpus=gpu_places(config.engine, visible).ray if visible else None,
                )
            )
            heads = None
            if wanted:
                # Not in the run's folder, where the versions are.
                first = OwnedFolder("medusa-ppo-heads-")
                stack.callback(first.close)
                heads = MedusaPlugin.prepare_heads(config, actor, first.path / "heads")
            self.engine: RolloutEngine = stack.enter_context(
                make_engine(
                    model_path, heads, config.engine, config.seed, supervised=True, step=step
                )
            )
            if wanted:
                if not step and config.companion.enabled:
                    _keep_earlier(self._folder)
                plugin = start_or_resume(self._start, config, self._folder, step)
                stack.callback(plugin.close)
                self.plugin = plugin
                self._tap = ForwardTap(actor, plugin)
                stack.callback(self._tap.close)
            self._stack = stack.pop_all()

    def _start(self, state: str) -> MedusaPlugin:
        plugin = MedusaPlugin.start(
            self._config, self._actor, self.engine, self._folder, resume_from=state
        )
        self._goes_on = bool(state)
        return plugin

    def warm_up(self, prompts: Prompts, sampling: Sampling) -> WarmUpReport:
        """Train untrained heads on responses to these prompts before the first step, so that the
        first step drafts with them (`heads.warm_up_tokens`, `heads.warm_up_s`).

        Args:
            prompts: the prompts of the coming steps, in their order; without images.
            sampling: the loop's own.
        """
        section = self._config.heads
        if section.path:
            return WarmUpReport(problem="heads.path names trained heads")
        if self._goes_on:
            return WarmUpReport(problem="the heads go on from those of an earlier loop")
        return self.plugin.warm_up(
            prompts,
            sampling,
            self._read,
            tokens=section.warm_up_tokens,
            seconds=section.warm_up_s,
            folder=self._folder / WARM_UP_FOLDER,
        )

    def _read(self, rollouts: Rollouts) -> None:
        """Run the actor over a warm-up's responses, which the loop never sees."""
        trained = self._actor.training
        self._actor.eval()
        rows = [
            (rollouts.prompts[response.prompt_index], response.token_ids)
            for response in rollouts.responses
        ]
        device = next(self._actor.parameters()).device
        try:
            for first in range(0, len(rows), READ_ROWS):
                part = rows[first : first + READ_ROWS]
                width = max(len(prompt) + len(response) for prompt, response in part)
                ids_BT = torch.zeros(len(part), width, dtype=torch.int64)
                attention_BT = torch.zeros_like(ids_BT)
                mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
                for row, (prompt, response) in enumerate(part):
                    whole = len(prompt) + len(response)
                    ids_BT[row, :whole] = torch.tensor([*prompt, *response])
                    attention_BT[row, :whole] = 1
                    mask_BT[row, len(prompt) : whole] = True
                places = range(first, first + len(part))
                with torch.no_grad(), self.plugin.actor_forward(self._actor, mask_BT, places):
                    self._actor(input_ids=ids_BT.to(device), attention_mask=attention_BT.to(device))
        finally:
            self._actor.train(trained)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Like RolloutEngine; newer heads are installed first, if there are any."""
        self._warn_of_width(len(prompts) * sampling.responses_per_prompt)
        self.plugin.before_generation()
        rollouts = self.engine.generate(prompts, sampling)
        self.plugin.rollout_ready(rollouts)
        if self._tap is not None:
            self._tap.expect(rollouts)
        return rollouts

    def _warn_of_width(self, responses: int) -> None:
        """Say once if most of the responses wait only because nobody set how many may be written at
        once: next to a loop's own, wider engine drafting then looks many times slower than it is.
        """
        engine = self._config.engine
        width = engine.max_num_seqs * engine.replicas
        if self._told_width or "max_num_seqs" in engine.model_fields_set or responses <= width:
            return
        self._told_width = True
        logger.warning(
            "Of %d responses the engine writes %d at once, because engine.max_num_seqs is not set."
            " Set it to what your own engine had: vLLM's LLM takes 256 or more on a GPU.",
            responses,
            width,
        )

    def sync_actor(
        self, path: str | Path, version: int, checked: Checked | None = None
    ) -> SwapReceipt:
        """Like RolloutEngine; `medusa_ppo.engines.actor_sync.ActorSync` writes the file and calls
        this.
        """
        return self._synced(self.engine.sync_actor(path, version, checked))

    @property
    def streams(self) -> bool:
        """Like RolloutEngine: true with `engine.transfer=broadcast`."""
        return self.engine.streams

    def stream_actor(self, stream: ActorStream, version: int) -> SwapReceipt:
        """Like BroadcastPool; ActorSync calls this."""
        assert isinstance(self.engine, BroadcastPool), "streams says so"
        return self._synced(self.engine.stream_actor(stream, version))

    def _synced(self, receipt: SwapReceipt) -> SwapReceipt:
        self.plugin.policy_updated(self._actor, receipt.version)
        return receipt

    def metrics(self) -> dict[str, Any]:
        """The plugin's figures since the last call, with the names of contract/metrics.py; none
        without a plugin.
        """
        return self.plugin.metrics()

    def close(self) -> None:
        """Save the heads, and end what was started here."""
        try:
            # Saved first: the companion has the newest heads, and the stack ends it.
            self.plugin.save_heads(self._folder / HEADS_FOLDER)
        finally:
            self.plugin = NoPlugin()  # close() may be called again.
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
