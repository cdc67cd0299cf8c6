"""Actors on two gloo processes, in every form that is said to work: tapped and gathered right, and
trained as without the plugin.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TABLE = 50 * 32 * 4
CUT = ("fsdp1", "fsdp1-flat", "fsdp2", "fsdp2-pieces", "fsdp2-checkpointed")
WHOLE = ("ddp", "ddp-checkpointed")


def run(folder: Path, forms: tuple[str, ...]) -> dict[str, Any]:
    """What each of two processes found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = [sys.executable, str(Path(__file__).with_name("sharded_ranks.py"))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ranks = [
        subprocess.Popen([*script, str(rank), port, str(folder), *forms], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {form: (found[0][form], found[1][form]) for form in found[0]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("ranks"), (*CUT, *WHOLE))


def holds(
    seen: tuple[dict[str, Any], dict[str, Any]], *, cut: bool, frozen: bool = False, tables: int = 2
) -> None:
    for rank in seen:
        assert rank["bit_equal"], "the plugin changed what is learned"
        assert rank["hidden"] < 2e-5 and rank["tables"] < 2e-5
        assert rank["changed"] == [True, not frozen] and rank["again"] == [not frozen, False]
        gathers = (1 if frozen else 3) if cut else 0
        assert rank["bytes"] == gathers * tables * TABLE, (
            "only the two tables, and only when they changed"
        )
    assert frozen or seen[0]["moved"] > 1e-3, "nothing was learned"


@pytest.mark.parametrize("form", [*CUT, *WHOLE])
def test_each_form_is_tapped_gathered_and_left_alone(form: str, ranks: dict[str, Any]):
    holds(ranks[form], cut=form in CUT)


def test_no_rank_holds_more_of_a_table_than_a_piece(ranks: dict[str, Any]):
    """All ranks' devices had the whole table for a moment, 2.5 GB of an 8B's in float32."""
    assert {rank["largest"] for rank in ranks["fsdp2"]} == {TABLE}
    assert {rank["largest"] for rank in ranks["fsdp2-pieces"]} == {5 * 50 * 4}


@pytest.mark.slow
def test_compiled(tmp_path: Path):
    holds(run(tmp_path, ("ddp-compiled",))["ddp-compiled"], cut=False)


def test_a_piece_is_never_taken_for_the_table(ranks: dict[str, Any]):
    assert all(
        "only a shard of the actor's table" in rank["error"] for rank in ranks["unrefreshed"]
    )


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="PEFT is in the environments of make test-contracts",
)
def test_adapters(tmp_path: Path):
    seen = run(tmp_path, ("ddp-lora", "fsdp2-lora", "fsdp2-lora-tables", "ddp-lora-saved"))
    holds(seen["ddp-lora"], cut=False, frozen=True)
    holds(seen["fsdp2-lora"], cut=True, frozen=True)
    holds(seen["fsdp2-lora-tables"], cut=True)
    holds(seen["ddp-lora-saved"], cut=False)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is in the environments of make test-contracts",
)
def test_zero_3(tmp_path: Path):
    holds(run(tmp_path, ("zero3",))["zero3"], cut=True)
