"""What `medusa-ppo predict` would say about a finished run, from its GPU, actor, responses and
measured acceptance.
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
from medusa_ppo.predict.asking import Accepted, question_of, unpredicted
from medusa_ppo.predict.gpus import GPUS, GpuFigures
from medusa_ppo.predict.predict_options import PredictOptions
from medusa_ppo.predict.prediction import Prediction, Question, predict_on_gpu
from medusa_ppo.reports.run_files import Run
from medusa_ppo.vllm_plugin.vllm_versions import schedules_ahead

LEAST_SHARE = 1e-6


def expected_speed(run: Run, acceptance: list[float] | None) -> Prediction | None:
    """The prediction; None if the GPU, the actor or the acceptance is unknown, or for engines on
    V2 that worked in a way that no prediction covers.
    """
    gpu = _gpu(run)
    config = _config(run)
    if gpu is None or config is None or not acceptance:
        return None
    raw = _model(config)
    lengths = [length for length in run.column(m.RESPONSE_LENGTH) if length]
    if raw is None or not lengths:
        return None
    # A prediction requires falling shares; measured ones are noisy and may rise slightly.
    falling = tuple(
        max(LEAST_SHARE, min(acceptance[: place + 1])) for place in range(len(acceptance))
    )
    options = PredictOptions(model=config.model.path, length_mean=max(1.0, fmean(lengths)))
    try:
        question = question_of(options, raw, Accepted(falling, "as the engine counted"), config)
        if unpredicted(options, config, raw) or not _scheduled_ahead(run, question):
            return None
        return predict_on_gpu(question, gpu)
    except MedusaError:
        # A mixture of experts, or impossible lengths for a model of this size: no prediction.
        return None


def _scheduled_ahead(run: Run, question: Question) -> bool:
    """Whether the run's vLLM scheduled steps ahead, as the prediction assumes of V2."""
    version = run.section("versions").get("vllm")
    return question.runs_on == "v1" or version is None or schedules_ahead(str(version))


def _gpu(run: Run) -> GpuFigures | None:
    names = run.section("hardware").get("gpus")
    said = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    return next((gpu for name, gpu in GPUS.items() if name in said), None)


def _config(run: Run) -> RunConfig | None:
    try:
        return RunConfig.model_validate(run.config)
    except (ValidationError, MedusaError):
        # A run of a different loop or release.
        return None


def _model(config: RunConfig) -> dict[str, Any] | None:
    try:
        text = (Path(config.model.path) / "config.json").read_text(encoding="utf-8")
        raw = json.loads(text)
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
