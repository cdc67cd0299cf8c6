"""exact_answer: the number after the last mark, compared by value."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from heads.errors import DataError
from medusa_ppo.ppo.rewards import exact_answer


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (" 2 + 3 = 5.\n#### 5", "5", 1.0),
        (" 2 + 3 = 5.\n#### 6", "5", 0.0),
        ("#### 5", "2 + 3 = <<2+3=5>>5\n#### 5", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### $1000.00", "1,000", 1.0),
        ("#### -3.", "-3", 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 4\nno, #### 5", "5", 1.0),
        ("#### 5\nno, #### 4", "5", 0.0),
        ("#### 5 pens", "5", 0.0),
        ("#### 55", "5", 0.0),
        ("####", "5", 0.0),
        ("The answer is 5", "5", 0.0),
        ("", "5", 0.0),
        ("#### 12", 12, 1.0),
    ],
)
def test_compares_the_marked_number_by_value(response: str, answer: object, reward: float) -> None:
    assert exact_answer("Question", response, {"answer": answer}) == reward


@pytest.mark.parametrize("row", [{}, {"solution": "5"}, {"answer": "none"}, {"answer": "5\n####"}])
def test_a_row_without_a_reference_number_is_an_error(row: dict[str, str]) -> None:
    with pytest.raises(DataError, match="answer"):
        exact_answer("Question", "#### 5", row)


def test_every_gsm8k_solution_earns_its_own_reward(shared_dir: Path) -> None:
    rows = [
        json.loads(line)
        for line in (shared_dir / "data" / "gsm8k" / "train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    assert all(exact_answer(row["question"], row["answer"], row) == 1.0 for row in rows)
    shifted = [
        exact_answer(row["question"], other["answer"], row)
        for row, other in itertools.pairwise(rows)
    ]
    assert sum(shifted) < 0.1 * len(shifted)
