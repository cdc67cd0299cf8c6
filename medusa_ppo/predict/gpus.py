"""Known GPUs: their vendors' figures, and where their measured tables are."""

from __future__ import annotations

from dataclasses import dataclass

from heads.errors import UsageError


@dataclass(frozen=True)
class GpuFigures:
    """The vendor's figures for one GPU.

    Attributes:
        name: what `--gpu` calls it.
        flops: dense bf16 FLOP/s.
        memory_bytes_per_s: speed of its own memory.
        memory_bytes: size of its own memory.
        link_bytes_per_s: speed to the other GPUs of its node, one direction.
        host_bytes_per_s: speed to its host.
        tables: its name in aiconfigurator's data.
    """

    name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    tables: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuFigures("h100", 989e12, 3.35e12, 80 * 2**30, 450e9, 64e9, "h100_sxm"),
        GpuFigures("h200", 989e12, 4.8e12, 141 * 2**30, 450e9, 64e9, "h200_sxm"),
        GpuFigures("a100", 312e12, 2.039e12, 80 * 2**30, 300e9, 32e9, "a100_sxm"),
    )
}
"""SXM variants, as in training nodes."""
CPU = "cpu"
"""This machine's CPU, which is measured rather than looked up."""


def find_gpu(name: str) -> GpuFigures:
    """The GPU of this name.

    Raises:
        UsageError: the GPU is unknown.
    """
    if name not in GPUS:
        raise UsageError(
            "This GPU is unknown.",
            given=f"--gpu {name}",
            expected=" | ".join([*GPUS, CPU]),
            do=(
                "Choose the most similar one and treat the result as a guess, or measure yours:"
                " `medusa-ppo bench rollout`."
            ),
        )
    return GPUS[name]
