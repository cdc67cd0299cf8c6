"""Options of `medusa-ppo predict`, read without torch and without numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from medusa_ppo.predict.gpus import CPU, GPUS

LENGTH_SPREAD = 0.6


@dataclass(frozen=True)
class PredictOptions:
    """Options of `medusa-ppo predict`. 0 means: take it from the run, or use the default."""

    model: Annotated[
        str,
        Option(help="Folder or hub name of the actor; only its configuration is read."),
    ] = ""
    gpu: Annotated[
        str,
        Option(metavar=f"{'|'.join([*GPUS, CPU])}", help="GPU of the engines; cpu: this machine."),
    ] = "h100"
    tp: Annotated[
        int, Option(min=0, help="GPUs per engine (tensor parallel); 0: as --config says, else 1.")
    ] = 0
    runner: Annotated[
        Literal["auto", "v1", "v2"],
        Option(
            help="vLLM's model runner. auto: as --config's engines choose, else v2 (v1 with --tp);"
            " engines that other loops or medusa-ppo serve start are on v1."
        ),
    ] = "auto"
    acceptance: Annotated[
        tuple[float, ...],
        Option(min=0, help="Acceptance at positions 1, 2, ..., e.g. 0.6,0.4,0.3,0.2."),
    ] = ()
    heads: Annotated[
        str,
        Option(
            help="Native heads directory, or hf://owner/name; with --data, acceptance is measured."
        ),
    ] = ""
    data: Annotated[str, Option(help="With --heads: prompts for the replay.")] = ""
    template: Annotated[
        str, Option(help="With --data: prompt template with the row's fields in braces.")
    ] = ""
    lengths: Annotated[
        Path | None, Option(help="File with one response length, in tokens, on each line.")
    ] = None
    length_mean: Annotated[
        float,
        Option(
            min=0, help="Mean response length in tokens; 0: half of --config's longest, else 1,024."
        ),
    ] = 0.0
    length_spread: Annotated[
        float, Option(min=0, help="Standard deviation of the lengths' logarithm.")
    ] = LENGTH_SPREAD
    longest: Annotated[
        int,
        Option(
            min=0, help="Longest response in tokens; 0: as --config says, else the model's room."
        ),
    ] = 0
    responses: Annotated[
        int, Option(min=0, help="Responses per engine in a rollout; 0: as --config says, else 256.")
    ] = 0
    sequences: Annotated[
        int, Option(min=0, help="Maximum sequences running at once; 0: as --config says, else 256.")
    ] = 0
    prompt: Annotated[
        int, Option(min=0, help="Prompt length in tokens; 0: --config's longest, else 512.")
    ] = 0
    drafts: Annotated[
        int, Option(min=-1, help="Drafts in every step; -1: the number that pays best.")
    ] = -1
    other_seconds: Annotated[
        float, Option(min=-1, help="Seconds of a step outside its rollouts; -1: estimate them.")
    ] = -1.0
    config: Annotated[
        Path | None,
        Option(help="YAML file of a run, or a preset: its model, heads, engines and lengths."),
    ] = None
    dtype: Annotated[
        Literal["bfloat16", "float32"], Option(help="With --gpu cpu: the engine's dtype.")
    ] = "bfloat16"
    threads: Annotated[int, Option(min=1, help="With --gpu cpu: the engine's threads.")] = 2
