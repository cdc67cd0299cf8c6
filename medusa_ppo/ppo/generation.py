"""A step's rollouts, and on paired steps the same prompts without drafting, timed in turn on the same engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from medusa_ppo import metrics as names
from medusa_ppo.config import RunConfig
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.files import write_atomic
from medusa_ppo.reports.records import LOGPROBS, PROMPT_IDS, RESPONSE_IDS, ROLLOUTS_FOLDER
from medusa_ppo.types import Rollouts, Sampling


class RolloutFiles:
    """Keeps the rollouts of the last steps, a file each. A step that is done again after a restart replaces its file."""

    def __init__(self, run_dir: Path, steps: int | None) -> None:
        """
        Args:
            run_dir: folder of the run; the files go to its folder `rollouts`.
            steps: how many of the last steps to keep; None: nothing is written.
        """
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._steps = steps

    def write(self, step: int, rollouts: Rollouts) -> None:
        """Write one step's responses, and remove the file that is too old now."""
        if self._steps is None:
            return
        write_atomic(self._path(step), "".join(f"{line}\n" for line in _lines(step, rollouts)))
        self._path(step - self._steps).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.jsonl"


def _lines(step: int, rollouts: Rollouts) -> Iterator[str]:
    sampling = rollouts.sampling
    for response in rollouts.responses:
        yield json.dumps(
            {
                PROMPT_IDS: rollouts.prompts[response.prompt_index],
                RESPONSE_IDS: response.token_ids,
                LOGPROBS: response.logprobs,
                "step": step,
                "policy_version": rollouts.policy_version,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        )


Prompts = Sequence[Sequence[int]]


def sampling_of(config: RunConfig, step: int) -> Sampling:
    """How the responses of a step are sampled; the seed is a function of the run's seed and the step."""
    section = config.sampling
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k or 0,
        max_new_tokens=section.max_new_tokens,
        responses_per_prompt=section.responses_per_prompt,
        seed=(config.seed * 1_000_003 + step) % 2**31,
    )


def num_drafts(config: RunConfig) -> int:
    """Draft tokens per step that the configuration asks for."""
    return config.heads.num_heads if config.engine.num_drafts is None else config.engine.num_drafts


class SpeedPairs:
    """Every n-th step, generates the step's prompts twice: with drafting and without, the order changing from pair to pair.

    The rollouts that PPO trains on are always those with drafting; the others are timed and thrown away. The order alternates
    because the second of two generations finds a warmer machine (and prompts that the engine has seen).
    """

    def __init__(self, engine: RolloutEngine, config: RunConfig) -> None:
        self._engine = engine
        self._every = config.report.speed_every or 0
        self._prompts = config.report.speed_prompts
        self._drafts = num_drafts(config)

    def due(self, step: int) -> bool:
        """The last step of every n is paired, so that heads have had time to learn before the first pair."""
        return self._every > 0 and self._drafts > 0 and step % self._every == self._every - 1

    def generate(self, prompts: Prompts, sampling: Sampling, step: int) -> tuple[Rollouts, dict[str, float]]:
        """The step's rollouts, and the figures of the pair (empty on steps without one)."""
        if not self.due(step):
            return self._engine.generate(prompts, sampling), {}
        subset = prompts[: self._prompts]
        plain_first = (step // self._every) % 2 == 0
        plain = self._plain(subset, sampling) if plain_first else None
        rollouts = self._engine.generate(prompts, sampling)
        drafting = rollouts if len(subset) == len(prompts) else self._engine.generate(subset, sampling)
        if plain is None:
            plain = self._plain(subset, sampling)
        return rollouts, _figures(drafting, plain)

    def _plain(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        self._engine.configure(num_drafts=0)
        try:
            return self._engine.generate(prompts, sampling)
        finally:
            self._engine.configure(num_drafts=self._drafts)


def _figures(drafting: Rollouts, plain: Rollouts) -> dict[str, float]:
    return {
        names.PAIR_DRAFTING_TOKENS_PER_S: drafting.tokens_per_s,
        names.PAIR_PLAIN_TOKENS_PER_S: plain.tokens_per_s,
        names.PAIR_SPEEDUP: drafting.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else float("nan"),
    }
