"""The results are short, say where each table comes from, and have the figures that the README and
the page on choosing show.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
ARCHIVE = (ROOT / "benchmarks" / "RESULTS-archive.md").read_text(encoding="utf-8")
MOST_LINES, MOST_COLUMNS = 250, 100
FIGURE = re.compile(r"(?<![\w.])\d+(?:,\d+)*\.\d+")
"""Numbers with a decimal point: what somebody measured, not a count or a size."""


def prose(text: str) -> str:
    """A page without code, links' targets, and what a command writes into it."""
    text = re.sub(r"<!-- begin.*?<!-- end.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def slug(heading: str) -> str:
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def sources() -> list[list[str]]:
    """The cells of each row of the table that says where the others come from."""
    table = re.search(r"^\| table \| command .*\n\|[-|]+\n((?:\|.*\n)+)", RESULTS, re.MULTILINE)
    assert table
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        for row in table[1].splitlines()
    ]


def test_they_are_short() -> None:
    assert RESULTS.count("\n") <= MOST_LINES
    text = [line for line in RESULTS.splitlines() if not line.startswith("|")]
    assert [line for line in text if len(line) > MOST_COLUMNS] == []


def test_each_table_has_a_command_a_commit_a_machine_and_a_pair() -> None:
    rows = sources()
    assert all(len(row) == 5 and all(row) for row in rows)
    named = {anchor for row in rows for anchor in re.findall(r"\(#([^)]+)\)", row[0])}
    assert named == {slug(heading) for heading in re.findall(r"^## (.+)$", RESULTS, re.MULTILINE)}
    for _, command, commit, _, _ in rows:
        assert re.search(r"`[^`]+`|the same|in its rows", command)
        assert re.search(r"\b[0-9a-f]{7}\b|in its rows", commit)


def test_scripts_behind_the_figures_are_there() -> None:
    scripts = re.findall(r"((?:benchmarks|tests)/[\w/]+\.py)", RESULTS)
    assert scripts and [script for script in scripts if not (ROOT / script).is_file()] == []


def test_figures_of_the_readme_stand_in_the_results() -> None:
    """Those before the ways to use it; versions of packages are further down."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Three ways")[0]
    text = re.sub(r"Python [\d.]+ or [\d.]+", "", prose(text))
    found = set(FIGURE.findall(text))
    assert found and found - set(FIGURE.findall(RESULTS)) == set()


@pytest.mark.parametrize("page", ["choosing", "companion", "practice"])
def test_figures_of_a_page_stand_in_the_results_or_their_archive(page: str) -> None:
    found = set(FIGURE.findall(prose((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))))
    known = set(FIGURE.findall(RESULTS)) | set(FIGURE.findall(ARCHIVE))
    assert found and found - known == set()
