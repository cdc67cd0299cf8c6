"""How many drafts a step should have: a small model of what a step costs and what its drafts bring, learned while serving.

A step with B running sequences and k drafts each gives B (1 + a_1 + ... + a_k) tokens, where a_j is the share of draft runs that reach
position j. It takes c_0 + c_1 B (k + 1) + c_2 B k + c_3 [k > 0] seconds: a fixed part, the rows that the model computes, the drafting, and
what drafting costs once a step (verification, its bookkeeping). All c and a are estimated from the steps that happen anyway, with
exponential forgetting, so they follow the heads, the policy and the machine. The formula carries what was learned over to numbers of
sequences and drafts that were not seen; where steps were seen, what they took corrects it, because real steps have jumps (kernels change
with their rows).

A machine is fast and slow by turns (other programs, clocks). That pace is the same for all k, so it is estimated by itself and taken out:
what remains tells the k apart.

The k with the most tokens per second is taken, if it is faster than none beyond doubt (the standard error of what was measured): a step
without drafts is never a mistake. Now and then one draft more, one less, or none is tried, so that no estimate goes stale, more often
where it promises a gain, and all of them when the heads are new. How often follows from what the trial costs: trials of either kind take
about half a percent of the time.

All of this runs between any two steps, which may be 3 ms apart: what every step asks is plain floats, because numpy takes several times
as long for five numbers, and what numpy does (the costs) waits a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

FORGET_COST = 0.995
MEMORY_RUNS = 200.0
TRIAL_SHARE = 0.005
TRIAL_STEPS = (12, 2000)
PROMISING_TRIAL_STEPS = 6
FIRST_STEPS = 6
NEW_HEADS_RUNS = 10.0
NEW_HEADS_TRIALS = 2
RIDGE = 1e-6
REVIEW_STEPS = 4
"""Steps of one kind between two looks at costs and choice: they hardly move in between."""
CELL_MEMORY = 40.0
CELL_PRIOR = 1.0
FIRST_CLIP, CLIP = 1.5, 0.4
"""Largest step of an estimate of log seconds, while it is new and later: one slow step says little."""
NEW_CELL = 3.0
NEW_COSTS = 20.0
"""Observations up to which costs are solved after each."""
PACE_MEMORY = 20.0
NOISE_MEMORY = 50.0
MEAN_TO_DEVIATION = 1.25
UNSEEN = 0.35
"""Standard error of the formula's log seconds where no step was seen."""
SURE = 2.5
"""Standard errors by which drafts must be faster than none."""
NOT_SEEN = (0.0, 0.0)
"""Mean and steps of a cell that no step was seen of."""
OUTLIER = 4.0
MOST_OUTLIERS = 3


@dataclass
class StepCosts:
    """Recursive least squares for the four costs; `weight` counts (forgotten) observations."""

    gram: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    moment: list[float] = field(default_factory=lambda: [0.0] * 4)
    weight: float = 0.0
    costs: list[float] = field(default_factory=lambda: [0.0] * 4)
    """c_0 .. c_3."""
    cells: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(power of two of sequences, drafts) -> mean of log(seconds / formula), and how many steps stand behind it."""
    pace: float = 0.0
    """How much slower (log) the machine is now than the estimates."""
    noise: float = 0.1
    """Standard deviation of a step's log seconds around estimate and pace."""
    _last: tuple[int, int] = (0, 0)
    _unsolved: int = 0

    @staticmethod
    def features(batch: int, drafts: int) -> tuple[float, float, float, float]:
        return 1.0, batch * (drafts + 1), batch * drafts, float(drafts > 0)

    def _formula(self, batch: int, drafts: int) -> float:
        return max(sum(map(mul, self.costs, self.features(batch, drafts))), 1e-6)

    def observe(self, batch: int, drafts: int, seconds: float) -> None:
        """Relative errors count, so that the long tail of small batches is not drowned by large ones."""
        key = (batch.bit_length(), drafts)
        if key != self._last:
            self._solve()  # What is known of the next kind is compared with the formula of today.
        if self.weight >= 3:
            mean, steps = self.cells.get(key, NOT_SEEN)
            error = math.log(seconds / self._formula(batch, drafts)) - self.pace - mean
            clip = FIRST_CLIP if steps < NEW_CELL else CLIP
            if steps:
                self.pace += _clip(error, CLIP) / PACE_MEMORY
                self.noise += (MEAN_TO_DEVIATION * min(abs(error), CLIP) - self.noise) / NOISE_MEMORY
            steps = min(steps + 1.0, CELL_MEMORY)
            self.cells[key] = (mean + _clip(error, clip) / steps, steps)
            seconds *= math.exp(-self.pace)
        row = [value / seconds for value in self.features(batch, drafts)]
        self.gram = [[FORGET_COST * old + a * b for old, b in zip(line, row, strict=True)] for line, a in zip(self.gram, row, strict=True)]
        self.moment = [FORGET_COST * old + a for old, a in zip(self.moment, row, strict=True)]
        self.weight = FORGET_COST * self.weight + 1.0
        self._last, self._unsolved = key, self._unsolved + 1
        if self._unsolved >= REVIEW_STEPS or self.weight < NEW_COSTS:
            self._solve()

    def _solve(self) -> None:
        if self._unsolved:
            gram = np.array(self.gram)
            scale = np.sqrt(np.maximum(gram.diagonal(), 1e-30))
            scaled = gram / np.outer(scale, scale) + RIDGE * np.eye(4)
            self.costs, self._unsolved = (np.linalg.solve(scaled, self.moment / scale) / scale).tolist(), 0

    def predict(self, batch: int, drafts: Sequence[int]) -> list[float]:
        """Seconds of a step for each number of drafts; more drafts never cost less."""
        bits, most, seconds = batch.bit_length(), 0.0, []
        for k in drafts:
            mean, steps = self.cells.get((bits, k), NOT_SEEN)
            most = max(most, self._formula(batch, k) * math.exp(mean * steps / (steps + CELL_PRIOR)))
            seconds.append(most)
        return seconds

    def doubt(self, batch: int, drafts: Sequence[int]) -> list[float]:
        """Standard error of the log seconds of each."""
        bits = batch.bit_length()
        seen = [self.cells.get((bits, k), NOT_SEEN)[1] for k in drafts]
        return [math.hypot(UNSEEN / (1.0 + steps), self.noise / math.sqrt(max(steps, 1.0))) for steps in seen]

    def most_seen(self, batch: int) -> int:
        """The most drafts that a step of about so many sequences has had."""
        return max((k for bits, k in self.cells if bits == batch.bit_length()), default=0)


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


class DraftChooser:
    """Chooses k for each step from the number of running sequences."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.costs = StepCosts()
        self.reached = [0.0] * max_drafts
        self.tried = [0.0] * max_drafts
        self._steps = 0
        self._next_trial: dict[int, int] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._trials = 0
        self._full_trials = 0
        self._next_full_trial = 0
        self._outliers = 0
        self._seen: dict[tuple[int, int], int] = {}

    def observe_acceptance(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts and accepted drafts of each request in one step."""
        offered, reached = [0] * (self.max_drafts + 1), [0] * (self.max_drafts + 1)
        for count, right in zip(drafted, accepted, strict=True):
            offered[count] += 1
            reached[min(right, count)] += 1
        for position in range(1, self.max_drafts + 1):  # Who had so many drafts had all before, too.
            tried, right = sum(offered[position:]), sum(reached[position:])
            # By runs and not by steps, so that a batch of 64 forgets as fast as 64 single steps.
            kept = math.exp(-tried / MEMORY_RUNS)
            self.reached[position - 1] = kept * self.reached[position - 1] + right
            self.tried[position - 1] = kept * self.tried[position - 1] + tried

    def observe_step(self, batch: int, drafts: int, seconds: float) -> None:
        """One pure decode step. Pauses (a swap, a wait for requests) are left out: far longer than expected, but not again and again."""
        if self.costs.weight >= 3 and seconds > OUTLIER * self.costs.predict(batch, [drafts])[0]:
            self._outliers += 1
            if self._outliers <= MOST_OUTLIERS:
                return
        self._outliers = 0
        self.costs.observe(batch, drafts, seconds)
        key = (batch.bit_length(), drafts)
        self._seen[key] = self._seen.get(key, 0) + 1

    def acceptance(self) -> list[float]:
        """Share of runs that reach position 1..K; falling, and optimistic where nothing was tried yet."""
        shares = ((reached + 0.5) / (tried + 1.0) for reached, tried in zip(self.reached, self.tried, strict=True))
        return list(accumulate(shares, min))

    def tokens_per_second(self, batch: int) -> list[float]:
        """Expected for k = 0..K."""
        tokens = accumulate(self.acceptance(), initial=1.0)
        seconds = self.costs.predict(batch, range(self.max_drafts + 1))
        return [batch * count / each for count, each in zip(tokens, seconds, strict=True)]

    def take_report(self) -> list[dict[str, Any]]:
        """Decode steps since the last report, by sequences that ran and drafts they had, fewest sequences first.

        Each row: `running` (this many to not quite twice as many), `steps` (with 0..K drafts) and `speedup` (tokens per second of what
        would be chosen now, over those without drafts, both from measured steps).
        """
        seen, self._seen = self._seen, {}
        rows = []
        for size in sorted({bits for bits, _ in seen}):
            rates = self.tokens_per_second(running := 2 ** (size - 1))
            steps = [seen.get((size, k), 0) for k in range(self.max_drafts + 1)]
            rows.append({"running": running, "steps": steps, "speedup": rates[self._best(running, rates)] / rates[0]})
        return rows

    def heads_changed(self) -> None:
        """New heads or a new actor: what was accepted so far says little, so some steps try all positions, as soon as they may."""
        kept = [min(1.0, NEW_HEADS_RUNS / max(tried, 1.0)) for tried in self.tried]
        self.reached = [share * value for share, value in zip(kept, self.reached, strict=True)]
        self.tried = [share * value for share, value in zip(kept, self.tried, strict=True)]
        self._full_trials = NEW_HEADS_TRIALS

    def choose(self, batch: int) -> int:
        """Drafts of the next step for `batch` running sequences."""
        self._steps += 1
        if self._steps <= FIRST_STEPS or self.costs.weight < 3:
            # All drafts and none in turn: the two ends fix the costs, and all drafts show the acceptance of every position.
            return self.max_drafts if self._steps % 2 else 0
        if self._full_trials and self._steps >= self._next_full_trial:
            self._full_trials -= 1
            # A loop that changes its heads or its actor every few steps would do little else.
            all_rates = self.tokens_per_second(batch)
            self._next_full_trial = self._steps + 1 + self._pause(all_rates, self._best(batch, all_rates), self.max_drafts)
            return self.max_drafts
        bits = batch.bit_length()
        held, review = self._held.get(bits, (0, 0))
        trial_is_due = self._steps >= self._next_trial.get(bits, 0)
        if self._steps < review and not trial_is_due:
            return held
        # The formula flatters what was never seen at so many sequences: one draft more at a time.
        rates = self.tokens_per_second(batch)[: self.costs.most_seen(batch) + 2]
        best = self._best(batch, rates)
        self._held[bits] = (best, self._steps + REVIEW_STEPS)
        return self._trial(batch, rates, best) if trial_is_due else best

    def _trial(self, batch: int, rates: list[float], best: int) -> int:
        """A neighbour of the best, or none: what they cost is learned from nothing else. The most promising one, else each in turn."""
        others = [k for k in dict.fromkeys((best + 1, best - 1, 0)) if 0 <= k < len(rates) and k != best]
        if not others:
            return best
        hopes = [rate * math.exp(margin) for rate, margin in zip(rates, self._margins(batch, len(rates), best), strict=True)]
        trial = max(others, key=lambda k: hopes[k])
        if hopes[trial] <= rates[best]:
            trial = others[self._trials % len(others)]
        self._trials += 1
        least = PROMISING_TRIAL_STEPS if rates[trial] > rates[best] else TRIAL_STEPS[0]
        self._next_trial[batch.bit_length()] = self._steps + max(least, self._pause(rates, best, trial))
        return trial

    @staticmethod
    def _pause(rates: list[float], best: int, trial: int) -> int:
        """Steps of the best kind after which a trial has cost its share."""
        loss = max(0.0, rates[best] / rates[trial] - 1.0)
        return min(int(loss / TRIAL_SHARE), TRIAL_STEPS[1])

    def _best(self, batch: int, rates: list[float]) -> int:
        """The fastest of those that are faster than none beyond doubt."""
        margins = self._margins(batch, len(rates), 0)
        sure = [k for k, (rate, margin) in enumerate(zip(rates, margins, strict=True)) if rate * math.exp(-margin) > rates[0]]
        return max(sure, key=lambda k: rates[k], default=0)

    def _margins(self, batch: int, count: int, other: int) -> list[float]:
        """By how much (log) the rates with 0..count-1 drafts may differ from that with `other` by chance."""
        doubt = self.costs.doubt(batch, range(count))
        return [SURE * math.hypot(own, doubt[other]) for own in doubt]


def merge_choices(reports: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One report of several engines: steps add up, speed-ups are weighted by them."""
    merged: dict[int, dict[str, Any]] = {}
    for row in (row for report in reports for row in report):
        other = merged.get(row["running"])
        if other is None:
            merged[row["running"]] = dict(row)
            continue
        mine, theirs = sum(row["steps"]), sum(other["steps"])
        other["speedup"] = (row["speedup"] * mine + other["speedup"] * theirs) / max(mine + theirs, 1)
        other["steps"] = [a + b for a, b in zip(row["steps"], other["steps"], strict=True)]
    return [merged[running] for running in sorted(merged)]
