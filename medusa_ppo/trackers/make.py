"""Which trackers a run has: checked before anything starts, started once Ray is up."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.errors import ConfigError
from medusa_ppo.config import RunConfig
from medusa_ppo.trackers.base import Tracker, TrackerGroup
from medusa_ppo.trackers.prometheus import RayTracker
from medusa_ppo.trackers.services import TensorBoardTracker, TrackioTracker, WandbTracker

logger = logging.getLogger(__name__)

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "ray": "ray"}
"""Name in the configuration -> the package that it needs."""


@dataclass(frozen=True)
class Setting:
    """What a tracker is told at its start.

    Attributes:
        project, name: under which it shows the run.
        folder: the run's folder.
        first_step: 0, or the step that a resumed run goes on with.
        config: the run's configuration as plain data.
    """

    project: str
    name: str
    folder: Path
    first_step: int = 0
    config: dict[str, Any] = field(default_factory=dict)


STARTS: dict[str, Callable[[Setting], Tracker]] = {
    "tensorboard": lambda s: TensorBoardTracker(s.folder / "tensorboard", s.first_step),
    "wandb": lambda s: WandbTracker(s.project, s.name, s.folder, s.config),
    "trackio": lambda s: TrackioTracker(s.project, s.name, s.config, resumed=s.first_step > 0),
    "ray": lambda s: RayTracker(s.name),
}


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse a tracker whose package is missing, before anything starts. ConfigError."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"The tracker {name} needs a package that is not installed.",
                given=f"report.trackers with {name}",
                expected=f"the package {PACKAGES[name]}",
                do=f"pip install {PACKAGES[name]} (or medusa-ppo[trackers]), or leave {name} out.",
            )


def start_trackers(config: RunConfig, first_step: int) -> TrackerGroup:
    """Start what `report.trackers` names; Ray must be up for `ray`. ConfigError when one does not start."""
    report = config.report
    setting = Setting(report.project, config.name, config.run_dir, first_step, config.model_dump(mode="json"))
    started: dict[str, Tracker] = {}
    for name in report.trackers:
        try:
            started[name] = STARTS[name](setting)
        except Exception as error:  # Each library has errors of its own: not logged in, no network, a folder that can't be written.
            TrackerGroup(started).close()
            raise ConfigError(
                f"The tracker {name} did not start.",
                given=f"{type(error).__name__}: {error}",
                expected="a tracker that takes figures",
                do=f"Mend the cause (is {name} set up on this machine?), or leave it out of report.trackers.",
            ) from error
    return TrackerGroup(started)
