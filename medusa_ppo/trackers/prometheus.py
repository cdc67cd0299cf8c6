"""Ray gauges, which Ray's own agents offer to Prometheus: `ray_medusa_ppo_NAME`, shown by configs/grafana-dashboard.json.

A list is one gauge whose tag `position` counts from 1; a single number has the position "". The tag `run` is the run's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_ppo import metrics

PREFIX = "medusa_ppo_"
RAY_PREFIX = "ray_"  # Ray puts it before every name that it exports.
TAGS = ("run", "position")


class RayTracker:
    """One gauge for each name of medusa_ppo/metrics.py that the run has figures for."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._notes = metrics.describe()
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            name, _, position = key.partition("/")
            if name in self._notes:
                self._gauge(name).set(value, tags={"run": self._run, "position": position})

    def close(self) -> None:
        """Ray keeps the last figures until its nodes are stopped."""
        self._gauges.clear()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[name] = Gauge(PREFIX + name, description=self._notes[name], tag_keys=TAGS)
        return self._gauges[name]


def exported_names() -> set[str]:
    """Every name that Prometheus may see."""
    return {RAY_PREFIX + PREFIX + name for name in metrics.describe()}
