"""Verifiable rewards: plain functions `(prompt, response, row) -> float`, named in `ppo.reward` as `module:function`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from heads.errors import DataError

ANSWER_COLUMN = "answer"
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_answer(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the number after the response's last `####` equals the reference's, else 0.0.

    The reference is `row["answer"]`: the bare number, or a worked solution that ends with `#### number` (GSM8K). Numbers are compared by
    value: `1,000`, `$1000` and `1000.0` are the same.

    Raises:
        DataError: the row has no answer, or none with a number.
    """
    expected = _reference(row)
    given = _marked_number(response)
    return 1.0 if given is not None and given == expected else 0.0


def _reference(row: dict[str, Any]) -> Decimal:
    if ANSWER_COLUMN not in row:
        raise DataError(
            "A row has no reference answer.", given=sorted(row), expected=f"a column {ANSWER_COLUMN!r}", do="Set data.answer_column."
        )
    text = str(row[ANSWER_COLUMN])
    number = _marked_number(text) if "####" in text else _number(text)
    if number is None:
        raise DataError(
            "A reference answer holds no number.", given=repr(text[-80:]), expected="a number, or '#### number'", do="Correct the row."
        )
    return number


def _marked_number(text: str) -> Decimal | None:
    """The number that stands alone after the last answer mark; None where there is no mark or something else behind it."""
    marked = _MARKED.findall(text)
    return _number(marked[-1]) if marked else None


def _number(text: str) -> Decimal | None:
    """The text as one number; a currency or percent sign, a full stop at its end and commas between digits don't count."""
    bare = text.strip().strip("$€£% ").rstrip(".").strip()
    if not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare.replace(",", ""))
    except InvalidOperation:
        return None
