"""What a tracker is, how a step's figures reach several of them, and why none of them can stop PPO."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from medusa_ppo import metrics

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place that shows figures while a run goes on."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of one step, flat (`flatten`)."""

    def close(self) -> None:
        """Send what is left; harmless when called again."""


class TrackerGroup:
    """All trackers of a run. One that fails is told in the log once and tried again at the next step; PPO goes on."""

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        """`trackers`: by the name that the configuration gives them."""
        self._trackers = dict(trackers or {})
        self._told: set[str] = set()

    def log(self, values: Mapping[str, Any]) -> None:
        """One step's figures, as they stand in metrics.jsonl."""
        if not self._trackers:
            return
        flat = flatten(values)
        for name, tracker in self._trackers.items():
            try:
                tracker.log(int(values[metrics.STEP]), flat)
            except Exception as error:  # Libraries and networks fail in any way they like; figures are in metrics.jsonl anyway.
                self._tell(name, error)

    def close(self) -> None:
        """Close all; harmless when called again."""
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            try:
                tracker.close()
            except Exception as error:  # As in `log`.
                self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning("Tracker %s failed, PPO goes on without it: %s: %s", name, type(error).__name__, error)


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only: a list becomes `name/1` to `name/K`; text, nothing, NaN and infinities are left out."""
    flat: dict[str, float] = {}
    for name, given in values.items():
        value = given.tolist() if hasattr(given, "tolist") else given  # Arrays and tensors, without importing their libraries.
        if isinstance(value, Sequence) and not isinstance(value, str):
            flat |= flatten({f"{name}/{index}": item for index, item in enumerate(value, 1)})
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            flat[name] = float(value)
    return flat
