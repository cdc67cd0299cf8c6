"""Figures under the names that other people's loggers show."""

from __future__ import annotations

import pytest

from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import logged, serving_figures
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling


def test_a_logger_gets_numbers_under_one_prefix():
    rollouts = Rollouts(
        ((1, 2),),
        (Response(0, (3, 4), (-0.1, -0.2), "stop"),),
        Counters(10, 20, 9, (6, 3)),
        0.5,
        Sampling(),
    )
    choices = [
        {"running": 1, "steps": [2, 0, 6], "speedup": 1.5},
        {"running": 2, "steps": [8, 0, 0], "speedup": 1.0},
    ]
    found = logged(serving_figures(rollouts, None, choices) | {"companion_reason": "gain"})
    assert all(
        name.startswith("medusa/") and isinstance(value, float) for name, value in found.items()
    )
    assert found["medusa/mal_serving"] == pytest.approx(1.9)
    assert (
        found["medusa/acceptance_per_position_1"],
        found["medusa/acceptance_per_position_2"],
    ) == (
        pytest.approx(0.6),
        pytest.approx(0.3),
    )
    assert found["medusa/draft_speedup"] == pytest.approx(1.25)
    assert "medusa/companion_reason" not in found and not any(
        "draft_choices" in name for name in found
    )
    assert names.DRAFT_SPEEDUP not in serving_figures(rollouts, None, [])
    unknown = {"running": 8, "steps": [0, 0, 90], "speedup": None}
    assert serving_figures(rollouts, None, [*choices, unknown])[names.DRAFT_SPEEDUP] == 1.25
    assert names.DRAFT_SPEEDUP not in serving_figures(rollouts, None, [unknown])
