"""A step's figures from what the companion reports."""

from __future__ import annotations

import json

from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import companion_figures
from medusa_ppo.contract.status import CompanionStatus
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
    assert json.loads(json.dumps(clean(values)))[names.COMPANION_REASON] == "fixed"
    assert flatten(values)[
        names.COMPANION_PASSES
    ] == 0.25 and names.COMPANION_REASON not in flatten(values)


def test_every_figure_is_explained() -> None:
    status = CompanionStatus(passes=1.0, positions_frac=1.0, gpu_gib=0.0, last_loss=1.0)
    assert set(companion_figures(status)) <= set(names.describe())
