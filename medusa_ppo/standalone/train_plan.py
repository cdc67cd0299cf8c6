"""`medusa-ppo train --dry-run`: sizes, memory and time, before anything is started or written."""

from __future__ import annotations

import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import DTYPES
from medusa_ppo.reports.wording import seconds
from medusa_ppo.standalone.samples import train_setting
from medusa_ppo.standalone.scene import compute_dtype, training_device
from medusa_ppo.standalone.train_options import TrainOptions

FLOAT_BYTES = 4
ADAM_STATES = 2
PROBE_SIZE, PROBE_S = 1024, 0.3
BACKWARD = 2
"""A backward pass through a trained matrix is two products, through a frozen one (lm_head) one."""


def plan_training(options: TrainOptions) -> list[tuple[str, str]]:
    """What `--dry-run` prints, from the configuration files and a moment of matrix products."""
    setting = train_setting(options)
    model = AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        actor = sum(p.numel() for p in AutoModelForCausalLM.from_config(model).parameters())
    config = HeadsConfig(model.hidden_size, model.vocab_size, options.num_heads, options.kind)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in MedusaHeads(config).parameters())
    width, compute = DTYPES[options.dtype].itemsize, compute_dtype(options.dtype)
    hidden_bytes = options.max_train_tokens * model.hidden_size * width
    kept = min(hidden_bytes, options.cache_bytes)
    share = 1.0 if hidden_bytes <= options.cache_bytes else options.cache_bytes / hidden_bytes
    steps = options.epochs * -(-options.max_train_tokens // options.step_positions)
    rate = _measured_rate(compute)
    collect_s, train_s = _estimate(options, model, actor, parameters, share, rate)
    source = f"{len(setting.prompts)} prompts, responses by the model" if setting.prompts else f"column {setting.source.column!r}"
    return [
        ("model", f"{options.model} (hidden {model.hidden_size}, vocabulary {model.vocab_size}, {actor / 1e6:.1f} M parameters)"),
        ("heads", f"{options.num_heads} x {options.kind}, {parameters / 1e6:.2f} M parameters"),
        ("model in memory", f"{_mib(actor * compute.itemsize)}"),
        ("heads, optimizer, gradients", f"{_mib(parameters * FLOAT_BYTES * (2 + ADAM_STATES))}"),
        ("hidden states", f"{_mib(hidden_bytes)} for {options.max_train_tokens} tokens, {_mib(kept)} of them kept between epochs"),
        ("source", f"{source} ({setting.source.kind})"),
        ("optimizer steps", f"{steps} of {options.step_positions} positions"),
        ("matrix rate here", f"{rate / 1e9:.0f} GFLOP/s in {compute} on {training_device()}, measured now"),
        ("hidden states take", f"at least {seconds(collect_s)}" + (", after the writing of the responses" if setting.prompts else "")),
        ("training takes", f"at least {seconds(train_s)} (the matrix products alone)"),
        ("output", str(options.out)),
    ]


def _estimate(options: TrainOptions, model: PretrainedConfig, actor: int, parameters: int, kept: float, rate: float) -> tuple[float, float]:
    """Seconds of the first forward pass and of the training: the products that can't be left out, at the measured rate."""
    tokens = options.max_train_tokens
    forward = 2.0 * actor
    logits = 2.0 * options.num_heads * model.vocab_size * model.hidden_size
    step = 2.0 * parameters * (1 + BACKWARD) + logits * 2
    again = (1 - kept) * forward * (options.epochs - 1)
    return tokens * forward / rate, tokens * (options.epochs * step + again) / rate


def _measured_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of square matrix products in the dtype of the training."""
    device = training_device()
    matrix = torch.randn(PROBE_SIZE, PROBE_SIZE, device=device).to(dtype)
    float((matrix @ matrix).float().sum())  # The first product also loads what later ones need.
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < PROBE_S:
        float((matrix @ matrix)[0, 0])
        count += 1
    return count * 2.0 * PROBE_SIZE**3 / spent


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
