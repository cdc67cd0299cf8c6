"""How long one operation takes on a GPU: a matrix product, an attention, a pass over memory, an
all-reduce.

`RooflineTimes` calculates it from shares of the vendor's figures. `TableTimes`
(`measured_tables.py`) looks up measured times of vLLM's operators.
"""

from __future__ import annotations

from medusa_ppo.predict.gpus import GpuFigures
from medusa_ppo.predict.step_costs import StepCosts
from medusa_ppo.runtime.hardware import BFLOAT16, FLOAT32, ModelSizes


def attention_flops(model: ModelSizes, sequences: float, queries: int, context: float) -> float:
    """Floating-point operations of one layer's attention."""
    return 4.0 * model.heads * model.head_dim * context * sequences * queries


class RooflineTimes:
    """Time to read or time to multiply, whichever is longer, at shares of the vendor's figures.

    Attributes:
        source: where the seconds come from, in words.
    """

    def __init__(self, gpu: GpuFigures, costs: StepCosts) -> None:
        self.gpu = gpu
        self.costs = costs
        self.source = f"a roofline of the {gpu.name}, from its vendor's figures"

    def product(self, rows: float, inputs: int, outputs: int) -> float:
        """Seconds for rows `[N, in]` times a bf16 weight `[out, in]`."""
        read = BFLOAT16 * (inputs * outputs + rows * (inputs + outputs))
        return self.bounded(read, 2.0 * rows * inputs * outputs)

    def attention(
        self, model: ModelSizes, ranks: int, sequences: float, queries: int, context: float
    ) -> float:
        """Seconds for one layer: `queries` new rows per sequence on `context` cached tokens."""
        cached = BFLOAT16 * model.cache_elements_of_rank(ranks) / model.layers * context * sequences
        return self.bounded(cached, attention_flops(model, sequences, queries, context) / ranks)

    def bounded(self, nbytes: float, flops: float) -> float:
        """Seconds for a large operation that reads this many bytes and takes this many FLOPs."""
        return max(
            nbytes / (self.gpu.memory_bytes_per_s * self.costs.memory_share),
            flops / (self.gpu.flops * self.costs.flops_share),
        )

    def passes(self, rows: float, width: float, reads: float, element: int = FLOAT32) -> float:
        """Seconds for small operations that read or write rows `[N, width]` this many times."""
        speed = self.gpu.memory_bytes_per_s * self.costs.small_share
        return element * rows * width * reads / speed

    def reduce(self, rows: float, width: int, ranks: int) -> float:
        """One all-reduce of bf16 rows between tensor-parallel ranks."""
        if ranks == 1:
            return 0.0
        return self.costs.reduce_s + 2 * BFLOAT16 * rows * width / self.gpu.link_bytes_per_s
