"""Learning rates over a run, and gradients that are not finite: by hand."""

from __future__ import annotations

import pytest

from heads.errors import RunError
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.ppo.optimization import GradientNorms, learning_rate_share


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [1, 1, 1, 1]),
        ({"learning_rate_schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"learning_rate_schedule": "cosine"}, [1, 0.853553, 0.5, 0.146447]),
        ({"warmup_steps": 2}, [1 / 3, 2 / 3, 1, 1]),
        ({"learning_rate_schedule": "linear", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 0.5]),
    ],
)
def test_step_sizes_by_hand(options: dict, expected: list[float]):
    config = PPOConfig(steps=4, **options)
    assert [learning_rate_share(config, step) for step in range(4)] == pytest.approx(
        expected, abs=1e-6
    )


def test_steps_without_a_finite_gradient_are_counted():
    norms = GradientNorms()
    assert [norms.sound(norm) for norm in (1.0, float("nan"), 3.0, float("inf"))] == [
        True,
        False,
        True,
        False,
    ]
    assert norms.skipped == 2 and norms.mean("actor") == 2.0
    assert GradientNorms().mean("actor") == 0.0
    only = GradientNorms()
    only.sound(float("inf"))
    with pytest.raises(RunError, match="actor is not finite"):
        only.mean("actor")
