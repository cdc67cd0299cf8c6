"""The rollouts of a run's last steps as files, for `medusa-ppo train --data RUN/rollouts`: one JSON line per response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from medusa_ppo.reports.files import write_atomic
from medusa_ppo.reports.records import LOGPROBS, PROMPT_IDS, RESPONSE_IDS, ROLLOUTS_FOLDER
from medusa_ppo.types import Rollouts


class RolloutFiles:
    """Keeps the rollouts of the last steps, a file each. A step that is done again after a restart replaces its file."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        """
        Args:
            run_dir: folder of the run; the files go to its folder `rollouts`.
            steps: how many of the last steps to keep; 0: nothing is written.
        """
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._steps = steps

    def write(self, step: int, rollouts: Rollouts) -> None:
        """Write one step's responses, and remove the file that is too old now."""
        if self._steps == 0:
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
