"""The reference PPO loop: generate, score, update, sync, report. Read `PPOLoop.step` from top to
bottom.

The plugin is used through its public hooks only, in the lines that end with `# medusa`. Without
them (or with plugin=None) the loop is plain PPO, and the actor's weights come out bit for bit the
same from the same rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import counter_figures, lag_figures, rollout_figures
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.ppo import run_progress as phases
from medusa_ppo.ppo.batch import text_batch
from medusa_ppo.ppo.comparison import compare  # medusa
from medusa_ppo.ppo.generation import Prompt, PromptStream, RolloutFiles, SpeedPairs, sampling_of
from medusa_ppo.ppo.long_tail import LongTail
from medusa_ppo.ppo.placement import ACTOR, REWARD
from medusa_ppo.ppo.rewards import earned_by_steps
from medusa_ppo.ppo.rollout_maker import RolloutMaker
from medusa_ppo.ppo.run_progress import PeakMemory, ProgressSink
from medusa_ppo.ppo.run_state import COMPANION_FOLDER, RunPosition, keep_best, try_save
from medusa_ppo.ppo.session import Parts, RunSession
from medusa_ppo.reports.findings import LOGPROB_GAP_NATS
from medusa_ppo.reports.store import RunWriter
from medusa_ppo.runtime.hardware import settled

Metrics = dict[str, Any]


class PPOLoop:
    """One run. `parts` come from `session`; tests bring an engine of their own."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        progress: ProgressSink | None = None,
        position: RunPosition | None = None,
    ) -> None:
        self.config = config
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
        # medusa
        self.plugin = parts.plugin
        self.remembered = parts.remembered
        self.maker = RolloutMaker(
            parts.learner,
            SpeedPairs(parts.engine, config),
            self._rewards,
            pad_id=getattr(parts.tokenizer, "pad_token_id", None) or 0,
            piece_prompts=config.ppo.piece_prompts,
            ahead=config.ppo.steps_ahead > 0,
            tail=self._long_tail(),
        )
        self.begun = self.position.next_step
        self.written_by = self.position.policy_version
        self.memory = PeakMemory()
        self.alarmed = False
        self.rollout_files = RolloutFiles(config.run_dir, config.report.keep_rollouts)

    def _long_tail(self) -> LongTail | None:
        """Who carries prompts over to the next step, where ppo.carry_after says so."""
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

    def run(self, writer: RunWriter) -> None:
        """All steps from the current position on; every finished step is on disk before the next
        begins.
        """
        config = self.config
        began = time.monotonic() - self.position.wall_s
        self.progress.run_started(config.name, self.position.next_step, config.ppo.steps)
        for step in range(self.position.next_step, config.ppo.steps):
            values = self.step(step)
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
                with self.progress.phase(phases.SAVE, step):
                    if self.plugin is not None and config.companion.wait:  # medusa
                        self.plugin.save(config.run_dir / COMPANION_FOLDER)  # medusa
                    try_save(config.run_dir, self.learner, self.position, config, self.remembered())

    def step(self, step: int) -> Metrics:
        """One PPO step. Returns its metrics; the actor in the engine is the updated one
        afterwards.
        """
        config = self.config
        learner = self.learner
        version = self.position.policy_version
        values: Metrics = {names.STEP: step}

        # (1) GENERATE: the engine writes the responses, with the actor's weights of this version;
        # whole pieces are scored meanwhile. With ppo.staleness they were begun in an earlier step,
        # and the engine goes on with those of later ones.
        with self.progress.phase(phases.GENERATE, step), self.memory.during(names.GENERATE_PEAK):
            self.turns.clear()
            if not self.maker.has_begun(step):
                self.begun = step
            self._write_up_to(step, step)
            tap = None
            if self.plugin is not None:  # medusa
                tap = self.plugin.actor_forward  # medusa
            rollouts, pair = self.maker.finish(step, tapped=tap is not None)
            if self.plugin is not None:  # medusa
                self.plugin.rollout_ready(rollouts)  # medusa
            self._write_up_to(step + config.ppo.steps_ahead, step)
            self.turns.sleep(self.engine, config.engine.sleep_level)
        values |= rollout_figures(rollouts) | counter_figures(rollouts) | pair
        values |= lag_figures(rollouts, version)
        self.rollout_files.write(step, rollouts)

        # (2) SCORE: rewards; log-probs of actor and reference; values; whitened advantages.
        with (
            self.progress.phase(phases.SCORE, step) as score_s,
            self.memory.during(names.SCORE_PEAK),
        ):
            batch, rewards, scores, report = self.maker.score(rollouts, tap)
        values |= report | self._reward_metrics(rewards)
        self._alarm(report[names.LOGPROB_GAP])

        # (3) UPDATE: epochs of clipped PPO on actor and critic.
        at_work = self.maker.timeline.at_work
        with (
            self.progress.phase(phases.UPDATE, step) as update_s,
            at_work("update"),
            self.memory.during(names.UPDATE_PEAK),
        ):
            texts = None
            if self.texts is not None:
                drawn = self.texts.batch(step, len(batch))
                texts = text_batch([text.token_ids for text in drawn], learner.device, batch.pad_id)
            values |= learner.update(batch, scores, rollouts.sampling, step, texts)

        # (4) SYNC: the new actor into the engine.
        aside = self.turns.aside(ACTOR)
        peak = self.memory.during(names.SYNC_PEAK)
        with self.progress.phase(phases.SYNC, step) as sync_s, at_work("sync"), peak, aside:
            if self.plugin is not None:  # medusa
                self.plugin.policy_updated(learner.actor, version + 1)  # medusa
            self.turns.wake(self.engine, config.engine.sleep_level)
            if self.maker.idle:  # Or before the next responses are begun.
                self.sync(learner.actor, version + 1)

        # (5) EVALUATE, on some steps: other prompts, the new actor; the best so far is kept.
        if self.evaluation is not None and (step + 1) % (config.ppo.eval_every or 1) == 0:
            values |= self._evaluate(self.evaluation, step)

        # (6) REPORT
        values |= self.maker.figures() | self.memory.take() | self.turns.take()
        values |= {names.SCORE_S: score_s(), names.UPDATE_S: update_s(), names.SYNC_S: sync_s()}
        values |= {names.SYNC_COLLECT_S: self.sync.collect_s, names.SYNC_BYTES: self.sync.nbytes}
        values[names.ENGINE_RESTARTS] = self.engine.restarts
        if self.plugin is not None:  # medusa
            values |= self.plugin.metrics()  # medusa
        return values

    def _write_up_to(self, last: int, step: int) -> None:
        """Begin with the rollouts of steps up to `last`, with the newest actor where the engine is
        idle. One whose weights would be more than ppo.steps_ahead updates old when it is learned
        from has to wait.
        """
        version = self.position.policy_version
        while self.begun <= last and self.begun < max(step + 1, self.config.ppo.steps):
            if self.maker.idle:
                if self.config.ppo.steps_ahead and self.engine.policy_version < version:
                    self.sync(self.learner.actor, version)
                if self.plugin is not None:  # medusa
                    self.plugin.before_generation()  # medusa
                self.written_by = version
            elif version + self.begun - step - self.written_by > self.config.ppo.steps_ahead:
                return
            prompts = self.prompts.batch(self.begun, self.config.ppo.prompts_per_step)
            self.maker.begin(self.begun, prompts, sampling_of(self.config, self.begun))
            self.begun += 1

    def _rewards(self, rollouts: Rollouts, prompts: list[Prompt]) -> torch.Tensor:
        """Of each response (S), or with steps of each token (S, R)."""
        asked = [prompts[r.prompt_index] for r in rollouts.responses]
        separator = self.config.ppo.step_separator
        texts = [p.text for p in asked]
        rows = [p.row for p in asked]
        if separator is not None:
            pieces = [
                self.tokenizer.batch_decode([[i] for i in r.token_ids], skip_special_tokens=True)
                for r in rollouts.responses
            ]
            with self.turns.on(REWARD):
                return earned_by_steps(self.reward, pieces, texts, rows, separator)
        responses = self.tokenizer.batch_decode(
            [list(r.token_ids) for r in rollouts.responses], skip_special_tokens=True
        )
        with self.turns.on(REWARD):
            return self.reward.score(texts, responses, rows)

    def _evaluate(self, prompts: PromptStream, step: int) -> Metrics:
        with self.progress.phase(phases.EVALUATE, step) as evaluate_s:
            sampling = replace(sampling_of(self.config, 0), responses_per_prompt=1)
            found = self.engine.generate([p.token_ids for p in prompts.prompts], sampling)
            means = self._reward_metrics(self._rewards(found, prompts.prompts))
            values = {names.EVAL_REWARD: means[names.REWARD_MEAN]}
            if names.CORRECT_FRAC in means:
                values[names.EVAL_CORRECT] = means[names.CORRECT_FRAC]
            keep_best(
                self.config.run_dir, {names.STEP: step, **values}, self.learner, self.tokenizer
            )
        return {**values, names.EVALUATE_S: evaluate_s()}

    def _alarm(self, gap: float) -> None:
        """Said once: engine and actor are not the same policy."""
        if gap > LOGPROB_GAP_NATS and not self.alarmed:
            self.alarmed = True
            self.progress.note(
                f"Engine and actor differ by {gap:.3f} nats a token: compare their dtypes, see"
                " ppo.importance_bound."
            )

    def _reward_metrics(self, rewards: torch.Tensor) -> Metrics:
        rewards_S = rewards.sum(dim=1) if rewards.dim() == 2 else rewards
        correct_S = self.reward.correct(rewards_S)
        known = {} if correct_S is None else {names.CORRECT_FRAC: correct_S.float().mean().item()}
        late = (
            {}
            if self.config.ppo.reward_timeout_s is None
            else {names.REWARDS_LATE: self.reward.late}
        )
        return {names.REWARD_MEAN: rewards_S.mean().item(), **known, **late}


def run_ppo(
    config: RunConfig,
    progress: ProgressSink | None = None,
    *,
    resume: bool = False,
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Run PPO as configured, from nothing to the report; Ray, engine and companion are started here
    and closed here.

    Args:
        config: what to run; its files go to config.run_dir.
        progress: listener; None: silent.
        resume: go on from run_dir/checkpoint.
        allow: keys of the configuration, or sections of it, that may have changed since then.

    Returns:
        The summary, as written to summary.json.

    Raises:
        MedusaError: what went wrong, in one sentence; finished steps stay on disk, with a report.
        KeyboardInterrupt: stopped by Ctrl-C or SIGTERM, after everything was closed and the partial
            report written.
    """
    config = settled(config)
    progress = progress or ProgressSink()
    with RunSession(config, progress) as session:
        parts, position, writer = session.prepare(resume, allow)
        loop = PPOLoop(config, parts, progress, position)
        loop.run(writer)
        session.save(parts, loop.position)
        if config.report.compare_pairs and parts.plugin is not None:  # medusa
            session.compare(
                parts, lambda plain: compare(config, PPOLoop, parts, plain, progress, loop.position)
            )  # medusa
        return session.finish()
