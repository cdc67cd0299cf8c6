"""Who takes a step when, on which weights, and what is counted: the comparison with the same loop
without the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.ppo.comparison import STEP_S, Comparison
from medusa_ppo.ppo.generation import Prompt, PromptStream
from medusa_ppo.ppo.run_state import RunPosition

STREAM = PromptStream([Prompt(str(i), (i,), {}) for i in range(64)], seed=0)


class Plugin:
    def __init__(self, diary: list[str]) -> None:
        self._diary = diary

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._diary.append("pause")
        yield
        self._diary.append("go on")


class TimedEngine:
    """Answers at a rate that is known."""

    def __init__(self, name: str, rate: float, diary: list[str]) -> None:
        self.name = name
        self.rate = rate
        self.diary = diary
        self.policy_version = 0

    def generate(self, prompts: list[Any], sampling: Any) -> Any:
        self.diary.append(f"{self.name} {len(prompts)}")
        return SimpleNamespace(tokens_per_s=self.rate)


@dataclass
class Loop:
    """Writes down what is asked of it, in a diary that both share."""

    name: str
    rate: float
    diary: list[str]
    plugin: Any = None
    position: RunPosition = field(default_factory=lambda: RunPosition(14, 14))
    prompts: PromptStream = STREAM
    learner: Any = field(default_factory=lambda: SimpleNamespace(actor="actor"))

    def __post_init__(self) -> None:
        self.engine = TimedEngine(self.name, self.rate, self.diary)

    def sync(self, actor: str, version: int) -> None:
        self.engine.policy_version = version
        self.diary.append(f"{self.name} gets {version}")

    def step(self, step: int) -> dict[str, Any]:
        version = self.position.policy_version
        assert self.engine.policy_version == version, "the engine has the policy of this very step"
        self.engine.policy_version = version + 1
        self.diary.append(f"{self.name} step {step}")
        times = {names.GENERATE_S: 2.0, names.SCORE_S: 1.0, names.UPDATE_S: 3.0, names.SYNC_S: 0.1}
        return {**times, names.TOKENS_PER_S: self.rate}


@pytest.fixture
def scene() -> tuple[Comparison, list[str]]:
    diary: list[str] = []
    ours = Loop("ours", 150.0, diary, Plugin(diary))
    plain = Loop("plain", 100.0, diary)
    ours.engine.policy_version = 14
    return Comparison(build_config({"ppo": {"prompts_per_step": 6}}), ours, plain), diary


def test_steps_alternate_and_the_companion_waits_outside_of_its_own(
    scene: tuple[Comparison, list[str]],
) -> None:
    comparison, diary = scene
    steps = comparison.pairs(3)["steps"]
    assert diary == [
        # Neither engine is timed on its first prompts.
        "plain gets 14", "ours 4", "plain 4",
        # Not timed: the companion has nothing to do in it.
        "ours step 14",
        "pause", "go on", "ours step 14",
        "pause", "plain gets 16", "plain step 14", "go on",
        "pause", "plain step 15", "go on",
        "pause", "ours gets 18", "go on", "ours step 15",
        "pause", "go on", "ours step 16",
        "pause", "plain gets 20", "plain step 16", "go on",
    ]  # fmt: skip
    assert len(steps) == 3 and all(set(pair) == {"with", "without"} for pair in steps)
    assert 0 < steps[0]["without"][STEP_S] < 1.25, "the whole step by our own clock"


def test_seconds_of_a_pair_are_those_for_as_many_tokens(
    scene: tuple[Comparison, list[str]],
) -> None:
    comparison, _ = scene
    pair = comparison.pairs(1)["steps"][0]
    assert pair["with"]["tokens"] == 300.0 and pair["without"]["tokens"] == 200.0
    assert pair["with"][names.UPDATE_S] == pytest.approx(3.0 * 250 / 300)
    assert pair["without"][names.UPDATE_S] == pytest.approx(3.0 * 250 / 200)


def test_rollouts_are_those_of_the_steps_and_each_pair_is_said(
    scene: tuple[Comparison, list[str]],
) -> None:
    comparison, _ = scene
    said: list[str] = []
    comparison._say = said.append
    rollouts = comparison.pairs(2)["rollouts"]
    assert [pair[names.PAIR_SPEEDUP] for pair in rollouts] == [1.5, 1.5]
    assert rollouts[0][names.PAIR_PLAIN_TOKENS_PER_S] == 100.0
    assert said[1].startswith("  pair 2 of 2: rollouts 150 tokens/s, 100 without the plugin;")
