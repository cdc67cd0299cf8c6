"""What of a Ray's GPUs the companion gets, and what is said where it gets none. Ray's answers are
doubles: no test machine has GPUs.
"""

from __future__ import annotations

import logging

import pytest
import ray
import torch

from heads.heads_config import HeadsConfig
from medusa_ppo.companion import client
from medusa_ppo.companion.without_gpu import gpus_left, operations
from medusa_ppo.config.companion_section import CompanionConfig

HEADS = HeadsConfig(16, 12, 2)


def cluster(monkeypatch: pytest.MonkeyPatch, gpus: float, free: float) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": gpus})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 8.0, "GPU": free})


@pytest.mark.parametrize(("gpus", "free", "left"), [(8.0, 0.2, 0.1), (8.0, 0.1, 0.0), (0, 0, 0)])
def test_two_workers_get_a_share_each_or_none(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpus: float,
    free: float,
    left: float,
) -> None:
    cluster(monkeypatch, gpus, free)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        assert gpus_left(CompanionConfig(workers=2, cores=(0,)), HEADS, None) == left
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (gpus > 0 and not left)
    for text in said:
        assert "all GPUs of this Ray (8)" in text and "threads: 1;" in text
        assert all(way in text for way in ("0.1 GPU", "companion.resource", "engine.draft_vocab"))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_operations_are_those_of_the_heads_and_of_the_tokens_that_drafts_come_from() -> None:
    # Two layers of [16, 16]; logits of two heads forward and back, of the actor forward.
    assert operations(HEADS, 12) == 6 * 2 * 16 * 16 + 2 * (2 * 2 + 1) * 16 * 12
    assert operations(HEADS, 4) < operations(HEADS, 12)
    own = HeadsConfig(16, 12, 2, lm_head="own")
    assert operations(own, 12) == 6 * 2 * (16 * 16 + 16 * 12) + 2 * 16 * 12


def test_a_loop_is_told_when_its_companion_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster(monkeypatch, 8.0, 0.0)
    with caplog.at_level(logging.WARNING):
        for given in (None, 0.0):
            # What the client starts it with.
            assert client._with_gpus(CompanionConfig(num_gpus=given), HEADS, None).num_gpus == 0
    told = [r for r in caplog.records if "The companion trains on the CPU" in r.getMessage()]
    assert len(told) == 1, "who says that it gets none needs not be told"
