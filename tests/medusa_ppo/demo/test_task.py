"""The generated problems: right, repeatable, and in streams that share nothing."""

from __future__ import annotations

import itertools
import re

import pytest

from heads.errors import DataError
from medusa_ppo.demo.pretraining import Recipe, _encode_pool
from medusa_ppo.demo.task import (
    CHECK_MARK,
    CHECKED_WORTH,
    LARGEST,
    SPLITS,
    build_tokenizer,
    demo_rows,
    graded,
    graded_lines,
    problem,
    split_of,
)
from medusa_ppo.ppo.rewards import exact_answer

_SUM = re.compile(r"(\d+)(?: \w+)? ([-+*]) (\d+)(?: \w+)? = (\d+) ")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def _sums(solution: str) -> list[tuple[int, str, int, int]]:
    return [
        (int(left), sign, int(right), int(result))
        for left, sign, right, result in _SUM.findall(solution)
    ]


def test_every_step_is_right_and_the_last_one_is_the_answer() -> None:
    for index in range(500):
        found = problem(index, seed=3)
        sums = _sums(found.solution)
        assert 2 <= len(sums) <= 3
        assert all(_OPERATIONS[sign](left, right) == result for left, sign, right, result in sums)
        assert all(1 <= result <= LARGEST for *_, result in sums)
        assert all(before[3] == after[0] for before, after in itertools.pairwise(sums))
        assert found.solution.endswith(f"#### {sums[-1][3]}")
        assert found.answer == str(sums[-1][3])


def test_the_solution_follows_from_the_question() -> None:
    for index in range(200):
        found = problem(index, seed=4)
        numbers = [int(number) for number in re.findall(r"\d+", found.question)]
        sums = _sums(found.solution)
        assert numbers == [sums[0][0], sums[0][2], *(right for _, _, right, _ in sums[1:])]
        clauses = found.question.split(". ")[:-1]
        assert all(clause in found.solution for clause in clauses)


def test_a_problem_is_a_function_of_index_seed_and_split() -> None:
    assert problem(7, seed=1) == problem(7, seed=1)
    assert len({problem(7, seed=seed).question for seed in range(20)}) == 20
    assert len({problem(index, seed=1).question for index in range(200)}) > 190


def test_the_splits_share_no_question() -> None:
    questions = {
        split: {row["question"] for seed in range(3) for row in demo_rows(split, seed, 400)}
        for split in SPLITS
    }
    for split in SPLITS:
        assert all(split_of(question) == split for question in questions[split])
        assert not any(questions[split] & questions[other] for other in SPLITS if other != split)


def test_an_unknown_split_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(DataError, match="eval"):
        problem(0, seed=0, split="test")


def test_rows_are_what_the_reward_reads() -> None:
    rows = demo_rows("train", seed=5, limit=100)
    assert len(rows) == 100
    for row, other in itertools.pairwise(rows):
        assert row["prompt"] == f"Question: {row['question']}\nAnswer:"
        assert exact_answer(row["prompt"], row["solution"], row) == 1.0
        wrong = other["solution"]
        assert exact_answer(row["prompt"], wrong, row) == float(other["answer"] == row["answer"])


def test_slips_change_the_answer_at_their_rate_and_nothing_else() -> None:
    wrong = 0
    for index in range(600):
        exact = problem(index, 6)
        slipped = problem(index, 6, slip_rate=0.6)
        assert slipped.question == exact.question
        assert slipped.solution.rsplit("\n", 1)[0] == exact.solution.rsplit("\n", 1)[0]
        sums = _sums(slipped.solution)
        assert exact.answer == str(sums[-1][3])
        assert slipped.answer in (exact.answer, str(sums[-2][3])) and slipped.solution.endswith(
            f"#### {slipped.answer}"
        )
        wrong += slipped.answer != exact.answer
    assert 0.55 < wrong / 600 < 0.65


def test_the_first_part_of_the_training_has_no_slips() -> None:
    recipe = Recipe(steps=32, slips_from=0.5, slip_rate=1.0)
    tokenizer = build_tokenizer()
    for pool, slips in ((0, False), (1, False), (2, True), (3, True)):
        answers = [
            tokenizer.decode(response[:-1]) for _, response in _encode_pool(recipe, tokenizer, pool)
        ]
        right = [int(a.split("=")[-1].split()[0]) == int(a.split("####")[1]) for a in answers]
        assert not any(right) if slips else all(right)


def test_parts_that_can_be_checked_come_at_their_rate_and_say_the_same() -> None:
    numbered = marked = with_units = restated = steps = 0
    for index in range(400):
        plain = problem(index, 7)
        checked = problem(index, 7, checked_rate=0.25)
        assert checked.question == plain.question and checked.answer == plain.answer
        assert _sums(checked.solution) == _sums(plain.solution)
        lines = checked.solution.strip().splitlines()[:-1]
        steps += len(lines)
        numbered += sum(line.startswith("Step ") for line in lines)
        marked += sum(CHECK_MARK in line for line in lines)
        with_units += sum(re.search(r"\d (\w+) [-+] \d+ \1 =", line) is not None for line in lines)
        restated += sum("go on with" in line for line in lines)
    for parts in (numbered, marked, with_units, restated):
        assert 0.2 < parts / steps < 0.3


def test_the_reward_reads_the_task_s_own_text() -> None:
    for index in range(100):
        for rate, worth in ((0.0, 0.0), (1.0, CHECKED_WORTH)):
            found = problem(index, 3, checked_rate=rate)
            row = {"answer": found.answer, "solution": problem(index, 3).solution}
            steps = len(found.solution.splitlines()) - 1
            assert graded_lines("", found.solution, row) == pytest.approx([*[worth] * steps, 1.0])
            assert graded("", found.solution, row) == pytest.approx(1.0 + worth)


LOOSE = "which means that from this moment on there are in all exactly"
AGAIN = "and this is what we go on with:"
ROW = {"answer": "4", "solution": " First.\nFinally.\n#### 4"}


def test_each_line_that_is_not_blank_has_a_reward_of_its_own() -> None:
    response = f" Step 1: Tom. To check: 2 + 3 = 5 pens.\n\nThen, {LOOSE} 5 - 1 = 4 pens.\n#### 4"
    assert graded_lines("", response, ROW) == pytest.approx([0.45, 0.0, 1.0])
    assert graded_lines("", f"{response}\n", ROW) == pytest.approx([0.45, 0.0, 1.0])
    assert graded_lines("", f"{response}\nStep 3: 4", ROW) == pytest.approx([0.45, 0.0, 0.0, 0.0])


def test_more_steps_than_were_asked_for_earn_nothing() -> None:
    steps = "".join(f" Step {number}: Tom.\n" for number in (1, 2, 3))
    assert graded_lines("", f"{steps}#### 4", ROW) == pytest.approx([0.225, 0.225, 0.0, 1.0])


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (
            f" Step 1: Tom. To check: 2 pens + 3 pens = 5 pens, {AGAIN} 5.\n"
            f"Step 2: Tom. To check: 5 pens - 1 pens = 4 pens, {AGAIN} 4.\n#### 4",
            1.9,
        ),
        (" Then. To check: 2 + 3 = 5 pens.\nFinally. To check: 5 - 1 = 4 pens.\n#### 4", 1.225),
        (f" Step 1: Tom, {LOOSE} 2 + 3 = 5 pens.\nThen, {LOOSE} 5 - 1 = 4 pens.\n#### 4", 1.1125),
        (f" First Tom, {LOOSE} 2 + 3 = 5 pens, {AGAIN} 5.\n#### 4", 1.225),
        (f" First Tom, {LOOSE} 2 pens + 3 pens = 5 pens.\n#### 4", 1.225),
        # A wrong number, a wrong sum, other units, another result than the sum's, a result alone.
        (" Step 2: Tom. To check: 2 + 3 = 5 pens.\n#### 4", 1.225),
        (f" Step 1: Tom. To check: 2 + 3 = 6 pens, {AGAIN} 6.\n#### 5", 0.45),
        (" First Tom. To check: 2 pens + 3 cups = 5 pens.\n#### 5", 0.225),
        (f" First Tom. To check: 2 + 3 = 5 pens, {AGAIN} 6.\n#### 5", 0.225),
        (f" First Tom, {AGAIN} 6.\n#### 5", 0.0),
        ("#### 4", 1.0),
        ("", 0.0),
    ],
)
def test_the_reward_pays_for_a_right_answer_and_for_parts_that_can_be_checked(
    solution: str, expected: float
) -> None:
    assert graded("", solution, ROW) == pytest.approx(expected)
    assert CHECKED_WORTH < 1, "or a wrong answer would count as right"
