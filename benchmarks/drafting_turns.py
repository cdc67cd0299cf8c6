"""What one drafting call costs, this tree against another one, in turns: hydra heads, sampled
drafts, the actor of `--model`.

    git worktree add ../before COMMIT
    python benchmarks/drafting_turns.py --old ../before --model actors/gsm8k-4m
        [--dtype bfloat16] [--rounds 40] [--json FILE]
    python benchmarks/drafting_turns.py --context 16 --model actors/gsm8k-4m ...

With `--context` it is this tree against itself: heads with a context against heads without. Their
call begins with the pairs of two accepted positions of each request, which go into the ring.

Each tree works in a process of its own; in every round both time the same number of calls, one
after the other, in turns. Printed is the median of the ratios within a round, for several numbers
of requests. The products are the engine's own (oneDNN, packed) in both; the call begins with hidden
states and ends with draft ids and q kept for verification.

Shape letters: B requests, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS = 4
CALLS = 20
BATCHES = (1, 4, 16, 64)


# ---- in a tree's own process


def random_heads(vocab: int, hidden: int, dtype: Any, pairs: int = 0) -> Any:
    import torch

    from heads.heads_config import HeadsConfig
    from heads.modules import MedusaHeads

    torch.manual_seed(0)
    heads = MedusaHeads(
        HeadsConfig(hidden, vocab, HEADS, kind="hydra", **({"context": pairs} if pairs else {}))
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.05)
    return heads.to(dtype).requires_grad_(False)


def new_call(heads: Any, lm_head: Any, embed: Any, seeded: bool) -> Callable[[Any], None]:
    import torch

    from medusa_ppo.drafting.core import DraftingCore, DraftSampling
    from medusa_ppo.drafting.noise import DRAFT_LANE, uniforms
    from medusa_ppo.drafting.slots import DraftSlots, stamps
    from medusa_ppo.vllm_plugin.int8_products import packed_linear

    core = DraftingCore(heads, lm_head, embed, packed_linear)
    slots = DraftSlots(max(BATCHES), HEADS, heads.config.vocab_size, torch.device("cpu"))

    def call(hidden_BD: Any) -> None:
        batch = len(hidden_BD)
        last_ids_B = torch.tensor([1] * batch, dtype=torch.int64)
        positions_B = torch.arange(batch)
        noise_BK = uniforms(positions_B, positions_B if seeded else None, None, DRAFT_LANE, HEADS)
        core.draft(
            hidden_BD, last_ids_B, HEADS, DraftSampling(torch.ones(batch), noise_BK), slots=slots
        )
        slots.stamp(positions_B, stamps(positions_B, positions_B), HEADS)

    return call


def context_call(heads: Any, lm_head: Any, embed: Any, seeded: bool) -> Callable[[Any], None]:
    import torch

    from medusa_ppo.drafting.context import Arrived, PairRing, Standing
    from medusa_ppo.drafting.core import DraftingCore, DraftSampling
    from medusa_ppo.drafting.noise import DRAFT_LANE, uniforms
    from medusa_ppo.drafting.slots import DraftSlots, stamps
    from medusa_ppo.vllm_plugin.int8_products import packed_linear

    core = DraftingCore(heads, lm_head, embed, packed_linear)
    D = heads.config.hidden_size
    slots = DraftSlots(max(BATCHES), HEADS, heads.config.vocab_size, torch.device("cpu"))
    ring = PairRing(
        max(BATCHES), heads.config.context, 2 * D, core.fused.dtype, torch.device("cpu")
    )

    def call(hidden_BD: Any) -> None:
        batch = len(hidden_BD)
        numbers = [(row, 1, row, back) for row in range(batch) for back in (1, 0)]
        row_N, ids_N, request_N, back_N = torch.tensor([*zip(*numbers, strict=True)]).unbind(0)
        positions_B = torch.arange(batch) + 100
        requests_B = torch.arange(batch)
        at = Standing(requests_B, requests_B, positions_B)
        arrived = Arrived(
            hidden_BD[row_N],
            ids_N,
            request_N,
            request_N,
            positions_B[request_N] - back_N,
            2 * requests_B + 1,
        )
        seen = core.fused.look_back(ring, arrived, at)
        noise_BK = uniforms(positions_B, positions_B if seeded else None, None, DRAFT_LANE, HEADS)
        core.draft(
            hidden_BD, ids_N[1::2], HEADS, DraftSampling(torch.ones(batch), noise_BK), seen, slots
        )
        slots.stamp(requests_B, stamps(positions_B, positions_B), HEADS)

    return call


def work(
    arm: str, vocab: int, hidden: int, dtype_name: str, seeded: bool, threads: int, pairs: int
) -> None:
    """Answer each line (a number of requests) with the seconds of one call."""
    import torch
    from torch.nn import functional as F

    from medusa_ppo.vllm_plugin.int8_products import packed_linear

    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    heads = random_heads(vocab, hidden, dtype, pairs if arm == "context" else 0)
    lm_head = packed_linear((torch.randn(vocab, hidden) * 0.05).to(dtype))
    table_VD = torch.randn(vocab, hidden).to(dtype)
    make_call = context_call if arm == "context" else new_call
    call = make_call(heads, lm_head, lambda ids: F.embedding(ids, table_VD), seeded)
    with torch.inference_mode():
        for line in sys.stdin:
            hidden_BD = torch.randn(int(line), hidden).to(dtype)
            call(hidden_BD)
            seconds = []
            for _ in range(CALLS):
                began = time.perf_counter()
                call(hidden_BD)
                seconds.append(time.perf_counter() - began)
            sys.stdout.write(json.dumps(statistics.median(seconds)) + "\n")
            sys.stdout.flush()


# ---- the comparison


class TreeArm:
    """A process that draws drafts with one tree's code.

    It runs that tree's own copy of this script, which knows the names that its modules have there.
    """

    def __init__(self, arm: str, tree: Path, settings: list[str]) -> None:
        script = tree.resolve() / "benchmarks" / Path(__file__).name
        command = [sys.executable, str(script), "--arm", arm, *settings]
        environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )

    def seconds(self, batch: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{batch}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            try:
                return float(json.loads(line))
            except ValueError:
                continue  # vLLM greets on stdout.
        raise RuntimeError("The process that draws drafts has ended; its last words are above.")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(
    options: argparse.Namespace, config: dict[str, Any], dtype: str, seeded: bool
) -> list[dict[str, Any]]:
    settings = [
        "--sizes",
        f"{config['vocab_size']},{config['hidden_size']}",
        "--dtype",
        dtype,
        "--threads",
        str(options.threads),
    ]
    settings += ["--seeded"] if seeded else []
    here = Path(__file__).resolve().parent.parent
    if options.context:
        settings += ["--context", str(options.context)]
        before = "new"
        after = "context"
        arms = {before: TreeArm("new", here, settings), after: TreeArm("context", here, settings)}
    else:
        before = "old"
        after = "new"
        arms = {
            before: TreeArm("new", Path(options.old), settings),
            after: TreeArm("new", here, settings),
        }
    rows = []
    for batch in BATCHES:
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(-2, options.rounds):
            order = list(arms) if number % 2 else list(arms)[::-1]
            for name in order:
                took = arms[name].seconds(batch)
                if number >= 0:
                    seconds[name].append(took)
        ratios = sorted(new / old for new, old in zip(seconds[after], seconds[before], strict=True))
        row = {
            "dtype": dtype,
            "seeded": seeded,
            "requests": batch,
            f"{after}_over_{before}": round(statistics.median(ratios), 3),
        }
        row |= {"range": [round(ratios[0], 3), round(ratios[-1], 3)]}
        row |= {
            f"{name}_us": round(1e6 * statistics.median(values)) for name, values in seconds.items()
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        rows.append(row)
    for arm in arms.values():
        arm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", help="Another checkout that has this script.")
    parser.add_argument(
        "--context", type=int, default=0, help="Pairs of the context, in the place of --old."
    )
    parser.add_argument("--model", help="Folder of the actor whose sizes count.")
    parser.add_argument(
        "--dtype", default="", help="Default: bfloat16 and float32, one after the other."
    )
    parser.add_argument("--seeded", action="store_true", help="Every request has a seed.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--arm", choices=("new", "context"), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        vocab, hidden = (int(word) for word in options.sizes.split(","))
        work(
            options.arm,
            vocab,
            hidden,
            options.dtype,
            options.seeded,
            options.threads,
            options.context,
        )
        return
    if not (options.old or options.context) or not options.model:
        parser.error("--model is needed, and --old or --context")
    config = json.loads((Path(options.model) / "config.json").read_text())
    rows = [
        row
        for dtype in ([options.dtype] if options.dtype else ["bfloat16", "float32"])
        for row in compare(options, config, dtype, options.seeded)
    ]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
