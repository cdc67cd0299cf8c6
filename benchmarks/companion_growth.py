"""What a second worker adds to the companion: tokens trained per second of processor time, on the
same rollout batches.

    python benchmarks/companion_growth.py [--workers 1 2] [--json FILE]

Workers are real: Ray actors that share batches and optimizer steps. Processor time is counted
because on a machine with fewer cores than workers, or with other work, the clock says nothing about
a cluster. A worker that waits uses no processor time, so waiting shows only in the busiest worker's
share, which limits the speed. Random states replace an actor's: times don't depend on their values.

    work per core-second   tokens / seconds of all workers together
    growth                 work per core-second x workers, relative to one worker: what this many
                           cores give if none of them waits
    at the busiest         the same with the busiest worker's seconds for all workers: includes
                           waiting for it
    by the clock           seconds of a round with one worker / with this many; needs a quiet core
                           for each

Arms take turns, round by round; the median round counts. Letters: D hidden, V vocabulary, S
responses, M response tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import ray
import torch

from heads.heads_config import HeadsConfig
from medusa_ppo.companion.client import CONTROL, CompanionClient
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.runtime.processes import local_ray

WIDTH, VOCAB, RESPONSES, TOKENS = 256, 8192, 96, 128
ROUNDS = 3
BATCHES = 2
# A batch is about 10 MiB: none is dropped or sampled for want of room.
QUEUE_BYTES = 64 * 1024**2


class Round(NamedTuple):
    """What was trained, each worker's processor seconds, and the elapsed seconds."""

    tokens: int
    cores: list[float]
    clock: float


def make_batch(seed: int) -> RolloutBatch:
    """A rollout batch of random states; responses of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths_S = torch.randint(TOKENS // 2, TOKENS + 1, (RESPONSES,), generator=generator)
    rows = int(lengths_S.sum())
    return RolloutBatch(
        torch.randn(rows, WIDTH, generator=generator),
        torch.randint(VOCAB, (rows,), generator=generator),
        torch.full((rows,), -5.0),
        lengths_S,
        # Some responses to each prompt, as in a run: the holdout is chosen by prompts.
        prompts_S=torch.arange(RESPONSES) // 4,
    )


def start(workers: int, kind: str, lm_head_VD: torch.Tensor) -> CompanionClient:
    heads = HeadsConfig(WIDTH, VOCAB, 4, kind)
    config = CompanionConfig(
        workers=workers,
        loss="ce_tv",
        batch_positions=2048,
        epochs=2,
        wait=True,
        queue_bytes=QUEUE_BYTES,
    )
    return CompanionClient(
        heads, config, lm_head_VD, seed=0, embedding_VD=lm_head_VD if kind == "hydra" else None
    )


def core_seconds(client: CompanionClient, workers: int) -> list[float]:
    """Processor seconds of each worker's process so far."""
    # The incarnation begins with the process's number.
    if workers == 1:
        pids = [int(client.status().incarnation.split("-")[0])]
    else:
        pids = [int(name.split("-")[0]) for name in ray.get(client._call("workers", CONTROL))]
    assert len(pids) == workers, f"{len(pids)} of {workers} workers are there"
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def one_round(client: CompanionClient, workers: int, seed: int) -> Round:
    """Train on this round's batches."""
    before = core_seconds(client, workers)
    tokens = client.status().trained_tokens
    began = time.perf_counter()
    for index in range(BATCHES):
        client.submit(make_batch(seed + index))
        assert client.drain(600), "the companion did not finish"
    clock = time.perf_counter() - began
    after = core_seconds(client, workers)
    return Round(
        client.status().trained_tokens - tokens,
        [b - a for a, b in zip(before, after, strict=True)],
        clock,
    )


def measure(counts: list[int], kind: str, rounds: int = ROUNDS) -> list[dict[str, float]]:
    """A row for each number of workers; the others are compared with the first."""
    lm_head_VD = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    # All are started at once, and idle except in their turn: a start within a round would be part
    # of its time.
    clients = {count: start(count, kind, lm_head_VD) for count in counts}
    taken: dict[int, list[Round]] = {count: [] for count in counts}
    try:
        for turn in range(rounds + 1):
            for count, client in clients.items():
                taken[count].append(one_round(client, count, seed=turn * BATCHES))
    finally:
        for client in clients.values():
            client.close()
    # The first round warms up.
    counted = {count: turns[1:] for count, turns in taken.items()}
    return [summary(count, counted[count], counted[counts[0]]) for count in counts]


def summary(count: int, own: list[Round], first: list[Round]) -> dict[str, float]:
    """Medians over rounds; ratios are of rounds on the same batches."""
    assert [one.tokens for one in own] == [one.tokens for one in first], (
        "the same work in both arms"
    )
    workers = len(first[0].cores)
    pairs = list(zip(own, first, strict=True))
    growths = [sum(alone.cores) / workers / (sum(one.cores) / count) for one, alone in pairs]
    return {
        "workers": count,
        "tokens": own[0].tokens,
        "core_seconds": statistics.median(sum(one.cores) for one in own),
        "tokens_per_core_second": statistics.median(one.tokens / sum(one.cores) for one in own),
        "growth": statistics.median(growths),
        "growth_low": min(growths),
        "growth_high": max(growths),
        "at_the_busiest": statistics.median(
            max(alone.cores) / max(one.cores) for one, alone in pairs
        ),
        "by_the_clock": statistics.median(alone.clock / one.clock for one, alone in pairs),
    }


def table(kind: str, rows: list[dict[str, float]]) -> str:
    lines = [
        (
            f"| heads: {kind} | tokens a round | core-seconds | tokens per core-second | growth"
            " (lowest to highest) | at the busiest | by the clock |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['workers']} worker{'s' * (row['workers'] > 1)} | {row['tokens']:,} |"
            f" {row['core_seconds']:.1f} | {row['tokens_per_core_second']:,.0f} |"
            f" {row['growth']:.2f} ({row['growth_low']:.2f} to {row['growth_high']:.2f}) |"
            f" {row['at_the_busiest']:.2f} | {row['by_the_clock']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens trained per core-second, by workers of the companion."
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--kinds", nargs="+", default=["medusa", "hydra"], choices=("medusa", "hydra")
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with local_ray(queue_bytes=len(options.workers) * QUEUE_BYTES):
        for kind in options.kinds:
            found[kind] = measure(options.workers, kind, options.rounds)
            sys.stdout.write(table(kind, found[kind]) + "\n\n")
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
