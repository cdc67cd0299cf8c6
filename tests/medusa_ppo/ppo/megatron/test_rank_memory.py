"""A learning role's memory on a rank: storages that are given up, lent and filled again, with every
view of them as it was.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")
from medusa_ppo.ppo.megatron.rank_memory import RankResident
from medusa_ppo.ppo.placement import ALL, CRITIC, REWARD, Resident, Turns

SIZE = 8
WEIGHTS = 4 * 2 * (SIZE * SIZE + SIZE)


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))


class Learning:
    """A module as Megatron keeps one: gradients in one buffer, with `flat` parameters in another
    one, and an optimizer that steps on views of it or on copies.
    """

    def __init__(self, *, flat: bool, copies: bool) -> None:
        self.module = layers(0)
        self.expected = layers(0).state_dict()
        parameters = list(self.module.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        self.gradients = torch.zeros(count)
        if flat:
            self.buffer = torch.zeros(count)
            for parameter, part in zip(parameters, self.parts(self.buffer), strict=True):
                part.copy_(parameter.data)
                parameter.data = part
        self.stepped = [
            parameter.detach().clone() if copies else parameter.detach() for parameter in parameters
        ]
        self.moments = [torch.zeros_like(stepped) for stepped in self.stepped]
        model: Any = SimpleNamespace(
            model=self.module,
            ddp=SimpleNamespace(buffers=[SimpleNamespace(grad_data=self.gradients)]),
        )
        optimizer: Any = SimpleNamespace(kept=self.kept)
        self.resident = RankResident(model, optimizer)

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parameters = list(self.module.parameters())
        split = buffer.split([parameter.numel() for parameter in parameters])
        return [part.view_as(p) for part, p in zip(split, parameters, strict=True)]

    def kept(self) -> Any:
        for number, (stepped, moment) in enumerate(zip(self.stepped, self.moments, strict=True)):
            yield f"{number}/weights", stepped
            yield f"{number}/exp_avg", moment

    def step(self) -> None:
        """Every view that somebody has is used."""
        for part, stepped, moment in zip(
            self.parts(self.gradients), self.stepped, self.moments, strict=True
        ):
            part.fill_(1.0)
            moment.add_(part)
            stepped.sub_(moment)
        for parameter, stepped in zip(self.module.parameters(), self.stepped, strict=True):
            parameter.data.copy_(stepped)


@pytest.fixture(params=["whole", "flat", "copies"])
def learning(request: pytest.FixtureRequest) -> Learning:
    return Learning(flat=request.param == "flat", copies=request.param == "copies")


def places(module: nn.Module) -> set[int]:
    return {parameter.data_ptr() for parameter in module.parameters()}


@pytest.mark.parametrize("placement", ["swapped", "in_turn"])
def test_the_reward_model_stands_in_the_critics_memory(learning: Learning, placement: str) -> None:
    turns = Turns(placement)
    judge = layers(1)
    kept = len(list(learning.kept()))
    turns.settle(CRITIC, learning.resident)
    turns.settle(REWARD, Resident(judge))
    given_up = placement == "in_turn"
    beside = learning.resident.nbytes() - WEIGHTS
    for round_ in range(3):
        with turns.on(CRITIC, training=True):
            learning.step()
            own = places(learning.module)
        weights = [parameter.detach().clone() for parameter in learning.module.parameters()]
        with turns.on(REWARD):
            assert places(judge) == own, "in place"
            for name, tensor in layers(1).state_dict().items():
                assert torch.equal(judge.state_dict()[name], tensor)
            assert turns.ledger.now[REWARD] == WEIGHTS
        with turns.on(REWARD):
            assert places(judge) == own, "it stays until another one comes"
            for name, tensor in layers(1).state_dict().items():
                assert torch.equal(judge.state_dict()[name], tensor)
            assert turns.ledger.now[CRITIC] == (0 if given_up else beside)
        with turns.on(CRITIC):
            for parameter, expected in zip(learning.module.parameters(), weights, strict=True):
                assert torch.equal(parameter, expected)
            assert turns.ledger.now[REWARD] == 0
            # Without gradients and moments as long as nothing is learned.
            assert turns.ledger.now[CRITIC] == WEIGHTS + (0 if given_up else beside)
            assert all(parameter.numel() == 0 for parameter in judge.parameters())
        with turns.on(CRITIC, more=ALL):
            assert all(bool((moment == round_ + 1).all()) for moment in learning.moments)
            assert turns.ledger.now[CRITIC] == beside + WEIGHTS
    assert kept == len(list(learning.kept())) and not turns.ledger.now.get("left, held elsewhere")


def test_nothing_is_left_when_a_third_one_comes(learning: Learning) -> None:
    turns = Turns("in_turn")
    turns.settle(CRITIC, learning.resident)
    turns.settle(REWARD, Resident(layers(1)))
    third = nn.Linear(3, 3)
    turns.add("actor", third)
    with turns.on(REWARD):
        pass
    with turns.on("actor"):
        assert {role for role, count in turns.ledger.now.items() if count} == {"actor"}
        assert learning.gradients.untyped_storage().nbytes() == 0
        assert all(p.untyped_storage().nbytes() == 0 for p in learning.module.parameters())
    with turns.on(CRITIC):
        for name, tensor in learning.expected.items():
            assert torch.equal(learning.module.state_dict()[name], tensor)


def test_what_was_given_up_is_not_lent_to_the_next_one(learning: Learning) -> None:
    """A small model takes a part of the memory; the rest is free, and the next one needs it all."""
    turns = Turns("in_turn")
    small = nn.Sequential(nn.Linear(SIZE, SIZE))
    judge = layers(1)
    turns.settle(CRITIC, learning.resident)
    turns.settle(REWARD, Resident(judge))
    turns.add("reference", small)
    with turns.on("reference"):
        pass
    with turns.on(REWARD):
        for name, tensor in layers(1).state_dict().items():
            assert torch.equal(judge.state_dict()[name], tensor)
        assert turns.ledger.now[REWARD] == WEIGHTS and turns.ledger.now["reference"] == 0
    with turns.on(CRITIC, training=True):
        learning.step()


def test_what_nobody_changed_is_not_copied_again(learning: Learning) -> None:
    turns = Turns("swapped")
    turns.settle(CRITIC, learning.resident)
    turns.settle(REWARD, Resident(layers(1)))
    moved = []
    for training in (True, False, True):
        before = turns._moved
        with turns.on(CRITIC, training=training):
            pass
        with turns.on(REWARD):
            pass
        moved.append(turns._moved - before)
    away, back, judge = WEIGHTS, WEIGHTS, WEIGHTS
    assert moved == [away + judge, back + judge, back + away + judge]
