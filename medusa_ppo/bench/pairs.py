"""Paired timing: arms take turns, each round in another order, and only ratios within a round are compared (no torch)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PairedRates:
    """Rates of several arms, one per round, and their ratios to the base arm within each round.

    Attributes:
        base: name of the arm that the others are compared with.
        rates: arm -> one rate (e.g. tokens/s) per round.
    """

    base: str
    rates: Mapping[str, tuple[float, ...]]

    def ratios(self, arm: str) -> tuple[float, ...]:
        return tuple(own / base for own, base in zip(self.rates[arm], self.rates[self.base], strict=True))

    def median_ratio(self, arm: str) -> float:
        return statistics.median(self.ratios(arm))

    def spread(self, arm: str) -> tuple[float, float]:
        """Smallest and largest ratio of any round."""
        ratios = self.ratios(arm)
        return min(ratios), max(ratios)

    def median_rate(self, arm: str) -> float:
        return statistics.median(self.rates[arm])


def run_rounds(arms: Mapping[str, Callable[[int], float]], base: str, rounds: int, warmup: int = 1) -> PairedRates:
    """Run every arm once per round; the order rotates, so that no arm always finds the machine as another left it.

    Args:
        arms: name -> function of the round's number that does the work and returns its rate.
        base: the arm to compare with.
        rounds: counted rounds.
        warmup: rounds before them that are not counted.
    """
    names: Sequence[str] = list(arms)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            rate = arms[name](number)
            if number >= 0:
                rates[name].append(rate)
    return PairedRates(base, {name: tuple(values) for name, values in rates.items()})
