"""A run's warm-up of the heads: before step 0, with its own prompts, sampling and actor.

It does not affect what the policy learns: a step's prompts and seeds are functions of its number,
and the actor is only read.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.plugin.no_plugin import NoPlugin
from medusa_ppo.plugin.warm_up import FOLDER, LEAST_PROMPTS
from medusa_ppo.ppo import run_progress as phases
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.generation import Prompt, PromptStream, sampling_of
from medusa_ppo.ppo.placement import ACTOR
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.run_state import RunPosition
from medusa_ppo.ppo.session import Parts

logger = logging.getLogger(__name__)

TOKENS_PER_PROMPT = 16
"""Request one prompt per this many tokens: short responses need many prompts."""


def wanted(config: RunConfig, position: RunPosition) -> bool:
    """Whether the run has a warm-up, and has not begun."""
    return bool(config.warm_up_tokens) and not position.next_step


def prompts_of(config: RunConfig, stream: PromptStream) -> list[Prompt]:
    """The prompts that a run's warm-up is about: those of its first steps."""
    most = max(LEAST_PROMPTS, config.heads.warm_up_tokens // TOKENS_PER_PROMPT)
    return stream.batch(0, min(most, len(stream.prompts)))


def warm_up(config: RunConfig, parts: Parts, progress: ProgressSink, position: RunPosition) -> None:
    """Train the heads before step 0, if `wanted`, and report cost and gain.

    The engine is awake before and after, with the current actor.
    """
    if isinstance(parts.plugin, NoPlugin) or not wanted(config, position):
        return
    section = config.heads
    level = config.engine.sleep_level
    turns = parts.learner.turns
    pad_id = getattr(parts.tokenizer, "pad_token_id", None) or 0
    prompts = prompts_of(config, parts.prompts)

    def score(rollouts: Rollouts) -> None:
        turns.sleep(parts.engine, level)
        batch = PPOBatch(rollouts, parts.learner.device, pad_id)
        tap: Any = parts.plugin.tap
        parts.learner.read(batch, rollouts.sampling, tap)
        if level:
            wake = functools.partial(turns.wake, parts.engine, level)
            with turns.aside(ACTOR):
                parts.sync(parts.learner.actor, position.policy_version, wake)

    with progress.phase(phases.WARM_UP):
        turns.clear()
        report = parts.plugin.warm_up(
            [prompt.token_ids for prompt in prompts],
            sampling_of(config, 0),
            score,
            tokens=section.warm_up_tokens,
            seconds=section.warm_up_s,
            folder=config.run_dir / FOLDER,
            advance=progress.phase_advanced,
        )
    # The report of the run has warnings; a terminal shows both.
    if report.problem:
        logger.warning("%s", report)
    else:
        progress.note(str(report))
