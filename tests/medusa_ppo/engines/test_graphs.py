"""Which of vLLM's CUDA graphs a step with drafts gets, asked of vLLM's own dispatcher: V1 rounds
capture sizes to what a sequence has with all drafts.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from medusa_ppo.engines.launch import graph_sizes

SEQUENCES = 1024
VLLM_STOPS_AT = 512
"""`VllmConfig._set_cudagraph_sizes`, on all but Blackwell."""


def dispatcher(sizes: list[int], most_drafts: int) -> CudagraphDispatcher:
    """As `GPUModelRunner` makes it for attention that takes whole graphs of uniform batches."""
    config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
    )
    config.adjust_cudagraph_sizes_for_spec_decode(most_drafts + 1)
    found = object.__new__(CudagraphDispatcher)
    found.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES),
        lora_config=None,
        num_speculative_tokens=most_drafts,
    )
    found.compilation_config = config
    found.uniform_decode_query_len = most_drafts + 1
    found.cudagraph_keys = {CUDAGraphMode.PIECEWISE: set(), CUDAGraphMode.FULL: set()}
    found.keys_initialized = found.specialize_lora_count = False
    found.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, most_drafts + 1)
    return found


def graph_of(found: CudagraphDispatcher, sequences: int, drafts: int) -> CUDAGraphMode:
    uniform = drafts + 1 == found.uniform_decode_query_len
    return found.dispatch(sequences * (drafts + 1), uniform_decode=uniform)[0]


@pytest.mark.parametrize("most_drafts", [2, 4, 8])
def test_every_number_of_drafts_has_a_graph_for_every_batch(most_drafts: int) -> None:
    ours = dispatcher(graph_sizes(SEQUENCES, most_drafts), most_drafts)
    for drafts in range(most_drafts + 1):
        for sequences in range(1, SEQUENCES + 1):
            wanted = CUDAGraphMode.FULL if drafts == most_drafts else CUDAGraphMode.PIECEWISE
            assert graph_of(ours, sequences, drafts) == wanted, (drafts, sequences)


def test_left_to_itself_v1_has_none_for_most_batches() -> None:
    stock = dispatcher([1, 2, 4, *range(8, VLLM_STOPS_AT + 1, 8)], 4)
    assert graph_of(stock, 101, 4) == CUDAGraphMode.FULL
    assert graph_of(stock, 102, 4) == CUDAGraphMode.NONE


def test_sizes_are_few_and_fit_into_a_step() -> None:
    assert len(graph_sizes(SEQUENCES, 4)) < 80
    assert graph_sizes(3, 4) == [5, 10, 15]
    assert max(graph_sizes(SEQUENCES, 4, 2048)) <= 2048
