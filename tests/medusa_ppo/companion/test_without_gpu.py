"""The companion's share of a Ray's GPUs, and the warning if there is none. Ray's answers are
doubles: no test machine has GPUs in a Ray.
"""

from __future__ import annotations

import logging

import pytest
import ray
import torch

from heads.heads_config import HeadsConfig
from medusa_ppo.companion import client, without_gpu
from medusa_ppo.companion.without_gpu import gpus_left
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.runtime.hardware import Hardware

HEADS = HeadsConfig(16, 12, 2)


def cluster(monkeypatch: pytest.MonkeyPatch, gpus: float, free: float, machine: int = 0) -> None:
    found = Hardware(machine, machine > 0, 8, "made up")
    monkeypatch.setattr(without_gpu, "find_hardware", lambda: found)
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
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (gpus > 0 and not left)
    for text in warnings:
        assert "(of 8)" in text and "threads: 1)" in text
        assert all(way in text for way in ("0.1 GPU", "companion.resource", "engine.draft_vocab"))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("machine", "resource", "warned"), [(8, None, 1), (0, None, 0), (8, "n", 0)]
)
def test_a_ray_without_the_machines_gpus_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: int,
    resource: str | None,
    warned: int,
) -> None:
    """As a Ray of ours where the processes of a training have all GPUs of the machine."""
    cluster(monkeypatch, 0.0, 0.0, machine)
    with caplog.at_level(logging.WARNING):
        assert gpus_left(CompanionConfig(resource=resource), HEADS, None) == 0
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warned and all("no GPU is left for it (of 8)" in text for text in texts)


def test_a_loop_is_warned_when_its_companion_starts_unless_it_asked_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster(monkeypatch, 8.0, 0.0)
    with caplog.at_level(logging.WARNING):
        assert client._with_gpus(CompanionConfig(num_gpus=0.0), HEADS, None).num_gpus == 0
        assert not caplog.records
        assert client._with_gpus(CompanionConfig(), HEADS, None).num_gpus == 0
    assert "The companion trains on the CPU" in caplog.text
