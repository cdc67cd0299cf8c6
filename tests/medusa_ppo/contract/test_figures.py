"""A step's figures from what the companion reports."""

from __future__ import annotations

import json

import pytest

from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import companion_figures, lengths_over_frozen, seconds_saved
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import CompanionStatus, ReplayRow
from medusa_ppo.reports.store import clean
from medusa_ppo.reports.trackers import flatten


def test_the_schedule_is_told_from_the_first_decision_on() -> None:
    before = companion_figures(CompanionStatus())
    assert not {
        names.COMPANION_PASSES,
        names.COMPANION_REASON,
        names.COMPANION_POSITIONS,
        names.COMPANION_GPU,
    } & set(before)
    status = CompanionStatus(passes=0.25, positions_frac=0.4, optimizer_steps=7, gpu_gib=0.5)
    values = companion_figures(status)
    assert (
        values[names.COMPANION_PASSES],
        values[names.COMPANION_REASON],
        values[names.COMPANION_POSITIONS],
    ) == (0.25, "fixed", 0.4)
    assert (values[names.COMPANION_STEPS], values[names.COMPANION_GPU]) == (7, 0.5)
    assert names.COMPANION_LEARNING_RATE not in values, "this process took no step"
    trained = companion_figures(CompanionStatus(passes=1.0, rate=0.5, learning_rate=1e-4))
    assert (trained[names.COMPANION_RATE], trained[names.COMPANION_LEARNING_RATE]) == (0.5, 1e-4)
    assert json.loads(json.dumps(clean(values)))[names.COMPANION_REASON] == "fixed"
    assert flatten(values)[
        names.COMPANION_PASSES
    ] == 0.25 and names.COMPANION_REASON not in flatten(values)


def test_every_figure_is_explained() -> None:
    status = CompanionStatus(
        passes=1.0, positions_frac=1.0, learning_rate=1e-3, gpu_gib=0.0, last_loss=1.0
    )
    assert set(companion_figures(status)) <= set(names.describe())


def test_what_training_saved_is_what_its_first_heads_would_have_taken_longer() -> None:
    # With the first heads 3.3 steps in the place of 3, each of 2 s.
    assert seconds_saved(written(4), {3: 1.1}) == pytest.approx(0.6)
    assert seconds_saved(written(4), {3: 0.9}) == pytest.approx(-0.6)
    assert seconds_saved(written(0), {3: 1.1}) == 0, "nothing was drafted"
    # One draft step and nine without drafts, in which no heads would have been faster.
    assert seconds_saved(written(1), {3: 1.1}) == pytest.approx(0.06)
    assert seconds_saved(written(4), {2: 1.1}) == 0, "these were never judged"


def test_what_a_verdict_published_is_as_good_as_it_was_judged() -> None:
    judged = {"serving": row(4.4), "candidate": row(5.0), "frozen": row(4.0)}
    refused = CompanionStatus(versions_published=3, replayed_version=3, **judged)
    assert lengths_over_frozen(refused) == {3: pytest.approx(1.1)}
    published = CompanionStatus(versions_published=3, fresh=True, replayed_version=2, **judged)
    assert lengths_over_frozen(published) == {2: pytest.approx(1.1), 3: pytest.approx(1.25)}
    went_back = CompanionStatus(versions_published=3, replayed_version=2, **judged)
    assert lengths_over_frozen(went_back) == {2: pytest.approx(1.1)}, "the engine refused 3"
    first = CompanionStatus(versions_published=1, fresh=True, replayed_version=0, **judged)
    assert lengths_over_frozen(first)[1] == 1.0, "it is the one that others are compared with"
    assert lengths_over_frozen(CompanionStatus(versions_published=3, serving=row(4.4))) == {}
    assert lengths_over_frozen(CompanionStatus(versions_published=3, fresh=True)) == {}


def test_replay_estimates_say_whose_they_are() -> None:
    """A verdict that publishes replaces the heads that it judged as serving ones."""
    judged = {"serving": row(3.98), "candidate": row(4.14), "frozen": row(3.95)}
    versions = {"replayed_version": 3, "replayed_policy_version": 11, "last_policy_version": 12}
    values = companion_figures(
        CompanionStatus(versions_published=4, fresh=True, **judged, **versions)
    )
    assert (values[names.REPLAY_HEADS_VERSION], values[names.REPLAY_POLICY_VERSION]) == (3, 11)
    assert names.REPLAY_HEADS_VERSION not in companion_figures(CompanionStatus())


def written(drafts: int) -> Rollouts:
    response = Response(0, (1,) * 12, (0.0,) * 12, "length")
    counters = Counters(drafts=drafts, accepted=2 * drafts)
    return Rollouts(((1,),), (response,), counters, 6.0, Sampling(1.0, 12), heads_version=3)


def row(length: float) -> ReplayRow:
    return ReplayRow(length, ())
