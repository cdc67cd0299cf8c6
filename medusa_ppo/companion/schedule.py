"""How much the heads are trained: as much as pays for the loop, in seconds, measured step by step
(no torch).

A step costs and brings
    lost     the seconds that the loop's own work took longer because the companion trained beside
             it, and those inside the plugin's hooks
    saved    the seconds that the same tokens took with the heads that the run began with (the
             quickest of those steps), less those of now

What a second of training costs the loop is estimated from the steps: seconds outside generation = a
x response tokens + b x seconds of training. It begins at b = 1 and is 0 where the companion has
cores or a device of its own.

The rule, for each batch before its states are collected. What training is worth is what the
candidate has more than the serving heads, over the next HORIZON steps; what it costs is all that
was lost since the last version was published. What one pass *more* brings is about half of what
those before it brought on average (MORE), so as many passes pay as are worth twice what they cost.

    alone      the companion takes nothing from the loop: the most passes
    behind     a batch waits already, because training takes longer than a step: none, and the
               batch is not even collected
    start      nothing was published yet, for START batches: the most
    pays       one pass more would be worth its cost: more, at most twice as many as before
    waning     it would not: fewer, at least a quarter of before
    rest       so few would be less than LEAST: none
    fell       acceptance (the engine's counters) fell by more than a batch's training costs: as
               many as the fall is worth
    probe      a while has passed, longer each time that it brought nothing: LEAST
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

START = 8
LEAST = 0.25
HORIZON = 10.0  # Steps for which a gain in acceptance is counted.
# What a pass more brings, of the mean of those before it: doubled passes brought a tenth more
# (benchmarks/RESULTS.md).
MORE = 0.5
GROWTH = (0.25, 2.0)  # Least and most passes after a verdict, as factors on those before.
LAG = 0.03  # Share of the extra tokens below which a fall is noise.
PROBE_STEPS = (8, 64)  # Steps of rest before a probe: at first, and at most.
PULL = 0.05  # Weight of b = 1 against the steps: it decides where all of them trained alike.
KEPT = 0.9  # Of what earlier steps say, with each step.


@dataclass(frozen=True)
class Decision:
    """How much to train on a batch.

    Attributes:
        passes: over its positions; below 1 a random part of them once; 0: it is not trained on.
        reason: a key of `metrics.REASONS`; empty before the first batch.
    """

    passes: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class StepSeen:
    """What a finished step of the loop took, and what the companion had done at its end.

    Attributes:
        generate_s, other_s, hooks_s: seconds of generation, of all else, and inside the plugin's
            hooks.
        tokens: response tokens.
        length: mean acceptance length by the engine's counters.
        trained_s: seconds of a core (or of the device that is shared) that the companion's training
            had meanwhile.
        judged: batches that the gate has judged so far.
        gain: candidate minus serving heads, mean acceptance length, when it judged last.
        published, serving: versions of the heads that were published last, and that the responses
            were drafted with.
        waiting: a batch waits behind the one in training.
    """

    generate_s: float
    other_s: float
    hooks_s: float
    tokens: int
    length: float
    trained_s: float
    judged: int
    gain: float
    published: int
    serving: int
    waiting: bool = False


@dataclass
class SharedSeconds:
    """Least squares for other_s = a x tokens + b x trained_s, with forgetting, and with b pulled a
    little towards 1.
    """

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, tokens: int, trained_s: float, other_s: float) -> None:
        products = (
            tokens * tokens,
            tokens * trained_s,
            trained_s * trained_s,
            tokens * other_s,
            trained_s * other_s,
        )
        self.sums = [KEPT * old + new for old, new in zip(self.sums, products, strict=True)]

    @property
    def price(self) -> float:
        """Seconds that the loop loses by one second of training: b, within what can be."""
        nn, nc, cc, no, co = self.sums
        if not nn or not cc:
            return 1.0
        pull = PULL * cc
        return min(3.0, max(0.0, (co + pull - nc * no / nn) / (cc + pull - nc * nc / nn)))


class Account:
    """Keeps the books and decides. `step` after each step of the loop, `decide` before each batch
    is collected.

    Attributes:
        saved_s, lost_s: of the last step.
        last: decision.
    """

    def __init__(self, most: float, *, shared: bool) -> None:
        """
        Args:
            most: passes over a batch.
            shared: the companion trains on cores or a device that the loop uses too.
        """
        self._most = most
        self._shared = shared
        self._seconds = SharedSeconds()
        self._first_s = math.inf  # Of a token's generation with the heads that the run began with.
        self._length = self._level = 0.0  # Acceptance now, and as it was when training ended.
        self._generate_s = self._pass_s = 0.0  # Of a step; lost by one pass over a batch.
        self._spent_s = 0.0  # Lost since the last publish.
        self._judged = self._version = self._batches = self._idle = 0
        self._patience = PROBE_STEPS[0]
        self._worth: float | None = (
            None  # Of the training judged last, as a multiple of what it cost.
        )
        self._waiting = False
        self._now = (
            Decision()
        )  # As `last`, without the batches that were left out because another one waited.
        self.saved_s = self.lost_s = 0.0
        self.last = Decision()

    def step(self, seen: StepSeen) -> None:
        """Book a finished step."""
        warming_up = self._first_s == math.inf
        if not seen.serving or warming_up:
            self._first_s = min(self._first_s, seen.generate_s / max(1, seen.tokens))
        self.saved_s = seen.tokens * self._first_s - seen.generate_s if seen.serving else 0.0
        if not warming_up:
            self._seconds.add(seen.tokens, seen.trained_s, max(0.0, seen.other_s - seen.hooks_s))
        self.lost_s = seen.hooks_s + (self._seconds.price * seen.trained_s if self._shared else 0.0)
        self._generate_s = seen.generate_s
        self._length = seen.length
        self._spent_s += self.lost_s
        if self.last.passes:
            self._pass_s = self.lost_s / self.last.passes
        if seen.judged != self._judged:
            worth_s = HORIZON * self._generate_s * seen.gain / seen.length
            self._worth = worth_s / max(self._spent_s, 1e-9)
            if seen.published != self._version:
                self._spent_s = 0.0
        self._judged = seen.judged
        self._version = seen.published
        self._waiting = seen.waiting

    def decide(self) -> Decision:
        """Passes over the batch that comes next."""
        if self._shared and self._waiting:
            self.last = Decision(0.0, "behind")
            return self.last
        self.last = self._now = self._decide()
        self._batches += 1
        self._idle = 0 if self.last.passes else self._idle + 1
        return self.last

    def _decide(self) -> Decision:
        if not self._shared:
            return Decision(self._most, "alone")
        if not self._batches or (not self._version and self._batches < START):
            return Decision(self._most, "start")
        if not self._now.passes:
            return self._woken()
        worth = self._worth
        self._worth = None
        if worth is None:
            return self._now  # Not judged yet.
        least, most = GROWTH
        passes = min(self._most, self._now.passes * min(most, max(least, MORE * worth)))
        if MORE * worth >= 1:
            self._patience = PROBE_STEPS[0]
            return Decision(passes, "pays")
        if max(passes, LEAST * worth) >= LEAST:
            return Decision(max(passes, LEAST), "waning")
        self._level = self._length
        self._spent_s = 0.0
        return Decision(0.0, "rest")

    def _woken(self) -> Decision:
        """From a rest, by a fall of acceptance that is worth it, or by time."""
        self._worth = None
        self._spent_s = 0.0
        self._level = max(self._level, self._length)
        fallen = self._level - self._length
        worth = (
            HORIZON * self._generate_s * fallen / self._length / self._pass_s
            if self._pass_s
            else self._most
        )
        if fallen > LAG * (self._level - 1) and worth >= LEAST:
            self._level = self._length
            return Decision(min(self._most, worth), "fell")
        if self._idle >= self._patience:
            self._patience = min(PROBE_STEPS[1], 2 * self._patience)
            return Decision(LEAST, "probe")
        return Decision(0.0, "rest")
