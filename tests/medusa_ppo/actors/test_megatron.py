"""Megatron's final hidden states on two gloo processes against a transformers copy of the same
weights, through the plugin's own hook.

Real megatron-core models (tests' shim: cpu_megatron.py). What its CPU forms can't run stands there
by name: torch's norms refuse sequence parallelism, and its local attention refuses context
parallelism and packed sequences, so these cases bring a norm and an attention of the tests' own;
everything else in them, rotary positions of packed and cut sequences included, is Megatron's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.errors import DataError
from medusa_ppo.actors.megatron_checkpoint import as_transformers
from medusa_ppo.actors.megatron_layout import (
    Gathering,
    Groups,
    Packing,
    context_positions,
    gather_rows,
    join_context,
)

pytest.importorskip("megatron.core")
from tests.medusa_ppo.actors.cpu_megatron import llama

CASES = ("tp", "sp", "cp", "dp", "packed-tp", "packed-cp", "packed-sp", "pp", "pp-tied")
REPORTER = {"pp": 1, "pp-tied": 1}
TOKENS = 28  # Response tokens of the four sequences.


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def figures(run_ranks: Callable[..., str], ranks_folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = ranks_folder
    run_ranks(
        Path(__file__).with_name("megatron_ranks.py"),
        2,
        str(folder / "store"),
        str(folder / "figures.json"),
        timeout_s=240,
    )
    found = json.loads((folder / "figures.json").read_text())
    for rank in found:
        for name, case in rank.items():
            assert "error" not in case, f"{name}: {case['error']}"
    return found


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_transformers(figures: list[dict[str, Any]], case: str) -> None:
    reporters = [rank[case] for rank in figures if rank[case]["reports"]]
    assert len(reporters) == (2 if case == "dp" else 1)
    assert case == "dp" or figures[REPORTER.get(case, 0)][case]["reports"]
    for found in reporters:
        assert found["rows"] == TOKENS
        assert found["hidden"] < 1e-5


@pytest.mark.parametrize("case", ["tp", "sp", "cp", "dp", "pp", "pp-tied"])
def test_whole_tables_reach_the_rank_that_reports(figures: list[dict[str, Any]], case: str) -> None:
    for rank in figures:
        assert ("lm_head" in rank[case]) == rank[case]["reports"]
        assert rank[case].get("lm_head", 0.0) == 0.0
        assert rank[case].get("embedding", 0.0) == 0.0


def test_the_actor_is_untouched(figures: list[dict[str, Any]]) -> None:
    for rank in figures:
        found = rank["gradients"]
        assert found["same"] and found["count"] > 10
        assert found["hooks"] == 0


def test_refusals(figures: list[dict[str, Any]]) -> None:
    for rank in figures:
        assert rank["refusals"] == {
            "said": ["ModelError", "DataError", "DataError"],
            "unwrapped": True,
        }


@pytest.mark.parametrize("kind", ["tp", "pp", "tied"])
def test_a_checkpoint_that_megatron_wrote_becomes_one_of_transformers(
    figures: list[dict[str, Any]], ranks_folder: Path, tmp_path: Path, kind: str
) -> None:
    """Layers, query groups and the vocabulary's rows were cut over two ranks, and the vocabulary
    has padding.
    """
    source = llama(tied=kind == "tied")
    source.config.save_pretrained(ranks_folder / kind)
    path = as_transformers(str(ranks_folder / kind), tmp_path / "model")
    found, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, ours), theirs in zip(found.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


# ---- bookkeeping


def test_context_parallel_pieces_by_hand() -> None:
    assert context_positions(0, 2, 8).tolist() == [0, 1, 6, 7]
    assert context_positions(1, 2, 8).tolist() == [2, 3, 4, 5]
    assert context_positions(0, 2, 12, (0, 4)).tolist() == [0, 3, 4, 5, 10, 11]
    assert context_positions(1, 2, 12, (0, 4)).tolist() == [1, 2, 6, 7, 8, 9]
    assert context_positions(0, 1, 3).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="multiple of 4"):
        context_positions(0, 2, 10)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_context_parallel_pieces_cover_everything_once(ranks: int) -> None:
    positions = torch.cat([context_positions(rank, ranks, 64, (0, 8, 40)) for rank in range(ranks)])
    assert sorted(positions.tolist()) == list(range(64))


def test_packed_sequences_become_rows() -> None:
    parameters = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 3, 3, 5, 5]),
        cu_seqlens_q_padded=torch.tensor([0, 4, 4, 8, 12]),
    )
    packing = Packing.read(parameters)
    assert packing == Packing(bounds=(0, 4, 4, 8), starts=(0, 4), lengths=(3, 2))
    hidden_T1D = torch.arange(12.0).view(12, 1, 1)
    assert packing.unpack(hidden_T1D).squeeze(-1).tolist() == [[0.0, 1.0, 2.0], [4.0, 5.0, 0.0]]
    assert Packing.read(
        SimpleNamespace(cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_q_padded=None)
    ) == Packing((0, 2), (0, 2), (2, 3))
    assert Packing.read(None) is None


def test_one_rank_needs_no_group() -> None:
    rows_VD = torch.randn(6, 2)
    (part,) = Gathering(rows_VD, None).wait()
    assert torch.equal(part, rows_VD)
    whole = gather_rows(rows_VD, None, 5)
    assert whole is not None and torch.equal(whole, rows_VD[:5])
    assert Groups().leads and join_context(rows_VD.unsqueeze(1), Groups(), None) is not None
