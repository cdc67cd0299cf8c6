"""Seconds until a new actor is in all engines, as a file and as a broadcast in turn, for pools of
one and of two engines.

    python benchmarks/sync_time.py --model DIR [--engines 1 2] [--rounds 10] [--bucket-bytes
    268435456]

Real engines in Ray actors, started once: both ways go to the same engines, through `ActorSync` as a
run's loop does it. A round has one sync of each kind, the order changing with every round; the
first two rounds are thrown away. Wall time holds for this machine and for what else runs on it; the
ratio is of the pairs.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from medusa_ppo.config.run_config import EngineConfig
from medusa_ppo.engines.actor_sync import BUCKET_BYTES, ActorSync, BroadcastPool, actor_stream
from medusa_ppo.engines.ray_engine import RayEngine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.runtime.processes import local_ray

WARM_UP = 2
WAYS = ("file", "broadcast")


class FileSync(ActorSync):
    """The file, also to a pool that could take a broadcast."""

    def _send(self, pool: BroadcastPool, actor: Any, version: int) -> Any:
        path = self._folder.path / "actor.safetensors"
        actor_stream(actor, self._dtype).write(path)
        try:
            return pool.sync_actor(path, version)
        finally:
            path.unlink()


class Shared:
    """An engine that several pools have: they don't close it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


def measure(
    pool: BroadcastPool, actors: list[Any], rounds: int, bucket_bytes: int
) -> dict[str, list[float]]:
    """Seconds of each sync, by its way."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    version = 0
    with (
        FileSync(pool, "float32") as by_file,
        ActorSync(pool, "float32", bucket_bytes) as by_broadcast,
    ):
        for index in range(rounds + WARM_UP):
            sums = set()
            for way in WAYS[:: 1 if index % 2 else -1]:
                version += 1
                began = time.perf_counter()
                receipt = (by_file if way == "file" else by_broadcast)(actors[index % 2], version)
                if index >= WARM_UP:
                    found[way].append(time.perf_counter() - began)
                sums |= {receipt.checksum, pool.checksums()["actor"]}
            assert len(sums) == 1, "both ways brought the same actor to all engines"
    return found


def report(found: dict[int, dict[str, list[float]]]) -> None:
    for size, ways in found.items():
        for way, seconds in ways.items():
            spread = (
                f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * min(seconds):.1f} to"
                f" {1e3 * max(seconds):.1f})"
            )
            sys.stdout.write(f"{size} engines, {way}: {spread}\n")
        ratios = sorted(b / f for f, b in zip(ways["file"], ways["broadcast"], strict=True))
        sys.stdout.write(
            f"{size} engines, broadcast over file: {statistics.median(ratios):.2f} ({ratios[0]:.2f}"
            f" to {ratios[-1]:.2f})\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds of an actor's sync, by file and by broadcast."
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the actor")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    config = EngineConfig(max_num_seqs=8, threads=1, transfer="broadcast")
    first, second = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(
            False
        )
        for _ in range(2)
    )
    for parameter in second.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
    with ExitStack() as stack:
        stack.enter_context(local_ray(cpus=2))
        engines = [
            stack.enter_context(RayEngine(options.model, None, config, seed))
            for seed in range(max(options.engines))
        ]
        found = {}
        for size in options.engines:
            with BroadcastPool(lambda index: Shared(engines[index]), size) as pool:
                found[size] = measure(pool, [first, second], options.rounds, options.bucket_bytes)
    report(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
