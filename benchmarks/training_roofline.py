"""Compares the speed of training heads with the speed of its matrix products alone, for an actor
with a large vocabulary. Both are timed in one run, in turns.

    python benchmarks/training_roofline.py [--hidden 1024] [--vocab 151936] [--drafted 8192]
                                           [--rows 4096] [--rounds 3] [--profile]

The heads of the default configuration are trained with the companion's own trainer, on one thread,
in the dtype that the companion uses on this machine. The products are those that one pass over the
batch really computes: recorded from torch's calls, and repeated on numbers that are in the cache or
not, as they would be with these shapes. They leave out everything else: look-ups, softmax, losses,
copies between layouts, clipping, the optimizer. There is no actor: states and tables are random,
tokens follow Zipf's law.

The output is positions per second of both, their ratio (asked: at least 0.6), and the products'
operations per position next to those that the formulas of `heads/modules.py` and `heads/losses.py`
require, so that a product computed twice can't raise the ratio unnoticed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.runtime.console import say
from medusa_ppo.runtime.hardware import cpu_has_bfloat16, processor_name
from medusa_ppo.runtime.kept_memory import keep_freed_memory

LENGTH, PROMPT = 512, 128
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Products(TorchDispatchMode):
    """Records every matrix product that torch computes: its operator, and the sizes, strides and
    dtypes of its inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Shape, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            shapes = tuple(
                (tuple(a.shape), a.stride(), a.dtype) for a in args if isinstance(a, torch.Tensor)
            )
            self.seen.append((func, shapes))
        return func(*args, **(kwargs or {}))

    @property
    def operations(self) -> int:
        """Multiplications and additions of all of them."""
        total = 0
        for func, shapes in self.seen:
            left, right = shapes[-2][0], shapes[-1][0]
            if func.overloadpacket.__name__ == "linear":
                left, right = shapes[0][0], shapes[1][0][::-1]
            count = 2 * right[-1]
            for size in left:
                count *= size
            total += count
        return total

    def replayed(self) -> Callable[[], None]:
        """Repeats all of them, on random numbers."""
        tensors: dict[Shape, torch.Tensor] = {}
        for _, shapes in self.seen:
            for shape in shapes:
                if shape not in tensors:
                    size, stride, dtype = shape
                    held = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
                    flat = torch.randn(held).to(dtype)
                    tensors[shape] = flat.as_strided(size, stride)
        calls = [(func, [tensors[shape] for shape in shapes]) for func, shapes in self.seen]

        def run() -> None:
            with torch.no_grad():
                for func, given in calls:
                    func(*given)

        return run


def formula(heads: HeadsConfig, drafted: int, rows: int, used: int) -> float:
    """Operations per position that the formulas require, for the parts that don't depend on the
    layout of the rows: what a head, the context and lm_head multiply, forward and backward.
    """
    D, K, H, C = heads.hidden_size, heads.num_heads, heads.inner_size, heads.context
    # Gradients of the input and of the weight, besides the product itself.
    trained = 3 * 2
    cell = H * D + K * H * D + (K - 1) * H * H + K * H * D
    layer = heads.context_layers * (3 * 2 * D * D + D * D + 2 * heads.feed_forward * D * D)
    blocks = heads.num_layers * K * D * D
    # lm_head has no gradient of its own; the actor's own distribution has none at all.
    table = 2 * 2 * K * D * drafted + 2 * D * drafted * used / rows
    pairs = trained * 2 * C * D * heads.context_layers
    return trained * (cell + layer + blocks) + table + pairs


def batch_of(hidden: int, vocab: int, rows: int, generator: torch.Generator) -> RolloutBatch:
    """Responses of LENGTH tokens to prompts of PROMPT."""
    sequences = max(1, rows // LENGTH)
    weights_V = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    order_V = torch.randperm(vocab, generator=generator)

    def tokens(count: int) -> torch.Tensor:
        return order_V[torch.multinomial(weights_V, count, True, generator=generator)]

    rows = sequences * LENGTH
    return RolloutBatch(
        torch.randn(rows, hidden, generator=generator).bfloat16(),
        tokens(rows),
        -torch.rand(rows, generator=generator),
        torch.full((sequences,), LENGTH),
        prompts_S=torch.arange(sequences),
        before_ids_X=tokens(sequences * PROMPT).to(torch.int32),
        before_S=torch.full((sequences,), PROMPT),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--drafted", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loss", default=CompanionConfig().loss)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # As in the companion's process.
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    heads = HeadsSection().sizes(options.hidden, options.vocab)
    dtype = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    table_VD = (torch.randn(options.vocab, options.hidden) / options.hidden**0.5).bfloat16()
    trainer = HeadsTrainer(
        MedusaHeads(heads),
        table_VD,
        CompanionConfig(epochs=1, loss=options.loss),
        0,
        embedding_VD=table_VD,
        dtype=dtype,
    )
    batch = batch_of(options.hidden, options.vocab, options.rows, generator)
    rows = batch.response_ids_M.numel()
    counts_V = torch.bincount(batch.response_ids_M, minlength=options.vocab)
    order_V = counts_V.argsort(descending=True, stable=True)
    trainer.ids_W = order_V[: options.drafted].sort().values
    # The first step allocates moments, and the memory of autograd's threads.
    trainer.train_batch(batch)
    with Products() as products:
        trainer.train_batch(batch)
    again = products.replayed()
    again()
    took: dict[str, list[float]] = {"training": [], "products": []}
    for _ in range(options.rounds):
        for name, work in (("training", lambda: trainer.train_batch(batch)), ("products", again)):
            began = time.perf_counter()
            work()
            took[name].append(time.perf_counter() - began)
    training_s, products_s = (statistics.median(took[name]) for name in ("training", "products"))
    asked = formula(heads, options.drafted, rows, rows)
    say(
        f"{processor_name()}, {options.threads} thread(s), {str(dtype).removeprefix('torch.')}:"
        f" hidden {options.hidden}, {options.drafted} of {options.vocab} tokens,"
        f" {heads.num_heads} heads, loss {options.loss}, {rows} positions"
    )
    say(
        f"training {rows / training_s:.0f} positions/s, its products alone"
        f" {rows / products_s:.0f}: {products_s / training_s:.2f} (asked: >= 0.6; rounds"
        f" {', '.join(f'{p / t:.2f}' for t, p in zip(*took.values(), strict=True))})"
    )
    say(
        f"operations a position: {products.operations / rows / 1e6:.0f} M in"
        f" {len(products.seen)} products; {asked / 1e6:.0f} M by the formulas, without copying;"
        f" {products.operations / products_s / 1e9:.0f} G a second in the products"
    )
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            trainer.train_batch(batch)
        say(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


if __name__ == "__main__":
    main()
