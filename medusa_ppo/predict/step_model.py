"""How long one engine step takes: the actor's pass over all rows, samplers, drafting, the host.

A step with K drafts for S sequences passes S (K + 1) rows through the actor, verifies them, and
drafts again. It is compared with vLLM's own plain step: asynchronous, in CUDA graphs, not
configured for speculation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from medusa_ppo.predict.draft_work import HeadsDrafter, LayeredDrafter, layer_products
from medusa_ppo.predict.operator_times import RooflineTimes
from medusa_ppo.predict.step_costs import StepCosts
from medusa_ppo.runtime.hardware import BFLOAT16, ModelSizes

Drafter = HeadsDrafter | LayeredDrafter
PREFILL_ROWS = 2048
"""Rows in each pass that prefills prompts."""


class Steps(Protocol):
    """Step times on some machine.

    Attributes:
        source: where the seconds come from, in words.
    """

    source: str

    def plain(self, sequences: float, context: float) -> float:
        """vLLM's own step, without speculation."""
        ...

    def drafted(self, sequences: float, drafts: int, context: float) -> float:
        """A step of an engine with heads and this many drafts per sequence, which may be 0."""
        ...

    def prefill(self, tokens: float) -> float:
        """The prefill of this many prompt tokens."""
        ...


class GpuSteps:
    """Step times on GPUs, added up from their operations. None is below the host's time for it."""

    def __init__(
        self,
        model: ModelSizes,
        drafter: Drafter,
        times: RooflineTimes,
        ranks: int = 1,
        runner: Literal["v1", "v2"] = "v2",
        *,
        least_host: bool = True,
    ) -> None:
        """
        Args:
            runner: vLLM's model runner of the engine with heads; V2 schedules its steps ahead.
                Without heads it is vLLM's own choice.
            least_host: a step takes at least the host's time for one on V2. Earlier releases of
                vLLM, without V2, had other hosts.
        """
        self.model = model
        self.drafter = drafter
        self.source = times.source
        self._times = times
        self._costs: StepCosts = times.costs
        self._ranks = ranks
        self._v2 = runner == "v2"
        self._least_host = least_host

    def plain(self, sequences: float, context: float) -> float:
        seconds = self.forward(sequences, 1, context) + self._costs.plain_host_s
        return max(seconds, self._host(sequences))

    def drafted(self, sequences: float, drafts: int, context: float) -> float:
        costs = self._costs
        of_each = costs.v2_sequence_s if self._v2 else costs.draft_sequence_s
        configured = costs.plain_host_s + costs.draft_host_s + of_each * sequences
        seconds = self.forward(sequences, drafts + 1, context) + configured
        seconds += self.drafting(sequences, drafts, context) if drafts else 0.0
        # V1's host has as much to do, and the device waits for it.
        return max(seconds, self._host(sequences, drafts))

    def _host(self, sequences: float, drafts: int = 0) -> float:
        if not self._least_host:
            return 0.0
        costs = self._costs
        if drafts:
            return costs.v2_drafted_host_s + costs.v2_drafted_host_sequence_s * sequences
        return costs.v2_host_s + costs.v2_host_sequence_s * sequences

    def prefill(self, tokens: float) -> float:
        return tokens / PREFILL_ROWS * self.forward(1, PREFILL_ROWS, PREFILL_ROWS / 2)

    def forward(self, sequences: float, queries: int, context: float) -> float:
        """The actor's pass over `queries` rows of each sequence, and its samplers."""
        model, times, ranks = self.model, self._times, self._ranks
        rows = sequences * queries
        layer = self._products(layer_products(model, rows, ranks))
        layer += times.attention(model, ranks, sequences, queries, context)
        layer += times.passes(rows, model.hidden, self._costs.layer_passes, BFLOAT16)
        layer += 2 * times.reduce(rows, model.hidden, ranks)
        layer += self._costs.layer_launches * self._costs.launch_s
        head = times.product(rows, model.hidden, max(1, model.vocab // ranks))
        sampler = times.passes(rows, model.vocab, self._costs.sampler_reads)
        return model.layers * layer + head + sampler

    def drafting(self, sequences: float, drafts: int, context: float) -> float:
        """One drafting call. The host launches while the device works, so the slower one counts."""
        drafter, costs = self.drafter, self._costs
        if isinstance(drafter, HeadsDrafter):
            # Each rank runs all heads on all sequences, and draws by itself.
            device = self._products(drafter.own_products(sequences, drafts))
            device += self._shared_logits(drafter, sequences, drafts)
            device += self._times.passes(
                drafter.drawn_rows(sequences, drafts), drafter.width, costs.draw_reads
            )
            return max(device, drafter.launches(drafts) * costs.eager_s)
        device = self._products(drafter.products(sequences, drafts))
        queries = drafts + 1 if drafter.one_pass else 1
        device += drafter.layers * self._times.attention(
            drafter.model, 1, sequences, queries, context
        )
        return drafter.passes(drafts) * max(device, costs.pass_host_s)

    def _shared_logits(self, drafter: HeadsDrafter, sequences: float, drafts: int) -> float:
        """Logits of all drafts: each rank multiplies by its part of the rows and gathers those of
        the others, which is counted as an all-reduce. Heads that know the tokens before gather
        their embeddings as well.
        """
        times, ranks = self._times, self._ranks
        products = list(drafter.logit_products(sequences, drafts))
        seconds = sum(
            times.product(rows, inputs, max(1, outputs // ranks))
            + times.reduce(rows, outputs, ranks)
            for rows, inputs, outputs in products
        )
        if drafter.config.needs_embedding:
            seconds += drafts * times.reduce(sequences, drafter.config.hidden_size, ranks)
        return seconds

    def _products(self, products: Iterable[tuple[float, int, int]]) -> float:
        return sum(self._times.product(*product) for product in products)
