"""Compares a run with and without the plugin. After its last step, the run takes whole PPO steps on
the same prompts, in turn with the plugin and without it; the steps are timed, and so are the
rollouts in them. "Without" is what a user would have without us: the same loop without the plugin,
and a separate engine without speculation, compiled, otherwise at vLLM's defaults. That engine is
started for the comparison and closed afterwards.

During steps with the plugin the companion trains as in any other step, on the previous step's
batch. In between it waits, so that each of these steps finds it as the one before left it. (On a
node of its own it goes on training, and costs neither kind of step anything.) An untimed step comes
first, because the companion has run out of work since the run's last step. The steps are real, and
the policy keeps learning in all of them; what it learns is thrown away with the run's process.

The two steps of a pair draw their own responses, so one has more tokens than the other by chance.
Generation and training both take time in proportion to tokens, so the seconds of both are scaled to
the mean of their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.plugin import AnyPlugin
from medusa_ppo.ppo.generation import PromptStream, pair_figures, sampling_of
from medusa_ppo.ppo.learner import PPOLearner
from medusa_ppo.ppo.run_state import RunPosition
from medusa_ppo.ppo.session import Parts
from medusa_ppo.reports.summary import STEP_S

WARM_UP_PROMPTS = 4
"""Number of prompts that each engine answers before timing starts."""
TIMED = (names.GENERATE_S, names.SCORE_S, names.UPDATE_S, names.SYNC_S)


class TakenStep(NamedTuple):
    """Seconds of a step and of its phases, tokens/s of its generation, and how many tokens that
    was.
    """

    seconds: dict[str, float]
    tokens_per_s: float
    tokens: float

    def seconds_for(self, tokens: float) -> dict[str, float]:
        """The seconds scaled to this many tokens; under `tokens`, how many the step really had."""
        scaled = {name: value * tokens / self.tokens for name, value in self.seconds.items()}
        return scaled | {"tokens": self.tokens}


class ComparedLoop(Protocol):
    """The parts of a PPO loop that are compared; `PPOLoop` explains each."""

    config: RunConfig
    parts: Parts
    position: RunPosition
    prompts: PromptStream
    learner: PPOLearner
    engine: RolloutEngine
    sync: ActorSync
    plugin: AnyPlugin

    def step(self, step: int) -> dict[str, Any]: ...

    def alike(self, config: RunConfig, parts: Parts) -> Self: ...


def compare(
    loop: ComparedLoop, plain: Parts, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Compare a run's loop, at its end, with plain PPO over `config.report.compare_pairs` pairs.
    Returns the entries `rollouts` and `steps` of the summary.

    Args:
        plain: the run's parts without the plugin.
        say: receives a line for each pair.
    """
    config = loop.config
    pairs = config.report.compare_pairs or 0
    report = config.report.model_copy(
        update={"keep_rollouts": None, "speed_every": None}
    )  # These steps are not part of the run.
    quiet = config.model_copy(update={"report": report})
    with_plugin = loop.alike(quiet, replace(loop.parts, evaluation=None))
    without = loop.alike(quiet, replace(plain, evaluation=None))
    return Comparison(quiet, with_plugin, without, say).pairs(pairs)


class Comparison:
    """Alternates between a run's own loop and the same loop without the plugin. The run's files are
    already written.
    """

    def __init__(
        self,
        config: RunConfig,
        loop: ComparedLoop,
        plain: ComparedLoop,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            loop: the run's own, at its end.
            plain: the same learner, no plugin, an engine without speculation with any weights of
                the same actor.
            say: receives a line for each pair.
        """
        self._config = config
        self._with = loop
        self._without = plain
        self._first = loop.position.next_step
        self._version = loop.position.policy_version
        self._say = say

    def pairs(self, count: int) -> dict[str, list[Any]]:
        """Take this many pairs of steps, in the order with, without, without, with. Returns
        `steps`: seconds of whole steps and their phases, `with` and `without` the plugin, scaled to
        the mean of their tokens; and `rollouts`: tokens/s of the generation in these steps.
        """
        self._warm_up()
        rollouts: list[dict[str, float]] = []
        steps: list[dict[str, dict[str, float]]] = []
        for pair in range(count):
            order = [self._without, self._with] if pair % 2 else [self._with, self._without]
            taken = {loop is self._with: self._step(loop, self._first + pair) for loop in order}
            rates = {ours: seen.tokens_per_s for ours, seen in taken.items()}
            rollouts.append(pair_figures(rates[True], rates[False]))
            tokens = (taken[True].tokens + taken[False].tokens) / 2
            with_s = taken[True].seconds_for(tokens)
            without_s = taken[False].seconds_for(tokens)
            steps.append({"with": with_s, "without": without_s})
            ratio = with_s[STEP_S] / without_s[STEP_S]
            self._say(
                f"  pair {pair + 1} of {count}: rollouts {rates[True]:.0f} tokens/s,"
                f" {rates[False]:.0f} without the plugin; a step takes {ratio:.2f} of the time"
            )
        return {"rollouts": rollouts, "steps": steps}

    def _warm_up(self) -> None:
        """Both engines answer some prompts, so that neither is timed on its first ones, and the
        companion gets a batch to train on.
        """
        self._without.sync(self._without.learner.actor, self._version)
        for loop in (self._with, self._without):
            prompts = loop.prompts.batch(self._first, self._config.ppo.prompts_per_step)
            ids = [prompt.token_ids for prompt in prompts[:WARM_UP_PROMPTS]]
            loop.engine.generate(ids, sampling_of(self._config, self._first))
        self._take(self._with, self._first)

    def _step(self, loop: ComparedLoop, step: int) -> TakenStep:
        """Time a step, from the state in which it would begin if all steps were of its kind."""
        with self._with.plugin.paused():
            if loop.engine.policy_version != self._version:
                loop.sync(loop.learner.actor, self._version)
            if loop is self._without:
                return self._timed(loop, step)
        return self._timed(loop, step)

    def _timed(self, loop: ComparedLoop, step: int) -> TakenStep:
        began = time.perf_counter()
        values = self._take(loop, step)
        seconds = time.perf_counter() - began
        phases = {name: float(values[name]) for name in TIMED}
        rate = float(values[names.TOKENS_PER_S])
        tokens = max(1.0, rate * phases[names.GENERATE_S])
        return TakenStep({STEP_S: seconds, **phases}, rate, tokens)

    def _take(self, loop: ComparedLoop, step: int) -> dict[str, Any]:
        loop.position = RunPosition(step, self._version)
        values = loop.step(step)
        self._version += 1
        return values
