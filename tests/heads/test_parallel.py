"""Vocabulary-parallel heads on two gloo processes against whole ones in one: losses, gradients,
drafts, files, and what crosses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heads.errors import ConfigError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.parallel import ParallelHeads, ShardedVocabulary
from heads.vocabulary import WHOLE

D, V, K, N = 16, 1001, 3, 23  # As in parallel_ranks.py.
RANKS = 2
KINDS = ("medusa-shared", "medusa-own", "hydra")
LOSSES = ("ce", "tv", "kl_tv", "all")


@pytest.fixture(scope="module")
def figures(
    run_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(
        Path(__file__).with_name("parallel_ranks.py"),
        RANKS,
        str(folder / "store"),
        str(folder / "figures.json"),
    )
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_one_process(
    figures: list[dict[str, Any]], kind: str, loss: str
) -> None:
    for rank in figures:
        assert rank[f"loss-{kind}-{loss}"] < 3e-6
        assert rank[f"size-{kind}-{loss}"] > 1e-3
        assert rank[f"gradient-{kind}-{loss}"] < 3e-6 * max(1.0, rank[f"size-{kind}-{loss}"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_clipped_by_the_whole_head(figures: list[dict[str, Any]], kind: str) -> None:
    for rank in figures:
        assert rank[f"clip-{kind}"] < 1e-5
        assert max(rank[f"clip-norm-{kind}-{k}"] for k in range(K)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_their_probabilities_are_those_of_one_process(
    figures: list[dict[str, Any]], kind: str
) -> None:
    for rank in figures:
        assert rank[f"argmax-{kind}"] == 0
        for cut in ("plain", "top_k", "top_p", "both"):
            assert rank[f"draft-probability-{kind}-{cut}"] < 1e-5


def test_a_teacher_that_is_cut(figures: list[dict[str, Any]]) -> None:
    assert max(rank["loss-cut-teacher"] for rank in figures) < 3e-6


def test_cuts_keep_the_same_tokens(figures: list[dict[str, Any]]) -> None:
    for rank in figures:
        assert [rank[f"cut-{name}"] for name in ("top_k", "top_p", "both", "most", "one")] == [
            0
        ] * 5


def test_the_likeliest_token_is_the_smallest_among_equals(figures: list[dict[str, Any]]) -> None:
    for rank in figures:
        assert rank["tied argmax"] == [2, 2]


def test_logits_do_not_cross(figures: list[dict[str, Any]]) -> None:
    """Counted elements: three numbers per row and head, and the features' gradient; nothing is
    gathered.
    """
    for rank in figures:
        traffic = rank["traffic"]
        assert traffic.keys() == {"all_reduce", "largest", "logits"}
        assert traffic["all_reduce"] == N * K * (3 + D)
        assert traffic["largest"] == N * K * D
        assert traffic["all_reduce"] < traffic["logits"] / 50
        assert rank["traffic-argmax"] == 2 * N


@pytest.mark.parametrize("kind", KINDS)
def test_files_load_at_another_tensor_parallel_size(
    figures: list[dict[str, Any]], kind: str
) -> None:
    for rank in figures:
        assert rank[f"file-{kind}"] == 0
        assert rank[f"reshard-{kind}"] == 0
        assert rank[f"padding-{kind}"] == 0


def test_a_failing_rank_ends_all(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "one_fails.py"
    script.write_text(
        "import sys, time\nif sys.argv[1] == '0':\n    sys.exit('rank 0 has"
        " enough')\ntime.sleep(600)\n"
    )
    with pytest.raises(AssertionError, match="rank 0 has enough"):
        run_ranks(script, 2, timeout_s=30)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_and_sizes_that_do_not_fit(alone: Any) -> None:
    vocabulary = ShardedVocabulary(V, alone)
    logits_NV = torch.randn(N, V)
    assert torch.equal(vocabulary.argmax(logits_NV), WHOLE.argmax(logits_NV))
    with pytest.raises(ConfigError, match="spread"):
        ShardedVocabulary(V, alone, rows_per_rank=1000)
    with pytest.raises(ConfigError, match="another size"):
        ParallelHeads(HeadsConfig(D, V + 1, K), vocabulary)
    share = ParallelHeads.shard(MedusaHeads(HeadsConfig(D, V, K)), vocabulary)
    with pytest.raises(ConfigError, match="lm_head does not fit"):
        share.factored(torch.randn(N, D), torch.randn(V - 1, D))
