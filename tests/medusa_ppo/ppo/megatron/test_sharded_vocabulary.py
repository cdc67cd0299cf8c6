"""A vocabulary spread over two gloo processes against a whole one in one: log-probs, entropies,
gradients, cuts, and what crosses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from heads.errors import ConfigError
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary

V, N = 1001, 50  # As in sharded_vocabulary_ranks.py.
PADDED_ROWS = 512
RANKS = 2
CUTS = ("top_k", "top_p", "both", "most", "one")


@pytest.fixture(scope="module")
def figures(
    run_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(
        Path(__file__).with_name("sharded_vocabulary_ranks.py"),
        RANKS,
        str(folder / "store"),
        str(folder / "figures.json"),
    )
    return json.loads((folder / "figures.json").read_text())


def test_values_and_gradients_are_those_of_one_process(figures: list[dict[str, Any]]) -> None:
    for rank in figures:
        assert rank["logprobs"] < 1e-5
        assert rank["entropy"] < 1e-5
        assert rank["gradient"] < 3e-6


def test_cuts_keep_the_same_tokens(figures: list[dict[str, Any]]) -> None:
    for rank in figures:
        assert [rank["cuts"][name] for name in CUTS] == [0] * 5
        assert [rank["cuts with padding"][name] for name in CUTS] == [0] * 5


def test_padding_is_left_out(figures: list[dict[str, Any]]) -> None:
    rows = [rank["rows of a padded table"] for rank in figures]
    assert rows == [PADDED_ROWS, V - PADDED_ROWS]


def test_logits_do_not_cross(figures: list[dict[str, Any]]) -> None:
    """Counted elements: three numbers per row for the log-prob and one for the entropy; nothing is
    gathered.
    """
    for rank in figures:
        assert rank["traffic"] == {"all_reduce": 4 * N}


def test_sizes_that_do_not_fit(alone: dist.ProcessGroup) -> None:
    with pytest.raises(ConfigError, match="sharded"):
        ShardedVocabulary(V, alone, rows_per_rank=1000)


def test_a_failing_rank_ends_all(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "one_fails.py"
    script.write_text(
        "import sys, time\nif sys.argv[1] == '0':\n    sys.exit('rank 0 has"
        " enough')\ntime.sleep(600)\n"
    )
    with pytest.raises(AssertionError, match="rank 0 has enough"):
        run_ranks(script, 2, timeout_s=30)
