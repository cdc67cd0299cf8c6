"""The head of docs/choosing.md is what its command writes."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from medusa_ppo.predict.measured_tables import PACKAGE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("decision_table")


def test_a_block_takes_the_place_of_the_one_before(table: ModuleType) -> None:
    page = f"head\n{table.BEGIN}\nold\n{table.END}\ntail\n"
    new = table.written(page, [table.BEGIN, "new", table.END])
    assert new == f"head\n{table.BEGIN}\nnew\n{table.END}\ntail\n"
    assert table.written(new, [table.BEGIN, "new", table.END]) == new


def test_the_page_has_a_row_for_each_actor_and_acceptance(table: ModuleType) -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    block = page.partition(table.BEGIN)[2].partition(table.END)[0]
    for name in table.ACTORS:
        for length in table.ACCEPTED:
            assert f"| {name} | {length:.1f} |" in block
    picture = (ROOT / "docs" / "choosing.svg").read_text(encoding="utf-8")
    assert picture.count("<polyline") == len(next(iter(table.ACCEPTED.values())))


def test_shares_have_the_lengths_that_they_stand_for(table: ModuleType) -> None:
    for length, shares in table.ACCEPTED.items():
        assert 1 + sum(shares) == pytest.approx(length)
        assert list(shares) == sorted(shares, reverse=True)


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="needs the tables of medusa-ppo[predict]"
)
def test_the_page_is_as_it_would_be_written(table: ModuleType) -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert table.written(page, table.block(table.predictions())) == page
