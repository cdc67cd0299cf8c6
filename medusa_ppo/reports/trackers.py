"""Trackers show a run's figures live. They are checked before anything starts, and started once Ray
is up.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from heads.errors import ConfigError
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics
from medusa_ppo.reports.store import without_secrets

# Prometheus shows it after Ray's own prefix, `ray_`.
PREFIX = "medusa_ppo_"
TAGS = ("run", "position")
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "ray": "ray"}
"""Name in the configuration -> the package that it needs."""

MOST_WAITING, CLOSE_S = 256, 30.0
"""Maximum steps that wait for a tracker, and seconds for which a run's end waits for all trackers.
"""
Figures = tuple[int, dict[str, float]]

logger = logging.getLogger(__name__)


class RayTracker:
    """One gauge per name in medusa_ppo/contract/metrics.py that the run has figures for."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._notes = metrics.describe()
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            # A gauge has one name and tags; positions in a list become the tag.
            name, _, position = key.partition("/")
            if name in self._notes:
                self._gauge(name).set(value, tags={"run": self._run, "position": position})

    def close(self) -> None:
        """Ray keeps the last figures until its nodes stop."""
        self._gauges.clear()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[name] = Gauge(PREFIX + name, description=self._notes[name], tag_keys=TAGS)
        return self._gauges[name]


class TensorBoardTracker:
    """Event files in a folder of the run; view them with `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Hide the points from `first_step` on that an earlier, stopped run left."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # TensorBoard shows what is in the file; its own buffer would wait two minutes.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ServiceTracker:
    """A run in a library with Weights & Biases' interface."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(ServiceTracker):
    """A Weights & Biases run in a group named after ours; a resumed run starts a new one there."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, name=name, group=name, dir=str(folder), config=dict(config)
        )


class TrackioTracker(ServiceTracker):
    """A trackio run, kept on this machine unless trackio is configured otherwise."""

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], *, resumed: bool = False
    ) -> None:
        import trackio

        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(config),
            # A new run with an old name must not continue the old one's charts.
            resume="allow" if resumed else "never",
            embed=False,
        )


class Tracker(Protocol):
    """One place that shows figures during a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of one step, flat (`flatten`)."""

    def close(self) -> None:
        """Send what is left. Safe to call again."""


class TrackerGroup:
    """All trackers of a run, each in its own thread: if one fails or hangs, the log says so once,
    and PPO continues.
    """

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        """`trackers`: by their names in the configuration."""
        self._told: set[str] = set()
        self._lines: dict[str, queue.Queue[Figures | None]] = {}
        self._threads: dict[str, threading.Thread] = {}
        for name, tracker in (trackers or {}).items():
            # Bounded: a service that hangs must not fill the memory of a run that lasts days.
            line: queue.Queue[Figures | None] = queue.Queue(MOST_WAITING)
            self._lines[name] = line
            self._threads[name] = threading.Thread(
                # A daemon: a library that never returns must not keep the process from ending.
                target=self._serve,
                args=(name, tracker, line),
                name=f"tracker-{name}",
                daemon=True,
            )
            self._threads[name].start()

    def log(self, values: Mapping[str, Any]) -> None:
        """One step's figures, as in metrics.jsonl."""
        for name in self._lines:
            self._put(name, (int(values[metrics.STEP]), flatten(values)))

    def close(self) -> None:
        """Let all trackers send what is left, within CLOSE_S in total, and close them; harmless
        when called again.
        """
        lines = self._lines
        # From here on, late figures and a second call of `close` find no queues.
        self._lines = {}
        for name, line in lines.items():
            self._put(name, None, line)
        deadline = time.monotonic() + CLOSE_S
        for name, thread in self._threads.items():
            # One common deadline: three dead services must not take three times as long.
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._tell(
                    name,
                    f"it does not answer; {lines[name].qsize() if name in lines else 'some'} of "
                    "its steps were not sent",
                )

    def _put(
        self, name: str, figures: Figures | None, line: queue.Queue[Figures | None] | None = None
    ) -> None:
        try:
            # Never `put`: PPO must not wait for a tracker.
            (line or self._lines[name]).put_nowait(figures)
        except queue.Full:
            self._tell(
                name,
                f"it does not answer, {MOST_WAITING} steps wait for it, later ones are left out",
            )

    def _serve(self, name: str, tracker: Tracker, line: queue.Queue[Figures | None]) -> None:
        while (figures := line.get()) is not None:
            self._try(name, tracker.log, *figures)
        self._try(name, tracker.close)

    def _try(self, name: str, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            # Libraries and networks can fail in any way; the figures are in metrics.jsonl anyway.
            self._tell(name, f"{type(error).__name__}: {error}")

    def _tell(self, name: str, what: str) -> None:
        # Once: a tracker without network fails at every step.
        if name not in self._told:
            self._told.add(name)
            logger.warning("Tracker %s failed, PPO continues without it: %s", name, what)


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only: a list becomes `name/1` to `name/K`; text, nothing, NaN and infinities are left
    out.
    """
    flat: dict[str, float] = {}
    for name, given in values.items():
        # Arrays and tensors, without importing their libraries.
        value = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(value, Sequence) and not isinstance(value, str):
            flat |= flatten({f"{name}/{index}": item for index, item in enumerate(value, 1)})
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            flat[name] = float(value)
    return flat


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration without secrets: a tracker's service is somebody else's machine."""
    return dict(without_secrets(config.model_dump(mode="json")))


STARTS: dict[str, Callable[[RunConfig, int], Tracker]] = {
    "tensorboard": lambda config, first_step: TensorBoardTracker(
        config.run_dir / "tensorboard", first_step
    ),
    "wandb": lambda config, _: WandbTracker(
        config.report.project, config.name, config.run_dir, plain(config)
    ),
    "trackio": lambda config, first_step: TrackioTracker(
        config.report.project, config.name, plain(config), resumed=first_step > 0
    ),
    "ray": lambda config, _: RayTracker(config.name),
}
"""Name in the configuration -> how to start it; the step is 0, or the first step of a resumed run.
"""


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a tracker whose package is missing, before anything starts."""
    for name in names:
        # Looked up, not imported: wandb alone takes seconds.
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"The tracker {name} needs a package that is not installed.",
                given=f"report.trackers with {name}",
                expected=f"the package {PACKAGES[name]}",
                do=f"pip install {PACKAGES[name]} (or medusa-ppo[trackers]), or leave {name} out.",
            )


def start_trackers(config: RunConfig, first_step: int) -> TrackerGroup:
    """Start the trackers in `report.trackers`; `ray` needs Ray to be up. Raises ConfigError if one
    does not start.
    """
    started: dict[str, Tracker] = {}
    for name in config.report.trackers:
        try:
            started[name] = STARTS[name](config, first_step)
        except Exception as error:
            # Each library has its own errors: not logged in, no network, an unwritable folder.
            # Close the trackers that already started: their services would show a run that never
            # ended.
            TrackerGroup(started).close()
            raise ConfigError(
                f"The tracker {name} did not start.",
                given=f"{type(error).__name__}: {error}",
                expected="a tracker that accepts figures",
                do=(
                    f"Remove the cause (is {name} set up on this machine?), or leave it out of"
                    " report.trackers."
                ),
            ) from error
    return TrackerGroup(started)
