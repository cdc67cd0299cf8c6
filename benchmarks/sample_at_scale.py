"""The companion's sample, hold-out and judging at the size of a real model, with the program's own
functions on batches of that shape. There is no actor: states are created where they are read.

    python benchmarks/sample_at_scale.py sample   # an 8B actor: 64 x 16 x 8,192 tokens, V = 152k
    python benchmarks/sample_at_scale.py judge    # held-out responses of 8,192 tokens, K = 4

`sample`: of the rows that companion.queue_bytes has room for, how many are trained on and judged
on, and on how many prompts; bytes that leave each of 8 ranks of a 70B actor for the same batch; and
how much of the last quarter of a batch that arrives in pieces is in the sample.

`judge`: seconds of judging over those of all matrix products of the heads' forward passes (cell,
attention, feed-forward layer, copying, lm_head), D = 512, a draft vocabulary of 8,192, with the
default heads and with the sizes of `--kind medusa`. Every response and set of heads takes the same
time, so a few of the 64 x 3 are timed (`--responses`).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heads.acceptance import replay_probabilities
from heads.modules import MedusaHeads
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.companion.positions import ROW_BYTES, EarlySample
from medusa_ppo.config.companion_section import HOLDOUT_SHARE, CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.loops.passes import RowTap
from medusa_ppo.runtime.console import say

PROMPTS, SIBLINGS, LENGTH = 64, 16, 8192
BFLOAT16 = 2
PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.linear,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
}
"""What matrix products are below autograd, on a CPU."""


def rows_for(hidden: int) -> int:
    """Rows that fit next to the previous batch."""
    return CompanionConfig().queue_bytes // 2 // (hidden * BFLOAT16 + ROW_BYTES)


def sample() -> None:
    """Print the contents of the sample."""
    lengths_S = torch.full((PROMPTS * SIBLINGS,), LENGTH)
    prompts_S = torch.arange(PROMPTS * SIBLINGS) // SIBLINGS
    for name, hidden in (("8B, hidden 4,096", 4096), ("70B, hidden 8,192", 8192)):
        rows = rows_for(hidden)
        began = time.perf_counter()
        weights_M, held_S = EarlySample(rows, HOLDOUT_SHARE, 0, ahead=4).draw(lengths_S, prompts_S)
        took = time.perf_counter() - began
        assert held_S is not None
        kept = int((weights_M >= 0).sum())
        judged = int((weights_M[held_S.repeat_interleave(LENGTH)] > 0).sum())
        trained = int((weights_M > 0).sum()) - judged
        say(
            f"{name}: room for {rows:,} rows, kept {kept:,}, trained on {trained:,}"
            f" ({trained / rows:.1%}), judged on {judged:,} of {int(held_S.sum())} prompts; drawn"
            f" in {took:.1f} s"
        )
        ranks_M = (torch.arange(len(lengths_S)) % 8).repeat_interleave(LENGTH)
        each = torch.bincount(ranks_M[weights_M >= 0], minlength=8) * hidden * BFLOAT16
        everything = len(weights_M) // 8 * hidden * BFLOAT16
        say(
            f"  bytes that leave one of 8 ranks: at most {int(each.max()) / 1e9:.2f} GB of"
            f" {everything / 1e9:.1f}"
        )
    in_pieces()


class Pieces(RowTap):
    """A tap whose passes are announced but never run: their result is known in advance."""

    def _hooked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def in_pieces() -> None:
    """A batch in 128 log-prob passes, as OpenRLHF makes them, through the real tap's sampler."""
    tap = Pieces(Sampling(), 1, 4)
    rows, kept = rows_for(4096), torch.zeros(4)
    tap.expect(128 * 8 * 1024)
    for piece in range(128):
        responses = tuple(Response(0, (1,) * 1024, (-1.0,) * 1024, "stop") for _ in range(8))
        rollouts = Rollouts(((1,),), responses, Counters(), 0.0, Sampling())
        kept[piece // 32] += tap._collector_of(rollouts, rows).kept
    say(
        f"in 128 pieces: {int(kept.sum()):,} rows of room for {rows:,}; of the last quarter"
        f" {float(kept[3] / kept.sum()):.1%}"
    )


class Products(TorchDispatchMode):
    """Counts the seconds of the matrix products in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.seconds += time.perf_counter() - began
        return result


def judge(kind: str, count: int) -> None:
    """Print the seconds of judging `count` responses with heads of this kind."""
    generator = torch.Generator().manual_seed(0)
    hidden, vocab, prompt = 512, 8192, 256
    lengths_S = torch.full((count,), LENGTH)
    tokens = count * LENGTH
    lm_head_VD, embedding_VD = (
        torch.randn(vocab, hidden, generator=generator) * hidden**-0.5 for _ in range(2)
    )
    heads = MedusaHeads(HeadsSection(kind=kind).sizes(hidden, vocab))
    batch = RolloutBatch(
        torch.randn(tokens, hidden, generator=generator),
        torch.randint(vocab, (tokens,), generator=generator),
        torch.full((tokens,), -2.0),
        lengths_S,
        before_ids_X=torch.randint(
            vocab, (count * prompt,), generator=generator, dtype=torch.int32
        ),
        before_S=torch.full((count,), prompt),
    )

    def judged() -> float:
        began = time.perf_counter()
        replay(heads, batch, lm_head_VD, embedding_VD=embedding_VD, served=Served(1.0))
        return time.perf_counter() - began

    with torch.no_grad():
        # In turns, because other programs may run beside this one.
        rounds = []
        for _ in range(3):
            with Products() as products:
                judged()
            rounds.append((products.seconds, judged()))
    accept_MK = torch.rand(tokens, heads.config.num_heads, generator=generator)
    began = time.perf_counter()
    replay_probabilities(accept_MK, lengths_S)
    walk = time.perf_counter() - began
    ratios = sorted(whole / inside for inside, whole in rounds)
    inside, whole = min(rounds)
    say(
        f"{kind}, {heads.config.num_heads} heads, {count} responses of {LENGTH} tokens, one set of"
        f" heads: forward products {inside:.1f} s, judging {whole:.1f} s: {ratios[1]:.2f}"
        f" ({ratios[0]:.2f} to {ratios[2]:.2f}); of it the walk over stops {walk:.2f} s"
    )


def main() -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["sample", "judge"])
    parser.add_argument("--kind", default=HeadsSection().kind, choices=["hydra", "medusa"])
    parser.add_argument("--responses", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "sample":
        sample()
    else:
        judge(args.kind, args.responses)


if __name__ == "__main__":
    main()
