"""What `eval` shows: every figure is there, in the terminal, in Markdown and on a page that loads
nothing.
"""

from __future__ import annotations

import re
from typing import Any

from medusa_ppo.reports.evaluation import draw_intervals, lines, markdown_report, render_eval_page
from tests.medusa_ppo.reports.test_html import parsed


def figures(length: float, other: float | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "mean_acceptance_length": length,
        "acceptance_per_position": [length - 1.2, 0.2],
        "drafts": 1234,
        "accepted": 900,
        "confidence_interval": [length - 0.05, length + 0.05],
    }
    if other is not None:
        difference = length - other
        made["compare"] = {
            **figures(other),
            "difference": difference,
            "difference_interval": [difference - 0.02, difference + 0.02],
        }
    return made


def result(compare: bool = True) -> dict[str, Any]:
    other = 1.5 if compare else None
    parts = [
        {"category": name, **figures(1.6 + i / 10, other)}
        for i, name in enumerate(("algebra", "<b>&|"))
    ]
    rows = [
        {"temperature": t, **figures(2.0 - t / 2, other), "categories": parts} for t in (0.3, 1.0)
    ]
    settings = {
        "heads": "heads/a",
        "compare": "heads/b" if compare else None,
        "engine": "replay",
        "category": "topic",
        "temperature": 0.3,
    }
    speed = {"generated_tokens": 12345, "tokens_per_s": 678.0, "prompts": 99, "settings": settings}
    return {
        **{k: v for k, v in rows[0].items() if k != "temperature"},
        "temperatures": rows,
        **speed,
    }


def test_markdown_holds_every_table() -> None:
    text = markdown_report(result())
    assert text.count("\n## ") == 5 and "| algebra | 1.600 | 1.550 to 1.650 |" in text
    assert (
        "+0.350 tokens a step (95 % interval +0.330 to +0.370, paired): better" in text
        and "Student's t over prompts" in text
    )
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1, "a cell breaks the table"


def test_prompts_that_are_left_out_are_told() -> None:
    assert "99 prompts, 12,345" in markdown_report(result())
    some = {**result(), "prompts_left_out": 7}
    assert "99 prompts (7 more were too long), 12,345" in markdown_report(some)
    assert "(7 more were too long)" in render_eval_page(some)


def test_the_terminal_shows_the_same_figures() -> None:
    shown = "\n".join(lines(result()))
    assert (
        "1.850  (95 % interval 1.800 to 1.900, replay)" in shown
        and "algebra" in shown
        and "heads/b" in shown
    )
    plain = {
        key: value
        for key, value in result(False).items()
        if key not in ("temperatures", "categories")
    }
    assert len(lines(plain)) == 3


def test_the_page_is_whole_and_loads_nothing() -> None:
    for compare in (True, False):
        page = render_eval_page(result(compare))
        attributes = parsed(page).attributes
        assert [value for _, name, value in attributes if name in ("src", "href")] == ["data:,"]
        assert "<b>&|" not in page and "default-src 'none'" in page
        assert "1.850" in page and page.count("<table") == 5 and ("paired" in page) is compare


def test_intervals_stand_where_their_figures_are() -> None:
    drawn = draw_intervals(
        "t", ["x"], [{"mean_acceptance_length": 1.5, "confidence_interval": [1.0, 2.0]}]
    )
    assert 'cx="50.00%"' in drawn and 'x1="0.00%" x2="100.00%"' in drawn


def test_where_drafts_are_accepted_is_told_where_it_is_known() -> None:
    parts = {
        "By place": [{"part": "0 to 16", "drafts": 1234, "mean_acceptance_length": 2.5}],
        "By suffix": [{"part": "1 to 2", "drafts": 50, "accepted_share": 0.61}],
    }
    known = {**result(), "parts": parts}
    shown = "\n".join(lines(known))
    written = markdown_report(known)
    for text in (shown, written):
        assert (
            "By place" in text
            and "2.500" in text
            and "1,234" in text
            and "61 %" in text.replace("\N{NARROW NO-BREAK SPACE}", " ")
        )
    assert "## By suffix" in written and "By place" not in "\n".join(lines(result()))
