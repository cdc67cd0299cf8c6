"""How many passes over a batch the heads are trained: a fixed number, or many while that pays and few while it doesn't (no torch).

The rule of `drift`, for each batch before it is trained on. Extra tokens are the mean acceptance length less 1.

    start      nothing was published yet, for START batches                                    the most passes
    fell       the serving heads surely lost extra tokens since they were published            the most passes
    at_upper   the serving heads reach the upper mark of the batch before: nothing is left     the fewest
    behind     the serving heads surely lacked extra tokens of the batch before's candidate    the most passes
    unsure     they seemed to, but not surely                                                  as many as before
    settling   none of these                                                                   half as many as before
    floor      the same, and the fewest are reached

"Lost" and "lacked" mean a share of at least LAG, and "surely" with the gate's confidence. Heads that begin at nothing show no gain
for a while (no draft is accepted before it is the likeliest token), hence `start`. A candidate that is not published goes on
learning, so small gains add up, at the fewest passes too, until they are sure: then the serving heads are `behind`. When acceptance
fell because the policy grew less sure, no training gains anything, and the rule settles again after a few batches.
"""

from __future__ import annotations

from dataclasses import dataclass

REASONS = {
    "fixed": "the schedule is fixed",
    "unjudged": "the batch had no holdout, so it got as many passes as the one before",
    "start": "the run begins, and no version was published yet",
    "fell": "the serving heads lost acceptance since they were published",
    "at_upper": "the serving heads reach the upper mark",
    "behind": "newer heads surely reached more than the serving ones",
    "unsure": "newer heads seemed to reach more than the serving ones",
    "settling": "the training before gained next to nothing",
    "floor": "training has gained next to nothing for a while",
}
"""Reason of a decision -> what it means."""
CODES = tuple(REASONS)
START = 8
LEAST = 0.25
LAG = 0.03
NOISE = 2**0.5  # The level was measured too, on other responses: a difference is that much noisier than one measurement.
KEPT = 0.5  # Of the expected level with each batch; the rest is what the serving heads reached on it.


@dataclass(frozen=True)
class Decision:
    """How much to train on a batch.

    Attributes:
        passes: over its positions; below 1 a random part of them once.
        reason: a key of REASONS; empty before the first batch.
    """

    passes: float = 0.0
    reason: str = ""


class Schedule:
    """Decides for one batch after the other. `decide` before a training, `judged` after the gate has spoken."""

    def __init__(self, kind: str, most: float, least: float = LEAST, lag: float = LAG) -> None:
        """
        Args:
            kind: `fixed` (always `most`) or `drift`.
            most, least: passes; below 1 a random part of the positions once.
            lag: share of the extra tokens that is worth a training.
        """
        self._kind = kind
        self._most, self._least, self._lag = most, least, lag
        self._start = START  # Batches left in which a first version is awaited.
        self._level = 0.0  # Mean acceptance length that the serving heads are expected to reach; 0: not known yet.
        self._gained = False  # The last candidate had a lead that is worth a training ...
        self._sure = False  # ... or any lead, and surely.
        self._at_upper = False
        self.last = Decision()

    def decide(self, length: float | None, high: float = 0.0) -> Decision:
        """Passes over the batch that has come.

        Args:
            length: mean acceptance length of the serving heads on its holdout; None: it has none.
            high: upper end of its interval.
        """
        self.last = self._decide(length, high)
        return self.last

    def judged(self, serving: float, candidate: float, low: float, *, published: bool, upper: float | None = None) -> None:
        """What came of the training.

        Args:
            serving, candidate: mean acceptance lengths on the holdout.
            low: lower end of the interval of their difference, candidate minus serving.
            published: the candidate serves from now on.
            upper: the upper mark on the same holdout; None: not measured.
        """
        if self._kind == "fixed":
            return
        self._start = 0 if published else max(0, self._start - 1)
        now = candidate if published else serving
        if published or not self._level:
            self._level = now
        self._gained = candidate - serving >= self._lag * (candidate - 1) > 0
        self._sure = low > 0
        self._at_upper = upper is not None and upper - now < self._lag * (upper - 1)

    def _decide(self, length: float | None, high: float) -> Decision:
        if self._kind == "fixed":
            return Decision(self._most, "fixed")
        if self._start:
            return Decision(self._most, "start")
        if length is None:
            return Decision(self.last.passes, "unjudged")
        fell = self._level - length > max(self._lag * (self._level - 1), NOISE * (high - length))
        self._level = KEPT * self._level + (1 - KEPT) * length
        if fell:
            return Decision(self._most, "fell")
        if self._at_upper:
            return Decision(self._least, "at_upper")
        if self._gained:
            return Decision(self._most, "behind") if self._sure else Decision(self.last.passes, "unsure")
        passes = max(self._least, self.last.passes / 2)
        return Decision(passes, "settling" if passes > self._least else "floor")

    def state(self) -> list[float]:
        """Everything that later decisions depend on, as numbers."""
        reason = CODES.index(self.last.reason) if self.last.reason else -1
        return [self._start, self._level, self._gained, self._sure, self._at_upper, self.last.passes, reason]

    def load(self, state: list[float]) -> None:
        """Go on from a state."""
        start, self._level, gained, sure, at_upper, passes, reason = state
        self._start = int(start)
        self._gained, self._sure, self._at_upper = bool(gained), bool(sure), bool(at_upper)
        self.last = Decision(passes, CODES[int(reason)] if reason >= 0 else "")
