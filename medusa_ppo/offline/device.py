"""Where heads are trained and judged, and what products are computed in there."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from medusa_ppo.actors.hf import DTYPES

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of CPUs (x86, Arm) that multiply bfloat16 themselves. Without one, torch's products take many times as long as float32 ones."""


def training_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, moved to where heads are trained."""
    torch.nn.Module.to(model, training_device())
    return model


def compute_dtype(dtype: str) -> torch.dtype:
    """The dtype that was asked for, or float32 where the machine can't multiply it. The same on every call, so runs repeat."""
    wanted = DTYPES[dtype]
    if wanted == torch.float32 or torch.cuda.is_available() or BFLOAT16_FLAGS & _cpu_flags():
        return wanted
    return torch.float32


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.partition(":")[2].split()}
