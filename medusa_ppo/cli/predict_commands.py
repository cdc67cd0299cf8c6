"""`medusa-ppo predict`: what would drafting gain, on my GPUs, at my lengths?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heads.errors import UsageError
from medusa_ppo.cli.command_options import check_outputs, options_from
from medusa_ppo.cli.input_checks import check_data, check_heads
from medusa_ppo.predict.predict_options import PredictOptions
from medusa_ppo.runtime.console import command, offline_progress, say
from medusa_ppo.runtime.files import write_atomic

if TYPE_CHECKING:
    from heads.heads_config import HeadsConfig
    from medusa_ppo.config.run_config import RunConfig
    from medusa_ppo.predict.asking import Accepted
    from medusa_ppo.predict.prediction import Prediction, Question

REPLAY_PROMPTS = 128
"""Number of prompts for a replay that measures acceptance: a few minutes on two cores."""
CPU_ERROR = 0.10
"""Relative error that a prediction for a CPU should stay within; part of its interval."""


@command
@options_from(PredictOptions)
def predict(
    options: PredictOptions,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the answer and every assumption to this file."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Write an SVG: speed-up against running sequences, one line for each K."),
    ] = None,
) -> None:
    """Predict what drafting would gain: rollouts with and without it, the best number of drafts,
    the acceptance above which it pays, and commands to check it. Starts no engine.

    Example:  [bold]medusa-ppo predict --model models/actor --gpu h100
    --acceptance 0.6,0.4,0.25,0.15 --length-mean 2000 --longest 4096[/bold]
    """
    from medusa_ppo.config.run_config import load_config
    from medusa_ppo.ppo.role_memory import model_config
    from medusa_ppo.predict.answer_lines import answer_lines
    from medusa_ppo.predict.asking import question_of, unpredicted
    from medusa_ppo.predict.check_lines import check_lines
    from medusa_ppo.predict.gpus import CPU, find_gpu
    from medusa_ppo.predict.prediction import predict_on_gpu
    from medusa_ppo.reports.picture_files import draw_curves

    check_outputs(json=json_file, picture=picture)
    run = load_config(options.config) if options.config else None
    name = options.model or (run.model.path if run else "")
    if not name:
        raise UsageError(
            "No model was given.",
            given="neither --model nor --config",
            expected="a folder or a hub name",
            do="Add --model DIR.",
        )
    options = dataclasses.replace(options, model=name)
    gpu = None if options.gpu == CPU else find_gpu(options.gpu)
    raw = model_config(name)
    # The replay takes minutes, so an unknown GPU or model is refused before it, and so are engines
    # that can't be predicted, heads and data.
    if gpu and run and (setting := unpredicted(options, run, raw)):
        raise UsageError(
            "This is not predicted for vLLM's V2 runner: the costs are those of an engine that"
            " schedules steps ahead and replays its drafting as CUDA graphs.",
            given=setting,
            expected="a configuration without it",
            do="Measure it on your GPU (`medusa-ppo bench rollout`), or leave it out.",
        )
    if options.heads:
        check_heads(options.heads, raw, hub=True)
    if options.data and options.template:
        check_data(options.data)
    heads = _local_heads(options, run)
    accepted, trained = _accepted(options, run, heads)
    question = question_of(options, raw, accepted, run, trained)
    prediction = predict_on_gpu(question, gpu) if gpu else _on_this_cpu(question, options)
    for line in answer_lines(prediction):
        say(line)
    checks = check_lines(prediction, heads or "HEADS", gpu, options.dtype, options.threads)
    say("\nTo check this on such a machine:")
    for line in checks:
        say(f"  {line}")
    if json_file:
        answer = {**prediction.to_json(), "check": checks}
        write_atomic(json_file, json.dumps(answer, indent=1, default=str) + "\n")
    if picture:
        rows = prediction.rows
        curves = {
            f"K = {drafts}": [row.speedups[drafts - 1] for row in rows]
            for drafts in range(1, len(question.acceptance) + 1)
        }
        sizes = [row.sequences for row in rows]
        title = f"Tokens/s over vLLM's plain step: {name} on {prediction.machine}"
        write_atomic(picture, draw_curves(title, sizes, curves, "running sequences"))


def _local_heads(options: PredictOptions, run: RunConfig | None) -> str:
    """The folder of the heads, pulled from the hub if they are there: a replay and the commands to
    check only read folders. Empty if there are no heads.
    """
    name = options.heads or (run.heads.path if run else "") or ""
    if not name:
        return ""
    from medusa_ppo.offline.hub import local_heads

    return str(local_heads(name))


def _accepted(
    options: PredictOptions, run: RunConfig | None, folder: str
) -> tuple[Accepted, HeadsConfig | None]:
    """The acceptance, given or measured by replay, and the sizes of the heads if there are any. A
    replay samples and drafts as the run does.
    """
    from medusa_ppo.predict.asking import Accepted

    trained = None
    if folder:
        from medusa_ppo.predict.trained_heads import read_trained

        trained = read_trained(Path(folder))
    if options.acceptance:
        return Accepted(options.acceptance), trained
    if not (folder and options.data):
        raise UsageError(
            "The acceptance is unknown.",
            given="neither --acceptance nor --heads with --data",
            expected="shares like 0.6,0.4,0.25,0.15, or heads and prompts to measure them",
            do="Add --acceptance; `medusa-ppo eval` prints it for existing heads.",
        )
    from medusa_ppo.config.engine_section import EngineConfig
    from medusa_ppo.config.sampling_section import SamplingConfig
    from medusa_ppo.offline.evaluate import evaluate_heads
    from medusa_ppo.offline.options import EvalOptions, line_breaks

    engine = run.engine if run else EngineConfig()
    sampling = run.sampling if run else SamplingConfig()
    with offline_progress() as progress:
        found = evaluate_heads(
            EvalOptions(
                model=options.model,
                heads=folder,
                data=options.data,
                template=line_breaks(options.template),
                limit=REPLAY_PROMPTS,
                draft_vocab=-1 if engine.draft_vocab is None else engine.draft_vocab,
                draft_temperature=engine.draft_temperature,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or 0,
            ),
            progress,
        )
    low, high = found["confidence_interval"]
    said = f"by replay of {found['prompts']} prompts, {folder}"
    shares = tuple(found["acceptance_per_position"])
    return Accepted(shares, said, (high - low) / 2), trained


def _on_this_cpu(question: Question, options: PredictOptions) -> Prediction:
    """The prediction for this machine, after a few seconds of microbenchmarks."""
    import torch

    from medusa_ppo.predict.cpu_steps import CpuSteps
    from medusa_ppo.predict.prediction import predict_on
    from medusa_ppo.runtime.hardware import cpu_has_bfloat16, processor_name
    from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear

    torch.set_num_threads(options.threads)
    say("Timing matrix products, samplers and drafting on this CPU ...")
    try:
        steps = CpuSteps(
            question.model,
            question.heads,
            getattr(torch, options.dtype),
            onednn_product,
            packed_linear,
            question.sequences,
            question.prompt + question.lengths.mean / 2,
        )
    except RuntimeError as error:
        # oneDNN offers no bfloat16 matrix products on CPUs that can't even emulate them.
        if options.dtype != "bfloat16" or cpu_has_bfloat16():
            raise
        raise UsageError(
            "This CPU can't multiply in bfloat16.",
            given=f"--dtype bfloat16 (the default) on {processor_name()}",
            expected="a CPU with bfloat16 units, or another dtype",
            do="Add --dtype float32.",
        ) from error
    machine = f"this CPU ({processor_name()}, {options.dtype}, {options.threads} threads)"
    return predict_on(question, machine, steps, steps.measured, CPU_ERROR)
