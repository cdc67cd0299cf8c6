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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
CELL_MEMORY = 40.0
CELL_PRIOR = 1.0
FIRST_CLIP, CLIP = 1.5, 0.4
"""Largest step of an estimate of log seconds, while it is new and later: one slow step says little."""
NEW_CELL = 3.0
PACE_MEMORY = 20.0
NOISE_MEMORY = 50.0
MEAN_TO_DEVIATION = 1.25
UNSEEN = 0.35
"""Standard error of the formula's log seconds where no step was seen."""
SURE = 2.5
"""Standard errors by which drafts must be faster than none."""
OUTLIER = 4.0
MOST_OUTLIERS = 3


@dataclass
class StepCosts:
    """Recursive least squares for the four costs; `weight` counts (forgotten) observations."""

    gram: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    moment: np.ndarray = field(default_factory=lambda: np.zeros(4))
    weight: float = 0.0
    cells: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(power of two of sequences, drafts) -> mean of log(seconds / formula), and how many steps stand behind it."""
    pace: float = 0.0
    """How much slower (log) the machine is now than the estimates."""
    noise: float = 0.1
    """Standard deviation of a step's log seconds around estimate and pace."""

    @staticmethod
    def features(batch: int, drafts: int) -> np.ndarray:
        return np.array([1.0, batch * (drafts + 1), batch * drafts, float(drafts > 0)])

    def observe(self, batch: int, drafts: int, seconds: float) -> None:
        """Relative errors count, so that the long tail of small batches is not drowned by large ones."""
        if self.weight >= 3:
            mean, steps = self.cells.get(key := (batch.bit_length(), drafts), (0.0, 0.0))
            error = float(np.log(seconds / self._formula(batch, [drafts])[0])) - self.pace - mean
            clip = FIRST_CLIP if steps < NEW_CELL else CLIP
            if steps:
                self.pace += float(np.clip(error, -CLIP, CLIP)) / PACE_MEMORY
                self.noise += (MEAN_TO_DEVIATION * min(abs(error), CLIP) - self.noise) / NOISE_MEMORY
            steps = min(steps + 1.0, CELL_MEMORY)
            self.cells[key] = (mean + float(np.clip(error, -clip, clip)) / steps, steps)
            seconds *= float(np.exp(-self.pace))
        row = self.features(batch, drafts) / seconds
        self.gram = FORGET_COST * self.gram + np.outer(row, row)
        self.moment = FORGET_COST * self.moment + row
        self.weight = FORGET_COST * self.weight + 1.0

    def predict(self, batch: int, drafts: Sequence[int]) -> np.ndarray:
        """Seconds of a step for each number of drafts; more drafts never cost less."""
        seconds = self._formula(batch, drafts)
        for index, k in enumerate(drafts):
            mean, steps = self.cells.get((batch.bit_length(), k), (0.0, 0.0))
            seconds[index] *= np.exp(mean * steps / (steps + CELL_PRIOR))
        return np.maximum.accumulate(seconds)

    def doubt(self, batch: int, drafts: Sequence[int]) -> np.ndarray:
        """Standard error of the log seconds of each."""
        steps = np.array([self.cells.get((batch.bit_length(), k), (0.0, 0.0))[1] for k in drafts])
        return np.hypot(UNSEEN / (1.0 + steps), self.noise / np.sqrt(np.maximum(steps, 1.0)))

    def most_seen(self, batch: int) -> int:
        """The most drafts that a step of about so many sequences has had."""
        return max((k for bits, k in self.cells if bits == batch.bit_length()), default=0)

    def _formula(self, batch: int, drafts: Sequence[int]) -> np.ndarray:
        scale = np.sqrt(np.maximum(np.diag(self.gram), 1e-30))
        scaled = self.gram / np.outer(scale, scale) + RIDGE * np.eye(4)
        costs = np.linalg.solve(scaled, self.moment / scale) / scale
        seconds = np.array([self.features(batch, k) @ costs for k in drafts])
        return np.maximum(seconds, 1e-6)


class DraftChooser:
    """Chooses k for each step from the number of running sequences."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.costs = StepCosts()
        self.reached = np.zeros(max_drafts)
        self.tried = np.zeros(max_drafts)
        self._steps = 0
        self._next_trial: dict[int, int] = {}
        self._trials = 0
        self._full_trials = 0
        self._next_full_trial = 0
        self._outliers = 0
        self._seen: dict[tuple[int, int], int] = {}

    def observe_acceptance(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts and accepted drafts of each request in one step."""
        runs = np.asarray(accepted)[:, None] > np.arange(self.max_drafts)
        offered = np.asarray(drafted)[:, None] > np.arange(self.max_drafts)
        if offered.any():
            # By runs and not by steps, so that a batch of 64 forgets as fast as 64 single steps.
            kept = np.exp(-offered.sum(0) / MEMORY_RUNS)
            self.reached *= kept
            self.tried *= kept
            self.reached += (runs & offered).sum(0)
            self.tried += offered.sum(0)

    def observe_step(self, batch: int, drafts: int, seconds: float) -> None:
        """One pure decode step. Pauses (a swap, a wait for requests) are left out: far longer than expected, but not again and again."""
        if self.costs.weight >= 3 and seconds > OUTLIER * float(self.costs.predict(batch, [drafts])[0]):
            self._outliers += 1
            if self._outliers <= MOST_OUTLIERS:
                return
        self._outliers = 0
        self.costs.observe(batch, drafts, seconds)
        key = (batch.bit_length(), drafts)
        self._seen[key] = self._seen.get(key, 0) + 1

    def acceptance(self) -> np.ndarray:
        """Share of runs that reach position 1..K; falling, and optimistic where nothing was tried yet."""
        share = (self.reached + 0.5) / (self.tried + 1.0)
        return np.minimum.accumulate(share)

    def tokens_per_second(self, batch: int) -> np.ndarray:
        """Expected for k = 0..K."""
        tokens = batch * np.concatenate([[1.0], 1.0 + np.cumsum(self.acceptance())])
        return tokens / self.costs.predict(batch, range(self.max_drafts + 1))

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
            rows.append({"running": running, "steps": steps, "speedup": float(rates[self._best(running, rates)] / rates[0])})
        return rows

    def heads_changed(self) -> None:
        """New heads or a new actor: what was accepted so far says little, so some steps try all positions, as soon as they may."""
        kept = np.minimum(1.0, NEW_HEADS_RUNS / np.maximum(self.tried, 1.0))
        self.reached *= kept
        self.tried *= kept
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
        # The formula flatters what was never seen at so many sequences: one draft more at a time.
        rates = self.tokens_per_second(batch)[: self.costs.most_seen(batch) + 2]
        best = self._best(batch, rates)
        return best if self._steps < self._next_trial.get(batch.bit_length(), 0) else self._trial(batch, rates, best)

    def _trial(self, batch: int, rates: np.ndarray, best: int) -> int:
        """A neighbour of the best, or none: what they cost is learned from nothing else. The most promising one, else each in turn."""
        others = [k for k in dict.fromkeys((best + 1, best - 1, 0)) if 0 <= k < len(rates) and k != best]
        if not others:
            return best
        hopes = rates * np.exp(self._margins(batch, len(rates), best))
        trial = max(others, key=lambda k: hopes[k])
        if hopes[trial] <= rates[best]:
            trial = others[self._trials % len(others)]
        self._trials += 1
        least = PROMISING_TRIAL_STEPS if rates[trial] > rates[best] else TRIAL_STEPS[0]
        self._next_trial[batch.bit_length()] = self._steps + max(least, self._pause(rates, best, trial))
        return trial

    @staticmethod
    def _pause(rates: np.ndarray, best: int, trial: int) -> int:
        """Steps of the best kind after which a trial has cost its share."""
        loss = max(0.0, float(rates[best] / rates[trial]) - 1.0)
        return min(int(loss / TRIAL_SHARE), TRIAL_STEPS[1])

    def _best(self, batch: int, rates: np.ndarray) -> int:
        """The fastest of those that are faster than none beyond doubt."""
        sure = rates * np.exp(-self._margins(batch, len(rates), 0)) > rates[0]
        return int(np.argmax(np.where(sure, rates, 0.0))) if sure.any() else 0

    def _margins(self, batch: int, count: int, other: int) -> np.ndarray:
        """By how much (log) the rates with 0..count-1 drafts may differ from that with `other` by chance."""
        doubt = self.costs.doubt(batch, range(count))
        return SURE * np.hypot(doubt, doubt[other])


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
