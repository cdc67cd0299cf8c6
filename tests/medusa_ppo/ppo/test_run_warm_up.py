"""The warm-up of a run: the policy learns to the bit what it learns without one, and one that was
stopped goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.plugin import MedusaPlugin, NoPlugin
from medusa_ppo.plugin.medusa_plugin import initial_heads
from medusa_ppo.plugin.warm_up import FOLDER, WarmUpReport
from medusa_ppo.ppo.generation import Prompt, PromptStream
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.run_state import FOLDER as CHECKPOINT
from medusa_ppo.ppo.run_state import RunPosition, only_warmed_up
from medusa_ppo.ppo.run_warm_up import wanted, warm_up
from medusa_ppo.reports.run_files import METRICS_FILE
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.test_loop import LoopScene, settings

PROMPTS = PromptStream(
    [Prompt(f"{a} {b}", (a, b), {}) for a in range(1, 9) for b in range(9, 13)], seed=0
)


def config_of(tmp_path: Path, tokens: int = 200, level: int | None = None, **ppo: Any) -> RunConfig:
    config = settings(tmp_path)
    heads = config.heads.model_copy(update={"warm_up_tokens": tokens})
    engine = config.engine.model_copy(update={"sleep_level": level})
    loop = config.ppo.model_copy(update=ppo)
    return config.model_copy(update={"heads": heads, "engine": engine, "ppo": loop})


class WarmScene(LoopScene):
    """A loop with more prompts, and a companion that writes down what it gets."""

    def __init__(self, config: RunConfig, actor: Any, engine_class: Any) -> None:
        self.companion = RecordingCompanion()
        heads = initial_heads(config, actor)

        def plugin_of(engine: Any) -> MedusaPlugin:
            return MedusaPlugin(engine, self.companion, heads=heads)

        super().__init__(config, actor, engine_class, plugin_of)
        self.parts.prompts = PROMPTS


class Notes(ProgressSink):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.advanced: list[float] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase_advanced(self, done: float, total: float, note: str = "") -> None:
        self.advanced.append(done / total)


def rewards(steps: list[dict]) -> list[float]:
    return [step[names.REWARD_MEAN] for step in steps]


@pytest.mark.parametrize(
    ("level", "ppo"),
    [
        (None, {}),
        (1, {}),
        (2, {"placement": "shared"}),
        (None, {"staleness": 1, "importance_bound": 2.0}),
    ],
)
def test_the_policy_learns_to_the_bit_what_it_learns_without(
    tmp_path: Path, tiny_actor, sampling_engine, level: int | None, ppo: dict[str, Any]
):
    found = []
    for tokens in (0, 200):
        config = config_of(tmp_path / str(tokens), tokens, level, **ppo)
        scene = WarmScene(config, tiny_actor(), sampling_engine)
        found.append((rewards(scene.run()), scene.weights(), scene.companion.batches))
    (plain, before, without), (warmed, after, batches) = found
    assert warmed == plain and (before == after).all()
    assert len(batches) == len(without) + 1 and batches[0].rising_s is not None
    for ours, theirs in zip(batches[1:], without, strict=True):
        assert (ours.response_ids_M == theirs.response_ids_M).all()


def test_its_states_are_the_actors_own(tmp_path: Path, tiny_actor, sampling_engine):
    """What lm_head makes of them are the log-probs that the engine reported."""
    scene = WarmScene(config_of(tmp_path), tiny_actor(), sampling_engine)
    warm_up(scene.config, scene.parts, ProgressSink(), RunPosition())
    (batch,) = scene.companion.batches
    lm_head_VD = scene.learner.actor.lm_head.weight.detach()
    logprobs_MV = (batch.hidden_MD @ lm_head_VD.T).log_softmax(-1)
    found_M = logprobs_MV.gather(1, batch.response_ids_M[:, None])[:, 0]
    assert (found_M - batch.logprobs_M).abs().max() < 1e-4 and batch.response_ids_M.numel() >= 200


def test_the_first_step_tells_what_it_took(tmp_path: Path, tiny_actor, sampling_engine):
    steps = WarmScene(config_of(tmp_path), tiny_actor(), sampling_engine).run()
    assert steps[0][names.WARM_UP_TOKENS] >= 200 and steps[0][names.WARM_UP_S] > 0
    assert steps[0][names.WALL_S] >= steps[0][names.WARM_UP_S]
    assert not any(names.WARM_UP_S in step for step in steps[1:])


def test_what_came_of_it_is_said_once(
    tmp_path: Path, tiny_actor, sampling_engine, caplog: pytest.LogCaptureFixture
):
    """As a warning, which a terminal shows as well, or as a note."""
    scene = WarmScene(config_of(tmp_path), tiny_actor(), sampling_engine)
    for problem in ("", "the time was up"):
        notes = Notes()
        report = WarmUpReport(problem=problem)
        scene.parts.plugin.warm_up = lambda *_, report=report, **__: report
        caplog.clear()
        warm_up(scene.config, scene.parts, notes, RunPosition())
        assert [*notes.notes, *caplog.messages] == [str(report)]
        assert bool(caplog.messages) == bool(problem)


class StopsWarmUp(ProgressSink):
    """Ctrl-C while the responses are scored: all of them were written before."""

    def phase_advanced(self, done: float, total: float, note: str = "") -> None:
        if done == total:
            raise KeyboardInterrupt


def test_one_that_was_stopped_goes_on(tmp_path: Path, tiny_actor, sampling_engine):
    config = config_of(tmp_path)
    assert not only_warmed_up(config.run_dir)
    scene = WarmScene(config, tiny_actor(), sampling_engine)
    with pytest.raises(KeyboardInterrupt):
        warm_up(config, scene.parts, StopsWarmUp(), RunPosition())
    assert only_warmed_up(config.run_dir) and not scene.companion.batches
    rest = WarmScene(config, tiny_actor(), sampling_engine)
    rest.engine.generate = None
    warm_up(config, rest.parts, ProgressSink(), RunPosition())
    assert rest.companion.batches[0].response_ids_M.numel() >= 200
    steps = config.run_dir / METRICS_FILE
    steps.write_text('{"step": 0}')
    assert not only_warmed_up(config.run_dir), "a run that has made a step is not thrown away"
    steps.write_text("")
    assert only_warmed_up(config.run_dir)
    (config.run_dir / CHECKPOINT).mkdir()
    assert not only_warmed_up(config.run_dir), "from then on the checkpoint is gone on from"


def test_too_few_prompts_are_said_and_the_run_begins(
    tmp_path: Path, tiny_actor, sampling_engine, caplog: pytest.LogCaptureFixture
):
    scene = WarmScene(config_of(tmp_path), tiny_actor(), sampling_engine)
    scene.parts.prompts = PromptStream(PROMPTS.prompts[:4], seed=0)
    warm_up(scene.config, scene.parts, ProgressSink(), RunPosition())
    assert "4 different prompts are too few" in caplog.text
    assert not scene.companion.batches and not (scene.config.run_dir / FOLDER).exists()


def test_where_there_is_none(tmp_path: Path):
    config = config_of(tmp_path)

    def changed(section: str, **values: Any) -> RunConfig:
        return config.model_copy(
            update={section: getattr(config, section).model_copy(update=values)}
        )

    assert wanted(config, RunPosition())
    assert not wanted(config, RunPosition(next_step=1))
    assert not wanted(changed("heads", warm_up_tokens=0), RunPosition())
    assert not wanted(changed("heads", path="heads"), RunPosition())
    assert not wanted(changed("companion", enabled=False), RunPosition())
    assert not wanted(changed("engine", num_drafts=0), RunPosition())
    assert not wanted(changed("data", images="image"), RunPosition())


def test_without_a_plugin_nothing_is_asked(tmp_path: Path, tiny_actor, sampling_engine):
    scene = WarmScene(config_of(tmp_path), tiny_actor(), sampling_engine)
    scene.parts.plugin = NoPlugin()
    scene.engine.generate = None
    progress = Notes()
    warm_up(scene.config, scene.parts, progress, RunPosition())
    assert not progress.notes, "who wants no plugin is not told that it did nothing"
