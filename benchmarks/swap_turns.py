"""Seconds of an engine's start, a swap of heads and an actor's sync, in this tree and in another
one, in turns.

    git worktree add ../before COMMIT
    python benchmarks/swap_turns.py --old ../before --model DIR
        [--kind medusa] [--heads 12] [--rounds 3] [--swaps 12]

A round starts an engine in each tree, in its own process, and gives it two sets of heads and two
actors alternately, as files in shared memory. A tree's first swaps and syncs are shown next to the
median of all, because memory is then new to a process. Sizes are those of `--model`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PARTS = ("start", "first swap", "swap", "first sync", "sync")


# ---- in a tree's own process


def work(options: argparse.Namespace) -> None:
    """Print the seconds of one engine as JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    from heads.checkpoint import save_heads
    from heads.heads_config import HeadsConfig
    from heads.modules import MedusaHeads
    from heads.tensorfile import save_state
    from medusa_ppo.config.engine_section import EngineConfig
    from medusa_ppo.engines.ray_engine import RayEngine
    from medusa_ppo.runtime.processes import local_ray

    torch.manual_seed(0)
    actor = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(
        False
    )
    table_VD = actor.get_output_embeddings().weight
    vocab, hidden = table_VD.shape
    heads = MedusaHeads(
        HeadsConfig(hidden, vocab, options.heads, kind=options.kind)
    ).requires_grad_(False)
    with tempfile.TemporaryDirectory(
        # Where the product's own files are; otherwise a disk would be timed.
        prefix="medusa-ppo-bench-",
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None,
    ) as name:
        folder = Path(name)
        for version in (0, 1):
            for parameter in (*heads.parameters(), *actor.parameters()):
                # Different weights in each file: an engine may skip what it already has.
                parameter.add_(0.01 * torch.randn_like(parameter))
            save_state(
                folder / f"heads{version}",
                {key: value.float() for key, value in heads.trainable_state().items()},
            )
            save_state(folder / f"actor{version}", dict(actor.named_parameters()))
        save_heads(folder / "heads", heads, lm_head_VD=table_VD)
        config = EngineConfig(dtype="float32", max_num_seqs=8, max_model_len=64, threads=2)
        with local_ray():
            began = time.perf_counter()
            with RayEngine(options.model, folder / "heads", config, 0) as engine:
                start = time.perf_counter() - began
                swaps = _timed(engine.swap_heads, folder / "heads", options.swaps)
                syncs = _timed(engine.sync_actor, folder / "actor", options.swaps)
    rows = (start, swaps[0], statistics.median(swaps), syncs[0], statistics.median(syncs))
    size = (
        sum(parameter.numel() for parameter in heads.parameters()),
        sum(parameter.numel() for parameter in actor.parameters()),
    )
    sys.stdout.write(
        "\n" + json.dumps({"size": size, **dict(zip(PARTS, rows, strict=True))}) + "\n"
    )


def _timed(feed: Callable[[Path, int], object], stem: Path, times: int) -> list[float]:
    seconds = []
    for version in range(1, times + 1):
        began = time.perf_counter()
        feed(Path(f"{stem}{version % 2}"), version)
        seconds.append(time.perf_counter() - began)
    return seconds


# ---- the comparison


def seconds_of(tree: Path, model: Path) -> dict[str, float]:
    """One engine of `tree`, timed by that tree's own copy of this script."""
    command = [
        sys.executable,
        str(tree.resolve() / "benchmarks" / Path(__file__).name),
        "--work",
        *sys.argv[1:],
        "--model",
        # The last --model counts: an absolute one, because the process works in another folder.
        str(model),
    ]
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree, check=True
    )
    # vLLM and Ray print lines of their own before.
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds of a start, a swap and a sync, this tree against another one."
    )
    parser.add_argument("--old", type=Path, required=True, help="the other tree")
    parser.add_argument("--model", type=Path, required=True, help="folder of the actor")
    parser.add_argument("--kind", default="medusa")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--swaps", type=int, default=12)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model.resolve()
    options.old = options.old.resolve()
    if options.work:
        work(options)
        return
    trees = {"old": options.old, "new": Path(__file__).resolve().parent.parent}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(options.rounds):
        # Take turns at going first.
        for name in list(trees)[:: 1 if number % 2 else -1]:
            found[name].append(seconds_of(trees[name], options.model))
    sys.stdout.write("parameters of heads and actor: {} and {}\n".format(*found["new"][0]["size"]))
    for part in PARTS:
        old, new = ([row[part] for row in found[name]] for name in ("old", "new"))
        ratios = sorted(b / a for a, b in zip(old, new, strict=True))
        middle = f"{statistics.median(old):.3f} s before, {statistics.median(new):.3f} s now"
        sys.stdout.write(
            f"{part}: {middle}, {statistics.median(ratios):.2f} of it ({ratios[0]:.2f} to"
            f" {ratios[-1]:.2f})\n"
        )


if __name__ == "__main__":
    main()
