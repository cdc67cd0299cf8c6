"""Paired timing: every arm runs in every round, the order rotates, warm-up is not counted, ratios
stay within a round.
"""

from __future__ import annotations

import pytest

from medusa_ppo.bench.pairs import run_rounds


def test_ratios_cancel_a_machine_that_slows_down() -> None:
    order: list[str] = []

    def arm(name: str, factor: float):
        def work(number: int) -> float:
            order.append(name)
            return factor * 100 / (number + 5)

        return work

    result = run_rounds(
        {"plain": arm("plain", 1.0), "ours": arm("ours", 1.5)}, base="plain", rounds=4, warmup=1
    )
    assert result.ratios("ours") == pytest.approx((1.5,) * 4)
    assert result.median_ratio("plain") == 1.0
    assert len(order) == 10
    firsts = order[::2]
    assert {"plain", "ours"} == set(firsts), "the order must rotate"
    assert result.spread("ours") == pytest.approx((1.5, 1.5))
    assert result.median_rate("plain") < 100 / 5


def test_an_arm_does_not_always_run_after_the_same_one() -> None:
    order: list[str] = []
    names = ("none", "ngram", "fixed", "chosen")

    def arm(name: str):
        def work(number: int) -> float:
            order.append(name)
            return 1.0

        return work

    run_rounds({name: arm(name) for name in names}, base="none", rounds=8, warmup=0)
    rounds = [order[start : start + 4] for start in range(0, 32, 4)]
    assert all(sorted(turn) == sorted(names) for turn in rounds)
    followed = [turn[turn.index("chosen") - 1] for turn in rounds if turn[0] != "chosen"]
    assert max(map(followed.count, followed)) <= len(followed) / 2, followed
