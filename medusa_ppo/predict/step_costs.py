"""What a prediction assumes besides a GPU's tables: each cost with its unit, reason and range."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """Costs of an engine's step that no table of operators has.

    `plain_host_s`, `draft_host_s` and `pass_host_s` are fitted to the first half of
    benchmarks/published_cases.json by `python benchmarks/predict_published.py`; a test compares
    them with the result of that script.

    Attributes:
        flops_share: share of the vendor's FLOP/s that large matrix products reach. Used without
            tables.
        memory_share: share of the vendor's memory speed that large reads reach. Used without
            tables.
        small_share: share of the vendor's memory speed that passes of samplers and norms reach.
        layer_passes: reads and writes of a layer's rows between its matrix products (norms,
            rotations, gate), in widths of the hidden state.
        layer_launches: kernels of a layer other than matrix products.
        launch_s: time from one kernel to the next inside a CUDA graph.
        eager_s: the host's time to launch one operation outside a graph.
        reduce_s: an all-reduce of a few rows between tensor-parallel ranks; each layer has two.
            Used without tables.
        sampler_reads: float32 passes over the logits of a row in vLLM's samplers.
        draw_reads: float32 passes over a draft's logits when we draw it: scale, softmax, running
            sums, search.
        plain_host_s: host time in a plain step while the device waits.
        draft_host_s: what being configured for speculation adds to that, with drafts or without.
        draft_sequence_s: what it adds per running sequence on V1: the host keeps drafts, positions
            and accepted tokens by request. From vllm#49548: K = 0 costs 0.95 ms at 2 sequences and
            16.6 ms at 189.
        v2_sequence_s: the same on V2, which schedules steps ahead. From an 8B's shape on an H200: 8
            us at 64 sequences and 15 at 16 (53 and 66 if steps are not scheduled ahead).
        v2_host_s, v2_host_sequence_s: the host's time for a plain step on V2, and per running
            sequence. The device works meanwhile, so the longer of the two counts. From a 1.5B's
            shape on that machine, with 1 and 32 sequences. An engine without heads is on V2
            whatever the one with heads is on, and no step on V1 is taken to be shorter either.
        v2_drafted_host_s, v2_drafted_host_sequence_s: the same for a step with drafts, from that
            shape with one sequence and the 8B's with 64, which takes no longer.
        pass_host_s: the host's time for one pass of a drafter that runs pass by pass. The device
            works meanwhile, so the longer of the two counts.
    """

    flops_share: float = 0.65
    memory_share: float = 0.8
    small_share: float = 0.35
    layer_passes: float = 14.0
    layer_launches: float = 5.0
    launch_s: float = 1.5e-6
    eager_s: float = 6e-6
    reduce_s: float = 10e-6
    sampler_reads: float = 6.0
    draw_reads: float = 10.0
    plain_host_s: float = 0.00097
    draft_host_s: float = 0.00055
    draft_sequence_s: float = 84e-6
    v2_sequence_s: float = 12e-6
    v2_host_s: float = 0.0025
    v2_host_sequence_s: float = 37e-6
    v2_drafted_host_s: float = 0.005
    v2_drafted_host_sequence_s: float = 136e-6
    pass_host_s: float = 0.00093


RANGES: dict[str, tuple[float, float]] = {
    "flops_share": (0.5, 0.75),
    "memory_share": (0.7, 0.9),
    "small_share": (0.2, 0.6),
    "launch_s": (1e-6, 3e-6),
    "eager_s": (3e-6, 10e-6),
    "sampler_reads": (4.0, 10.0),
    "draw_reads": (6.0, 14.0),
    "plain_host_s": (0.0002, 0.0013),
    "draft_host_s": (0.0002, 0.002),
    "draft_sequence_s": (10e-6, 100e-6),
    "v2_sequence_s": (5e-6, 60e-6),
    "v2_host_s": (0.001, 0.003),
    "v2_host_sequence_s": (10e-6, 50e-6),
    "v2_drafted_host_s": (0.003, 0.006),
    "v2_drafted_host_sequence_s": (20e-6, 165e-6),
}
"""Ranges of uncertain costs; a prediction's interval shows what it would be at their ends. Costs
that are not listed change no prediction by as much as a percent.
"""


def varied(costs: StepCosts) -> Iterator[tuple[str, StepCosts, StepCosts]]:
    """Each uncertain cost at the lower and the upper end of its range, with the others
    unchanged.
    """
    for name, (low, high) in RANGES.items():
        yield (
            name,
            dataclasses.replace(costs, **{name: low}),
            dataclasses.replace(costs, **{name: high}),
        )
