"""Rollouts as training data: what a run wrote trains heads without an engine, and a row that can't
be used is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from heads.errors import DataError
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.offline.collect import samples_from_rollouts
from medusa_ppo.offline.options import TrainOptions
from medusa_ppo.offline.scene import read_scene
from medusa_ppo.offline.train import train_heads
from medusa_ppo.ppo.generation import RolloutFiles
from medusa_ppo.runtime.console import OfflineProgress

ROW: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "logprobs": [-1.0, -0.5, 0.0],
    "temperature": 1.0,
    "top_p": 1.0,
}


def samples(rows: list[dict[str, Any]], *, context: int = 16, max_tokens: int = 100):
    return samples_from_rollouts(rows, 8, context, 1.0, max_tokens)


def test_rows_become_samples_newest_first():
    found = samples(
        [ROW, {"prompt_ids": [2], "response_ids": [5]}, {**ROW, "response_ids": [6, 6, 6]}]
    )
    assert [sample.ids for sample in found] == [(1, 2, 6, 6, 6), (2, 5), (1, 2, 3, 4, 5)]
    assert [sample.prompt for sample in found] == [0, 1, 0], "answers to one prompt have its number"
    assert [sample.spans for sample in found] == [((2, 5),), ((1, 2),), ((2, 5),)]
    assert found[0].logprobs == (-1.0, -0.5, 0.0) and found[1].logprobs is None
    assert len(samples([ROW, ROW, ROW], max_tokens=4)) == 2
    assert (
        len(
            samples(
                [ROW, {**ROW, "prompt_ids": [1] * 20}, {**ROW, "response_ids": [], "logprobs": []}]
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": "text"},
        {"response_ids": [3, 8, 5]},
        {"response_ids": [3, -1, 5]},
        {"logprobs": [-1.0]},
        {"logprobs": [-1.0, 0.5, 0.0]},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 5},
    ],
)
def test_a_row_that_can_not_be_used_is_named(change: dict[str, Any]):
    with pytest.raises(DataError, match=f"{next(iter(change))}.*\n*.*row 1"):
        samples([ROW, {**ROW, **change}])


def test_nothing_usable():
    with pytest.raises(DataError, match="No rollout is usable"):
        samples([{**ROW, "prompt_ids": []}])


def test_what_a_run_wrote_trains_heads(chain_actor: Path, tmp_path: Path):
    ids = [
        tuple(
            AutoTokenizer.from_pretrained(chain_actor)(
                f"{i} + {i + 1} = {2 * i + 1}; and so on"
            ).input_ids
        )
        for i in range(40)
    ]
    responses = tuple(
        Response(i, row[2:], (-0.5,) * (len(row) - 2), "stop") for i, row in enumerate(ids)
    )
    rollouts = Rollouts(tuple(row[:2] for row in ids), responses, Counters(), 1.0, Sampling())
    RolloutFiles(tmp_path, 3).write(7, rollouts)
    data = str(tmp_path / "rollouts")
    options = TrainOptions(
        model=str(chain_actor),
        data=data,
        out=tmp_path / "heads",
        num_heads=2,
        epochs=1,
        batch_positions=32,
    )
    assert train_heads(options, OfflineProgress(quiet=True))["tokens"] > 100
    setting = read_scene(str(chain_actor), data, "", 8, respond=True)
    assert setting.prompts == [row[:2] for row in ids], "eval answers their prompts anew"
    (file,) = (tmp_path / "rollouts").iterdir()
    assert json.loads(file.read_text().splitlines()[0])["step"] == 7
