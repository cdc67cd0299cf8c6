"""The reference PPO loop: generate, score, update, sync, report. Each mode is one function,
readable from top to bottom: `_serial`, `_in_turns`, `_with_long_tail`, `_ahead`.

The plugin is used only through its public hooks, in the lines that end with `# medusa`. Without
them (or with a NoPlugin) the loop is plain PPO, and the same rollouts give bit-identical actor
weights.

Hooks that get rollouts or a new actor read the actor's tables, also where it waits on the host:
`turns.aside`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import counter_figures, lag_figures, rollout_figures
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.colocated import DEEP_SLEEP
from medusa_ppo.plugin.medusa_plugin import StatesTap  # medusa
from medusa_ppo.ppo import run_progress as phases
from medusa_ppo.ppo.batch import PPOBatch, text_batch
from medusa_ppo.ppo.comparison import compare  # medusa
from medusa_ppo.ppo.generation import (
    Prompt,
    PromptStream,
    RolloutFiles,
    SpeedPairs,
    evaluation_sampling,
    sampling_of,
)
from medusa_ppo.ppo.long_tail import LongTail
from medusa_ppo.ppo.placement import ACTOR, REWARD
from medusa_ppo.ppo.rewards import earned_by_steps, token_texts
from medusa_ppo.ppo.rollout_maker import RolloutMaker
from medusa_ppo.ppo.run_progress import PeakMemory, ProgressSink
from medusa_ppo.ppo.run_state import (
    RunPosition,
    keep_best,
    save_companion,  # medusa
    try_save,
)
from medusa_ppo.ppo.run_warm_up import warm_up  # medusa
from medusa_ppo.ppo.scores import Scores
from medusa_ppo.ppo.session import Parts, RunSession
from medusa_ppo.reports.findings import LOGPROB_GAP_NATS
from medusa_ppo.reports.store import RunWriter
from medusa_ppo.runtime.hardware import settled
from medusa_ppo.runtime.processes import cluster_without_gpu, run_hardware

Metrics = dict[str, Any]


class PPOLoop:
    """One run. `parts` come from `session`; tests supply their own engine."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        progress: ProgressSink | None = None,
        position: RunPosition | None = None,
    ) -> None:
        self.config = config
        self.parts = parts
        self.progress = progress or ProgressSink()
        self.position = position or RunPosition()
        self.prompts = parts.prompts
        self.tokenizer = parts.tokenizer
        self.learner = parts.learner
        self.reward = parts.reward
        self.engine = parts.engine
        self.sync = parts.sync
        self.trackers = parts.trackers
        self.evaluation = parts.evaluation
        self.texts = parts.texts
        self.turns = parts.learner.turns
        self.tap: StatesTap | None = None
        self.plugin = parts.plugin  # medusa
        self.tap = parts.plugin.tap  # medusa
        self.remembered = parts.remembered
        self.maker = RolloutMaker(
            parts.learner,
            SpeedPairs(parts.engine, config),
            self._rewards,
            pad_id=getattr(parts.tokenizer, "pad_token_id", None) or 0,
            piece_prompts=config.ppo.piece_prompts,
            tail=self._long_tail(),
        )
        self.begun = self.position.next_step
        self.written_by = self.position.policy_version
        self.memory = PeakMemory()
        self.alarmed = False
        self.rollout_files = RolloutFiles(config.run_dir, config.report.keep_rollouts)

    def _long_tail(self) -> LongTail | None:
        """Carries prompts over to the next step, if ppo.carry_after is set."""
        ppo = self.config.ppo
        position = self.position
        if ppo.carry_after is None:
            return None

        def prompts_of(step: int) -> list[Prompt]:
            return self.prompts.batch(step, ppo.prompts_per_step)

        first = position.policy_version - position.next_step
        carried = (position.next_step, position.carried)
        return LongTail(
            self.engine,
            prompts_of,
            ppo.carry_after,
            ppo.staleness,
            ppo.steps - 1,
            first_version=first,
            carried=carried,
        )

    def alike(self, config: RunConfig, parts: Parts) -> PPOLoop:
        """A loop at the same position, with different settings and parts."""
        return PPOLoop(config, parts, self.progress, self.position)

    def run(self, writer: RunWriter, stop_if_told: Callable[[], None] = lambda: None) -> None:
        """All steps from the current position on; every finished step is on disk before the next
        begins.

        Args:
            stop_if_told: called after each step; raises if a signal to stop came and was caught on
                its way.
        """
        config = self.config
        began = time.monotonic() - self.position.wall_s
        warm_up(config, self.parts, self.progress, self.position)  # medusa
        self.progress.run_started(config.name, self.position.next_step, config.ppo.steps)
        for step in range(self.position.next_step, config.ppo.steps):
            values = self.step(step)
            # A reward that catches everything has caught the signal, too, and what it gave then
            # is not to be built on.
            stop_if_told()
            wall_s = time.monotonic() - began
            self.position = RunPosition(
                step + 1,
                self.position.policy_version + 1,
                wall_s,
                self.maker.carried_into(step + 1),
            )
            values[names.WALL_S] = wall_s
            writer.step(values)
            self.trackers.log(values)
            self.progress.step_finished(values)
            if config.ppo.checkpoint_every and (step + 1) % config.ppo.checkpoint_every == 0:
                with self.progress.phase(phases.SAVE, step), self._reading_roles():
                    with save_companion(config, self.plugin, step + 1):  # medusa
                        try_save(
                            config.run_dir, self.learner, self.position, config, self.remembered()
                        )

    def step(self, step: int) -> Metrics:
        """One PPO step, in the configured mode. Returns its metrics; afterwards the engine has the
        updated actor.
        """
        ppo = self.config.ppo
        if ppo.steps_ahead > 0:
            return self._ahead(step)
        if ppo.carry_after is not None:
            return self._with_long_tail(step)
        if self.config.engine.sleep_level:
            return self._in_turns(step)
        return self._serial(step)

    # ---- the modes

    def _serial(self, step: int) -> Metrics:
        """A step's parts, one after another. With ppo.piece_prompts, complete pieces are scored
        while the engine writes the others.
        """
        with self._generating(step):
            self.plugin.before_generation()  # medusa
            rollouts, written = self.maker.write(*self._asked(step), self.tap)
            with self.turns.aside(ACTOR):  # medusa
                self.plugin.rollout_ready(rollouts)  # medusa
        values = self._keep(step, rollouts, written)
        batch, scores = self._score(step, rollouts, values)
        self._update(step, rollouts, batch, scores, values)
        with self._syncing(step, values) as version, self.turns.aside(ACTOR):
            self.plugin.policy_updated(self.learner.actor, version)  # medusa
            self.sync(self.learner.actor, version)
        self._evaluate_if_due(step, values)
        return self._report(values, self.maker.figures())

    def _in_turns(self, step: int) -> Metrics:
        """Like `_serial`, but the engine sleeps from its rollouts to the sync (engine.sleep_level),
        and the models take turns on its device meanwhile (ppo.placement=shared). With
        ppo.piece_prompts they start taking turns while the engine still writes. It wakes up when
        the actor's new weights are in a file, and the actor has left.
        """
        with self._generating(step):
            self.turns.clear()
            self.plugin.before_generation()  # medusa
            rollouts, written = self.maker.write(*self._asked(step), self.tap)
            with self.turns.aside(ACTOR):  # medusa
                self.plugin.rollout_ready(rollouts)  # medusa
            self.turns.sleep(self.engine, self.config.engine.sleep_level)
        values = self._keep(step, rollouts, written)
        batch, scores = self._score(step, rollouts, values)
        self._update(step, rollouts, batch, scores, values)
        with self._syncing(step, values) as version, self.turns.aside(ACTOR):
            self.plugin.policy_updated(self.learner.actor, version)  # medusa
            self.sync(self.learner.actor, version, self._wake)
        self._evaluate_if_due(step, values)
        return self._report(values, self.maker.figures())

    def _with_long_tail(self, step: int) -> Metrics:
        """Like `_in_turns` (also for an engine that stays awake), plus the prompts carried over
        from the previous step: the engine stops when enough are answered, and the others are
        carried over to the next step (ppo.carry_after).
        """
        with self._generating(step):
            self.turns.clear()
            self.plugin.before_generation()  # medusa
            rollouts, written = self.maker.write_with_carried(*self._asked(step))
            with self.turns.aside(ACTOR):  # medusa
                self.plugin.rollout_ready(rollouts)  # medusa
            self.turns.sleep(self.engine, self.config.engine.sleep_level)
        values = self._keep(step, rollouts, written)
        batch, scores = self._score(step, rollouts, values)
        self._update(step, rollouts, batch, scores, values)
        with self._syncing(step, values) as version, self.turns.aside(ACTOR):
            self.plugin.policy_updated(self.learner.actor, version)  # medusa
            self.sync(self.learner.actor, version, self._wake)
        self._evaluate_if_due(step, values)
        return self._report(values, self.maker.figures())

    def _ahead(self, step: int) -> Metrics:
        """A step while the engine generates for later ones, up to ppo.staleness ahead. With
        ppo.carry_after, unfinished prompts are carried over.
        """
        with self._generating(step):
            if not self.maker.has_begun(step):
                self.begun = step
            self._begin_up_to(step, step)
            rollouts, written = self.maker.take(step)
            with self.turns.aside(ACTOR):  # medusa
                self.plugin.rollout_ready(rollouts)  # medusa
            self._begin_up_to(step + self.config.ppo.steps_ahead, step)
        values = self._keep(step, rollouts, written)
        batch, scores = self._score(step, rollouts, values)
        self._update(step, rollouts, batch, scores, values)
        with self._syncing(step, values) as version, self.turns.aside(ACTOR):
            self.plugin.policy_updated(self.learner.actor, version)  # medusa
            if self.maker.idle:  # Or before the next responses are begun.
                self.sync(self.learner.actor, version)
        return self._report(values, self.maker.figures_ahead())

    # ---- the parts of a step, in their order

    @contextlib.contextmanager
    def _generating(self, step: int) -> Iterator[None]:
        """Context around the engine's work for the step, with the actor's weights of this
        version.
        """
        with self.progress.phase(phases.GENERATE, step), self.memory.during(names.GENERATE_PEAK):
            yield

    def _asked(self, step: int) -> tuple[int, list[Prompt], Sampling]:
        """A step, its prompts, and their sampling."""
        prompts = self.prompts.batch(step, self.config.ppo.prompts_per_step)
        return step, prompts, sampling_of(self.config, step)

    def _begin_up_to(self, last: int, step: int) -> None:
        """Begin the rollouts of steps up to `last`, with the newest actor if the engine is idle. A
        step has to wait if its weights would be more than ppo.steps_ahead updates old when it is
        learned from.
        """
        version = self.position.policy_version
        while self.begun <= last and self.begun < max(step + 1, self.config.ppo.steps):
            if self.maker.idle:
                if self.engine.policy_version < version:
                    with self.turns.aside(ACTOR):
                        self.sync(self.learner.actor, version)
                self.plugin.before_generation()  # medusa
                self.written_by = version
            elif version + self.begun - step - self.written_by > self.config.ppo.steps_ahead:
                return
            self.maker.begin(*self._asked(self.begun))
            self.begun += 1

    def _keep(self, step: int, rollouts: Rollouts, written: dict[str, float]) -> Metrics:
        """The step's metrics so far, from its rollouts and how they were written; the rollouts
        themselves go to their file.
        """
        self.rollout_files.write(step, rollouts)
        return {
            names.STEP: step,
            **rollout_figures(rollouts),
            **counter_figures(rollouts),
            **written,
            **lag_figures(rollouts, self.position.policy_version),
        }

    def _score(self, step: int, rollouts: Rollouts, values: Metrics) -> tuple[PPOBatch, Scores]:
        """Rewards; log-probs of actor and reference; values; whitened advantages."""
        with (
            self.progress.phase(phases.SCORE, step) as seconds,
            self.memory.during(names.SCORE_PEAK),
        ):
            batch, rewards, scores, report = self.maker.score(rollouts, self.tap)
        values |= report | self._reward_metrics(rewards) | {names.SCORE_S: seconds()}
        # An older actor's tokens (ppo.staleness) differ however sound engine and sync are.
        if not values[names.POLICY_LAG]:
            self._alarm(report[names.LOGPROB_GAP])
        return batch, scores

    def _update(
        self, step: int, rollouts: Rollouts, batch: PPOBatch, scores: Scores, values: Metrics
    ) -> None:
        """Epochs of clipped PPO on actor and critic."""
        with (
            self.progress.phase(phases.UPDATE, step) as seconds,
            self.maker.timeline.at_work("update"),
            self.memory.during(names.UPDATE_PEAK),
        ):
            texts = None
            if self.texts is not None:
                drawn = self.texts.batch(step, len(batch))
                token_ids = [text.token_ids for text in drawn]
                texts = text_batch(token_ids, self.learner.device, batch.pad_id)
            values |= self.learner.update(batch, scores, rollouts.sampling, step, texts)
        values[names.UPDATE_S] = seconds()

    @contextlib.contextmanager
    def _syncing(self, step: int, values: Metrics) -> Iterator[int]:
        """Context around sending the new actor to the engine; yields its version."""
        with (
            self.progress.phase(phases.SYNC, step) as seconds,
            self.maker.timeline.at_work("sync"),
            self.memory.during(names.SYNC_PEAK),
        ):
            yield self.position.policy_version + 1
        values[names.SYNC_S] = seconds()

    def _wake(self) -> None:
        """Wake the engine, if it sleeps in each step."""
        self.turns.wake(self.engine, self.config.engine.sleep_level)

    @contextlib.contextmanager
    def _reading_roles(self, *, judging: bool = False) -> Iterator[None]:
        """Context in which roles are read after the sync: the engine sleeps again if they can only
        be read on its device.

        Args:
            judging: the reward model judges, too. Beside an awake engine it has room only if pieces
                are judged there in every step: the start of the run looks at that.
        """
        level = self.config.engine.sleep_level
        judges = judging and self.turns.judges_beside_engine
        if not (self.turns.read_on_device or (judges and self.config.ppo.piece_prompts is None)):
            yield
            return
        self.turns.sleep(self.engine, level)
        yield
        if level == DEEP_SLEEP:  # It has lost the actor.
            with self.turns.aside(ACTOR):
                self.sync(self.learner.actor, self.engine.policy_version, self._wake)
        else:
            self._wake()

    def _evaluate_if_due(self, step: int, values: Metrics) -> None:
        """In some steps the new actor answers evaluation prompts; the best actor so far is kept."""
        if self.evaluation is not None and (step + 1) % (self.config.ppo.eval_every or 1) == 0:
            values |= self._evaluate(self.evaluation, step)

    def _report(self, values: Metrics, timeline: Metrics) -> Metrics:
        """The step's metrics, completed with those of all parts."""
        values |= timeline | self.memory.take() | self.learner.take_memory()
        values |= {names.SYNC_COLLECT_S: self.sync.collect_s, names.SYNC_BYTES: self.sync.nbytes}
        values[names.ENGINE_RESTARTS] = self.engine.restarts
        values |= self.plugin.metrics()  # medusa
        return values

    # ---- rewards

    def _rewards(self, rollouts: Rollouts, prompts: list[Prompt]) -> torch.Tensor:
        """A reward for each response (S) or, if steps are rewarded, for each token (S, R)."""
        asked = [prompts[r.prompt_index] for r in rollouts.responses]
        separator = self.config.ppo.step_separator
        texts = [p.text for p in asked]
        rows = [p.row for p in asked]
        if separator is not None:
            pieces = token_texts(self.tokenizer, [r.token_ids for r in rollouts.responses])
            with self.turns.on(REWARD):
                return earned_by_steps(self.reward, pieces, texts, rows, separator)
        responses = self.tokenizer.batch_decode(
            [list(r.token_ids) for r in rollouts.responses], skip_special_tokens=True
        )
        with self.turns.on(REWARD):
            return self.reward.score(texts, responses, rows)

    def _evaluate(self, prompts: PromptStream, step: int) -> Metrics:
        with self.progress.phase(phases.EVALUATE, step) as evaluate_s:
            asked = [p.token_ids for p in prompts.prompts]
            found = self.engine.generate(asked, evaluation_sampling(self.config))
            # What was chosen for these steps is none of the next rollouts'.
            if self.config.engine.chooses_drafts:  # medusa
                self.engine.choices()  # medusa
            with self._reading_roles(judging=True):
                means = self._reward_metrics(self._rewards(found, prompts.prompts))
                values = {names.EVAL_REWARD: means[names.REWARD_MEAN]}
                if names.CORRECT_FRAC in means:
                    values[names.EVAL_CORRECT] = means[names.CORRECT_FRAC]
                keep_best(
                    self.config.run_dir, {names.STEP: step, **values}, self.learner, self.tokenizer
                )
        return {**values, names.EVALUATE_S: evaluate_s()}

    def _alarm(self, gap: float) -> None:
        """Warn once that engine and actor are not the same policy."""
        if gap > LOGPROB_GAP_NATS and not self.alarmed:
            self.alarmed = True
            self.progress.note(
                f"Engine and actor differ by {gap:.3f} nats a token: compare their dtypes, and "
                "see ppo.importance_bound."
            )

    def _reward_metrics(self, rewards: torch.Tensor) -> Metrics:
        rewards_S = rewards.sum(dim=1) if rewards.dim() == 2 else rewards
        correct_S = self.reward.correct(rewards)
        known = {} if correct_S is None else {names.CORRECT_FRAC: correct_S.float().mean().item()}
        ppo = self.config.ppo
        counted = {}
        if ppo.reward_timeout_s is not None:
            counted[names.REWARDS_LATE] = self.reward.late
        if ppo.reward_too_long == "cut":
            counted[names.REWARDS_CUT] = self.reward.cut
        return {names.REWARD_MEAN: rewards_S.mean().item(), **known, **counted}


def run_ppo(
    config: RunConfig,
    progress: ProgressSink | None = None,
    *,
    resume: bool = False,
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Run PPO as configured, from start to report; Ray, engine and companion are started and closed
    here.

    Args:
        config: what to run; its files go to config.run_dir.
        progress: listener; None: silent.
        resume: continue from run_dir/checkpoint.
        allow: configuration keys or sections that may have changed since then.

    Returns:
        The summary, as written to summary.json.

    Raises:
        MedusaError: what went wrong, in one sentence; finished steps stay on disk, with a report.
        KeyboardInterrupt: stopped by Ctrl-C or SIGTERM, after closing everything and writing the
            partial report.
    """
    progress = progress or ProgressSink()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster_without_gpu())
        config = settled(config, run_hardware)
        session = stack.enter_context(RunSession(config, progress))
        parts, position, writer = session.prepare(resume, allow)
        loop = PPOLoop(config, parts, progress, position)
        loop.run(writer, session.stop_if_told)
        session.save(parts, loop.position)
        if config.report.compare_pairs:  # medusa
            say = session.pair_done  # medusa
            session.compare(parts, functools.partial(compare, loop, say=say))  # medusa
        return session.finish()
