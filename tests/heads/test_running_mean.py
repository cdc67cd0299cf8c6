"""The running mean of heads: its length at the start, its arithmetic, a new beginning."""

from __future__ import annotations

import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from heads.running_mean import WARM, RunningMean


def heads(value: float) -> MedusaHeads:
    made = MedusaHeads(HeadsConfig(4, 6, num_heads=2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def level(mean: RunningMean) -> float:
    values = torch.cat([parameter.flatten() for parameter in mean.heads.parameters()])
    assert torch.equal(values, values[:1].expand_as(values))
    return round(float(values[0]), 6)


def test_heads_from_nothing_are_left_behind_at_once() -> None:
    mean = RunningMean(heads(0.0), 0.9)
    for _ in range(30):
        mean.add(heads(1.0).parameters())
    assert level(mean) > 0.999 > 1 - 0.9**30, "nine tenths kept from the first step on would leave more of the start"


def test_trained_heads_weigh_in_full() -> None:
    mean = RunningMean(heads(0.0), 0.9, steps=WARM)
    mean.add(heads(1.0).parameters())
    assert level(mean) == 0.1
    mean.add(heads(1.0).parameters())
    assert level(mean) == 0.19
    assert not any(parameter.requires_grad for parameter in mean.heads.parameters())


def test_nothing_kept_is_the_last_heads() -> None:
    mean = RunningMean(heads(0.0), 0.0)
    for value in (3.0, 5.0):
        mean.add(heads(value).parameters())
    assert level(mean) == 5.0


def test_a_restart_forgets_what_was() -> None:
    mean = RunningMean(heads(0.0), 0.9)
    mean.add(heads(1.0).parameters())
    mean.restart(heads(7.0).trainable_state())
    assert level(mean) == 7.0
    mean.add(heads(8.0).parameters())
    assert level(mean) == 7.1
