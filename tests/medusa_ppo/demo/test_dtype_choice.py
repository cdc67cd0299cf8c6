"""The dtype of the embedded example, by what both take."""

from __future__ import annotations

import pytest
import torch

from medusa_ppo.demo.dtype_choice import ROWS, time_bfloat16


@pytest.mark.parametrize(
    ("ratios", "taken"),
    [
        ((0.5, 0.5, 0.5), True),  # Units of its own.
        ((0.95, 0.95, 0.95), False),  # No more than noise.
        ((0.9, 0.4, 4.0), False),  # Half the bytes to read, but products are emulated.
        ((1.2, 0.3, 0.3), False),  # One token alone is what most of a rollout is.
    ],
)
def test_it_is_taken_where_nothing_gets_slower(ratios: tuple[float, ...], taken: bool) -> None:
    by_rows = dict(zip(ROWS.values(), ratios, strict=True))
    found = time_bfloat16(lambda rows, dtype: by_rows[rows] if dtype == torch.bfloat16 else 1.0)
    assert (tuple(found.ratios.values()), found.taken) == (pytest.approx(ratios), taken)


def test_a_slow_moment_decides_nothing() -> None:
    times = iter([50.0, 1.0] * 40 + [0.5, 1.0] * 100)
    assert time_bfloat16(lambda rows, dtype: next(times)).taken


def test_real_products_are_timed_and_said() -> None:
    found = time_bfloat16(rounds=1)
    assert all(ratio > 0 for ratio in found.ratios.values())
    assert all(what in str(found) for what in ROWS)
