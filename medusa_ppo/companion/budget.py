"""How much to train if training takes time from the loop: never more than a share of the loop's
seconds, and nothing while nothing is gained (no torch).

The limit is a budget in seconds of training. A step of the loop that took s seconds adds `share` x
s; what training took from the loop is subtracted. Training in seconds that nothing else needed
(while the loop waits for rewards, weights or the slowest response) is not counted: the companion
doesn't report it as work. So the loop slows down by `share` at most, whatever is gained.

    alone      the companion takes nothing from the loop: the maximum of passes, without a budget
    training   heads still improve, and there is a budget: as many passes as it pays for, mostly a
               part of one, so that every policy is learned from while it is new
    waiting    the budget has no room for LEAST of a pass, or a batch waits already: none, and the
               batch isn't even collected. After a batch had to wait, fewer passes are made at a
               time: one over every batch teaches more than two over every other one
    resting    PATIENCE verdicts in a row without a new version: none. It ends when acceptance
               falls, or when a probe of one pass (rarer each time) brings a new version

Untrained heads get the income of AHEAD steps once: heads that draft from the second step on are
worth more than any later ones. Heads that were trained before, by a run that is resumed too, get no
such advance.

On a CPU the budget is spent in turns: before each generation the loop waits while the companion
trains on all cores, and what is left of the budget is the longest it waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

AHEAD = 10
"""Steps whose income may be saved up, and is advanced before the first version."""
LEAST = 0.25
"""The smallest part of a pass: below it, judging takes longer than training. It is also used while
the duration of a pass is unknown.
"""
PATIENCE = 12
"""Verdicts in a row without a new version after which training rests. One in ten equal candidates
passes the gate by chance, so good heads rarely take that long.
"""
PROBE_STEPS = (8, 64)
"""Steps of rest before a probe: initially, and at most. They double after each probe."""
LENGTHS = (8, 32)
"""Minimum and maximum steps that measure the serving heads' earlier acceptance."""
RECENT = 3
"""Last steps that are compared with those; a single one may have unusual prompts."""
LONGER = 1.1
"""Factor by which passes at a time grow again in each step without a batch that waits."""
ERRORS = 3.0
"""Standard errors that make a decrease more than the counters' noise."""


@dataclass(frozen=True)
class Decision:
    """How much to train on a batch.

    Attributes:
        passes: over its positions; below 1: a random part of them once; 0: none.
        reason: a key of `metrics.REASONS`; empty before the first batch.
    """

    passes: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class StepSeen:
    """What a finished step of the loop took, and the companion's state at its end.

    Attributes:
        step_s: its seconds.
        trained_s: seconds of a core (or of the device that is shared) that training took from the
            loop meanwhile, beside turns.
        length: mean acceptance length by the engine's counters.
        published, rejected: versions published so far, and candidates that were judged but not
            published.
        serving: version of the heads that drafted the responses.
        behind: a batch waits behind the one in training.
    """

    step_s: float
    trained_s: float
    length: float
    published: int
    rejected: int
    serving: int
    behind: bool = False


class Budget:
    """Call `step` after each step of the loop, `decide` before each batch is collected.

    Attributes:
        left_s: seconds of training allowed now; below 0 the last pass took longer than expected.
        taken_frac: share of the loop's seconds that training took so far.
        last: the last decision.
    """

    def __init__(self, share: float, most: float, *, shared: bool, untrained: bool = True) -> None:
        """
        Args:
            share: share of the loop's seconds that training may take.
            most: maximum passes over a batch.
            shared: the companion trains on cores or a device that the loop uses too.
            untrained: the heads start at nothing.
        """
        self._untrained = untrained
        self._share = share
        self._most = self._at_a_time = most
        self._shared = shared
        self.left_s = 0.0
        self._loop_s = self._trained_s = self._passes = 0.0  # Of all steps.
        self._published = self._rejected = 0  # When training began or woke.
        self._rejected_so_far = 0
        self._resting = self._behind = False
        self._rested = 0  # Batches since training ended, or since the last probe.
        self._probe_after = PROBE_STEPS[0]
        self._serving = 0
        self._lengths: deque[float] = deque(maxlen=LENGTHS[1])
        self.last = Decision()

    def begin(self, published: int, rejected: int) -> None:
        """Record the published versions and rejected candidates of a warm-up, or of an earlier
        run.
        """
        self._published = published
        self._rejected = self._rejected_so_far = rejected

    @property
    def taken_frac(self) -> float:
        return self._trained_s / self._loop_s if self._loop_s else 0.0

    def step(self, seen: StepSeen) -> None:
        """Record a finished step."""
        income_s = self._share * seen.step_s
        if not self._loop_s and not self._published and self._untrained:
            self.left_s += AHEAD * income_s
        self._loop_s += seen.step_s
        self._trained_s += seen.trained_s
        self._passes += self.last.passes
        most_s = max(
            AHEAD * income_s, LEAST * self._pass_s
        )  # Otherwise a long pass would never fit.
        self.left_s = min(most_s, self.left_s + income_s - seen.trained_s)
        self._behind = seen.behind
        if seen.behind:
            self._at_a_time = min(self._at_a_time, max(1.0, self._at_a_time / 2))
        else:
            self._at_a_time = min(self._most, LONGER * self._at_a_time)
        if seen.serving != self._serving:
            self._serving = seen.serving
            self._lengths.clear()
        self._lengths.append(seen.length)
        self._rejected_so_far = seen.rejected
        if seen.published != self._published:
            self._published = seen.published
            self._wake()
        elif seen.rejected - self._rejected >= PATIENCE and not self._resting:
            self._resting = True
            self._rested = 0

    def take(self, turn_s: float) -> None:
        """Record a turn, for which the loop waited."""
        self.left_s -= turn_s
        self._trained_s += turn_s

    def decide(self) -> Decision:
        """Passes over the next batch."""
        self.last = self._decide()
        return self.last

    def _decide(self) -> Decision:
        if not self._shared:
            return Decision(self._most, "alone")
        if self._resting and self._fallen:
            self._wake()
        most = self._at_a_time
        if self._resting:
            self._rested += 1
            if self._rested <= self._probe_after:
                return Decision(0.0, "resting")
            most = 1.0
        first = most if self._untrained and not self._published else LEAST
        passes = min(most, self.left_s / self._pass_s) if self._pass_s else first
        if self._behind or passes < LEAST:
            return Decision(0.0, "waiting")
        if not self._resting:
            return Decision(passes, "training")
        self._rested = 0
        self._probe_after = min(PROBE_STEPS[1], 2 * self._probe_after)
        return Decision(passes, "resting")

    def _wake(self) -> None:
        """Resume training, until PATIENCE verdicts in a row bring no new version."""
        self._resting = False
        self._rejected = self._rejected_so_far
        self._probe_after = PROBE_STEPS[0]
        self._lengths.clear()  # A fall that training can't repair counts only once.

    @property
    def _pass_s(self) -> float:
        """Seconds that a pass takes from the loop; 0 before one was made."""
        return self._trained_s / self._passes if self._passes else 0.0

    @property
    def _fallen(self) -> bool:
        """Whether the last steps' acceptance is significantly below that of earlier steps with the
        same heads.
        """
        lengths = list(self._lengths)
        before = lengths[:-RECENT]
        if len(before) < LENGTHS[0]:
            return False
        error = stdev(before) * (1 / RECENT + 1 / len(before)) ** 0.5
        return fmean(lengths[-RECENT:]) < fmean(before) - ERRORS * error
