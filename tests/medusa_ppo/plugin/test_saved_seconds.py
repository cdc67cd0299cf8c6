"""What the heads in training saved, in seconds of generation."""

from __future__ import annotations

import pytest

from medusa_ppo.plugin.saved_seconds import SavedSeconds


def test_what_is_saved_is_seconds_and_not_tokens_a_step() -> None:
    """Twice as many tokens a step are not half of the seconds: a step with drafts takes longer."""
    saved = SavedSeconds()
    assert saved.of(2.6, 1000, 0) == 0, "something else ran beside it"
    assert saved.of(2.0, 1000, 0) == 0
    assert saved.of(1.8, 1200, 1) == pytest.approx(1.2 * 2.0 - 1.8)
    assert saved.of(2.5, 1000, 1) == pytest.approx(-0.5), "drafts can cost more than they bring"


def test_a_run_that_is_gone_on_with_compares_with_its_first_step() -> None:
    saved = SavedSeconds()
    assert saved.of(2.0, 1000, 7) == 0
    assert saved.of(1.5, 1000, 8) == pytest.approx(0.5)
