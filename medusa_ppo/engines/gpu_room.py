"""Whether an engine has room on its GPUs, looked at before vLLM loads the model: vLLM says it
later, without the bytes of each part (no torch).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from heads.errors import EngineError, ModelError
from heads.heads_config import COPY_WINDOW, HeadsConfig
from medusa_ppo.config.engine_section import RANK_KINDS
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.runtime.hardware import (
    BFLOAT16,
    FLOAT32,
    GpuMemory,
    ModelSizes,
    memory_of_first,
)
from medusa_ppo.runtime.wording import size_text
from medusa_ppo.vllm_plugin.vllm_versions import is_cpu_build

ROOM_WITHIN_S = 20.0
"""A process that was just ended still holds its memory; vLLM itself would look about as late."""
LOOK_EVERY_S = 1.0
KNOWN = ("llama", "mistral", "qwen2", "qwen3", *VISION_FAMILIES)
"""Families (`model_type`) whose weights, keys and values take at least what is counted here; others
may share layers, or keep less of a token.
"""
CUT = ("tensor", "pipeline")
"""Of the ways in which vLLM splits an engine, those that cut its weights."""
OTHER_SIZES = ("quantization", "kv_cache_dtype", "cpu_offload_gb", "hf_overrides")
"""Arguments of vLLM that change what a model takes."""
OTHER_MEMORY = ("load_format", "nnodes")
"""Arguments of vLLM with which weights may be held by another process, or ranks run elsewhere."""


def heads_parameters(config: HeadsConfig) -> int:
    """Number of trainable parameters in a set of heads."""
    return sum(math.prod(shape) for shape in config.tensor_shapes().values())


def least_parts(
    model: Mapping[str, Any],
    engine_args: Mapping[str, Any],
    extra: Mapping[str, Any],
    heads: HeadsConfig | None,
    draft_vocab: int,
    *,
    sampled: bool,
) -> dict[str, int]:
    """The bytes that each rank of an engine has on its GPU at least, by part. What can't be known
    is left out, as are activations, CUDA graphs and vLLM itself.

    Args:
        model: the model's config.json.
        engine_args: vLLM's arguments, those of `extra` included.
        extra: the user's arguments.
        heads: sizes of the draft heads; None: there are none.
        draft_vocab: tokens that drafts come from; 0: all.
        sampled: drafts are sampled, so what they were drawn with is kept.
    """
    element = FLOAT32 if engine_args["dtype"] in ("float32", "float") else BFLOAT16
    cut = math.prod(int(extra.get(f"{kind}_parallel_size", 1)) for kind in CUT)
    parts = _model_parts(model, engine_args, extra, element, cut)
    # All keys and values, if their size is set.
    if extra.get("kv_cache_memory_bytes"):
        parts["keys and values (kv_cache_memory_bytes)"] = int(extra["kv_cache_memory_bytes"])
    if heads is not None:
        slots = int(engine_args["max_num_seqs"]) + 1
        draft_vocab = draft_vocab if draft_vocab < heads.vocab_size else 0
        width = draft_vocab or heads.vocab_size
        parts["heads"] = element * heads_parameters(heads)
        kept = element * slots * heads.context * 2 * heads.hidden_size * heads.context_layers
        if heads.copies:
            window = min(COPY_WINDOW, _longest(engine_args))
            kept += element * slots * window * heads.copy_width
        if sampled:
            kept += FLOAT32 * slots * width * (heads.num_heads + 2)
        if draft_vocab:
            kept += element * draft_vocab * heads.hidden_size
        parts["drafting buffers"] = kept
    return parts


def _model_parts(
    model: Mapping[str, Any],
    engine_args: Mapping[str, Any],
    extra: Mapping[str, Any],
    element: int,
    cut: int,
) -> dict[str, int]:
    """Weights, and the keys and values of one sequence; empty if the model's may be smaller."""
    text = {**model, **(model.get("text_config") or {})}
    quantised = text.get("quantization_config") or text.get("compression_config")
    if (
        model.get("model_type") not in KNOWN
        or quantised
        or any(extra.get(name) for name in OTHER_SIZES)
    ):
        return {}
    try:
        sizes = ModelSizes.from_config(model)
    except ModelError:
        return {}
    parts = {"weights": element * sizes.parameters // cut}
    longest = _longest(engine_args)
    if not extra.get("kv_cache_memory_bytes"):
        window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
        tokens = min(longest, int(window or longest))
        # vLLM starts only if the longest sequence fits.
        what = f"keys and values of one sequence of {longest:,} tokens"
        parts[what] = element * sizes.cache_elements * tokens // cut
    return parts


def _longest(engine_args: Mapping[str, Any]) -> int:
    """Longest sequence, in tokens; 0 if vLLM is to find out, which takes what fits."""
    given = engine_args["max_model_len"]
    return max(0, given) if isinstance(given, int) else 0


def require_room(
    engine_args: Mapping[str, Any], parts: Mapping[str, int], environment: Mapping[str, str]
) -> None:
    """Look at the GPUs that an engine is about to use, and wait a little for memory that is being
    freed. Where their memory is not known, or the engine is for CPUs, nothing is asked.

    What vLLM accepts is never refused: it reserves `gpu_memory_utilization` of the GPU, and does
    not start if less is free, whoever holds the rest (other programs, or roles of the same run that
    are awake).

    Args:
        engine_args: vLLM's arguments.
        parts: as `least_parts` says.
        environment: the variables of the engine's process.

    Raises:
        EngineError: too little is free, or what vLLM reserves is too little for the parts.
    """
    if is_cpu_build() or any(engine_args.get(name) for name in OTHER_MEMORY):
        return
    # Ray would put the ranks where it finds GPUs.
    if engine_args.get("distributed_executor_backend") not in (None, "mp", "uni"):
        return
    ranks = math.prod(int(engine_args.get(f"{kind}_parallel_size", 1)) for kind in RANK_KINDS)
    fraction = float(engine_args["gpu_memory_utilization"])
    until = time.monotonic() + ROOM_WITHIN_S
    while True:
        gpus = memory_of_first(ranks, environment)
        full = next((gpu for gpu in gpus if gpu.free < fraction * gpu.total), None)
        if full is None:
            break
        if time.monotonic() >= until:
            raise _too_little_free(full, fraction, parts)
        time.sleep(LOOK_EVERY_S)
    need = sum(parts.values())
    for gpu in gpus:
        # A cache of a set size is not taken from what is reserved.
        sets_cache = engine_args.get("kv_cache_memory_bytes")
        most = gpu.free if sets_cache else math.ceil(fraction * gpu.total)
        if need > most:
            raise _too_small(gpu, fraction, most, parts)


def _too_little_free(gpu: GpuMemory, fraction: float, parts: Mapping[str, int]) -> EngineError:
    do = "End what else runs on it (`nvidia-smi` lists the processes), or let CUDA_VISIBLE_DEVICES"
    do += " name another GPU"
    need = sum(parts.values())
    # Nothing is certain to fit: activations, graphs and vLLM's own come on top.
    if need < gpu.free:
        lower = math.floor(100 * gpu.free / gpu.total) / 100
        do += f", or set engine.memory_fraction to {lower:.2f} or less"
    return EngineError(
        "The engine's GPU has too little free memory.",
        given=(
            f"GPU {gpu.index} ({gpu.model}): {size_text(gpu.free)} free of {size_text(gpu.total)};"
            f" other processes have {size_text(gpu.total - gpu.free)}"
        ),
        expected=(
            f"{size_text(fraction * gpu.total)} free, engine.memory_fraction={fraction:g} of it,"
            f" for {_listed(parts)}"
        ),
        do=f"{do}.",
    )


def _too_small(gpu: GpuMemory, fraction: float, most: int, parts: Mapping[str, int]) -> EngineError:
    return EngineError(
        "The engine's share of the GPU's memory is too small for it.",
        given=(
            f"{size_text(most)} of GPU {gpu.index} ({gpu.model}, {size_text(gpu.total)}),"
            f" engine.memory_fraction={fraction:g}"
        ),
        expected=f"{size_text(sum(parts.values()))} at least, for {_listed(parts)}",
        do=(
            "Raise engine.memory_fraction, lower engine.max_model_len, use a smaller model, or give"
            " each engine more GPUs (engine.extra.tensor_parallel_size)."
        ),
    )


def _listed(parts: Mapping[str, int]) -> str:
    named = [f"{what} {size_text(size)}" for what, size in parts.items()]
    more = "activations and more keys and values" if parts else "the model"
    return ", ".join([*named, more])
