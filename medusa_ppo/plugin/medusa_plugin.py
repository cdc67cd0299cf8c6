"""MedusaPlugin: the few hooks that a PPO loop calls. They only read; the loop's own tensors and
random numbers don't change.

    plugin.warm_up(prompts, sampling, score)                    before the first step: trains new
                                                                heads
    plugin.before_generation()                                  installs newer heads in the engine
    plugin.rollout_ready(rollouts)                              remembers tokens and behaviour log-
                                                                probs
    with plugin.actor_forward(model, response_mask_BT, rows):   taps the loop's own log-prob pass,
                                                                per micro-batch
        model(...)
    plugin.policy_updated(model, policy_version)                the new lm_head goes to the
                                                                companion
    with plugin.exposed():                                      counts what else the loop does for
        ...                                                     the plugin alone
    plugin.metrics()                                            this step's figures, under the names
                                                                of medusa_ppo/contract/metrics.py
    plugin.close()

Shape letters: B rows of a micro-batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import load_heads, save_heads
from heads.errors import CheckpointError, ConfigError, DataError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import Actor, as_view
from medusa_ppo.companion.budget import Budget, Decision, StepSeen
from medusa_ppo.companion.client import POLL_TIMEOUT_S, CompanionClient
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.holdout import held_out
from medusa_ppo.companion.service import VERSIONS
from medusa_ppo.companion.wire import TableRows, WantedRows
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import (
    REPLAYED,
    companion_figures,
    lengths_over_frozen,
    seconds_saved,
    serving_figures,
)
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.contract.status import CompanionStatus, PublishedHeads
from medusa_ppo.engines.launch import draft_vocabulary
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.plugin import warm_up as warming
from medusa_ppo.plugin.installer import HeadsInstaller
from medusa_ppo.plugin.piece_states import PickingTap, PieceStates
from medusa_ppo.plugin.warm_up import WarmUpReport, warm_up_figures

logger = logging.getLogger(__name__)

VERSIONS_FOLDER = "heads"
"""Folder within the run's of the heads that the companion has published."""
DRAIN_TIMEOUT_S = 600.0
WAIT_SLICE_S = 1.0
TRAINED_AFTER_S = 60.0
"""How far the companion may exceed the seconds of a warm-up: it checks the clock only between
passes.
"""
Tables = tuple[torch.Tensor, torch.Tensor | None]
"""The actor's lm_head, and its embedding for heads that read it."""


@dataclasses.dataclass
class _Step:
    """Sums over one PPO step."""

    began: float = 0.0
    exposed_s: float = 0.0
    waited_s: float = 0.0
    beside_s: float = 0.0
    saved_s: float = 0.0
    rollouts: Rollouts | None = None
    serving: PublishedHeads | None = None
    choices: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class MedusaPlugin:
    """Joins a PPO loop, a rollout engine and a companion. With `companion=None` it only reports the
    engine's acceptance.

    Attributes:
        empty_responses: responses without a token so far; they teach nothing.
        budget: decides how much to train; None: `companion.epochs` passes over every batch.
        installer: installs heads in the engine, and counts how often.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        companion: CompanionClient | None,
        *,
        wait: bool = False,
        on_error: str = "disable",
        heads: MedusaHeads | None = None,
        passes: float | None = None,
        share: float = CompanionConfig().share,
        choices: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engine: where the responses come from.
            companion: where heads are trained; None: nowhere.
            wait: let before_generation wait until the companion has trained all it was given
                (repeatable runs).
            on_error: `raise` or `disable`: what happens to the loop if heads don't reach the
                engine.
            heads: the heads that the engine started with, for `save_heads`.
            passes: maximum passes over a batch if training has a budget; None: the companion's
                configured number over every batch.
            share: share of the loop's seconds that training may then take.
            choices: the engine may choose the number of drafts, and is asked what it chose when the
                rollouts are there.
            clock: seconds.
        """
        self._asks_choices = choices
        self._engine = engine
        self._companion = companion
        self._wait = wait
        self._heads = heads
        self.installer = HeadsInstaller(engine, heads, on_error)
        self._clock = clock
        # For each thread: hooks of the engine's and of the models' thread may overlap.
        self._counting = threading.local()
        self._collector: BatchCollector | None = None
        self._pieces: PieceStates | None = None
        self._decided = False  # How much to train on the next batch.
        self._tables: Tables | None = None
        self._tables_sent = True
        self.budget = (
            None
            if passes is None or companion is None
            else Budget(
                share,
                passes,
                shared=companion.shared,
                untrained=heads is None or heads.untrained,
            )
        )
        self._decision = Decision()
        self._unfinished = False
        self._step = _Step()
        self._hands_over = True
        self._warm_up: dict[str, float] = {}
        self._train_s_before = self._worked_s_before = 0.0
        self._lengths: dict[int, float] = {}  # Of versions, by `lengths_over_frozen`.
        self.empty_responses = 0

    @staticmethod
    def prepare_heads(config: RunConfig, model: Actor, folder: str | Path) -> Path:
        """Write the heads that a run starts with into `folder` (native format), for the engine to
        load. See `initial_heads`.

        Raises:
            CheckpointError: as `initial_heads`; or the folder would be replaced with more than
                heads in it.
        """
        _refuse_versions(Path(folder))
        save_heads(
            folder,
            initial_heads(config, model),
            lm_head_VD=as_view(model).lm_head_VD.detach(),
            metadata={"start": config.heads.path or "zero"},
        )
        return Path(folder)

    @classmethod
    def start(
        cls,
        config: RunConfig,
        model: Actor,
        engine: RolloutEngine,
        run_dir: str | Path,
        *,
        resume_from: str | Path = "",
    ) -> MedusaPlugin:
        """Start the companion (if wanted) with the same heads that `prepare_heads` wrote for the
        engine.

        Args:
            config: the run's configuration.
            model: the actor.
            engine: a running engine that was started with the prepared heads.
            run_dir: the run's folder.
            resume_from: folder that `save` wrote; empty: begin anew.

        Raises:
            ConfigError: `heads.path` is one of the versions that the companion would remove.
        """
        heads = initial_heads(config, model)
        return cls.start_from_tables(
            config, heads, _tables(model, heads.config), engine, run_dir, resume_from=resume_from
        )

    @classmethod
    def start_from_tables(
        cls,
        config: RunConfig,
        heads: MedusaHeads,
        tables_VD: Tables,
        engine: RolloutEngine,
        run_dir: str | Path,
        *,
        resume_from: str | Path = "",
    ) -> MedusaPlugin:
        """Like `start`, for an actor in another process. `tables_VD`: its lm_head and its
        embedding.
        """
        companion = None
        if config.companion.enabled:
            refuse_own_heads(config.heads.path, Path(run_dir) / VERSIONS_FOLDER)
            companion = CompanionClient(
                heads.config,
                config.companion,
                tables_VD[0].detach(),
                seed=config.seed,
                draft_temperature=config.engine.draft_temperature,
                num_drafts=config.engine.most_drafts,
                draft_vocab=draft_vocabulary(config.engine, heads.config),
                run_dir=run_dir,
                initial_state=heads.trainable_state(),
                embedding_VD=_embedding(tables_VD, heads.config),
                resume_from=resume_from,
                takes_turns=config.has_budget,
            )
        settings = config.companion
        passes = float(settings.epochs) if config.has_budget else None
        wait = settings.wait
        on_error = settings.on_error
        # An engine that writes several steps ahead is never idle, and can't be asked.
        choices = config.engine.chooses_drafts and config.ppo.steps_ahead <= 1
        plugin = cls(
            engine,
            companion,
            wait=wait,
            on_error=on_error,
            heads=heads,
            passes=passes,
            share=settings.share,
            choices=choices,
        )
        plugin._tables = tables_VD
        if companion is not None and resume_from:
            # What an earlier run trained is not the first step's, and heads that it has published
            # get no advance.
            status = companion.status()
            plugin._train_s_before = status.train_s
            plugin.installer.published_before = status.versions_published
            if plugin.budget is not None:
                plugin.budget.begin(status.versions_published, status.candidates_rejected)
        return plugin

    # ---- before the first step

    def warm_up(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        score: Callable[[Rollouts], None],
        *,
        tokens: int = warming.TOKENS,
        seconds: float = warming.SECONDS,
        folder: str | Path | None = None,
        advance: warming.Advance = warming.silent,
    ) -> WarmUpReport:
        """Before the first step: let the engine answer prompts, train the heads on the answers
        until acceptance on held-out prompts stops rising, and install them. The engine must be
        idle.

        Nothing of the loop changes: none of its random numbers is drawn, and no weight changes.

        Args:
            prompts: prompts of the coming steps, in order.
            sampling: as the loop's responses are sampled.
            score: runs the loop's log-prob pass over these rollouts, inside `actor_forward`.
            tokens: response tokens to train and judge on; 0: do nothing.
            seconds: time limit.
            folder: where responses are kept until the run is done, so that an interrupted warm-up
                continues; None: nowhere.
            advance: receives progress.

        Raises:
            SwapError: the engine did not take the heads, and `on_error` is `raise`.
        """
        companion = self._companion
        if companion is None or not tokens:
            return WarmUpReport(problem="nothing is trained here")
        began = self._clock()
        own = warming.different(prompts)
        if len(own) < warming.LEAST_PROMPTS:
            problem = (
                f"{len(own)} different prompts are too few to train and judge on; a warm-up needs "
                f"{warming.LEAST_PROMPTS}. The heads begin untrained."
            )
            return WarmUpReport(prompts=len(own), problem=problem)
        rollouts = warming.write_responses(
            self._engine,
            own,
            sampling,
            tokens,
            warming.WRITING_SHARE * seconds,
            None if folder is None else Path(folder),
            self._table_sum(),
            advance,
            self._clock,
        )
        if self._asks_choices:
            # Its steps, without heads that could draft, are none of the first rollouts'.
            self._engine.choices()
        batch = self._states_of(companion, rollouts, score)
        if batch is None:
            problem = "none of its responses was scored inside plugin.actor_forward"
            return WarmUpReport(seconds=self._clock() - began, problem=problem)
        if batch.held_S is None or not bool(batch.held_S.any()):
            held_S = held_out(batch.lengths_S, batch.prompts_S, HOLDOUT_SHARE, sampling.seed or 0)
            batch = dataclasses.replace(batch, held_S=held_S)
        left_s = max(0.0, seconds - (self._clock() - began))
        published = self._trained(companion, batch, left_s, advance)
        status = companion.status()
        self._train_s_before = status.train_s
        self._worked_s_before = status.worked_s
        if self.budget is not None:
            self.budget.begin(status.versions_published, status.candidates_rejected)
        if published is not None:
            self.installer.install(published)
        self._step = _Step()  # All of this was before the first step.
        installed = published is not None and self.installer.installed is published
        report = WarmUpReport(
            tokens=batch.response_ids_M.numel(),
            prompts=len({response.prompt_index for response in rollouts.responses}),
            seconds=self._clock() - began,
            before=status.serving.mean_acceptance_length if status.serving else None,
            after=status.candidate.mean_acceptance_length if status.candidate else None,
            problem="" if installed else _why_none(status, published is not None),
        )
        self._warm_up = warm_up_figures(report)
        return report

    def _states_of(
        self,
        companion: CompanionClient,
        rollouts: Rollouts,
        score: Callable[[Rollouts], None],
    ) -> RolloutBatch | None:
        """The batch from rollouts that the loop scores only for the heads; None: it has scored
        nothing.
        """
        collector = companion.collector(rollouts)
        self._collector = collector
        self._hands_over = False
        try:
            score(rollouts)
        finally:
            self._collector = None
            self._hands_over = True
        return collector.batch() if collector.has_states else None

    def _trained(
        self,
        companion: CompanionClient,
        batch: RolloutBatch,
        seconds: float,
        advance: warming.Advance,
    ) -> PublishedHeads | None:
        """What the companion publishes after training on a batch for as long as acceptance on its
        holdout rises; None: nothing.
        """
        companion.submit(dataclasses.replace(batch, rising_s=seconds))
        began = self._clock()
        ends = began + seconds + TRAINED_AFTER_S
        while not companion.drain(WAIT_SLICE_S):
            now = self._clock()
            if now >= ends or not companion.status().alive:
                break
            advance(min(now - began, seconds), seconds, "training")
        return companion.newest(self.installer.known_version, DRAIN_TIMEOUT_S)

    def _table_sum(self) -> int:
        """Identifies an actor by a few rows of its lm_head."""
        if self._tables is None:
            return 0
        return zlib.crc32(self._tables[0][:8].detach().float().cpu().numpy().tobytes())

    # ---- the hooks

    @property
    def tap(self) -> StatesTap:
        """The context for the actor's passes: `actor_forward`."""
        return StatesTap(self)

    def before_generation(self) -> None:
        """Install newer heads, if the companion has any, and restore the heads of an engine that
        lost them. The engine must be idle.

        Raises:
            SwapError: the engine did not take newer heads, and `on_error` is `raise`.
        """
        with self._exposed():
            self._book_last()
        self._decided, self._pieces = False, None  # Of a step that failed.
        self._step.began = self._clock()
        with self._exposed():
            back = self.installer.take_back()
            if self._companion is not None:
                if back and self._heads is not None:
                    heads, serving = self.installer.heads_to_save(lambda: None)
                    self._companion.go_on_from(
                        self.installer.known_version, heads.trainable_state(), serving
                    )
                published = self._ask_for_heads(self._companion)
                if published is not None:
                    self.installer.install(published)
            self.installer.feed_again()
        if self._companion is not None:
            self._companion.give_way(True)

    def _book_last(self) -> None:
        """Pass the last rollouts to the budget if nobody asked for their figures: a loop need not,
        and may generate several times for one step.
        """
        step = self._step
        if self.budget is not None and self._companion is not None and step.rollouts is not None:
            self._book(self.budget, step, step.rollouts, self._companion.status())
            step.rollouts = None

    def _ask_for_heads(self, companion: CompanionClient) -> PublishedHeads | None:
        began = self._clock()
        if self._wait and not companion.drain(DRAIN_TIMEOUT_S):
            logger.warning("The companion did not finish its batches; the serving heads stay.")
        budget = self.budget if self._unfinished else None
        if budget is not None and budget.left_s > 0 and companion.takes_turns:
            self._unfinished = not companion.take_turn(budget.left_s)
            budget.take(self._clock() - began)
        published = companion.newest(
            self.installer.known_version, DRAIN_TIMEOUT_S if self._wait else POLL_TIMEOUT_S
        )
        self._step.waited_s += self._clock() - began
        return published

    def rollout_ready(self, rollouts: Rollouts) -> BatchCollector | None:
        """Remember this batch's tokens and log-probs. Returns the collector that gets its states
        through `actor_forward`, or None if the batch is not wanted.
        """
        with self._exposed():
            self._flush()
            pieces, self._pieces = self._pieces, None
            self._step.rollouts = rollouts
            self._step.serving, self._step.choices = (
                self.installer.installed,
                self._engine.choices() if self._asks_choices else [],
            )
            self.installer.judge(rollouts)
            if self._companion is not None:
                if not self._decided:
                    self._decide()
                self._decided = False
                if self._wants_states:
                    # Tables that were not sent while nothing was trained.
                    self._send_tables(rollouts.policy_version)
                    sample = None
                    if pieces is not None:
                        tokens = sum(len(response.token_ids) for response in rollouts.responses)
                        sample = pieces.settle(tokens)
                    self._collector = self._companion.collector(rollouts, sample)
                    self.empty_responses += self._collector.empty_responses
        return self._collector

    def begin_pieces(self, step: int, responses: int, prompts: int) -> PieceStates | None:
        """What keeps the states of a batch that is scored piece by piece, before all of it is
        written; None: none are wanted. `StatesTap.take` gives them to the collector of
        `rollout_ready`.

        Args:
            step: number of the step, which tells its sample from others.
            responses, prompts: how many the batch will have.
        """
        if self._companion is None:
            return None
        with self.exposed():
            self._decide()
            self._decided = True
            if self._wants_states:
                sample = self._companion.begin_sample(step)
                self._pieces = PieceStates(sample, responses, prompts)
        return self._pieces

    def _decide(self) -> None:
        self._decision = self.budget.decide() if self.budget else Decision()

    @property
    def _wants_states(self) -> bool:
        return self.budget is None or self._decision.passes > 0

    @contextlib.contextmanager
    def actor_forward(
        self,
        model: Actor,
        response_mask_BT: torch.Tensor,
        sequences: Sequence[int | None] | torch.Tensor,
    ) -> Iterator[None]:
        """Context around a forward pass of the actor that the loop runs anyway, with any
        micro-batches, order of rows and padding. Once every response has been seen, the batch goes
        to the companion, which trains while the loop updates.

        Args:
            model: the actor, a transformers model or a `MegatronActor`.
            response_mask_BT: true where token t of the row is a response token.
            sequences: for each row, the index of its response in `rollouts.responses`; None: the
                row is none of them.

        Raises:
            DataError: no single forward pass happened inside, or the rows do not fit the rollouts.
        """
        collector = self._collector
        if collector is None:
            yield
            return
        with as_view(model).tap() as tap:
            yield
        with self._exposed():
            collector.add(tap.hidden_BTD, response_mask_BT, sequences)
            if collector.complete and self._hands_over:
                self._flush()

    def wanted_rows(self) -> WantedRows | None:
        """The rows of the actor's tables that the companion needs with the next batch, for an actor
        in another process; None: none.
        """
        return self._companion.wanted_rows() if self._companion is not None else None

    def most_states(self) -> int:
        """How many states of the next batch the companion can take, for an actor in another process
        that selects them itself.
        """
        return self._companion.most_rows() if self._companion is not None else 0

    def batch_ready(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        """Call this instead of `actor_forward` if an actor in another process tapped its pass.

        Args:
            batch: what was tapped.
            rows: what `wanted_rows` named, of the actor that gave the batch's states; None: the
                tables were given to `tables_updated`.
        """
        with self._exposed():
            collector = self._collector
            self._collector = None
            if rows is not None:
                self._tables = None  # Those of the start: the actor may have changed since.
            if self._companion is not None and self._wants_states:
                if collector is None or not collector.tokens:
                    # Rows that the plugin knows were counted when their sample was drawn.
                    self._companion.count_left_out(batch.left_out)
                self._submit(batch, rows)

    def policy_updated(self, model: Actor | None, policy_version: int) -> None:
        """The actor has changed: its lm_head goes to the companion. A batch that was only partly
        scored is sent now.

        Args:
            model: the actor; None: its tables have not changed (e.g. adapters that leave them
                alone) and are not sent again.
        """
        tables = (
            None if model is None else _tables(model, self._heads.config if self._heads else None)
        )
        self.tables_updated(tables, policy_version)

    def tables_updated(self, tables_VD: Tables | None, policy_version: int) -> None:
        """Like `policy_updated`, for an actor in another process."""
        with self._exposed():
            self._flush()
            if tables_VD is not None:
                self._tables = tables_VD
                self._tables_sent = False
            if self._wants_states:
                self._send_tables(policy_version)

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the block's seconds as spent in the plugin's hooks: for what a loop does only
        because of the plugin, e.g. gathering rows and tables. Blocks and hooks inside it count
        once. `metrics` belongs after the block: what is counted later goes to the next step.
        """
        if getattr(self._counting, "on", False):
            yield
            return
        self._counting.on = True
        began = self._clock()
        try:
            yield
        finally:
            self._counting.on = False
            self._step.exposed_s += self._clock() - began

    def metrics(self) -> dict[str, Any]:
        """Figures of the step since the last call, under the names of contract/metrics.py. Unknown
        figures are left out.
        """
        with self._exposed():
            status = self._companion.status() if self._companion is not None else None
        step = self._step
        self._step = _Step()
        values: dict[str, Any] = {
            names.PLUGIN_EXPOSED_S: step.exposed_s,
            names.SWAP_S: self.installer.take_seconds(),
            **self._warm_up,
        }
        warmed_up, self._warm_up = bool(self._warm_up), {}
        if step.rollouts is not None:
            values |= serving_figures(step.rollouts, step.serving, step.choices)
        if status is not None:
            trained_s = max(0.0, status.train_s - self._train_s_before)
            self._train_s_before = status.train_s
            figures = companion_figures(status)
            if warmed_up:
                # What was judged last are the warm-up's responses, and heads from before it.
                for name in REPLAYED:
                    figures.pop(name, None)
            values |= figures
            values[names.SWAP_ALARMS] = self.installer.watch.alarms
            values[names.COMPANION_TRAIN_S] = trained_s
            values[names.COMPANION_HIDDEN_S] = max(0.0, trained_s - step.waited_s)
            if self.budget is not None and step.rollouts is not None:
                values |= self._book(self.budget, step, step.rollouts, status)
        return values

    def _book(
        self, budget: Budget, step: _Step, rollouts: Rollouts, status: CompanionStatus
    ) -> dict[str, Any]:
        """Pass seconds and verdicts of a finished step to the budget, which returns what to
        report.
        """
        worked_s = max(0.0, status.worked_s - self._worked_s_before)
        self._worked_s_before = status.worked_s
        beside_s = worked_s if self._companion is not None and self._companion.shared else 0.0
        step.beside_s += beside_s
        # Not every batch is judged, and what a verdict publishes drafts after it.
        self._lengths |= lengths_over_frozen(status)
        step.saved_s += seconds_saved(rollouts, self._lengths)
        # A batch that waited too long for an answer may still be there.
        self._unfinished = self._unfinished or status.queue_bytes > 0
        budget.step(
            StepSeen(
                step_s=self._clock() - step.began,
                trained_s=beside_s,
                length=rollouts.counters.mean_acceptance_length,
                published=status.versions_published,
                rejected=status.candidates_rejected,
                serving=rollouts.heads_version,
                behind=status.queue_bytes > 0,
            )
        )
        return {
            names.COMPANION_PASSES: budget.last.passes,
            names.COMPANION_REASON: budget.last.reason,
            names.COMPANION_TAKEN: budget.taken_frac,
            names.COMPANION_BUDGET_S: budget.left_s,
            names.COMPANION_SAVED_S: step.saved_s,
            names.COMPANION_LOST_S: step.exposed_s + step.beside_s,
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the companion waits if it shares cores or a device with the loop: its work would
        slow down whatever is being timed.
        """
        if self._companion is not None:
            self._companion.give_way(True)
        try:
            yield
        finally:
            if self._companion is not None:
                self._companion.give_way(False)

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
        """Wait, outside any step, until the companion has trained on all it was given. False if it
        was not done in time.
        """
        return self._companion is None or self._companion.drain(timeout_s)

    def save(self, folder: str | Path) -> bool:
        """Write the companion's whole state, for `start(resume_from=...)`. False if there is none.

        With `wait` it is written after training on everything handed over; otherwise after the
        batch in training.
        """
        if self._wait:
            self.drain()
        return self._companion is not None and self._companion.save(folder)

    def save_heads(self, folder: str | Path) -> Path:
        """Write the heads that the engine drafts with as a native directory.

        Raises:
            DataError: the plugin was made without the heads that the engine started with.
        """
        if self._heads is None:
            raise DataError(
                "There are no heads to save.",
                given="heads=None",
                expected="the engine's heads",
                do="Use MedusaPlugin.start.",
            )
        companion = self._companion
        heads, version = self.installer.heads_to_save(
            lambda: companion.newest(0) if companion is not None else None
        )
        save_heads(
            folder, heads, lm_head_VD=self._tables[0] if self._tables else None, version=version
        )
        return Path(folder)

    def close(self) -> None:
        """End the companion; the caller ends the engine. Safe to call again."""
        self._collector = None
        if self._companion is not None:
            self._companion.close()

    # ---- parts

    def _flush(self) -> None:
        """Hand over what was tapped. If that is nothing, only the log says so: a loop may skip
        steps, a remote one may have had no usable row, and responses may be empty.
        """
        collector = self._collector
        self._collector = None
        if collector is None or self._companion is None:
            return
        if not collector.has_states:
            # Scored responses without a state are rows that the sample leaves out.
            if not collector.seen:
                logger.warning(
                    "No response with a token was scored inside plugin.actor_forward since the last"
                    " rollouts; the companion gets nothing."
                )
            return
        self._submit(collector.batch())

    def _submit(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        assert self._companion is not None
        self._send_tables(
            batch.policy_version
        )  # Tables that were not sent while nothing was trained.
        self._companion.submit(
            dataclasses.replace(batch, passes=self._decision.passes) if self.budget else batch, rows
        )
        self._unfinished = True

    def _send_tables(self, policy_version: int) -> None:
        """Send the actor's tables to the companion, once after each update."""
        if (
            self._tables_sent
            or self._tables is None
            or self._companion is None
            or self._heads is None
        ):
            return
        self._tables_sent = True
        # The loop's own tensors, not views of them now: it may carry them to another device
        # before their rows are read.
        self._companion.update_lm_head(
            self._tables[0],
            policy_version,
            embedding_VD=_embedding(self._tables, self._heads.config),
        )

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        """A hook's own work; the companion need not wait any longer."""
        with self.exposed():
            if self._companion is not None:
                self._companion.give_way(False)
            yield


class StatesTap(PickingTap):
    """A plugin's tap, which a loop holds for a whole run: `actor_forward`, and what a loop needs if
    its passes run in other processes.
    """

    def __init__(self, plugin: MedusaPlugin) -> None:
        self._plugin = plugin

    def __call__(
        self, model: Actor, response_mask_BT: torch.Tensor, sequences: Sequence[int | None]
    ) -> contextlib.AbstractContextManager[None]:
        """As `MedusaPlugin.actor_forward`."""
        return self._plugin.actor_forward(model, response_mask_BT, sequences)

    @property
    def wanted(self) -> tuple[torch.Tensor, ...] | None:
        collector = self._plugin._collector
        return None if collector is None else collector.wanted

    def put(self, states: Mapping[int, torch.Tensor]) -> None:
        plugin, collector = self._plugin, self._plugin._collector
        if collector is None:
            return
        with plugin._exposed():
            for sequence, states_ND in states.items():
                collector.put(sequence, states_ND)
            if collector.complete and plugin._hands_over:
                plugin._flush()

    def begin_pieces(self, step: int, responses: int, prompts: int) -> PieceStates | None:
        """As `MedusaPlugin.begin_pieces`."""
        return self._plugin.begin_pieces(step, responses, prompts)

    def take(self, pieces: PieceStates) -> None:
        """Take the states of all pieces, once `rollout_ready` knows the whole batch."""
        wanted = self.wanted
        if wanted is not None:
            self.put({s: pieces.take(s, tokens) for s, tokens in enumerate(wanted)})


def _why_none(status: CompanionStatus, published: bool) -> str:
    if published:
        return "the engine did not accept the trained heads (the log says why)"
    if not status.alive:
        return f"the companion does not answer: {status.error}"
    if status.error:
        return status.error
    if status.restarts:
        return "the companion was ended during it, and restarted"
    if status.last_policy_version < 0:
        return (
            "the companion was still training when the time was up (heads.warm_up_s); its heads"
            " are installed before the first step that finds them ready"
        )
    return "the trained heads were not significantly better than the previous ones"


def _refuse_versions(folder: Path) -> None:
    """Raise CheckpointError if a companion publishes into this folder: `save_heads` replaces it
    whole, and a loop that is started again in its own would lose what its heads have learned.
    """
    versions = sorted(folder.glob(VERSIONS))
    if versions:
        raise CheckpointError(
            "This folder has the versions that a companion has published.",
            given=versions[-1],
            expected="another folder for the heads that the engine starts with",
            do="Name another one, e.g. RUN_DIR/heads-start. To go on from what the heads have"
            " learned: MedusaPlugin.start(..., resume_from=RUN_DIR/companion).",
        )


def refuse_own_heads(path: str | None, *folders: Path) -> None:
    """Raise ConfigError if a run is to start with heads in a folder whose content it removes or
    replaces: with the same settings it could not be started again.

    Args:
        path: the run's `heads.path`.
        folders: those folders.
    """
    for folder in folders:
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                "The run would replace the heads that it starts with.",
                given=f"heads.path={path}",
                expected=f"a folder outside {folder}",
                do=f"Copy it (cp -r {path} {folder.with_name('heads-start')}) and name the copy,"
                " which the run reads whenever it is started again.",
            )


def initial_heads(config: RunConfig, model: Actor) -> MedusaHeads:
    """The heads that a run starts with, the same at every call: those of `config.heads.path`, or
    zero heads (each equals lm_head).

    Raises:
        CheckpointError: the directory is damaged or belongs to another actor.
    """
    return heads_for_table(config, as_view(model).lm_head_VD.detach())


def heads_for_table(config: RunConfig, lm_head_VD: torch.Tensor) -> MedusaHeads:
    """Like `initial_heads`, from the actor's lm_head alone."""
    vocab_size, hidden_size = lm_head_VD.shape
    section = config.heads
    if section.path:
        heads, _ = load_heads(section.path, hidden_size=hidden_size, vocab_size=vocab_size)
        return heads.to(torch.float32)
    with torch.random.fork_rng(devices=[]):  # The loop's own random numbers don't change.
        torch.default_generator.manual_seed(config.seed)
        heads = MedusaHeads(section.sizes(hidden_size, vocab_size))
    if section.lm_head == "own":
        heads.init_own_lm_heads(lm_head_VD.to("cpu", torch.float32))
    return heads


def _embedding(tables_VD: Tables, config: HeadsConfig) -> torch.Tensor | None:
    return tables_VD[1] if config.needs_embedding else None


def _tables(model: Actor, config: HeadsConfig | None) -> Tables:
    """The actor's tables. The embedding comes only if the heads need it, because a Megatron actor
    must collect it from its ranks.
    """
    view = as_view(model)
    return (
        view.lm_head_VD,
        view.embedding_VD if config is not None and config.needs_embedding else None,
    )
