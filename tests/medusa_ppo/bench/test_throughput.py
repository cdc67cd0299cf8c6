"""The original recipe computes what it should, both recipes learn the same, and their rates are of
the same tokens.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import lm_head_weight, load_actor
from medusa_ppo.bench import heads_table
from medusa_ppo.bench.bench_options import HeadsBench
from medusa_ppo.bench.heads_table import (
    EPOCHS,
    first_tokens,
    original_loss,
    race,
    throughput_sentence,
    train_originally,
    train_ours,
)
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.offline.collect import Sample
from medusa_ppo.runtime.console import OfflineProgress

HEADS = 2


@pytest.fixture
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 5, 12, 7]
    ids = [tuple(torch.randint(1, 60, (n,), generator=generator).tolist()) for n in lengths]
    return [
        Sample(row, ((3, len(row)),), number, (-1.0,) * (len(row) - 3))
        for number, row in enumerate(ids)
    ]


def test_the_original_loss_is_that_of_each_written_token(
    chain_actor: Path, samples: list[Sample]
) -> None:
    actor = load_actor(chain_actor)
    lm_head_VD = lm_head_weight(actor).detach()
    heads = MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], HEADS))
    expected = 0.0
    for k in range(1, HEADS + 1):
        losses = []
        for sample in samples:
            with torch.no_grad():
                logits_TV = actor(torch.tensor([sample.ids])).logits[0]  # Heads start as lm_head.
            for target in range(3, len(sample.ids)):
                if target - k - 1 >= 0:
                    losses.append(
                        F.cross_entropy(logits_TV[target - k - 1], torch.tensor(sample.ids[target]))
                    )
        expected += float(torch.stack(losses).mean())
    assert float(original_loss(actor, heads, lm_head_VD, samples).detach()) == pytest.approx(
        expected, rel=1e-4
    )


def test_the_original_recipe_computes_where_the_actor_is(samples: list[Sample]) -> None:
    """Meta tensors stand in for a GPU's: they compute with no others."""
    seen: list[torch.device] = []

    def base_model(*, use_cache: bool, **given: torch.Tensor) -> SimpleNamespace:
        seen.extend(tensor.device for tensor in given.values())
        shape = given["input_ids"].shape
        return SimpleNamespace(last_hidden_state=torch.zeros(*shape, 16, device="meta"))

    actor: Any = SimpleNamespace(device=torch.device("meta"), base_model=base_model)
    heads = MedusaHeads(HeadsConfig(16, 64, HEADS)).to("meta")
    loss = original_loss(actor, heads, torch.zeros(64, 16, device="meta"), samples)
    assert loss.device == actor.device and seen == [actor.device] * 2


def test_heads_are_compared_on_the_gpu_if_there_is_one(
    chain_actor: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.nn.Module] = []
    trained_on: list[torch.device | None] = []

    class Recorder(HeadsTrainer):
        def __init__(self, *arguments: Any, device: torch.device | None = None, **named: Any):
            trained_on.append(device)
            super().__init__(*arguments, device=device, **named)

    def on_device(model: torch.nn.Module) -> torch.nn.Module:
        moved.append(model)
        return model

    doubles = {
        "on_device": on_device,
        "HeadsTrainer": Recorder,
        "HELD_OUT_RESPONSES": 1,
        "read_scene": lambda *_: SimpleNamespace(prompts=[(1, 2, 3)]),
        "engine_config": lambda *_: None,
        "running_engine": lambda *_: contextlib.nullcontext(),
        "response_rounds": lambda *_: [],
        "samples_of": lambda rounds: samples,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(heads_table, name, double)
    bench = HeadsBench(
        model=str(chain_actor), data="", template="", epochs=1, num_heads=HEADS, max_new_tokens=16
    )
    found = heads_table.collect(bench, OfflineProgress(quiet=True))
    assert moved == [found.actor]
    heads_table._train_and_judge(bench, "medusa", "ce", found)
    train_ours(found.actor, samples, HEADS, 8, 0)
    assert trained_on == [found.actor.device] * 2


def test_both_recipes_bring_the_loss_down(chain_actor: Path, samples: list[Sample]) -> None:
    actor = load_actor(chain_actor)
    lm_head_VD = lm_head_weight(actor).detach()
    start = float(
        original_loss(
            actor,
            MedusaHeads(HeadsConfig(lm_head_VD.shape[1], lm_head_VD.shape[0], HEADS)),
            lm_head_VD,
            samples,
        )
    )
    trained = [
        train_originally(actor, samples, HEADS, 8, 0, "own"),
        train_originally(actor, samples, HEADS, 8, 0, "shared"),
    ]
    for heads in (*trained, train_ours(actor, samples, HEADS, 8, 0)):
        with torch.no_grad():
            assert float(original_loss(actor, heads, lm_head_VD, samples)) < start
    assert trained[0].config.lm_head == "own" and not torch.equal(
        trained[0].own_lm_head(1), lm_head_VD
    )


def test_a_race_gives_rates_of_the_same_tokens(chain_actor: Path, samples: list[Sample]) -> None:
    chosen = first_tokens(samples, 7)
    assert chosen == samples[:2]
    figures = race(
        load_actor(chain_actor),
        samples,
        HEADS,
        8,
        0,
        OfflineProgress(quiet=True),
        tokens=7,
        rounds=1,
    )
    assert (
        figures["tokens"] == 8 and figures["epochs"] == EPOCHS and len(figures["tokens_per_s"]) == 3
    )
    speeds = figures["tokens_per_s"]
    assert figures["ratio"] == pytest.approx(speeds["ours"] / speeds["original"])
    assert f"x{figures['ratio']:.2f}" in throughput_sentence(figures)
