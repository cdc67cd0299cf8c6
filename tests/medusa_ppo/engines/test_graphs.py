"""Which of vLLM's CUDA graphs a step with drafts gets, asked of vLLM's own dispatchers: V1 rounds
capture sizes to what a sequence has with all drafts, V2 captures whole steps of one length.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import cudagraph_utils

from medusa_ppo.engines.launch import graph_sizes
from medusa_ppo.vllm_plugin.vllm_versions import has_graphs, vllm_version

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


def v2_manager(sequences: int, most_drafts: int) -> Any:
    """V2's list of captured steps, as its runner makes it with vLLM's own sizes."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, VLLM_STOPS_AT + 1, 16)]
    speculative = SimpleNamespace(
        method="medusa",
        draft_model_config=SimpleNamespace(model="heads"),
        num_speculative_tokens_per_batch_size=None,
    )
    speculative.uses_dynamic_speculative_decoding = lambda: (
        speculative.num_speculative_tokens_per_batch_size is not None
    )
    found: Any = object.__new__(cudagraph_utils.CudaGraphManager)
    found.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=most_drafts,
        additional_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    found.compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
    )
    found.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    found.max_num_reqs, found.decode_query_len = sequences, most_drafts + 1
    found.varlen_decode, found.ubatch_runner, found.lora_capture_cases = False, None, [0]
    found._candidates, found._capture_descs = {}, {}
    found._graphs_captured = True
    found._resolve_effective_loras = lambda loras: loras
    return found


def whole_steps(manager: Any, most_drafts: int) -> set[tuple[int, int]]:
    """(sequences, drafts) of the steps that are captured whole."""
    return {
        (sequences, drafts)
        for drafts in range(most_drafts + 1)
        for sequences in range(1, manager.max_num_reqs + 1)
        if manager.dispatch(sequences, sequences * (drafts + 1), drafts + 1, 0, drafts + 1).cg_mode
        == CUDAGraphMode.FULL
    }


@pytest.mark.skipif(not has_graphs(vllm_version()), reason="not read in this release")
@pytest.mark.parametrize(("sequences", "most_drafts"), [(64, 4), (32, 8), (96, 2), (2, 4)])
def test_v2_has_a_whole_step_for_every_number_of_drafts(sequences: int, most_drafts: int) -> None:
    speculator = pytest.importorskip("medusa_ppo.vllm_plugin.speculator")
    init = cudagraph_utils.CudaGraphManager._init_candidates
    stock, ours = v2_manager(sequences, most_drafts), v2_manager(sequences, most_drafts)
    getattr(init, "__wrapped__", init)(stock)
    speculator.with_graphs_for_each_number(getattr(init, "__wrapped__", init))(ours)
    every = {
        (count, drafts) for count in range(1, sequences + 1) for drafts in range(most_drafts + 1)
    }
    assert {drafts for _, drafts in whole_steps(stock, most_drafts)} == {most_drafts}
    # With fewer sequences than numbers, the smallest numbers of drafts have none.
    few = {step for step in every if step[1] <= most_drafts - sequences}
    assert whole_steps(ours, most_drafts) == every - few
    assert ours.vllm_config.speculative_config.num_speculative_tokens_per_batch_size is None
