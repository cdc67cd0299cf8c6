"""The section `report`: what else is measured and shown."""

from __future__ import annotations

from pydantic import field_validator

from medusa_ppo.config.section import Count, Section, unknown

TRACKERS = ("tensorboard", "wandb", "trackio", "ray")


class ReportConfig(Section):
    """What else is measured and shown."""

    compare_pairs: Count | None = None
    """After the last step, take this many pairs: a whole PPO step with the plugin, and one without
    it (an engine at vLLM's defaults); null: no comparison. Set it to find out whether the plugin
    pays; it needs room for a second engine, and each pair takes as long as a few steps.
    """
    speed_every: Count | None = None
    """In every n-th step, generate the same prompts again without drafting on the same engine and
    time both; null: never. Set it on a long run to see whether drafting still pays; such a step
    generates twice.
    """
    trackers: tuple[str, ...] = ()
    """Where each step's metrics go besides metrics.jsonl: any of tensorboard, wandb, trackio, ray
    (Prometheus). Set it to the ones that you use.
    """
    project: str = "medusa-ppo"
    """Project under which wandb and trackio show the run. Set it when you sort your runs by
    project.
    """
    keep_rollouts: Count | None = None
    """Write the rollouts of the last n steps to RUN/rollouts, for `medusa-ppo train --data
    RUN/rollouts`; null: none. Set it to train heads offline, or to read what the actor wrote.
    """

    @field_validator("trackers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TRACKERS:
                raise unknown("Unknown tracker in report.trackers.", name, TRACKERS)
        return tuple(dict.fromkeys(names))
