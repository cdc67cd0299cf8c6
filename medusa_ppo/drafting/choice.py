"""How many drafts a step should have: a small model of what a step costs and what its drafts bring,
learned while serving.

A step with B running sequences and k drafts each gives B (1 + a_1 + ... + a_k) tokens, where a_j is
the share of draft runs that reach position j. It takes c_0 + c_1 B (k + 1) + c_2 B k + c_3 [k > 0]
seconds: a fixed part, the rows that the model computes, the drafting, and what drafting costs once
a step (verification, its bookkeeping). All c and a are estimated from the steps that happen anyway,
with exponential forgetting, so they follow the heads, the policy and the machine. The formula
carries what was learned over to numbers of sequences and drafts that were not seen; where steps
were seen, what they took corrects it, because real steps have jumps (kernels change with their
rows).

A machine is fast and slow by turns (other programs, clocks). That pace is the same for all k, so it
is estimated by itself and taken out: what remains tells the k apart.

The k with the most tokens per second is taken, of those that were measured at about so many
sequences; drafts must be faster than none beyond the standard error. A number of sequences that is
new begins without drafts, and then measures k after k, as long as the next one promises more than
the best so far. Later on others are tried now and then, so that no estimate goes stale, more often
where they promise a gain, and all drafts when the heads are new. How often follows from what the
trial costs: trials take about half a percent of the time.

All of this runs between any two steps, which may be 3 ms apart: what every step asks is plain
floats, because numpy takes several times as long for five numbers, and what numpy does (the costs)
waits a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np

FORGET_COST = 0.995
MEMORY_RUNS = 200.0
TRIAL_SHARE = 0.005
TRIAL_STEPS = (12, 2000)
PROMISING_TRIAL_STEPS = 6
FIRST_STEPS = 4
NEW_HEADS_RUNS = 4.0
NEW_HEADS_TRIALS = 2
RIDGE = 1e-6
REVIEW_STEPS = 4
"""Steps of one kind between two looks at costs and choice: they hardly move in between."""
CELL_MEMORY = 150.0
FIRST_CLIP, CLIP = 1.5, 0.4
"""Largest step of an estimate of log seconds, while it is new and later: one slow step says
little.
"""
NEW_CELL, NEW_SHARE, FAR = 8.0, 0.5, 0.7
"""Steps that make a kind known, and what one that is quicker by half counts for until then."""
NEW_COSTS = 20.0
"""Observations up to which costs are solved after each."""
PACE_MEMORY = 20.0
NOISE_MEMORY = 50.0
MEAN_TO_DEVIATION = 1.25
UNSEEN, APART = 0.35, 0.08
"""Standard error of log seconds where no step was seen: with nothing to compare with, and for each
draft to the next one seen.
"""
SURE, HOPE = 1.6, 0.5
"""Standard errors by which drafts must be faster than none, and by which a trial may turn out
faster than expected.
"""
LEAST_SEEN = 4
"""Steps of a kind before it may be chosen."""
FINE = 4
OUTLIER = 4.0
MOST_OUTLIERS = 3


class Cell(NamedTuple):
    """Means over steps of one kind: log seconds at the machine's usual pace, sequences; and how
    many steps stand behind them.
    """

    log_seconds: float = 0.0
    batch: float = 1.0
    steps: float = 0.0


@dataclass
class StepCosts:
    """Recursive least squares for the four costs; `weight` counts (forgotten) observations."""

    gram: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    moment: list[float] = field(default_factory=lambda: [0.0] * 4)
    weight: float = 0.0
    costs: list[float] = field(default_factory=lambda: [0.0] * 4)
    """c_0 .. c_3."""
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    """By power of two of sequences, and drafts."""
    pace: float = 0.0
    """How much slower (log) the machine is now than the estimates."""
    noise: float = 0.1
    """Standard deviation of a step's log seconds around estimate and pace."""
    _last: tuple[int, int] = (0, 0)
    _unsolved: int = 0

    @staticmethod
    def features(batch: float, drafts: int) -> tuple[float, float, float, float]:
        return 1.0, batch * (drafts + 1), batch * drafts, float(drafts > 0)

    def _of_cell(self, cell: Cell, batch: float, drafts: int) -> float:
        """What such a step takes with another number of sequences."""
        return (
            math.exp(cell.log_seconds)
            * self._formula(batch, drafts)
            / self._formula(cell.batch, drafts)
        )

    def _formula(self, batch: float, drafts: int) -> float:
        return max(sum(map(mul, self.costs, self.features(batch, drafts))), 1e-6)

    def observe(self, batch: int, drafts: int, seconds: float) -> None:
        """Relative errors count, so that the long tail of small batches is not drowned by large
        ones.
        """
        key = (batch.bit_length(), drafts)
        if key != self._last:
            self._solve()  # What is known of the next kind is compared with the formula of today.
        if self.weight >= 3:
            cell = self.cells.get(key, Cell())
            own = math.log(seconds) - self.pace
            if cell.steps:
                error = own - math.log(self._of_cell(cell, batch, drafts))
                self.pace += _clip(error, CLIP) / PACE_MEMORY
                self.noise += (
                    MEAN_TO_DEVIATION * min(abs(error), CLIP) - self.noise
                ) / NOISE_MEMORY
                own -= error - _clip(error, FIRST_CLIP if cell.steps < NEW_CELL else CLIP)
                own -= math.log(self._formula(batch, drafts) / self._formula(cell.batch, drafts))
            steps = min(cell.steps + 1.0, CELL_MEMORY)
            warmed_up = (
                steps < NEW_CELL and own < cell.log_seconds - FAR
            )  # What a process pays once made the first steps slower.
            share = max(1.0 / steps, NEW_SHARE if warmed_up else 0.0)
            log_seconds = cell.log_seconds + (own - cell.log_seconds) * share
            self.cells[key] = Cell(
                log_seconds,
                cell.batch + (batch - cell.batch) / steps if cell.steps else batch,
                steps,
            )
            seconds *= math.exp(-self.pace)
        row = [value / seconds for value in self.features(batch, drafts)]
        self.gram = [
            [FORGET_COST * old + a * b for old, b in zip(line, row, strict=True)]
            for line, a in zip(self.gram, row, strict=True)
        ]
        self.moment = [FORGET_COST * old + a for old, a in zip(self.moment, row, strict=True)]
        self.weight = FORGET_COST * self.weight + 1.0
        self._last = key
        self._unsolved = self._unsolved + 1
        if self._unsolved >= REVIEW_STEPS or self.weight < NEW_COSTS:
            self._solve()

    def _solve(self) -> None:
        if self._unsolved:
            gram = np.array(self.gram)
            scale = np.sqrt(np.maximum(gram.diagonal(), 1e-30))
            scaled = gram / np.outer(scale, scale) + RIDGE * np.eye(4)
            self.costs = (np.linalg.solve(scaled, self.moment / scale) / scale).tolist()
            self._unsolved = 0

    def predict(self, batch: int, drafts: Sequence[int]) -> list[float]:
        """Seconds of a step for each number of drafts at the machine's pace of now; more drafts
        never cost less.
        """
        most = 0.0
        seconds = []
        for k in drafts:
            most = max(most, self._expected(batch, k))
            seconds.append(most * math.exp(self.pace))
        return seconds

    def _expected(self, batch: int, drafts: int) -> float:
        """From the steps of this kind; else the formula, or a line through the two nearest kinds
        seen, whichever promises more.
        """
        bits = batch.bit_length()
        own = self.cells.get((bits, drafts))
        if own is not None:
            return self._of_cell(own, batch, drafts)
        seen = sorted((k for size, k in self.cells if size == bits), key=lambda k: abs(k - drafts))
        if not seen:
            return self._formula(batch, drafts)
        near, *others = seen  # Other numbers of drafts.
        at_near = self._of_cell(self.cells[bits, near], batch, near)
        expected = at_near * self._formula(batch, drafts) / self._formula(batch, near)
        if not others:
            return expected
        slope = (self._of_cell(self.cells[bits, others[0]], batch, others[0]) - at_near) / (
            others[0] - near
        )
        return min(expected, max(at_near + slope * (drafts - near), 0.5 * at_near))

    def doubt(self, batch: int, drafts: Sequence[int]) -> list[float]:
        """Standard error of the log seconds of each."""
        bits = batch.bit_length()
        doubts = []
        for k in drafts:
            nearest = self._nearest(bits, k)
            steps = self.cells.get((bits, nearest), Cell()).steps
            own = math.hypot(UNSEEN / (1.0 + steps), self.noise / math.sqrt(max(steps, 1.0)))
            # The formula alone says what the first draft costs; what more of them cost follows from
            # that.
            apart = APART * abs(nearest - k) if nearest else UNSEEN * (k > 0)
            doubts.append(math.hypot(apart, own))
        return doubts

    def _nearest(self, bits: int, drafts: int) -> int:
        """The number of drafts itself where steps of it were seen, else that of the steps nearest
        to it.
        """
        if (bits, drafts) in self.cells:
            return drafts
        return min(
            (k for size, k in self.cells if size == bits),
            key=lambda k: abs(k - drafts),
            default=drafts,
        )

    def seen(self, batch: int, drafts: int) -> float:
        """Steps of about so many sequences that had so many drafts."""
        return self.cells.get((batch.bit_length(), drafts), Cell()).steps


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


class DraftChooser:
    """Chooses k for each step from the number of running sequences."""

    def __init__(self, max_drafts: int, allowed: Sequence[int] | None = None) -> None:
        """
        Args:
            allowed: what to choose from, 0 and `max_drafts` among them; None: every number up to 4,
                and then fewer and fewer.
        """
        self.max_drafts = max_drafts
        self.allowed = sorted(
            allowed
            or {
                k
                for k in range(max_drafts + 1)
                if k <= FINE or (k % 2 == 0 and k <= 2 * FINE) or k % 4 == 0
            }
            | {max_drafts}
        )
        self.costs = StepCosts()
        self.reached = [0.0] * max_drafts
        self.tried = [0.0] * max_drafts
        self._steps = 0
        self._next_trial: dict[int, int] = {}
        self._last_trial: dict[int, int] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._trials = 0
        self._full_trials = 0
        self._next_full_trial = 0
        self._outliers = 0
        self._seen: dict[tuple[int, int], int] = {}

    def observe_acceptance(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts and accepted drafts of each request in one step."""
        offered = [0] * (self.max_drafts + 1)
        reached = [0] * (self.max_drafts + 1)
        for count, right in zip(drafted, accepted, strict=True):
            offered[count] += 1
            reached[min(right, count)] += 1
        for position in range(
            1, self.max_drafts + 1
        ):  # Who had so many drafts had all before, too.
            tried = sum(offered[position:])
            right = sum(reached[position:])
            # By runs and not by steps, so that a batch of 64 forgets as fast as 64 single steps.
            kept = math.exp(-tried / MEMORY_RUNS)
            self.reached[position - 1] = kept * self.reached[position - 1] + right
            self.tried[position - 1] = kept * self.tried[position - 1] + tried

    def observe_step(self, batch: int, drafts: int, seconds: float) -> None:
        """One pure decode step. Pauses (a swap, a wait for requests) are left out: far longer than
        expected, but not again and again.
        """
        if self.costs.weight >= 3 and seconds > OUTLIER * self.costs.predict(batch, [drafts])[0]:
            self._outliers += 1
            if self._outliers <= MOST_OUTLIERS:
                return
        self._outliers = 0
        self.costs.observe(batch, drafts, seconds)
        key = (batch.bit_length(), drafts)
        self._seen[key] = self._seen.get(key, 0) + 1

    def acceptance(self) -> list[float]:
        """Share of runs that reach position 1..K; falling, and optimistic where nothing was tried
        yet.
        """
        shares = (
            (reached + 0.5) / (tried + 1.0)
            for reached, tried in zip(self.reached, self.tried, strict=True)
        )
        return list(accumulate(shares, min))

    def tokens_per_second(self, batch: int) -> list[float]:
        """Expected for k = 0..K."""
        tokens = accumulate(self.acceptance(), initial=1.0)
        seconds = self.costs.predict(batch, range(self.max_drafts + 1))
        return [batch * count / each for count, each in zip(tokens, seconds, strict=True)]

    def take_report(self) -> list[dict[str, Any]]:
        """Decode steps since the last report, by sequences that ran and drafts they had, fewest
        sequences first.

        Each row: `running` (this many to not quite twice as many), `steps` (with 0..K drafts) and
        `speedup` (tokens per second of what would be chosen now, over those without drafts, both
        from measured steps).
        """
        seen = self._seen
        self._seen = {}
        rows = []
        for size in sorted({bits for bits, _ in seen}):
            rates = self.tokens_per_second(running := 2 ** (size - 1))
            steps = [seen.get((size, k), 0) for k in range(self.max_drafts + 1)]
            rows.append(
                {
                    "running": running,
                    "steps": steps,
                    "speedup": rates[self._best(running, rates)] / rates[0],
                }
            )
        return rows

    def heads_changed(self) -> None:
        """New heads or a new actor: what was accepted so far says little, so some steps try all
        positions, as soon as they may.
        """
        kept = [min(1.0, NEW_HEADS_RUNS / max(tried, 1.0)) for tried in self.tried]
        self.reached = [share * value for share, value in zip(kept, self.reached, strict=True)]
        self.tried = [share * value for share, value in zip(kept, self.tried, strict=True)]
        self._full_trials = NEW_HEADS_TRIALS

    def choose(self, batch: int) -> int:
        """Drafts of the next step for `batch` running sequences."""
        self._steps += 1
        if self._steps <= FIRST_STEPS or self.costs.weight < 3:
            # All drafts and none in turn: the two ends fix the costs, and all drafts show the
            # acceptance of every position.
            return self.max_drafts if self._steps % 2 else 0
        if self._full_trials and self._steps >= self._next_full_trial:
            self._full_trials -= 1
            # A loop that changes its heads or its actor every few steps would do little else.
            all_rates = self.tokens_per_second(batch)
            self._next_full_trial = (
                self._steps
                + 1
                + self._pause(all_rates, self._best(batch, all_rates), self.max_drafts)
            )
            return self.max_drafts
        bits = batch.bit_length()
        held, review = self._held.get(bits, (0, 0))
        if self._steps < review and self._steps < self._next_trial.get(bits, 0):
            return held
        rates = self.tokens_per_second(batch)
        best = self._best(batch, rates)
        self._held[bits] = (best, self._steps + REVIEW_STEPS)
        if self.costs.seen(batch, 0) < LEAST_SEEN:
            return 0
        promising = (
            max(rates[k] for k in self.allowed) > rates[best]
            and self._steps >= self._last_trial.get(bits, 0) + PROMISING_TRIAL_STEPS
        )
        return (
            self._trial(batch, rates, best)
            if promising or self._steps >= self._next_trial.get(bits, 0)
            else best
        )

    def _trial(self, batch: int, rates: list[float], best: int) -> int:
        """Another one than the best: what they cost is learned from nothing else. The first that
        was not seen and may be better, step after step until it was; else the most promising one,
        or each in turn where none is.
        """
        hopes = self._hopes(batch, rates, best)
        new = [
            k
            for k in self.allowed
            if self.costs.seen(batch, k) < LEAST_SEEN and hopes[k] > rates[best]
        ]
        if new:
            return new[0]
        others = [k for k in self.allowed if k != best and self.costs.seen(batch, k)]
        if not others:
            return best
        trial = max(others, key=lambda k: hopes[k])
        if hopes[trial] <= rates[best]:
            trial = others[self._trials % len(others)]
        self._trials += 1
        bits = batch.bit_length()
        self._last_trial[bits] = self._steps
        pause = self._pause(rates, best, trial)
        if (
            trial == 0
        ):  # Its first steps may have been slow by bad luck, and to try it never costs much.
            pause = min(pause, int(TRIAL_STEPS[0] * self.costs.seen(batch, 0) ** 2))
        self._next_trial[bits] = self._steps + max(TRIAL_STEPS[0], pause)
        return trial

    @staticmethod
    def _pause(rates: list[float], best: int, trial: int) -> int:
        """Steps of the best kind after which a trial has cost its share."""
        loss = max(0.0, rates[best] / rates[trial] - 1.0)
        return min(int(loss / TRIAL_SHARE), TRIAL_STEPS[1])

    def _best(self, batch: int, rates: list[float]) -> int:
        """The fastest of those that were measured and are faster than none."""
        doubt = self.costs.doubt(batch, range(len(rates)))
        sure = [
            k
            for k in self.allowed
            if self.costs.seen(batch, k) >= LEAST_SEEN
            and rates[k] * math.exp(-SURE * math.hypot(doubt[k], doubt[0])) > rates[0]
        ]
        return max(sure, key=lambda k: rates[k], default=0)

    def _hopes(self, batch: int, rates: list[float], best: int) -> list[float]:
        """What the rates may be, if they are better than expected in comparison with the best."""
        doubt = self.costs.doubt(batch, range(len(rates)))
        return [
            rate * math.exp(HOPE * math.hypot(own, doubt[best]))
            for rate, own in zip(rates, doubt, strict=True)
        ]


def merge_choices(reports: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One report of several engines: steps add up, speed-ups are weighted by them."""
    merged: dict[int, dict[str, Any]] = {}
    for row in (row for report in reports for row in report):
        other = merged.get(row["running"])
        if other is None:
            merged[row["running"]] = dict(row)
            continue
        mine = sum(row["steps"])
        theirs = sum(other["steps"])
        other["speedup"] = (row["speedup"] * mine + other["speedup"] * theirs) / max(
            mine + theirs, 1
        )
        other["steps"] = [a + b for a, b in zip(row["steps"], other["steps"], strict=True)]
    return [merged[running] for running in sorted(merged)]
