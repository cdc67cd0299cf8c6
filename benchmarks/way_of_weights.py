"""Seconds to send an actor's weights to an engine, by each way, relative to one copy of the same
file in memory; the engine's own loading comes on top of each.

    python benchmarks/way_of_weights.py [--gib 2] [--rounds 3]

The file way writes the file, summing its pages meanwhile, and confirms it in each engine; a server
over HTTP does the same. A file that somebody else wrote is checked first, once for all engines. The
broadcast goes from one process to another over gloo. Hashes and other checksums of the same tensors
are shown for comparison.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from heads.tensorfile import checksum, crc, is_finite, load_state, sha256_of, write_summed
from medusa_ppo.contract.status import Checked
from medusa_ppo.engines.actor_sync import BUCKET_BYTES
from medusa_ppo.runtime.rendezvous import LOOPBACK
from medusa_ppo.vllm_plugin.confirm import read_state
from medusa_ppo.vllm_plugin.transfer import ActorStream, Group, Incoming, send

SIDE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count = max(int(options.gib * 2**30 / (2 * SIDE * SIDE)), 1)
    state = {f"layer.{i}": torch.randn(SIDE, SIDE).bfloat16() for i in range(count)}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="medusa-ppo-bench-") as name:
        file = Path(name) / "actor.safetensors"
        entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        stream = ActorStream(
            entries,
            state.items,
            lambda path, over: write_summed(path, entries, state.items(), over),
            BUCKET_BYTES,
        )
        found = Checked(stream.write(file, None))
        parts: dict[str, Callable[[], object]] = {
            "one copy in memory": lambda: shutil.copyfile(file, file.with_suffix(".copy")),
            "file: write over that of an earlier sync": lambda: stream.write(
                file, file.rename(file.with_suffix(".earlier"))
            ),
            "file: confirm, in an engine": lambda: read_state(file, "the actor", found),
            "(write a new file)": lambda: stream.write(file, None),
            "(check of a file of unknown origin)": lambda: read_state(file, "the actor"),
            "broadcast": lambda: broadcast(stream),
            "(page sums)": lambda: checksum(load_state(file, finite=True)),
            "(finite)": lambda: all(map(is_finite, state.values())),
            "(CRC-32)": lambda: crc(state),
            "(SHA-256)": lambda: sha256_of(state),
        }
        seconds: dict[str, list[float]] = {part: [] for part in parts}
        for _ in range(options.rounds):
            for part, work in parts.items():
                began = time.perf_counter()
                work()
                seconds[part].append(time.perf_counter() - began)
        copy_s = statistics.median(seconds["one copy in memory"])
        sys.stdout.write(
            f"{sum(t.nbytes for t in state.values()) / 2**30:.2f} GiB, {options.rounds} rounds\n"
        )
        for part, found_s in seconds.items():
            middle = statistics.median(found_s)
            sys.stdout.write(f"{part:40} {middle:7.3f} s   {middle / copy_s:5.2f} copies\n")


def broadcast(stream: ActorStream) -> None:
    first = Group.open(LOOPBACK, 2, timeout_s=120.0)

    def receive() -> None:
        group = Group(first.place.seen_by(1)).join()
        for _ in Incoming(group, stream.entries):
            pass
        group.leave()

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(receive)
        group = first.join()
        send(group, stream)
        done.result()
        group.leave()


if __name__ == "__main__":
    main()
