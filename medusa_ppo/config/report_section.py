"""The section `report`: what is measured and shown besides."""

from __future__ import annotations

from pydantic import field_validator

from medusa_ppo.config.section import Count, Section, unknown

TRACKERS = ("tensorboard", "wandb", "trackio", "ray")


class ReportConfig(Section):
    """What is measured besides."""

    compare_pairs: Count | None = None
    """After the last step, this many times: the rollouts and a whole PPO step with the plugin, and
    both without it (an engine at vLLM's defaults); null: no comparison. Set it when you want to
    know whether the plugin pays; a second engine needs room then, and each pair takes the time of
    a few steps.
    """
    speed_every: Count | None = None
    """Every n-th step the same engine generates the same prompts once more without drafting, and
    both are timed; null: never. Set it on a long run to see whether drafting still pays; such a
    step has two generations.
    """
    trackers: tuple[str, ...] = ()
    """Where each step's figures go beside metrics.jsonl: any of tensorboard, wandb, trackio, ray
    (Prometheus). Set it to the ones that you look at.
    """
    project: str = "medusa-ppo"
    """Project under which wandb and trackio show the run. Set it when your runs there are sorted by
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
