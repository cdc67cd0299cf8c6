"""Seconds until new heads are in all engines of a pool, for pools of several sizes, on this machine.

    python benchmarks/pool_swap.py --model DIR [--engines 1 2 4] [--rounds 15] [--kind hydra]

Real engines in Ray actors. Each pool swaps the same files in the same order; the first two swaps of a pool are thrown away. Machines with
fewer cores than engines can't copy in all of them at once, so the ratio holds for this machine only.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from heads.checkpoint import save_heads, save_state
from heads.config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config import EngineConfig
from medusa_ppo.runtime import local_ray
from medusa_ppo.serving.launch import read_model_config
from medusa_ppo.serving.make import make_engine
from medusa_ppo.serving.pool import EnginePool

WARM_UP = 2


def write_versions(folder: Path, config: HeadsConfig) -> list[Path]:
    """A native directory for the engines to start with, and two states to swap between."""
    torch.manual_seed(0)
    heads = MedusaHeads(config).requires_grad_(False)
    save_heads(folder / "heads", heads)
    files = []
    for version in (1, 2):
        for parameter in heads.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        files.append(folder / f"{version}.safetensors")
        save_state(files[-1], heads.trainable_state())
    return files


def swap_times(model: Path, folder: Path, files: list[Path], engines: int, rounds: int) -> list[float]:
    config = EngineConfig(replicas=engines, max_num_seqs=8, threads=1)
    with make_engine(model, folder / "heads", config) as engine:
        seconds = []
        for index in range(rounds + WARM_UP):
            began = time.perf_counter()  # Not the receipt's: an engine counts what it does itself, a pool what its caller waits for.
            engine.swap_heads(files[index % 2], index + 1)
            seconds.append(time.perf_counter() - began)
        assert not isinstance(engine, EnginePool) or len({report["pid"] for report in engine.plugin_report()["engines"]}) == engines
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a swap, by engines of the pool.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the actor")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kind", default="hydra", choices=("medusa", "markov", "hydra"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    sizes = read_model_config(options.model)
    found: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name, local_ray(cpus=2):
        folder = Path(name)
        files = write_versions(folder, HeadsConfig(sizes["hidden_size"], sizes["vocab_size"], 4, options.kind))
        for engines in options.engines:
            found[engines] = swap_times(options.model, folder, files, engines, options.rounds)
            times = sorted(found[engines])
            middle, one = statistics.median(times), statistics.median(found[options.engines[0]])
            spread = f"{1e3 * times[0]:.1f} to {1e3 * times[-1]:.1f}"
            sys.stdout.write(f"{engines} engines: {1e3 * middle:.1f} ms ({spread}), {middle / one:.2f} x the first\n")
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({str(n): times for n, times in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
