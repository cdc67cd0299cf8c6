"""The loop tells the ranks when engines on their devices sleep and wake, in this order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo.megatron.team_turns import TeamTurns
from medusa_ppo.ppo.placement import CRITIC


class Asked:
    """Ranks and an engine that note what they are asked."""

    count = 4

    def __init__(self) -> None:
        self.events: list[Any] = []

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.events.append((method, *arguments))
        return []

    def sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    def wake(self) -> None:
        self.events.append("wake")


def test_ranks_leave_before_the_engine_wakes_and_know_what_it_has() -> None:
    asked = Asked()
    turns = TeamTurns("shared", asked)
    assert turns.read_on_device
    turns.engine_started(4000)
    turns.sleep(asked, 2)
    turns.wake(asked, 2)
    assert asked.events == [
        ("engine_has", 1000),
        "sleep 2",
        ("engine_has", 0),
        ("clear",),
        "wake",
        ("engine_has", 1000),
    ]
    assert turns.take()[names.ENGINE_WAKE_S] > 0 and turns.take() == {}


@pytest.mark.parametrize("placement", ["separate", "swapped", "in_turn"])
def test_with_devices_of_their_own_ranks_hear_nothing(placement: str) -> None:
    asked = Asked()
    turns = TeamTurns(placement, asked)
    critic = torch.nn.Linear(2, 2)
    turns.add(CRITIC, critic)
    turns.engine_started(4000)
    turns.sleep(asked, 1)
    with turns.aside():
        turns.wake(asked, 1)
    assert asked.events == ["sleep 1", "wake"] and not turns.read_on_device
    assert critic.weight.numel() == (0 if placement == "in_turn" else 4)
