"""CUDA graphs in vLLM's V2 model runner, where a step may have any number of drafts: graphs of the
model, and of the drafting call.

The drafting call has a graph for each number of requests that vLLM captures, each number of drafts,
and with or without top-k and top-p ("cut"). Those without are captured together with vLLM's own,
where its memory profile counts them. The others (with a cut, and all of them after shapes change,
for example when a draft vocabulary begins) are captured on first use. A swap or a sync changes no
address (`drafting.fixed`), so graphs stay valid.

The call uses no generator: its random numbers are counted from seed and position.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from medusa_ppo.vllm_plugin.speculation import drafts_of_steps, heads_folder

logger = logging.getLogger(__name__)

CALL = Callable[[int, int, bool], None]
"""The drafting call on the current inputs: requests, drafts, whether top-k or top-p are used."""


def can_capture() -> bool:
    """Whether the installed vLLM's manager captures a function that it is given, as in 0.32."""
    known = inspect.signature(CudaGraphManager.capture).parameters
    made = inspect.signature(CudaGraphManager.__init__).parameters
    return {"create_forward_fn", "progress_bar_desc"} <= set(known) and "decode_query_len" in made


@dataclass(frozen=True)
class DraftDescriptor(BatchExecutionDescriptor):
    """Which call a graph holds."""

    drafts: int = 0
    cut: bool = False


def sizes_of(captured: Sequence[int], most_requests: int) -> list[int]:
    """Numbers of requests that drafting is captured for: vLLM's own sizes, and a full batch if they
    reach that far.
    """
    sizes = {size for size in captured if size < most_requests}
    if captured and max(captured) >= most_requests:
        sizes.add(most_requests)
    return sorted(sizes)


class DraftGraphs(CudaGraphManager):
    """vLLM's own graph manager (with its pool, streams and memory profile), for our call.

    Attributes:
        sizes: numbers of requests, ascending.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        call: CALL,
        clear: Callable[[int], None],
    ) -> None:
        """
        Args:
            clear: gives this many rows of the inputs to no request.
        """
        captured = vllm_config.compilation_config.cudagraph_capture_sizes or []
        self.sizes = sizes_of(captured, vllm_config.scheduler_config.max_num_seqs)
        self._call = call
        self._clear = clear
        self._layout: Hashable = None
        super().__init__(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)

    def _init_candidates(self) -> None:
        """vLLM dispatches by tokens; we do by requests and drafts (`of`)."""

    def capture_all(self, counts: Sequence[int], layout: Hashable) -> None:
        """Capture these numbers of drafts without a cut, for all sizes, the largest first so that
        the others reuse its memory.
        """
        self._renew_for(layout)
        sizes = reversed(self.sizes)
        self._record([_descriptor(size, count, False) for size in sizes for count in counts])

    def of(
        self, requests: int, drafts: int, cut: bool, layout: Hashable
    ) -> tuple[DraftDescriptor | None, bool]:
        """The graph for a call, and whether it was captured just now, which overwrites the inputs.
        None: there are more requests than in any graph.

        Args:
            layout: what the graphs depend on besides values; if it differs, they are captured
                again.
        """
        place = bisect.bisect_left(self.sizes, requests)
        if place == len(self.sizes):
            return None, False
        self._renew_for(layout)
        wanted = _descriptor(self.sizes[place], drafts, cut)
        if wanted in self.graphs:
            return wanted, False
        logger.info(
            "Capturing the drafting call of %d sequences, %d drafts%s.",
            wanted.num_reqs,
            drafts,
            ", top-k or top-p" if cut else "",
        )
        self._record([wanted])
        return wanted, True

    def _renew_for(self, layout: Hashable) -> None:
        if layout != self._layout:
            self.graphs.clear()
            self._layout = layout

    def _record(self, wanted: list[DraftDescriptor]) -> None:
        def prepared(desc: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            # The capture, and the run before it, are for no request.
            self._clear(desc.num_reqs)
            return lambda mode: self._call(desc.num_reqs, desc.drafts, desc.cut)

        self._capture_descs = {CUDAGraphMode.FULL: [*wanted]}
        # vLLM shows a progress bar by this name.
        super().capture(prepared, progress_bar_desc="Capturing drafting CUDA graphs")


def _descriptor(requests: int, drafts: int, cut: bool) -> DraftDescriptor:
    return DraftDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=requests,
        num_reqs=requests,
        uniform_token_count=1,
        drafts=drafts,
        cut=cut,
    )


# ---- graphs of the model


def with_a_graph_for_each_count(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`_init_candidates` of the model's graph manager: full graphs for each number of drafts that
    steps will have. vLLM makes them if a schedule by batch size names these numbers. We choose by
    measured times instead, so the schedule exists only during this call.
    """

    @functools.wraps(original)
    def _init_candidates(self: Any) -> None:
        config = self.vllm_config
        speculative = config.speculative_config
        counts = drafts_of_steps(config) if heads_folder(config) else []
        if len(counts) < 2 or speculative.num_speculative_tokens_per_batch_size is not None:
            original(self)
            return
        # With fewer sequences than numbers of drafts, the smallest numbers get no entry.
        schedule = [(place, place, count) for place, count in enumerate(counts, start=1)]
        speculative.num_speculative_tokens_per_batch_size = schedule
        try:
            original(self)
        finally:
            speculative.num_speculative_tokens_per_batch_size = None
        _see_the_next_of_each_count(self)

    return _init_candidates


def _see_the_next_of_each_count(manager: Any) -> None:
    """vLLM offers a step only the next larger full graphs. If these are all for other numbers of
    drafts, the step gets a piecewise one although a slightly larger full one exists; so we list the
    next one of each number.
    """
    full = [
        desc
        for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ())
        if desc.uniform_token_count is not None
    ]
    for loras in manager.lora_capture_cases:
        left = sorted(
            (desc for desc in full if desc.num_active_loras == loras),
            key=lambda desc: desc.num_tokens,
        )
        following: dict[Hashable, Any] = {}
        for tokens in range(left[-1].num_tokens if left else -1, -1, -1):
            while left and left[-1].num_tokens >= tokens:
                desc = left.pop()
                following[desc.uniform_token_count, desc.num_ubatches] = desc
            seen = manager._candidates.get((tokens, loras), [])
            others = [desc for desc in seen if desc not in following.values()]
            manager._candidates[tokens, loras] = [*following.values(), *others]


PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    ((ModelCudaGraphManager, "_init_candidates", with_a_graph_for_each_count),)
    if can_capture()
    else ()
)
