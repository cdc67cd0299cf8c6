"""TensorBoard, Weights & Biases and trackio behind the one interface; each library is imported when its tracker starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """Event files in a folder of the run; look with `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Points of `first_step` and later, left by a run that was stopped, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. A resumed run is a new one in the same group: its name."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=project, name=name, group=name, dir=str(folder), config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A trackio run, kept on this machine unless trackio is set up otherwise."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], *, resumed: bool = False) -> None:
        import trackio

        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow" if resumed else "never", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
