"""Compares the companion's memory according to `medusa-ppo plan` with that of real processes.

    python benchmarks/companion_memory.py [--sizes 512x32000 1024x65536 1024x151936] [--workers 1 2]

For each size of an actor (width x vocabulary) and each number of workers, a companion is started in
Ray as a loop starts it. It gets batches that fill companion.queue_bytes, with new tables before
each, until heads were published twice (so that all copies of heads exist) or after --batches. The
measurement is the largest resident size of each process according to the kernel (VmHWM), without
the pages of Ray's store that it has open (RssShmem), since a node holds these once for all; the
plan is that of a run with the same configuration, on this machine.

No actor is run: states are random vectors of the tokens, and each token has one successor, which
heads learn at once. The output is plan / measured (asked: 0.85 to 1.15), and the parts of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

from medusa_ppo.cli.plan import make_plan, size_text
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.engines.launch import draft_vocabulary
from medusa_ppo.runtime.console import say
from medusa_ppo.runtime.hardware import find_hardware

USED, LENGTH, SEQUENCES = 60, 100, 48
"""Tokens that occur, tokens of a response, and responses of a batch, each to its own prompt."""
WAIT_S = 900.0


def model_folder(folder: Path, hidden: int, vocab: int) -> Path:
    """A config.json, which is all that a plan reads."""
    sizes = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def batch_of(table_VD: torch.Tensor, step: int) -> RolloutBatch:
    """Responses in which a token is followed by the next one."""
    generator = torch.Generator().manual_seed(step)
    starts_S1 = torch.randint(USED, (SEQUENCES, 1), generator=generator)
    ids_ST = (starts_S1 + torch.arange(LENGTH)) % USED
    rows = ids_ST.numel()
    return RolloutBatch(
        # The state that predicts a token belongs to the token before it.
        table_VD[((ids_ST - 1) % USED).flatten()],
        ids_ST.flatten(),
        torch.full((rows,), -0.01),
        torch.full((SEQUENCES,), LENGTH),
        step,
        prompts_S=torch.arange(SEQUENCES),
    )


def peak(pid: int) -> tuple[int, str]:
    """Peak resident bytes of a process without shared memory, and its present bytes by kind."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    kinds = ("RssAnon", "RssFile", "RssShmem")
    now = ", ".join(f"{kind} {int(values[kind].split()[0]) // 1024:,} MiB" for kind in kinds)
    kib = {kind: int(values[kind].split()[0]) for kind in ("VmHWM", "RssShmem")}
    return 1024 * (kib["VmHWM"] - kib["RssShmem"]), now


def processes(client: CompanionClient, workers: int) -> list[int]:
    if workers == 1:
        return [int(client.status().incarnation.split("-")[0])]
    names = ray.get(client._call("workers", "control"))
    return [int(name.split("-")[0]) for name in names]


def measure(hidden: int, vocab: int, workers: int, batches: int, folder: Path) -> None:
    """One companion, from its start to its end."""
    table_VD = (torch.randn(vocab, hidden) / hidden**0.5).bfloat16()
    example = batch_of(table_VD, 0)
    given: dict[str, Any] = {
        "model": {"path": str(model_folder(folder / "model", hidden, vocab))},
        "heads": {"warm_up_tokens": 0},
        "companion": {"workers": workers, "queue_bytes": 2 * example.nbytes, "num_gpus": 0},
    }
    config = build_config(given)
    plan = make_plan(config, find_hardware())
    planned = next(p for p in plan.processes if p.name.startswith("companion"))
    heads = config.heads.sizes(hidden, vocab)
    embedding_VD = table_VD + 0.01
    client = CompanionClient(
        heads,
        config.companion,
        table_VD,
        seed=0,
        run_dir=folder / "run",
        embedding_VD=embedding_VD,
        draft_vocab=draft_vocabulary(config.engine, heads),
    )
    try:
        for step in range(batches):
            if step:
                client.update_lm_head(table_VD, step, embedding_VD=embedding_VD)
            client.submit(batch_of(table_VD, step))
            # Two of them fill the queue.
            if step % 2:
                client.drain(WAIT_S)
                client.newest(0, 30.0)
            status = client.status(60.0)
            if status.versions_published >= 2:
                break
        client.drain(WAIT_S)
        status = client.status(60.0)
        if status.error or not status.batches_trained:
            raise SystemExit(f"Nothing was learned: {status}")
        for number, pid in enumerate(processes(client, workers)):
            most, now = peak(pid)
            say(
                f"{hidden} x {vocab}, {workers} worker(s), process {number}: planned"
                f" {size_text(planned.memory)}, measured {size_text(most)}:"
                f" {planned.memory / most:.2f} (asked: 0.85 to 1.15); {status.batches_trained}"
                f" batches, {status.versions_published} versions, tables sent"
                f" {size_text(client.table_bytes)} ({now})"
            )
        say("  " + "; ".join(f"{what} {size_text(size)}" for what, size in planned.parts.items()))
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["512x32000", "1024x65536", "1024x151936"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for size in options.sizes:
            hidden, vocab = map(int, size.split("x"))
            for workers in options.workers:
                with tempfile.TemporaryDirectory() as folder:
                    measure(hidden, vocab, workers, options.batches, Path(folder))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
