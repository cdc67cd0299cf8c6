"""Seconds, and CPU seconds, until new heads are in all engines of a pool, for pools of several
sizes, on this machine.

    python benchmarks/pool_swap.py --model DIR [--engines 1 2 4] [--rounds 15] [--kind hydra]

Real engines in Ray actors, started once: pools of every size share them. The same files go into
each pool in turn, once as pools do it (the file is checked once, engines confirm its bytes) and
once with every engine checking all of it by itself; the first two rounds are thrown away. Wall time
holds for this machine, and for what else runs on it; CPU time says what a swap costs wherever it
runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from heads.checkpoint import save_heads, save_state
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.run_config import EngineConfig
from medusa_ppo.engines.launch import read_model_config
from medusa_ppo.engines.pool import EnginePool
from medusa_ppo.engines.ray_engine import RayEngine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.runtime.processes import local_ray

WARM_UP = 2
ARMS = ("checked once", "checked by each")


class Shared:
    """An engine that several pools have: they don't close it."""

    def __init__(self, engine: RolloutEngine, arm: str) -> None:
        self._engine = engine
        self._arm = arm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def swap_heads(self, path: Path, version: int, checked: Any = None) -> Any:
        return self._engine.swap_heads(path, version, checked if self._arm == ARMS[0] else None)

    def close(self) -> None:
        pass


class UncheckedPool(EnginePool):
    """Delivers without looking at the file first, as its engines look for themselves."""

    def _deliver(self, what: str, path: Any, version: int, checked: Any) -> Any:
        from medusa_ppo.contract.status import Checked

        return super()._deliver(what, path, version, Checked("", 0))


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


@contextmanager
def pools_of(
    engines: list[RolloutEngine], sizes: list[int]
) -> Iterator[dict[tuple[str, int], EnginePool]]:
    """A pool of each size and kind over the first of the engines."""
    with ExitStack() as stack:
        yield {
            (arm, size): stack.enter_context(
                kind(lambda index, arm=arm: Shared(engines[index], arm), size)
            )
            for arm, kind in zip(ARMS, (EnginePool, UncheckedPool), strict=True)
            for size in sizes
        }


def measure(
    pools: dict[tuple[str, int], EnginePool], pids: list[int], files: list[Path], rounds: int
) -> dict[tuple[str, int], dict[str, Any]]:
    """Seconds of each swap; CPU seconds of all swaps in this process, and in the engines that took
    part.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {
        key: {"seconds": [], "cpu_here": 0.0, "cpu_engines": 0.0} for key in pools
    }
    version = 0
    for index in range(rounds + WARM_UP):
        # Forwards and backwards, so that none is always the one behind a larger one.
        for key in list(pools)[:: 1 if index % 2 else -1]:
            version += 1
            processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids[: key[1]])]
            before = [cpu_seconds(p) for p in processes]
            began = time.perf_counter()
            pools[key].swap_heads(files[version % 2], version)
            seconds = time.perf_counter() - began
            after = [cpu_seconds(p) for p in processes]
            if index >= WARM_UP:
                found[key]["seconds"].append(seconds)
                found[key]["cpu_here"] += after[0] - before[0]
                found[key]["cpu_engines"] += sum(after[1:]) - sum(before[1:])
    return found


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def report(found: dict[tuple[str, int], dict[str, Any]], rounds: int) -> None:
    one = {
        arm: statistics.median(values["seconds"])
        for (arm, size), values in reversed(found.items())
        if size == min(s for _, s in found)
    }
    for (arm, size), values in found.items():
        times = sorted(values["seconds"])
        cpu = (
            f"CPU {1e3 * values['cpu_here'] / rounds:.1f} ms here,"
            f" {1e3 * values['cpu_engines'] / rounds / size:.1f} ms in each engine"
        )
        spread = (
            f"{1e3 * statistics.median(times):.1f} ms ({1e3 * times[0]:.1f} to"
            f" {1e3 * times[-1]:.1f})"
        )
        sys.stdout.write(
            f"{arm}, {size} engines: {spread}, {statistics.median(times) / one[arm]:.2f} x one;"
            f" {cpu}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a swap, by engines of the pool.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the actor")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kind", default="hydra", choices=("medusa", "hydra"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    sizes = read_model_config(options.model)
    config = EngineConfig(max_num_seqs=8, threads=1)
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
            )
        )
        stack.enter_context(local_ray(cpus=2))
        files = write_versions(
            folder, HeadsConfig(sizes["hidden_size"], sizes["vocab_size"], 4, options.kind)
        )
        engines = [
            stack.enter_context(RayEngine(options.model, folder / "heads", config, seed))
            for seed in range(max(options.engines))
        ]
        pids = [engine.plugin_report()["pid"] for engine in engines]
        pools = stack.enter_context(pools_of(list(engines), sorted(options.engines)))
        found = measure(pools, pids, files, options.rounds)
    report(found, options.rounds)
    if options.json:
        options.json.write_text(
            json.dumps(
                {f"{arm}, {size}": values for (arm, size), values in found.items()}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
