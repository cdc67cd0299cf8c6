"""Simulates rollouts with their long tail: responses of unequal lengths on an engine's slots, with
drafts and without.

Responses take free slots in order. In each step every running response grows by the accepted
tokens, and when one ends, the next begins. Towards the end few are left and steps are short; there
drafts pay most. Nothing changes while no response ends, so the simulation jumps from one end to the
next.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist, fmean

from heads.errors import DataError, UsageError
from medusa_ppo.predict.step_model import Steps

TOKEN_STEPS = 64
"""Longest jump in engine steps; longer ones are split, because contexts grow meanwhile."""
CONTEXT_FACTOR = 8
"""Ratio of neighbouring contexts in a StepTable. In between, a step's time is taken as linear: only
attention depends on the context.
"""


@dataclass(frozen=True)
class ResponseLengths:
    """Tokens of each response of a rollout.

    Attributes:
        tokens: in the order in which they start.
        said: where they come from, in words.
    """

    tokens: tuple[int, ...]
    said: str

    @classmethod
    def log_normal(
        cls, count: int, mean: float, spread: float, longest: int | None = None, seed: int = 0
    ) -> ResponseLengths:
        """Log-normal lengths, roughly like those of reasoning models. `spread` is the standard
        deviation of the logarithm. Longer responses are cut at `longest`; `mean` is the mean after
        cutting.
        """
        if mean < 1 or spread < 0 or count < 1:
            raise UsageError(
                "These lengths are not valid.",
                given=f"{count} responses, mean {mean}, spread {spread}",
                expected="responses >= 1, --length-mean >= 1, --length-spread >= 0",
                do="Correct them.",
            )
        if longest is not None and longest < mean:
            raise UsageError(
                "The mean response is longer than the longest one.",
                given=f"mean {mean:g}, longest {longest}",
                expected="a mean below the longest response",
                do="Correct --length-mean or --longest.",
            )
        # Evenly spaced quantiles in shuffled order, so that even a small sample has a tail.
        normal = NormalDist()
        factors = [math.exp(spread * normal.inv_cdf((n + 0.5) / count)) for n in range(count)]
        most = longest or math.inf

        def scaled(middle: float) -> list[int]:
            return [max(1, round(min(middle * factor, most))) for factor in factors]

        low, high = 0.0, 2.0 * mean
        while fmean(scaled(high)) < mean * (1 - 1e-6) and high < 1e3 * mean:
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if fmean(scaled(middle)) < mean else (low, middle)
        drawn = scaled(high)
        random.Random(seed).shuffle(drawn)
        return cls(tuple(drawn), f"log-normal, mean {mean:,.0f} tokens, spread {spread:g}")

    @classmethod
    def read(cls, path: Path) -> ResponseLengths:
        """Read one length per line, in the order in which the responses started.

        Raises:
            DataError: the file is missing, or a line is not a whole number above 0.
        """
        try:
            lines = path.read_text(encoding="utf-8").split()
        except OSError as error:
            raise DataError(
                "The lengths can't be read.",
                given=f"{path}: {error.strerror}",
                expected="a text file with a number of tokens on each line",
                do="Check the path.",
            ) from None
        bad = [line for line in lines if not line.isdecimal() or int(line) < 1]
        if bad or not lines:
            raise DataError(
                "The file of lengths is empty or has a line that is not a length.",
                given=f"{path}: {bad[0] if bad else 'nothing'}",
                expected="a whole number above 0 on each line",
                do="Correct the line.",
            )
        return cls(tuple(int(line) for line in lines), f"{len(lines)} of {path.name}")

    @property
    def mean(self) -> float:
        return fmean(self.tokens)


@dataclass(frozen=True)
class RolloutTime:
    """A simulated rollout.

    Attributes:
        seconds: until the last response ends.
        tail_s: seconds of these with fewer than half of the slots in use.
        steps: engine steps.
        drafts: mean number of drafts per step, weighted by time.
    """

    seconds: float
    tail_s: float
    steps: float
    drafts: float


class StepTable:
    """Step times by running sequences and context, interpolated between a few computed sizes."""

    def __init__(self, compute: Callable[[float, float], float], most: int, longest: float) -> None:
        self._compute = compute
        self._sizes = sorted({1, 2, *octaves(most), most})
        self._contexts = [1.0]
        while self._contexts[-1] <= longest:
            self._contexts.append(CONTEXT_FACTOR * self._contexts[-1])
        self._cells: dict[tuple[int, int], float] = {}

    def seconds(self, sequences: int, context: float) -> float:
        """Time of one step."""
        high = min(max(bisect_left(self._sizes, sequences), 1), len(self._sizes) - 1)
        far = min(max(bisect_left(self._contexts, context), 1), len(self._contexts) - 1)
        first, second = self._sizes[high - 1], self._sizes[high]
        near, wide = self._contexts[far - 1], self._contexts[far]
        share = min(1.0, max(0.0, (sequences - first) / (second - first)))
        part = min(1.0, max(0.0, (context - near) / (wide - near)))
        below = (1 - share) * self._cell(high - 1, far - 1) + share * self._cell(high, far - 1)
        above = (1 - share) * self._cell(high - 1, far) + share * self._cell(high, far)
        return (1 - part) * below + part * above

    def _cell(self, size: int, context: int) -> float:
        key = (size, context)
        if key not in self._cells:
            self._cells[key] = self._compute(self._sizes[size], self._contexts[context])
        return self._cells[key]


def octaves(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(int(math.log2(max(most, 1))) + 1)]


class RolloutModel:
    """Rollouts of one engine: the same responses on the same slots, plain and with drafts."""

    def __init__(
        self,
        steps: Steps,
        lengths: ResponseLengths,
        slots: int,
        prompt: float,
        most_drafts: int,
        drafted_slots: int | None = None,
    ) -> None:
        """
        Args:
            slots: maximum number of sequences that run at once.
            prompt: tokens of a prompt, in the cache of each sequence from its start.
            drafted_slots: the same with drafting, which takes memory from the KV cache.
        """
        self.lengths = lengths
        self.slots = max(1, min(slots, len(lengths.tokens)))
        self.drafted_slots = max(1, min(drafted_slots or slots, self.slots))
        self.prompt = prompt
        longest = prompt + max(lengths.tokens)
        self._plain = StepTable(steps.plain, self.slots, longest)

        def table(drafts: int) -> StepTable:
            return StepTable(
                lambda sequences, context: steps.drafted(sequences, drafts, context),
                self.slots,
                longest,
            )

        self._drafted = [table(drafts) for drafts in range(most_drafts + 1)]

    def plain(self) -> RolloutTime:
        """Without speculation."""
        return self._run(
            self.slots, lambda sequences, context: (self._plain.seconds(sequences, context), 1, 0)
        )

    def drafted(self, acceptance: Sequence[float], drafts: int | None = None) -> RolloutTime:
        """With this many drafts in every step; None: the best number, possibly zero."""
        tokens = list(accumulate(acceptance, initial=1.0))
        return self._run(
            self.drafted_slots,
            lambda sequences, context: self.best_step(tokens, sequences, context, drafts),
        )

    def best_step(
        self, tokens: Sequence[float], sequences: int, context: float, drafts: int | None = None
    ) -> tuple[float, float, int]:
        """(seconds, tokens per sequence, drafts) of the step with the most tokens per second."""
        allowed = range(len(tokens)) if drafts is None else (drafts,)
        found = (
            (self._drafted[count].seconds(sequences, context), tokens[count], count)
            for count in allowed
        )
        return max(found, key=lambda step: step[1] / step[0])

    def price(self, sequences: int, drafts: int) -> float:
        """How many times as long as a plain step one with this many drafts takes, with this many
        running sequences, each half-way through a response of mean length. Drafting pays if the
        mean acceptance length is higher.
        """
        context = self.prompt + self.lengths.mean / 2
        plain = self._plain.seconds(sequences, context)
        return self._drafted[drafts].seconds(sequences, context) / plain

    def _run(
        self, slots: int, step: Callable[[int, float], tuple[float, float, int]]
    ) -> RolloutTime:
        """Simulate a rollout, jumping from the end of one response to the next."""
        waiting = list(reversed(self.lengths.tokens))
        # All running responses progress equally, so each is identified by the progress at which it
        # ends.
        running: list[tuple[float, float]] = []
        progress = seconds = tail = steps = drafted = 0.0
        begun = 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                heapq.heappush(running, (progress + waiting.pop(), progress))
                begun += progress
            count = len(running)
            while running[0][0] > progress:
                # `begun` is the sum of their starting points, so their mean context needs no loop.
                context = self.prompt + progress - begun / count
                one_s, tokens, drafts = step(count, context)
                ahead = min(running[0][0] - progress, TOKEN_STEPS * tokens)
                taken = ahead / tokens
                progress += ahead
                seconds += taken * one_s
                steps += taken
                drafted += taken * one_s * drafts
                tail += taken * one_s * (not waiting and count < slots / 2)
            while running and running[0][0] <= progress:
                begun -= heapq.heappop(running)[1]
        return RolloutTime(seconds, tail, steps, drafted / max(seconds, 1e-12))
