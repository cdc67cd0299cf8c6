"""What the model of `medusa-ppo predict` says of a run that is over: from its GPU, actor, responses
and the acceptance that it really had.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from heads.errors import MedusaError
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as m
from medusa_ppo.predict.asking import Accepted, question_of
from medusa_ppo.predict.gpus import GPUS, GpuFigures
from medusa_ppo.predict.predict_options import PredictOptions
from medusa_ppo.predict.prediction import Prediction, predict_on_gpu
from medusa_ppo.reports.run_files import Run

LEAST_SHARE = 1e-6


def expected_speed(run: Run, acceptance: list[float] | None) -> Prediction | None:
    """The prediction; None where the GPU, the actor or what was accepted is not known."""
    gpu = _gpu(run)
    config = _config(run)
    if gpu is None or config is None or not acceptance:
        return None
    raw = _model(config)
    lengths = [length for length in run.column(m.RESPONSE_LENGTH) if length]
    if raw is None or not lengths:
        return None
    # Measured shares wander by their noise, and may rise a little.
    falling = tuple(
        max(LEAST_SHARE, min(acceptance[: place + 1])) for place in range(len(acceptance))
    )
    options = PredictOptions(model=config.model.path, length_mean=max(1.0, fmean(lengths)))
    try:
        question = question_of(options, raw, Accepted(falling, "as the engine counted"), config)
        return predict_on_gpu(question, gpu)
    except MedusaError:
        # A mixture, or lengths that no model of these sizes could have had: nothing is said then.
        return None


def _gpu(run: Run) -> GpuFigures | None:
    names = run.section("hardware").get("gpus")
    said = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    return next((gpu for name, gpu in GPUS.items() if name in said), None)


def _config(run: Run) -> RunConfig | None:
    try:
        return RunConfig.model_validate(run.config)
    except (ValidationError, MedusaError):
        # A run of another loop, or of another release.
        return None


def _model(config: RunConfig) -> dict[str, Any] | None:
    try:
        text = (Path(config.model.path) / "config.json").read_text(encoding="utf-8")
        raw = json.loads(text)
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
