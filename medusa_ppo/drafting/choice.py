"""Chooses the number of drafts in a step, from measured step times and acceptance.

A step of B running sequences with k drafts each yields B (1 + a_1 + ... + a_k) tokens, where a_j is
the share of draft runs that reach position j; its duration comes from a table by B and k. A
calibration fills the table when an engine starts, and every served step keeps it up to date.

The k with the most tokens per second is chosen. Zero is one of the choices, and drafting must be
significantly faster than not drafting. A step says nothing about other numbers of drafts, so these
are tried in turn. Before a trial, the time that it may lose is saved up, at half a percent of the
time of all steps, so that trials never cost more than that.

A machine is sometimes faster and sometimes slower (other programs, clocks). That pace is the same
for all k, so it is estimated separately and divided out; what remains tells the k apart.

All of this runs between two steps, which may be 3 ms apart, so it uses plain floats.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from medusa_ppo.contract.figures import mean_speedup

KEPT_STEPS = 96
"""Number of last steps of a kind whose median is the kind's time: enough to resolve 5 % on a noisy
machine, and few enough to follow a machine that changes within seconds.
"""
LEARNED_STEPS = 4
"""A calibration counts as at most this many steps, so that current steps soon dominate."""
LEAST_STEPS = 4
"""Minimum steps of a kind before it may be chosen."""
PACE_STEPS = 9
"""Number of last steps whose median is the machine's pace. It has to be a median, like a kind's
seconds: with a mean, single slow steps would raise the pace for good, and so lower all seconds.
"""
NOISE_STEPS = 20.0
"""Steps over which noise is averaged."""
LARGEST_SURPRISE = 0.4
"""Limit on what one step may add to the noise, in log seconds: a pause for a swap is not noise."""
SURE = 2.0
"""Standard errors by which drafting must be faster than not drafting."""
TRIAL_SHARE = 0.005
"""Share of the steps' time that trials may cost."""
TRIAL_STEPS = 5
"""Minimum steps between two trials of the same number of drafts."""
OTHER_PACE = 0.15
"""If the pace (log) changes by this much after a step without drafts, another such step is tried.
If that one is faster than expected by this much, more follow; otherwise the pace would hide that
only drafting became slower.
"""
NEW_MAY_LOSE = 0.85
"""A number of drafts without measurements at about this many sequences is tried for a few steps if
its expected speed is at least this share of the best one's.
"""
KEPT_RUNS = 200.0
"""Draft runs over which acceptance is averaged."""
FIRST_ODDS, PRIOR_RUNS = 0.9, 2.0
"""Prior for the acceptance of heads before they were tried, and its weight in runs. It is higher
than most heads reach: otherwise a first wrong draft would keep them from being tried again.
"""
NEW_HEADS_RUNS = 4.0
"""Weight, in runs, that everything before a swap keeps."""
REVIEW_STEPS = 4
"""Steps between two evaluations of the table, and between two steps that it learns from if all
steps are alike: it hardly changes in between, and each of these takes 20 us.
"""
FINE = 4
"""Up to this number, every number of drafts is a choice; above it they become sparser."""


def nearest_power(batch: int) -> int:
    """The exponent of the power of two closest to `batch`, the key of all tables."""
    return round(math.log2(batch))


class StepKind:
    """Log seconds of the last steps with about this many sequences and drafts."""

    def __init__(self) -> None:
        self._in_turn: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, log_seconds: float) -> None:
        if len(self._in_turn) == KEPT_STEPS:
            self._sorted.pop(bisect_left(self._sorted, self._in_turn.popleft()))
        self._in_turn.append(log_seconds)
        insort(self._sorted, log_seconds)

    @property
    def steps(self) -> int:
        return len(self._in_turn)

    @property
    def median(self) -> float:
        middle = len(self._sorted) // 2
        return (self._sorted[middle] + self._sorted[~middle]) / 2


class StepTable:
    """Seconds of a decode step by running sequences and drafts.

    Kinds exist for powers of two of sequences; in between, seconds are interpolated linearly.

    Attributes:
        noise: standard deviation of a step's log seconds around table and pace.
    """

    def __init__(self) -> None:
        self.kinds: dict[tuple[int, int], StepKind] = {}
        self.noise = 0.1
        self._offsets: dict[int, deque[float]] = {}
        self._paces: dict[int, float] = {}
        self._last_pace = 0.0
        self._last_drafts = 0
        self._alike = 0

    def observe(self, batch: int, drafts: int, seconds: float) -> float:
        """Record a step of `batch` sequences that had `drafts` drafts each.

        Returns how much longer (log) it took than expected at the present pace.
        """
        nearest = nearest_power(batch)
        pace = self.pace(batch)
        expected = self.seconds(batch, drafts)
        surprise = 0.0
        if expected is not None:
            offset = math.log(seconds) - math.log(expected)
            surprise = offset - pace
            # While serving, all steps of a size may take longer than in the calibration. If the
            # table attributed that to these drafts, it would be wrong for a long time.
            offsets = self._offsets.setdefault(nearest, deque(maxlen=PACE_STEPS))
            offsets.append(offset)
            self._paces[nearest] = self._last_pace = median(offsets)
            believed = min(abs(surprise), LARGEST_SURPRISE)
            self.noise += (1.25 * believed - self.noise) / NOISE_STEPS
        log_seconds = math.log(seconds) - pace
        kind = self.kinds.setdefault((nearest, drafts), StepKind())
        here = self._line(batch, lambda power: self._own(power, drafts))
        if here is not None and kind.steps:
            # The step's time is converted to that of the nearest power of two.
            log_seconds += kind.median - math.log(here)
        self._alike = self._alike + 1 if drafts == self._last_drafts else 1
        self._last_drafts = drafts
        # With only one number of drafts, the machine's pace can't be told from the step's own time.
        # Both would drift (the pace up and the seconds down if slow steps are the exception), until
        # nothing could be compared with them any more.
        if self._alike <= KEPT_STEPS or kind.steps < LEAST_STEPS:
            kind.add(log_seconds)
        return surprise

    def pace(self, batch: int) -> float:
        """How much slower (log) steps of about this many sequences are now than in the table."""
        return self._paces.get(nearest_power(batch), self._last_pace)

    def seconds(self, batch: int, drafts: int) -> float | None:
        """Seconds of such a step at the machine's usual pace; None: unknown.

        Fewer drafts never take longer, so a kind whose few steps happened to be slow gets the time
        of kinds with more drafts.
        """

        def fastest(power: int) -> float | None:
            if (power, drafts) not in self.kinds:
                return None
            return min(
                math.exp(kind.median)
                for (other, k), kind in self.kinds.items()
                if other == power and k >= drafts
            )

        return self._line(batch, fastest)

    def _own(self, power: int, drafts: int) -> float | None:
        kind = self.kinds.get((power, drafts))
        return math.exp(kind.median) if kind is not None and kind.steps else None

    @staticmethod
    def _line(batch: int, at: Callable[[int], float | None]) -> float | None:
        """A value interpolated between the powers of two around `batch`, or the only known one."""
        exact = math.log2(batch)
        below = at(math.floor(exact))
        above = at(math.ceil(exact))
        if below is None or above is None:
            return above if below is None else below
        share = (batch - 2 ** math.floor(exact)) / 2 ** math.floor(exact)
        return below + (above - below) * share

    def steps(self, batch: int, drafts: int) -> int:
        """Number of steps behind `seconds`."""
        kind = self.kinds.get((nearest_power(batch), drafts))
        return 0 if kind is None else kind.steps

    def error(self, batch: int, drafts: int) -> float:
        """Standard error of the log of `seconds`: that of a median."""
        return 1.25 * self.noise / math.sqrt(self.steps(batch, drafts))

    def rows(self) -> list[dict[str, float]]:
        """The table in its JSON form: `running`, `drafts`, `seconds`, `steps`."""
        return [
            {
                "running": 2**power,
                "drafts": drafts,
                "seconds": math.exp(kind.median + self.pace(2**power)),
                "steps": kind.steps,
            }
            for (power, drafts), kind in sorted(self.kinds.items())
        ]

    def learn(self, rows: Iterable[dict[str, float]]) -> None:
        """Load rows of another table for the same machine, model and engine."""
        for row in rows:
            key = (round(math.log2(row["running"])), int(row["drafts"]))
            kind = self.kinds.setdefault(key, StepKind())
            for _ in range(min(int(row["steps"]), LEARNED_STEPS)):
                kind.add(math.log(row["seconds"]))


class Acceptance:
    """Share of draft runs that reach each position, over recent runs."""

    def __init__(self, positions: int) -> None:
        self._reached = [0.0] * positions
        self._tried = [0.0] * positions

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts and accepted drafts of each request in one step."""
        positions = len(self._tried)
        offered = [0] * (positions + 1)
        right = [0] * (positions + 1)
        for count, good in zip(drafted, accepted, strict=True):
            offered[count] += 1
            right[min(good, count)] += 1
        for position in range(positions):
            # A run with a draft here also had all earlier ones.
            tried = sum(offered[position + 1 :])
            # By runs and not by steps, so that a batch of 64 forgets as fast as 64 single steps.
            kept = math.exp(-tried / KEPT_RUNS)
            self._reached[position] = kept * self._reached[position] + sum(right[position + 1 :])
            self._tried[position] = kept * self._tried[position] + tried

    def heads_changed(self) -> None:
        """Forget most of the acceptance, because that of the old heads says little about others."""
        for position, tried in enumerate(self._tried):
            kept = min(1.0, NEW_HEADS_RUNS / max(tried, 1.0))
            self._reached[position] *= kept
            self._tried[position] *= kept

    def shares(self) -> list[float]:
        """a_1, a_2, ..., decreasing. A position that was not tried yet counts as good as the
        previous one.
        """
        shares = []
        before = 1.0
        odds = FIRST_ODDS
        for reached, tried in zip(self._reached, self._tried, strict=True):
            share = min(before, (reached + PRIOR_RUNS * before * odds) / (tried + PRIOR_RUNS))
            odds = share / before
            before = share
            shares.append(share)
        return shares


class DraftChooser:
    """Chooses k for each step from the number of running sequences.

    Attributes:
        allowed: what is chosen from: every number up to 4, and then fewer and fewer.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        fine = range(min(max_drafts, FINE) + 1)
        coarse = [k for k in range(FINE, max_drafts) if k % (2 if k <= 2 * FINE else 4) == 0]
        self.allowed = sorted({*fine, *coarse, max_drafts})
        self.table = StepTable()
        self.acceptance = Acceptance(max_drafts)
        self._held = (-1, 0, 0)
        self._pace_of_none: dict[int, float] = {}
        self._surprise_of_none = 0.0
        self._surprise_of_drafts = 0.0
        self._savings_s = dict.fromkeys(self.allowed, 0.0)
        self._seen: dict[tuple[int, int], int] = {}
        self._last_key = (0, 0)
        self._alike = 0

    def observe_acceptance(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts and accepted drafts of each request in one step."""
        self.acceptance.observe(drafted, accepted)

    def observe_step(self, batch: int, drafts: int, seconds: float) -> None:
        """One pure decode step."""
        key = (batch.bit_length(), drafts)
        self._seen[key] = self._seen.get(key, 0) + 1
        self._alike = self._alike + 1 if key == self._last_key else 0
        self._last_key = key
        often = self._alike <= KEPT_STEPS
        if not often and self._alike % REVIEW_STEPS:
            return
        surprise = self.table.observe(batch, drafts, seconds)
        # A pause must not earn time for trials.
        usual_s = self.table.seconds(batch, drafts)
        afforded_s = min(seconds, usual_s or seconds) * (1 if often else REVIEW_STEPS)
        for k in self.allowed:
            self._savings_s[k] += self._share_of(k) * afforded_s
        if not drafts:
            self._pace_of_none[nearest_power(batch)] = self.table.pace(batch)
            self._surprise_of_none = surprise
        else:
            self._surprise_of_drafts += (surprise - self._surprise_of_drafts) / LEAST_STEPS

    def heads_changed(self) -> None:
        """Call this for new heads or a new actor: acceptance must be learned again."""
        self.acceptance.heads_changed()

    def choose(self, batch: int) -> int:
        """Drafts of the next step for `batch` running sequences."""
        nearest = nearest_power(batch)
        held_at, held, left = self._held
        if held_at == nearest and left:
            self._held = (nearest, held, left - 1)
            return held
        if self.table.steps(batch, 0) < LEAST_STEPS:
            return 0
        rates = self.tokens_per_second(batch)
        best = self._best(batch, rates)
        pace = self.table.pace(batch)
        pace_changed = abs(pace - self._pace_of_none.get(nearest, pace)) > OTHER_PACE
        # If the machine became faster again, steps with drafts are also faster than expected.
        quicker = max(self._surprise_of_none, self._surprise_of_none - self._surprise_of_drafts)
        if best and (pace_changed or quicker < -OTHER_PACE):
            # Either the machine is slower, or only drafting is; steps without drafts show which.
            return 0
        trial = self._trial(batch, rates, best)
        if trial is not None:
            return trial
        self._held = (nearest, best, REVIEW_STEPS - 1)
        return best

    def tokens_per_second(self, batch: int) -> dict[int, float]:
        """Expected tokens per second at the usual pace, for the allowed numbers of drafts with
        measurements at about this many sequences.
        """
        tokens = self._tokens()
        rates = {}
        for k in self.allowed:
            seconds = self.table.seconds(batch, k)
            if seconds is not None and self.table.steps(batch, k) >= LEAST_STEPS:
                rates[k] = batch * tokens[k] / seconds
        return rates

    def _tokens(self) -> list[float]:
        """Tokens per sequence in a step with 0, 1, ... drafts."""
        return list(accumulate(self.acceptance.shares(), initial=1.0))

    def _best(self, batch: int, rates: dict[int, float]) -> int:
        """The fastest number of drafts that is significantly faster than none."""
        sure = [0]
        for k, rate in rates.items():
            doubt = math.hypot(self.table.error(batch, k), self.table.error(batch, 0))
            if k and rate * math.exp(-SURE * doubt) > rates[0]:
                sure.append(k)
        return max(sure, key=lambda k: rates.get(k, 0.0))

    def _trial(self, batch: int, rates: dict[int, float], best: int) -> int | None:
        """A number of drafts to try instead of the best, if the time that this may lose has been
        saved up; None: no trial now.

        Each number has its own savings, so that numbers that lose little are tried often.
        """
        tokens = self._tokens()
        picked, most_s, price_s = None, 0.0, 0.0
        for k in self.allowed:
            if k not in rates:
                # More drafts are considered only after fewer.
                seconds = self._by_a_line(batch, k, rates)
                if batch * tokens[k] / seconds > NEW_MAY_LOSE * rates[best]:
                    return k
                break
            loss_s = batch * tokens[k] * (1.0 / rates[k] - 1.0 / rates[best])
            left_s = self._savings_s[k] - loss_s
            if k != best and left_s >= most_s:
                # A number that looks faster (within the noise) loses nothing; it still has to wait
                # its turn.
                least_s = TRIAL_STEPS * self._share_of(k) * batch * tokens[k] / rates[k]
                picked, most_s, price_s = k, left_s, max(loss_s, least_s)
        if picked is not None:
            self._savings_s[picked] -= price_s
        return picked

    def _share_of(self, k: int) -> float:
        """Share of the steps' time that trials of k may lose. Half of the total is for k = 0, which
        all others are compared with.
        """
        return TRIAL_SHARE / 2 / (1 if k == 0 else len(self.allowed) - 1)

    def _by_a_line(self, batch: int, k: int, rates: dict[int, float]) -> float:
        """Extrapolated seconds of a step with more drafts than were measured at about this many
        sequences.
        """
        known = sorted(rates)
        last = self.table.seconds(batch, known[-1])
        assert last is not None, "only measured numbers have a rate"
        if len(known) == 1:
            return last
        before = self.table.seconds(batch, known[-2])
        assert before is not None, "only measured numbers have a rate"
        return last + (last - before) / (known[-1] - known[-2]) * (k - known[-1])

    def take_report(self) -> list[dict[str, Any]]:
        """Decode steps since the last report, by running sequences and number of drafts, fewest
        sequences first.

        Each row: `running` (this many to not quite twice as many), `steps` (with 0..K drafts) and
        `speedup` (tokens per second of the present choice relative to those without drafts, both
        from measured steps; 1: the choice is to draft nothing; None: steps without drafts were not
        measured).
        """
        seen = self._seen
        self._seen = {}
        rows = []
        for size in sorted({bits for bits, _ in seen}):
            running = 2 ** (size - 1)
            rates = self.tokens_per_second(running)
            steps = [seen.get((size, k), 0) for k in range(self.max_drafts + 1)]
            speedup = rates[self._best(running, rates)] / rates[0] if 0 in rates else None
            rows.append({"running": running, "steps": steps, "speedup": speedup})
        return rows


def merge_choices(reports: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the reports of several engines: steps add up, speed-ups are averaged with steps as
    weights.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for row in (row for report in reports for row in report):
        found.setdefault(row["running"], []).append(row)
    return [
        {
            "running": running,
            "steps": [sum(counts) for counts in zip(*(row["steps"] for row in rows), strict=True)],
            "speedup": mean_speedup(rows),
        }
        for running, rows in sorted(found.items())
    ]
