"""What the report says of PPO's own curves, of runs of the loop that were made to have each fault,
and of a healthy one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo.rewards import CallableReward
from medusa_ppo.reports.findings import find
from medusa_ppo.reports.run_files import read_run
from medusa_ppo.reports.summary import build_summary
from tests.medusa_ppo.ppo.test_loop import LoopScene, identity, settings

PER_STEP = 16
HEALTHY = {
    "steps": 24,
    "epochs": 4,
    "actor_learning_rate": 3e-3,
    "critic_learning_rate": 1e-2,
    "kl_coefficient": 0.2,
    "value_clip_range": None,
}
CURVES = {"reward_jump", "value_loss_flat", "kl_flat", "kl_runaway"}
NEXT_TO_NONE = 1e-12
"""A learning rate that changes nothing."""


def run(folder: Path, actor: Any, engine_class: type, jumps_at: int | None, **ppo: Any) -> set[str]:
    """The findings about curves of a run. Half of the prompts earn a reward by themselves, which a
    critic can know; from `jumps_at` on all rewards are larger.
    """
    scene = LoopScene(settings(folder, **(HEALTHY | ppo)), actor, engine_class)
    judged = 0

    def reward(prompt: str, response: str, row: dict) -> float:
        nonlocal judged
        judged += 1
        late = jumps_at is not None and judged > jumps_at * PER_STEP
        return identity(prompt, response, row) + int(prompt) % 2 + float(late)

    scene.parts.reward = CallableReward(reward, "identity")
    steps = scene.run()
    for name in (names.REWARD_MEAN, names.KL_REFERENCE, names.VALUE_LOSS, names.VALUE_EXPLAINED):
        print(name, [round(step[name], 4) for step in steps])
    found = read_run(scene.config.run_dir)
    return {finding.code for finding in find(found, build_summary(found))} & CURVES


@pytest.mark.parametrize(
    ("code", "jumps_at", "ppo"),
    [
        (None, None, {}),
        ("reward_jump", 14, {}),
        ("value_loss_flat", None, {"critic_learning_rate": NEXT_TO_NONE}),
        ("kl_flat", None, {"actor_learning_rate": NEXT_TO_NONE}),
        ("kl_runaway", None, {"kl_coefficient": 0.0, "epochs": 8}),
    ],
)
def test_a_run_that_was_made_to_have_one_has_it(
    tmp_path: Path,
    tiny_actor,
    sampling_engine,
    code: str | None,
    jumps_at: int | None,
    ppo: dict[str, Any],
) -> None:
    found = run(tmp_path, tiny_actor(), sampling_engine, jumps_at, **ppo)
    assert code in found if code else not found
