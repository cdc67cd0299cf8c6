"""The embedded task: generated word problems of several arithmetic steps, with a worked solution and a checkable answer.

Every problem is a function of (seed, index, split) and of nothing else, so a stream needs no file and can be read from
anywhere. The splits share no question: which split a question belongs to is decided by a hash of its text, and a generator
draws until the text belongs to its own split.

The text to pretrain on may hold *slips*: a step whose result is off by a little, carried on to the end, as in text that people
write. A model trained on it knows the right result and is wrong at the rate of the slips, which is what PPO then removes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass

from heads.errors import DataError

TEMPLATE = "Question: {question}\nAnswer:"
"""How a question becomes a prompt; the same form as for GSM8K."""

ANSWER_MARK = "####"
"""Stands before the final answer, as in GSM8K."""

SPLITS = ("pretrain", "train", "eval")
"""The text that the actor was trained on from nothing, the questions of PPO, and those that nothing is trained on."""
_SHARES = (11, 4, 1)
"""How many of 16 questions belong to each."""

LARGEST = 20
"""No intermediate result is larger."""

SLIPS = (-2, -1, 1, 2)
"""By how much a slip is off: a miscount."""

NAMES = (
    ("Mia", "she"), ("Tom", "he"), ("Anna", "she"), ("Ben", "he"), ("Sara", "she"), ("Leo", "he"), ("Lucy", "she"), ("Max", "he"),
    ("Nina", "she"), ("Paul", "he"), ("Emma", "she"), ("Jack", "he"),
)  # fmt: skip
OBJECTS = ("pens", "apples", "books", "cards", "coins", "shells", "stamps", "marbles", "cookies", "stickers", "buttons", "beads")


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution (which ends with the answer mark and the answer), and the answer alone."""

    question: str
    solution: str
    answer: str


@dataclass(frozen=True)
class _Clause:
    """What happens to a number of things (the solution repeats it word for word), and the sign of the step it asks for."""

    text: str
    sign: str


_STARTS = (
    _Clause("{name} has {a} old {things} and {n} new {things}", "+"),
    _Clause("{name} has {a} red {things} and {n} blue {things}", "+"),
)
_CHANGES = (
    _Clause("{pronoun} buys {n} more {things}", "+"),
    _Clause("{pronoun} finds {n} {things} in the park", "+"),
    _Clause("{friend} brings {n} more {things}", "+"),
    _Clause("{pronoun} gives {n} {things} to {friend}", "-"),
    _Clause("{pronoun} loses {n} {things} on the way", "-"),
    _Clause("{pronoun} sells {n} {things} at school", "-"),
)
_ORDER = ("First", "Then", "Finally")
"""Opens the clauses, in the question and in the solution."""


@dataclass(frozen=True)
class _Step:
    """One step of a drawn problem: clause, right operand, and the exact result."""

    clause: _Clause
    operand: int
    result: int


def problem(index: int, seed: int, split: str = "train", slip_rate: float = 0.0) -> Problem:
    """The index-th problem of a stream; question and split do not depend on the slip rate.

    Args:
        index: position in the stream, from 0.
        seed: names the stream.
        split: one of SPLITS; they have no question in common, whatever the seeds.
        slip_rate: share of the steps with a wrong result (0: the solution and the answer are right).
    """
    if split not in SPLITS:
        raise DataError("The demo task has no such split.", given=split, expected=" or ".join(SPLITS), do="Name one of them.")
    attempt = 0
    while True:
        found = _draw(random.Random(f"{seed}/{index}/{attempt}"), random.Random(f"slips/{seed}/{index}"), slip_rate)
        if split_of(found.question) == split:
            return found
        attempt += 1


def split_of(question: str) -> str:
    """The split that a question belongs to, by a hash of its text."""
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    place = int.from_bytes(digest, "big") % sum(_SHARES)
    return next(split for split, end in zip(SPLITS, itertools.accumulate(_SHARES), strict=True) if place < end)


def document(found: Problem) -> tuple[str, str]:
    """The prompt and the response of a problem, as an actor reads and writes them."""
    return TEMPLATE.format(question=found.question), found.solution


def demo_rows(split: str = "train", seed: int = 0, limit: int = 1024) -> list[dict[str, str]]:
    """Rows of the task, as `datasets` would give them: question, prompt, answer, solution."""
    rows = []
    for index in range(limit):
        found = problem(index, seed, split)
        prompt, solution = document(found)
        rows.append({"question": found.question, "prompt": prompt, "answer": found.answer, "solution": solution})
    return rows


def _draw(rng: random.Random, slips: random.Random, slip_rate: float) -> Problem:
    """One problem: a start (two colours, or old and new), then one or two changes."""
    (name, pronoun), (friend, _) = rng.sample(NAMES, 2)
    words = {"name": name, "pronoun": pronoun, "friend": friend, "things": rng.choice(OBJECTS)}
    first = _draw_operand(rng)
    words["a"] = str(first)
    steps = [_draw_start(rng, first)]
    for _ in range(rng.choice((1, 2, 2))):
        steps.append(_draw_change(rng, steps[-1].result))
    clauses = [f"{order} {step.clause.text.format(**words, n=step.operand)}." for order, step in zip(_ORDER, steps, strict=False)]
    clauses.append("How many {things} does {name} have now?".format(**words))
    lines, answer = _solve(first, steps, words, slips, slip_rate)
    return Problem(" ".join(clauses), " " + "\n".join(lines), str(answer))


def _draw_operand(rng: random.Random) -> int:
    return rng.randint(2, 9)


def _draw_start(rng: random.Random, first: int) -> _Step:
    clause, operand = rng.choice(_STARTS), _draw_operand(rng)
    return _Step(clause, operand, _compute(first, clause.sign, operand))


def _draw_change(rng: random.Random, value: int) -> _Step:
    """A change after which the result lies between 1 and LARGEST."""
    while True:
        clause, operand = rng.choice(_CHANGES), _draw_operand(rng)
        result = _compute(value, clause.sign, operand)
        if 1 <= result <= LARGEST:
            return _Step(clause, operand, result)


def _compute(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


def _solve(first: int, steps: list[_Step], words: dict[str, str], slips: random.Random, slip_rate: float) -> tuple[list[str], int]:
    """The lines of the solution and the answer; a slip is carried on to the end, and never leads out of 1 to LARGEST."""
    lines: list[str] = []
    value = first
    for number, step in enumerate(steps, start=1):
        left, value = value, _compute(value, step.clause.sign, step.operand)
        if slips.random() < slip_rate:
            off = value - step.result
            ahead = [later.result + off for later in steps[number - 1 :]]
            value += slips.choice([by for by in SLIPS if min(ahead) + by >= 1 and max(ahead) + by <= LARGEST] or [0])
        clause = step.clause.text.format(**words, n=step.operand)
        lines.append(
            f"{_ORDER[number - 1]} {clause}, so now there are {left} {step.clause.sign} {step.operand} = {value} {words['things']}."
        )
    lines.append(f"{ANSWER_MARK} {value}")
    return lines, value
