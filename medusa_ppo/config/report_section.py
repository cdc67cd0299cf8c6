"""The section `report`: what is measured and shown besides."""

from __future__ import annotations

from pydantic import field_validator

from medusa_ppo.config.section import Count, Section, unknown

TRACKERS = ("tensorboard", "wandb", "trackio", "ray")


class ReportConfig(Section):
    """What is measured besides."""

    compare_pairs: Count | None = None
    """After the last step, so many pairs: rollouts and PPO steps with the plugin, and without it
    (an engine at vLLM's defaults).
    """
    speed_every: Count | None = None
    """Every n-th step the same prompts are also generated without drafting, in turn, by the same
    engine, and timed; null: never.
    """
    speed_prompts: Count | None = None
    """Prompts of such a pair; null: the step's own."""
    trackers: tuple[str, ...] = ()
    """Where each step's figures go beside metrics.jsonl: any of tensorboard, wandb, trackio, ray
    (Prometheus).
    """
    project: str = "medusa-ppo"
    """Project under which wandb and trackio show the run."""
    keep_rollouts: Count | None = None
    """Write the rollouts of the last n steps to RUN/rollouts, for `medusa-ppo train --data
    RUN/rollouts`; null: none.
    """

    @field_validator("trackers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TRACKERS:
                raise unknown("Unknown tracker in report.trackers.", name, TRACKERS)
        return tuple(dict.fromkeys(names))
