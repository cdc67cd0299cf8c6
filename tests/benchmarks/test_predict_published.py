"""The list of published cases and what is made of it: fitted on one half, blind for the other, and
the costs in the code are those that the fit finds.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from medusa_ppo.predict.measured_tables import PACKAGE
from medusa_ppo.predict.prediction import MODEL_ERROR
from medusa_ppo.predict.step_costs import StepCosts

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("predict_published")


def test_the_older_half_is_fitted_on(published: ModuleType) -> None:
    cases = published.read_cases()["cases"]
    dates = [case["date"] for case in cases]
    assert dates == sorted(dates)
    halves = [case["half"] for case in cases]
    assert halves == ["fit"] * (len(cases) // 2) + ["blind"] * (len(cases) - len(cases) // 2)
    assert halves.count("blind") >= 10


def test_speedups_are_what_the_sources_measured(published: ModuleType) -> None:
    for case in published.read_cases()["cases"]:
        found = case["plain"] / case["speculative"]
        if case["unit"] == "tokens/s":
            found = 1 / found
        assert case["speedup"] == pytest.approx(found, abs=0.001), case["source"]
        assert 1 <= case["acceptance_length"] <= 1 + case["drafts"]


def test_a_fit_finds_the_costs_that_made_the_cases(published: ModuleType) -> None:
    """On cases whose speed-ups are the model's own at other costs, by the roofline or by tables."""
    listed = published.read_cases()
    true = StepCosts(plain_host_s=0.0004, draft_host_s=0.0015, pass_host_s=0.0013)
    cases = []
    for case in listed["cases"][:11]:
        steps = published.steps_of(case, listed, true)
        plain_s = steps.plain(case["sequences"], case["context"])
        plain = 1e3 * plain_s if case["unit"] == "ms" else 1 / plain_s
        speedup = published.predicted(case, listed, true)
        cases.append({**case, "plain": plain, "speedup": speedup})
    found = published.fit(cases, listed)
    for name in published.FITTED:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05), name


def test_errors_are_means_of_each_half(published: ModuleType) -> None:
    rows = [
        {"half": "fit", "error": 0.1, "baseline_error": -0.3},
        {"half": "blind", "error": -0.2, "baseline_error": 0.1},
        {"half": "blind", "error": 0.4, "baseline_error": 0.1},
    ]
    assert published.mean_errors(rows, "blind") == pytest.approx((0.3, 0.1))
    assert published.mean_errors(rows, "fit") == pytest.approx((0.1, 0.3))


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="needs the tables of medusa-ppo[predict]"
)
def test_the_costs_in_the_code_are_those_of_the_fit(published: ModuleType) -> None:
    listed = published.read_cases()
    found = published.fit([case for case in listed["cases"] if case["half"] == "fit"], listed)
    for name in published.FITTED:
        assert getattr(StepCosts(), name) == pytest.approx(getattr(found, name), rel=0.02), name
    model, _ = published.mean_errors(published.table(listed, StepCosts()), "blind")
    assert model == pytest.approx(MODEL_ERROR, abs=0.01)
