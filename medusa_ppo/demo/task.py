"""The embedded task: generated word problems of several arithmetic steps, with a worked solution
and a checkable answer.

Every problem is a function of only (seed, index, split), so a stream needs no file and can be read
from anywhere. The splits share no question: a hash of a question's text decides its split, and a
generator draws until the text belongs to its own split.

The text to pretrain on may hold *slips*: a correct solution whose answer is the result before the
last step, as when people forget the last sentence. A model trained on it can solve the problems but
answers wrongly at the rate of the slips, which PPO can lower.

It also holds two ways to write each of four parts of a step: its opening (a word, or its number),
its sum (in the middle of a sentence, or behind a mark), the units within it (left out, or stated),
and its end (nothing, or the result once more). Every part is drawn for itself; at first a program
can check few of them. The reward (`graded_lines`) pays for right answers and for parts that can be
checked, as people reward real actors for a format that their checks can read. So PPO changes the
wording throughout a response, and heads that were trained on the old wording fall behind. Each line
has a reward of its own, as from a reward model that judges steps.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from heads.errors import DataError

TEMPLATE = "Question: {question}\nAnswer:"
"""How a question becomes a prompt; the same form as for GSM8K."""

ANSWER_MARK = "####"
"""Precedes the final answer, as in GSM8K."""

CHECK_MARK = "To check:"
"""Precedes a sum that can be checked."""

CHECKED_WORTH = 0.9
"""Reward of a step of which every part can be checked. A right answer is worth 1, so it alone
decides whether a response is right.
"""
_PARTS = 4
"""Parts of a step that may be checked."""

SPLITS = ("pretrain", "train", "eval")
"""The pretraining text, the questions for PPO, and the questions that nothing trains on.
"""
_SHARES = (11, 4, 1)
"""How many of 16 questions belong to each split."""

LARGEST = 12
"""Upper limit of intermediate results."""
_OPERANDS = (2, 5)
"""The smallest and the largest number that is added or subtracted."""

NAMES = (
    ("Mia", "she"), ("Tom", "he"), ("Anna", "she"), ("Ben", "he"),
    ("Sara", "she"), ("Leo", "he"), ("Lucy", "she"), ("Max", "he"),
    ("Nina", "she"), ("Paul", "he"), ("Emma", "she"), ("Jack", "he"),
)  # fmt: skip
OBJECTS = (
    "pens",
    "apples",
    "books",
    "cards",
    "coins",
    "shells",
    "stamps",
    "marbles",
    "cookies",
    "stickers",
    "buttons",
    "beads",
)


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution (which ends with the answer mark and the answer), and the
    answer alone.
    """

    question: str
    solution: str
    answer: str


@dataclass(frozen=True)
class _Clause:
    """What happens to a number of things (the solution repeats it word for word), and the sign of
    the step it asks for.
    """

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
_THEREFORE = "which means that from this moment on there are in all exactly"
"""Precedes each sum. As in most human text, much of a solution says nothing new, which is what
makes drafting work.
"""
_GOING_ON = "and this is what we go on with:"
"""Follows a sum, and precedes its result where that is stated once more."""
_SUM = re.compile(
    rf"({re.escape(CHECK_MARK)}|{_THEREFORE}) (\d+)( \w+)? ([-+]) (\d+)( \w+)? = (\d+)( \w+)"
)
"""The sum of a step with its units, and what precedes it."""
_RESULT = re.compile(rf"{_GOING_ON} (\d+)\.$")
"""The result at the end of a step."""
_ORDER = ("First", "Then", "Finally")
"""Words that open the clauses, in the question and in the solution."""


@dataclass(frozen=True)
class _ProblemStep:
    """One step of a drawn problem: clause, left and right operand, and the result."""

    clause: _Clause
    left: int
    operand: int
    result: int


def problem(
    index: int,
    seed: int,
    split: str = "train",
    slip_rate: float = 0.0,
    checked_rate: float = 0.0,
) -> Problem:
    """The index-th problem of a stream; question and split do not depend on the two rates.

    Args:
        index: position in the stream, from 0.
        seed: names the stream.
        split: one of SPLITS; they share no question, whatever the seeds.
        slip_rate: share of the solutions that give the result before the last step as their answer
            (0: all are right).
        checked_rate: share of the parts of steps that can be checked.
    """
    if split not in SPLITS:
        raise DataError(
            "The demo task has no such split.",
            given=split,
            expected=" or ".join(SPLITS),
            do="Name one of them.",
        )
    attempt = 0
    while True:
        found = _draw(
            random.Random(f"{seed}/{index}/{attempt}"),
            # Separate generators, so that questions and splits are the same at every rate.
            random.Random(f"slips/{seed}/{index}").random() < slip_rate,
            random.Random(f"wording/{seed}/{index}"),
            checked_rate,
        )
        if split_of(found.question) == split:
            return found
        attempt += 1


def split_of(question: str) -> str:
    """The split that a question belongs to, by a hash of its text."""
    # Python's own `hash` of a text differs between processes.
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    place = int.from_bytes(digest, "big") % sum(_SHARES)
    return next(
        split
        for split, end in zip(SPLITS, itertools.accumulate(_SHARES), strict=True)
        if place < end
    )


def document(found: Problem) -> tuple[str, str]:
    """The prompt and the response of a problem, as an actor reads and writes them."""
    return TEMPLATE.format(question=found.question), found.solution


def demo_rows(split: str = "train", seed: int = 0, limit: int = 1024) -> list[dict[str, str]]:
    """Rows of the task, in the form of `datasets`: question, prompt, answer, solution."""
    found = (problem(index, seed, split) for index in range(limit))
    return [
        {
            "question": one.question,
            "prompt": document(one)[0],
            "answer": one.answer,
            "solution": one.solution,
        }
        for one in found
    ]


def graded(prompt: str, response: str, row: dict[str, Any]) -> float:
    """`graded_lines` in one number, for algorithms without a critic: the answer's reward, and the
    mean of the steps'.
    """
    steps, answers = _split(response)
    earned = [_worth(step, number) for number, step in enumerate(steps, start=1)]
    return _answer_worth(response, row, answers) + sum(earned) / max(1, len(earned))


def graded_lines(prompt: str, response: str, row: dict[str, Any]) -> list[float]:
    """The demo's reward, for each line that is not blank (`ppo.step_separator`): 1 for a right
    answer, and up to CHECKED_WORTH for each step, by the share of its parts that can be checked.

    A step is a line before the answer; those beyond the steps of the row's solution earn nothing.
    Its four parts are its number, a sum behind the mark that is right, the units of that sum, and
    its result once more.
    """
    steps, answers = _split(response)
    asked, _ = _split(row["solution"])
    earned = [
        _worth(step, number) if number <= len(asked) else 0.0
        for number, step in enumerate(steps, start=1)
    ]
    if answers:
        earned.append(_answer_worth(response, row, answers))
    # A blank response is one step, too; what follows the answer earns nothing.
    return earned + [0.0] * (max(1, len(steps) + len(answers)) - len(earned))


def _split(response: str) -> tuple[list[str], list[str]]:
    """The lines of a response that are not blank: its steps, and those from the answer on."""
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    steps = list(itertools.takewhile(lambda line: ANSWER_MARK not in line, lines))
    return steps, lines[len(steps) :]


def _answer_worth(response: str, row: dict[str, Any], answers: list[str]) -> float:
    return float(bool(answers) and response.partition(ANSWER_MARK)[2].strip() == row["answer"])


def _worth(step: str, number: int) -> float:
    """What a step earns, by the parts that can be checked and are right."""
    parts = int(step.startswith(_number(number)))
    if (total := _SUM.search(step)) is not None:
        mark, left, left_unit, sign, right, right_unit, result, unit = total.groups()
        signed = int(right) if sign == "+" else -int(right)
        parts += mark == CHECK_MARK and int(left) + signed == int(result)
        parts += left_unit == right_unit == unit
        again = _RESULT.search(step)
        parts += again is not None and again.group(1) == result
    return CHECKED_WORTH * parts / _PARTS


def _draw(
    rng: random.Random, slipped: bool, wording: random.Random, checked_rate: float
) -> Problem:
    """One problem: a start (two colours, or old and new), then one or two changes."""
    (name, pronoun), (friend, _) = rng.sample(NAMES, 2)
    words = {"name": name, "pronoun": pronoun, "friend": friend, "things": rng.choice(OBJECTS)}
    first = rng.randint(*_OPERANDS)
    words["a"] = str(first)
    steps = [_draw_step(rng, _STARTS, first)]
    for _ in range(rng.choice((1, 2, 2))):
        steps.append(_draw_step(rng, _CHANGES, steps[-1].result))
    clauses = [
        f"{order} {step.clause.text.format(**words, n=step.operand)}."
        # Not strict: a problem has two or three steps.
        for order, step in zip(_ORDER, steps, strict=False)
    ]
    clauses.append("How many {things} does {name} have now?".format(**words))
    lines = [
        _line(number, step, words, [wording.random() < checked_rate for _ in range(_PARTS)])
        for number, step in enumerate(steps)
    ]
    answer = steps[-2].result if slipped else steps[-1].result
    lines.append(f"{ANSWER_MARK} {answer}")
    return Problem(" ".join(clauses), " " + "\n".join(lines), str(answer))


def _draw_step(rng: random.Random, clauses: tuple[_Clause, ...], left: int) -> _ProblemStep:
    """A step whose result is between 1 and LARGEST."""
    while True:
        clause = rng.choice(clauses)
        operand = rng.randint(*_OPERANDS)
        result = left + operand if clause.sign == "+" else left - operand
        if 1 <= result <= LARGEST:
            return _ProblemStep(clause, left, operand, result)


def _line(number: int, step: _ProblemStep, words: dict[str, str], checked: list[bool]) -> str:
    """A line of the solution: the clause, word for word, and the sum it asks for.

    Args:
        number: from 0.
        checked: which parts can be checked: opening, sum, units, end.
    """
    numbered, marked, with_units, restated = checked
    opening = _number(number + 1) if numbered else _ORDER[number]
    clause = step.clause.text.format(**words, n=step.operand)
    unit = f" {words['things']}"
    within = unit if with_units else ""
    total = f"{step.left}{within} {step.clause.sign} {step.operand}{within} = {step.result}{unit}"
    before = f". {CHECK_MARK}" if marked else f", {_THEREFORE}"
    end = f", {_GOING_ON} {step.result}." if restated else "."
    return f"{opening} {clause}{before} {total}{end}"


def _number(number: int) -> str:
    """How a step begins whose number is stated; from 1."""
    return f"Step {number}:"


END = "<|endoftext|>"
"""End of a document, and padding; id 0. Prompts have no start token."""

_WORDS_FROM = 4000
"""Number of problems whose words make the vocabulary; no template word is too rare to occur."""

_SPACE = "\u0120"
"""How the byte-level form writes a space."""

_NUMBERS = 100
"""Numbers below are one token each; larger ones are spelled digit by digit."""

_SPLITTER = pre_tokenizers.ByteLevel(add_prefix_space=False)
"""Words and numbers include the space before them, so that the text to copy directly follows the
word that leads to it.
"""


def build_tokenizer(*, checked: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer, the same on every call.

    Args:
        checked: it has the words of parts that can be checked; False: as in releases before 0.4,
            whose runs can be resumed.
    """
    vocabulary = {
        token: number
        for number, token in enumerate(
            [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_words(checked)]
        )
    }
    # Every word is one token, and unknown words are spelled in bytes: no merges to learn, and no
    # text without a token.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _SPLITTER
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


@functools.cache
def _words(checked: bool) -> list[str]:
    """All pieces of the task's text longer than one byte, sorted."""
    texts = (
        text
        for index in range(_WORDS_FROM)
        for text in document(problem(index, seed=0, checked_rate=0.5 if checked else 0.0))
    )
    seen = {piece for text in texts for piece, _ in _SPLITTER.pre_tokenize_str(text)}
    words = {piece for piece in seen if len(piece) > 1 and not re.search(r"\d", piece)}
    # Sorted, because a set's order differs between processes and ids must not.
    return sorted(words) + [f"{_SPACE}{number}" for number in range(_NUMBERS)]
