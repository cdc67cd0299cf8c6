"""Times several ways of doing the same thing (arms) in turn, and compares them within each round.

Only ratios within a round count: a shared machine is faster in one minute than in the next, and
both sides of such a ratio ran in the same minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from medusa_ppo.bench.bench_options import Table


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
        """An arm's rate over the base's, one ratio per round."""
        return tuple(
            own / base for own, base in zip(self.rates[arm], self.rates[self.base], strict=True)
        )

    def median_ratio(self, arm: str) -> float:
        return statistics.median(self.ratios(arm))

    def spread(self, arm: str) -> tuple[float, float]:
        """The smallest and the largest ratio of all rounds."""
        return min(self.ratios(arm)), max(self.ratios(arm))

    def ratio_figures(self, arm: str) -> dict[str, float]:
        """An arm's median ratio and its range, under the keys that benchmarks write."""
        low, high = self.spread(arm)
        return {"ratio": self.median_ratio(arm), "ratio_low": low, "ratio_high": high}

    def median_rate(self, arm: str) -> float:
        return statistics.median(self.rates[arm])


def run_rounds(
    arms: Mapping[str, Callable[[int], float]], base: str, rounds: int, warmup: int = 1
) -> PairedRates:
    """Run every arm once per round, in rotating order, and in each order forwards and backwards, so
    that an arm does not always run after the same one.

    Args:
        arms: name -> function that takes the round's number, does the work and returns its rate.
        base: the arm to compare with.
        rounds: counted rounds.
        warmup: uncounted rounds before them.
    """
    names: Sequence[str] = list(arms)
    rates: dict[str, list[float]] = {name: [] for name in names}
    # Warm-up rounds have negative numbers, so that an arm can tell them from counted ones.
    for number in range(-warmup, rounds):
        turn = number // 2 % len(names)
        order = [*names[turn:], *names[:turn]]
        for name in reversed(order) if number % 2 else order:
            rate = arms[name](number)
            if number >= 0:
                rates[name].append(rate)
    return PairedRates(base, {name: tuple(values) for name, values in rates.items()})


def table_of(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows as a table. `columns`: title -> format string for a row's figures. A cell stays
    empty if one of its figures is None.
    """

    def cell(form: str, row: Mapping[str, Any]) -> str:
        figures = [name for _, name, _, _ in Formatter().parse(form) if name]
        if any(row[name] is None for name in figures):
            return ""
        return form.format(**row)

    body = [[cell(form, row) for form in columns.values()] for row in rows]
    return [list(columns), *body]
