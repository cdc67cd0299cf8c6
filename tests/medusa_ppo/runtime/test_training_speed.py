"""The operations that training is said to take at least are those that torch counts in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heads.modules import MedusaHeads
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.runtime.training_speed import training_operations
from tests.medusa_ppo.companion.conftest import ChainTask

WIDTH = 128


@pytest.mark.parametrize("drafted", [WIDTH, WIDTH // 2])
@pytest.mark.parametrize(
    "settings",
    [{}, {"kind": "hydra", "context": 0}, {"kind": "medusa"}, {"kind": "medusa", "lm_head": "own"}],
)
def test_a_pass_takes_these_operations_at_least(settings: dict[str, Any], drafted: int) -> None:
    task = ChainTask(vocab=WIDTH, hidden=WIDTH)
    config = HeadsSection(num_heads=3, **settings).sizes(WIDTH, WIDTH)
    heads = MedusaHeads(config)
    if config.lm_head == "own":
        heads.init_own_lm_heads(task.lm_head_VD)
    once = CompanionConfig(epochs=1)
    trainer = HeadsTrainer(heads, task.lm_head_VD, once, 0, embedding_VD=task.lm_head_VD)
    if drafted < WIDTH:
        trainer.ids_W = torch.arange(drafted)
    with FlopCounterMode(display=False) as counted:
        trainer.train_batch(task.batch(sequences=16, length=40))
    found = counted.get_total_flops() / trainer.trained_tokens
    # Left out are backward products that only some matrices need, attention, and the actor's own
    # distribution, which some losses compare with.
    assert 1.0 <= found / training_operations(config, drafted) < 1.5
