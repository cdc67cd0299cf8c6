"""One engine step on an H100, on paper: with drafts and without, for 8B and 70B actors at 1 to 256
sequences.

    python benchmarks/step_on_paper.py                              # the tables
    python benchmarks/step_on_paper.py --vocabulary 16384 --drafts 2
        --set draft_host_s=0.0002 accepted=0.8

A model, not a measurement: no GPU has run this. What is not assumed is counted: the drafting call
is the one that serves (`medusa_ppo.drafting.core`), run on fake tensors of the actor's real sizes,
and every operation that it dispatches is counted with the bytes that it reads and writes and its
products. Everything else is a roofline with the vendor's figures, whose shares are fields of `Gpu`;
change them with --set. Compared is vLLM's own best plain step: asynchronous, in full CUDA graphs.

Letters: S sequences, K drafts, V vocabulary, D hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from scale import ACTORS, overridden
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.noise import DRAFT_LANE, uniforms
from medusa_ppo.drafting.products import plain_linear
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.runtime.hardware import BFLOAT16, ModelSizes

SEQUENCES = (1, 4, 16, 64, 256)
FLOAT32 = 4
ROWS_OF_A_TABLE = {"aten.embedding", "aten.index_select", "aten.gather", "aten.index"}
"""Operations that read a few rows of their first argument, not all of it."""


@dataclass(frozen=True)
class Gpu:
    """What is taken for granted; vendors' figures are those of an H100 SXM.

    Attributes:
        flops: dense bf16 products per second (vendor).
        memory_bytes_per_s: (vendor).
        share: of both, reached by large products and long reads.
        small_share: of the memory's speed, reached by the small operations between products.
        launch_s: from one kernel's end to the next one's start inside of a CUDA graph.
        eager_s: the same without a graph, where the host can't keep up.
        plain_host_s: host time of a plain step that the device waits for; asynchronous scheduling
            hides nearly all of it.
        draft_host_s: the same of a step with drafts; scheduling is synchronous on vLLM's V1 runner
            (set it to plain_host_s for V2).
        reduce_s: one all-reduce between tensor-parallel ranks; two per layer.
        context: tokens in the cache of each sequence.
        accepted: drafts accepted per step; mean acceptance length is 1 more. Measured on small
            actors only (RESULTS.md).
        sampler_reads: passes over the logits of a row in vLLM's samplers (float32: copy, softmax,
            top-k and top-p, the draw).
    """

    flops: float = 989e12
    memory_bytes_per_s: float = 3.35e12
    share: float = 0.7
    small_share: float = 0.3
    launch_s: float = 1.5e-6
    eager_s: float = 6e-6
    plain_host_s: float = 0.0002
    draft_host_s: float = 0.002
    reduce_s: float = 15e-6
    context: float = 1024
    accepted: float = 1.0
    sampler_reads: float = 6


@dataclass
class Count(TorchDispatchMode):
    """What is dispatched below: launches, and for each of them its bytes and its products.

    Attributes:
        launches: operations that are no views.
        work: (bytes, floating point operations) of each.
    """

    work: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def launches(self) -> int:
        return len(self.work)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view = any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in func._schema.returns
        )
        # A result that shares its input's memory without being written is a view.
        if view or func.namespace == "prim":
            # No work: another look at a tensor, or a question about it.
            return result
        made = [
            value
            for value in (result if isinstance(result, tuple | list) else [result])
            if isinstance(value, torch.Tensor)
        ]
        given = [value for value in args if isinstance(value, torch.Tensor)]
        given += [
            value
            for part in args
            if isinstance(part, list | tuple)
            for value in part
            if isinstance(value, torch.Tensor)
        ]
        if str(func.overloadpacket) in ROWS_OF_A_TABLE:
            # As much is read of the table as comes out.
            given = [*made, *given[1:]]
        flops = 0.0
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            # Of the second factor from the end: `addmm` has a bias before both.
            flops = 2.0 * made[0].numel() * given[-2].shape[-1]
        self.work.append(
            (sum(value.numel() * value.element_size() for value in [*made, *given]), flops)
        )
        return result


def counted(
    model: ModelSizes,
    kind: str,
    drafts: int,
    sequences: int,
    vocabulary: int | None,
    *,
    seeded: bool = False,
) -> Count:
    """The drafting call on fake tensors: sampled drafts, temperature 1, from all tokens or so
    many.
    """
    count = Count()
    with FakeTensorMode():
        # Heads are made in the default dtype, and serve in bfloat16.
        torch.set_default_dtype(torch.bfloat16)
        try:
            heads = MedusaHeads(
                HeadsConfig(model.hidden, model.vocab, drafts, kind)
            ).requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
        table_VD = torch.empty(model.vocab, model.hidden, dtype=torch.bfloat16)
        core = DraftingCore(heads, plain_linear(table_VD), lambda ids: F.embedding(ids, table_VD))
        if vocabulary:
            core.use_vocabulary(torch.arange(vocabulary), plain_linear(table_VD[:vocabulary]))
        hidden_BD = torch.empty(sequences, model.hidden, dtype=torch.bfloat16)
        ids_B = torch.zeros(sequences, dtype=torch.int64)
        ones_B = torch.ones(sequences)
        known = (ids_B, ids_B == 0) if seeded else (None, None)
        slots = DraftSlots(sequences, drafts, vocabulary or model.vocab, torch.device("cpu"))
        # What is made once is made before: the first call is not counted.
        for counting in (contextlib.nullcontext(), count):
            with counting:
                core.draft(
                    hidden_BD,
                    ids_B,
                    drafts,
                    DraftSampling(ones_B, uniforms(ids_B, *known, DRAFT_LANE, drafts)),
                    slots=slots,
                )
    return count


def draft_seconds(count: Count, gpu: Gpu, ranks: int, *, graph: bool = True) -> float:
    """Of a drafting call: each operation's reading or products, whichever takes longer, and its
    launch. Ranks share lm_head.
    """
    seconds = count.launches * (gpu.launch_s if graph else gpu.eager_s)
    for nbytes, flops in count.work:
        share = gpu.share if flops else gpu.small_share
        seconds += (
            max(nbytes / (gpu.memory_bytes_per_s * share), flops / (gpu.flops * gpu.share)) / ranks
        )
    return seconds


def target_seconds(model: ModelSizes, gpu: Gpu, ranks: int, sequences: int, rows: int) -> float:
    """Of the actor's pass over `rows` rows of each sequence, with its sampler."""
    cache = BFLOAT16 * model.cache_elements * gpu.context * sequences
    read = (BFLOAT16 * model.product_parameters + cache) / gpu.memory_bytes_per_s
    products = 2.0 * model.product_parameters * sequences * rows / gpu.flops
    sampler = (
        gpu.sampler_reads
        * FLOAT32
        * model.vocab
        * sequences
        * rows
        / (gpu.memory_bytes_per_s * gpu.small_share)
    )
    return (
        max(read, products) / (gpu.share * ranks)
        + sampler
        + (2 * model.layers * gpu.reduce_s if ranks > 1 else 0.0)
    )


def rows(gpu: Gpu, kind: str, drafts: int, vocabulary: int | None) -> list[dict[str, Any]]:
    """One row for each actor and number of sequences; `step_ms` and `ratio` are of steps with
    drafts.
    """
    found = []
    for name, ranks in (("8B", 1), ("70B", 4)):
        model = ACTORS[name].sizes
        for sequences in SEQUENCES:
            count = counted(model, kind, drafts, sequences, vocabulary)
            plain = target_seconds(model, gpu, ranks, sequences, 1) + gpu.plain_host_s
            draft, eager = (
                draft_seconds(count, gpu, ranks, graph=graph) for graph in (True, False)
            )
            step = (
                target_seconds(model, gpu, ranks, sequences, drafts + 1) + draft + gpu.draft_host_s
            )
            found.append(
                {
                    "actor": f"{name} on {ranks}",
                    "sequences": sequences,
                    "launches": count.launches,
                    "gib": sum(nbytes for nbytes, _ in count.work) / 2**30,
                    "tflop": sum(flops for _, flops in count.work) / 1e12,
                    "draft_ms": 1e3 * draft,
                    "eager_ms": 1e3 * eager,
                    "plain_ms": 1e3 * plain,
                    "step_ms": 1e3 * step,
                    "break_even": step / plain,
                    "ratio": (1 + gpu.accepted) * plain / step,
                }
            )
    return found


def markdown(found: list[dict[str, Any]]) -> list[str]:
    out = [
        (
            "| actor, GPUs | sequences | launches of a drafting call | its GiB | its TFLOP | its"
            " ms, in a graph / eager | plain step, ms | step with drafts, ms | break-even MAL |"
            " tokens/s over plain |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        drafting = f"{r['draft_ms']:.2f} / {r['eager_ms']:.2f}"
        steps = (
            f"{r['plain_ms']:.2f} | {r['step_ms']:.2f} | {r['break_even']:.2f} | {r['ratio']:.2f}"
        )
        out.append(
            f"| {r['actor']} | {r['sequences']} | {r['launches']} | {r['gib']:.2f} |"
            f" {r['tflop']:.3f} | {drafting} | {steps} |"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine step on an H100, on paper.")
    parser.add_argument("--kind", default="hydra", choices=("medusa", "hydra"))
    parser.add_argument("--drafts", type=int, default=4, help="K, as many as heads")
    parser.add_argument(
        "--vocabulary", type=int, help="draft from so many tokens; default: from all"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="another value of an assumption"
    )
    options = parser.parse_args()
    known = {field.name for field in dataclasses.fields(Gpu)}
    if unknown := [pair for pair in options.set if pair.split("=")[0] not in known]:
        parser.error(f"unknown: {unknown[0]}; known: {', '.join(sorted(known))}")
    sys.stdout.write(
        "\n".join(
            markdown(
                rows(
                    overridden(Gpu(), options.set), options.kind, options.drafts, options.vocabulary
                )
            )
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
