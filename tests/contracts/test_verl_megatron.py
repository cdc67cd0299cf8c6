"""Contract with verl's Megatron workers: names and signatures, and verl's own engine run on two
gloo processes under our worker.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-contracts")
pytest.importorskip("megatron.core")

from tests.contracts.sources import source

RANKS = Path(__file__).with_name("verl_megatron_ranks.py")
CASES = (
    "tensor",
    "tensor, rows of equal length",
    "micro-batches in another order",
    "sequence",
    "context",
    "pipeline",
    "data",
)
REPORTER = {"pipeline": 1}


def test_the_engine_has_what_the_tap_relies_on() -> None:
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl
    from verl.workers.engine.megatron.transformer_impl import (
        MegatronEngine,
        MegatronEngineWithLMHead,
    )

    assert EngineRegistry.get_engine_cls("language_model", "megatron") is MegatronEngineWithLMHead
    step = list(inspect.signature(MegatronEngineWithLMHead.forward_step).parameters)
    assert step[:3] == ["self", "batch_iter", "model"]
    assert "batch: TensorDict = next(batch_iter)" in source(MegatronEngineWithLMHead.forward_step)
    run = source(MegatronEngine.forward_backward_batch)
    assert "self.forward_step," in run and "model=self.module," in run
    assert "self.module = self._build_megatron_module()" in source(MegatronEngine.initialize)
    assert list(inspect.signature(MegatronEngine.to).parameters) == [
        "self",
        "device",
        "model",
        "optimizer",
        "grad",
    ]
    assert isinstance(MegatronEngine.is_param_offload_enabled, property)
    assert "get_data_parallel_rank" in vars(MegatronEngine)
    outputs = source(MegatronEngine.is_mp_src_rank_with_outputs)
    for part in (
        "get_tensor_model_parallel_rank() == 0",
        "get_context_parallel_rank() == 0",
        "get_pipeline_model_parallel_world_size() - 1",
    ):
        assert (
            part in outputs
        )  # The rank that has verl's log-probs is the one on which our rows come together.
    assert inspect.signature(MegatronEngine._get_context_parallel_layout).parameters.keys() == {
        "unwrapped_model"
    }
    assert 'return "zigzag"' in source(MegatronEngine._get_context_parallel_layout)
    assert hasattr(transformer_impl, "mpu")


@pytest.fixture(scope="module")
def figures(
    run_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(RANKS, 2, str(folder / "store"), str(folder / "figures.json"), timeout_s=400)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_verls_own_pass_is_tapped(figures: list[dict[str, Any]], case: str) -> None:
    ranks = [rank[case] for rank in figures]
    assert (
        [rank["reports"] for rank in ranks]
        == [rank["tables"] for rank in ranks]
        == [i == REPORTER.get(case, 0) for i in range(2)]
    )
    assert all(rank["clean"] for rank in ranks)
    (found,) = [rank for rank in ranks if rank["reports"]]
    assert (
        found["outputs"] and found["lengths"] == [2, 3, 1, 4] and found["prompts"] == [0, 1, 0, 2]
    )
    assert found["hidden"] < 1e-4 and found["logprobs"] < 1e-4
    assert found["lm_head"] == found["embedding"] == found["sent"] == 0.0
    assert found["sent of"] < 1.0


def test_other_replicas_do_not_notice(figures: list[dict[str, Any]]) -> None:
    other = figures[1]["data"]
    assert other["replica"] == 1 and other["outputs"] and not other["reports"]


def test_verls_log_probs_stay_what_they_are_to_the_bit(figures: list[dict[str, Any]]) -> None:
    assert all(rank["unchanged"]["same"] for rank in figures)
