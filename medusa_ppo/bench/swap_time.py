"""`medusa-ppo bench swap`: seconds until new heads draft in a running engine, and the proof that they do."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import load_heads, load_state, save_state
from medusa_ppo.config import EngineConfig
from medusa_ppo.console import OfflineProgress
from medusa_ppo.engines.ray_engine import RayEngine
from medusa_ppo.processes import local_ray

PROBE_SCALE = 0.5
TABLE = (
    ("parameters", "parameters", "{:,.0f}"),
    ("bytes", "bytes", "{:,.0f}"),
    ("first_s", "first swap, s", "{:.3f}"),
    ("median_s", "swap, s, median", "{:.3f}"),
    ("max_s", "swap, s, longest", "{:.3f}"),
    ("read_s", "reading the file, s", "{:.3f}"),
)


@dataclass(frozen=True)
class SwapBench:
    """What is swapped, and how often."""

    model: str
    heads: str
    repeats: int = 10
    seed: int = 0


def run_swap(bench: SwapBench, progress: OfflineProgress) -> dict[str, Any]:
    """Swap two states of the heads in turn; after each swap the engine drafts on fixed hidden states.

    Raises:
        ModelError, CheckpointError: unusable model or heads.
        SwapError: the engine did not take the heads.
    """
    heads, _ = load_heads(bench.heads)
    generator = torch.Generator().manual_seed(bench.seed)
    first = {name: tensor.float().contiguous() for name, tensor in heads.trainable_state().items()}
    other = {name: _disturbed(tensor, generator) for name, tensor in first.items()}
    hidden = torch.randn(64, heads.config.hidden_size, generator=generator)
    last_ids = torch.randint(heads.config.vocab_size, (64,), generator=generator).tolist()
    swaps, reads, drafts = [], [], []
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        files = [Path(folder) / name for name in ("a.safetensors", "b.safetensors")]
        for file, state in zip(files, (first, other), strict=True):
            save_state(file, state)
        config = EngineConfig(dtype="float32", max_num_seqs=8, max_model_len=64, threads=max(1, torch.get_num_threads()))
        progress.say("Starting the engine ...")
        with (
            local_ray(cpus=config.threads),
            RayEngine(bench.model, bench.heads, config, bench.seed) as engine,
            progress.phase("Swaps", bench.repeats) as advance,
        ):
            for version in range(1, bench.repeats + 1):
                file = files[version % 2]
                began = time.perf_counter()
                load_state(file)
                reads.append(time.perf_counter() - began)
                began = time.perf_counter()
                engine.swap_heads(file, version)
                swaps.append(time.perf_counter() - began)
                drafts.append(engine.probe(hidden.tolist(), last_ids))
                advance(1, f"{swaps[-1]:.3f} s")
    changed = sum(before != after for before, after in itertools.pairwise(drafts))
    return {
        "parameters": sum(tensor.numel() for tensor in first.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in first.values()),
        "first_s": swaps[0],
        "median_s": statistics.median(swaps),
        "max_s": max(swaps),
        "read_s": statistics.median(reads),
        "ratio_to_read": statistics.median(swap / read for swap, read in zip(swaps, reads, strict=True)),
        "swaps_that_changed_the_drafts": changed,
        "swaps_compared": max(0, bench.repeats - 1),
    }


def _disturbed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other heads of the same sizes."""
    return tensor + PROBE_SCALE * tensor.std().clamp_min(0.02) * torch.randn(tensor.shape, generator=generator)


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Header and one row."""
    return [[title for _, title, _ in TABLE], [form.format(result[key]) for key, _, form in TABLE]]


def verdict(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader wants first."""
    return [
        f"{result['parameters'] / 1e6:.1f}M parameters swap in {result['median_s']:.3f} s, x{result['ratio_to_read']:.1f} of reading and "
        f"checking their file; the drafts changed after {result['swaps_that_changed_the_drafts']} of {result['swaps_compared']} swaps."
    ]
