"""Which of vLLM's CUDA graphs a step with drafts gets, asked of vLLM's own dispatchers: V1 rounds
capture sizes to what a sequence has with all drafts, V2 for each number of drafts.

    PYTHONPATH=. python tests/medusa_ppo/engines/test_graphs.py     # the table of docs/limits.md
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from medusa_ppo.engines.launch import graph_sizes

SEQUENCES = 1024
VLLM_STOPS_AT = 512
"""`VllmConfig._set_cudagraph_sizes`, on all but Blackwell."""
LIMITS = Path(__file__).parents[3] / "docs/limits.md"


def of_vllm(most_drafts: int) -> list[int]:
    """Sizes that vLLM 0.32 captures by itself: tokens, and multiples of a sequence's."""
    tokens = most_drafts + 1
    steps = {1, 2, 4, *range(8, 256, 8), *range(256, VLLM_STOPS_AT + 1, 16)}
    return sorted(steps | {count * tokens for count in steps if count * tokens <= VLLM_STOPS_AT})


def on_v1(sizes: list[int], most_drafts: int) -> CudagraphDispatcher:
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


def v1_graph_of(found: CudagraphDispatcher, sequences: int, drafts: int) -> tuple[str, int]:
    """Which graph a step gets, and of how many tokens."""
    uniform = drafts + 1 == found.uniform_decode_query_len
    mode, graph = found.dispatch(sequences * (drafts + 1), uniform_decode=uniform)
    return mode.name, graph.num_tokens


def on_v2(sizes: list[int], most_drafts: int, counts: list[int] | None) -> Any:
    """vLLM's manager of V2's graphs of the model, with our hook where `counts` are told."""
    pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    from vllm.v1.worker.gpu import cudagraph_utils

    from medusa_ppo.vllm_plugin.draft_graphs import with_a_graph_for_each_count

    speculative = SimpleNamespace(
        method="medusa",
        draft_model_config=SimpleNamespace(model="/some/heads"),
        num_speculative_tokens=most_drafts,
        num_speculative_tokens_per_batch_size=None,
    )
    speculative.uses_dynamic_speculative_decoding = lambda: (
        speculative.num_speculative_tokens_per_batch_size is not None
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative,
        num_speculative_tokens=most_drafts,
        additional_config={} if counts is None else {"medusa_ppo_counts": counts},
    )
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = SimpleNamespace(get_global_graph_pool=lambda: (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
        patch.setattr(cudagraph_utils, "current_platform", platform)
        manager = cudagraph_utils.ModelCudaGraphManager
        patch.setattr(
            manager, "_init_candidates", with_a_graph_for_each_count(manager._init_candidates)
        )
        found = manager(config, None, CUDAGraphMode.FULL_AND_PIECEWISE, most_drafts + 1)
    assert speculative.num_speculative_tokens_per_batch_size is None, "the scheduler sees none"
    found._graphs_captured = True
    return found


def v2_graph_of(found: Any, sequences: int, drafts: int) -> tuple[str, int]:
    graph = found.dispatch(sequences, sequences * (drafts + 1), drafts + 1, 0)
    return graph.cg_mode.name, graph.num_tokens


def for_v2(most_drafts: int) -> list[int]:
    return graph_sizes(SEQUENCES, most_drafts, full=range(1, most_drafts + 2))


@pytest.mark.parametrize("most_drafts", [2, 4, 8])
def test_every_number_of_drafts_has_a_graph_for_every_batch(most_drafts: int) -> None:
    ours = on_v1(graph_sizes(SEQUENCES, most_drafts), most_drafts)
    for drafts in range(most_drafts + 1):
        for sequences in range(1, SEQUENCES + 1):
            wanted = "FULL" if drafts == most_drafts else "PIECEWISE"
            assert v1_graph_of(ours, sequences, drafts)[0] == wanted, (drafts, sequences)


@pytest.mark.parametrize("most_drafts", [2, 4, 8])
def test_v2_has_whole_graphs_of_every_number_of_drafts(most_drafts: int) -> None:
    ours = on_v2(for_v2(most_drafts), most_drafts, list(range(most_drafts + 1)))
    for drafts in range(most_drafts + 1):
        for sequences in range(1, SEQUENCES + 1):
            found = v2_graph_of(ours, sequences, drafts)
            assert found[0] == "FULL", (drafts, sequences)


def test_v2_without_being_told_has_them_for_all_drafts_alone() -> None:
    stock = on_v2(for_v2(4), 4, None)
    assert v2_graph_of(stock, 100, 4)[0] == "FULL" and v2_graph_of(stock, 100, 3)[0] != "FULL"


def test_left_to_itself_vllm_has_none_for_most_batches() -> None:
    asked: list[tuple[Callable[[Any, int, int], tuple[str, int]], Any]] = [
        (v1_graph_of, on_v1(of_vllm(4), 4)),
        (v2_graph_of, on_v2(of_vllm(4), 4, None)),
    ]
    for graph_of, stock in asked:
        assert graph_of(stock, 100, 4)[0] == "FULL"
        assert graph_of(stock, 103, 4)[0] == "NONE"


def test_sizes_are_few_and_fit_into_a_step() -> None:
    assert len(graph_sizes(SEQUENCES, 4)) < 80
    assert len(for_v2(4)) < 85
    assert graph_sizes(3, 4) == [5, 10, 15]
    assert max(graph_sizes(SEQUENCES, 4, 2048)) <= 2048


# ---- the table


def rows() -> list[str]:
    """For each number of drafts of a step up to how many sequences it gets which graph, and the
    most tokens that the graph has beside the step's own from 32 sequences on.
    """
    found = []
    for most in (4, 8):
        told = list(range(most + 1))
        asked: list[tuple[Callable[[Any, int, int], tuple[str, int]], Any]] = [
            (v1_graph_of, on_v1(of_vllm(most), most)),
            (v1_graph_of, on_v1(graph_sizes(SEQUENCES, most), most)),
            (v2_graph_of, on_v2(of_vllm(most), most, None)),
            (v2_graph_of, on_v2(for_v2(most), most, told)),
        ]
        for drafts in range(most + 1):
            cells = [_cell(graph_of, manager, drafts) for graph_of, manager in asked]
            found.append(f"| {most} | {drafts} | {' | '.join(cells)} |")
    return found


def _cell(graph_of: Callable[[Any, int, int], tuple[str, int]], found: Any, drafts: int) -> str:
    kinds = [graph_of(found, sequences, drafts) for sequences in range(1, SEQUENCES + 1)]
    parts = []
    for name, word in (("FULL", "full"), ("PIECEWISE", "piecewise")):
        those = [number for number, (kind, _) in enumerate(kinds, start=1) if kind == name]
        if those:
            parts.append(f"{word} to {max(those):,}")
    beside = max(
        (
            tokens / (number * (drafts + 1)) - 1
            for number, (kind, tokens) in enumerate(kinds, start=1)
            if kind != "NONE" and number >= 32
        ),
        default=0.0,
    )
    return f"{', '.join(parts)} (+{beside:.0%})"


def test_the_table_of_the_limits_is_what_the_dispatchers_say() -> None:
    text = LIMITS.read_text()
    missing = [row for row in rows() if row not in text]
    assert not missing, "\n".join(missing)


if __name__ == "__main__":
    print("\n".join(rows()))
