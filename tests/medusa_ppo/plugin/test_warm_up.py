"""The warm-up: what is asked and kept, what the companion gets, what is installed, and what goes
wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import checksum, save_state
from heads.errors import SwapError
from medusa_ppo.companion.holdout import HOLDOUT_PROMPTS, held_out, hold_out
from medusa_ppo.config.companion_section import HOLDOUT_SHARE
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.figures import REPLAYED
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import CompanionStatus, PublishedHeads, ReplayRow
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin, initial_heads
from medusa_ppo.plugin.warm_up import LEAST_PROMPTS, MOST_ANSWERS, SHORTEST, write_responses
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.plugin.test_plugin import DoubleEngine, config_of, score, tiny_actor

PROMPTS = [(1 + n % 3, 1 + n % 5, 4 + n) for n in range(20)]
SAMPLING = Sampling(max_new_tokens=400, responses_per_prompt=8, seed=5)


class WarmUpWriter:
    """An engine of which only `generate` is asked: responses of a length that is known."""

    policy_version = heads_version = num_drafts = 0

    def __init__(self, length: int = 10, clock: list[float] | None = None) -> None:
        self.length = length
        self.asked: list[tuple[int, Sampling]] = []
        self.clock = clock or [0.0]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        self.asked.append((len(prompts), sampling))
        self.clock[0] += 1.0
        ids = tuple(range(1, self.length + 1))
        responses = tuple(
            Response(n, ids, (-1.0 - len(self.asked),) * len(ids), "stop")
            for n in range(len(prompts))
        )
        return Rollouts(tuple(prompts), responses, Counters(), 1.0, sampling)


def write(engine: Any, folder: Path | None = None, **changes: Any) -> Rollouts:
    given: dict[str, Any] = {
        "prompts": PROMPTS,
        "sampling": SAMPLING,
        "tokens": 600,
        "seconds": 60.0,
        "actor": 7,
        "advance": lambda done, total, note: None,
        "clock": lambda: engine.clock[0],
        **changes,
    }
    return write_responses(engine, folder=folder, **given)


def test_as_many_tokens_are_written_as_are_asked_for_to_all_prompts_in_turn() -> None:
    engine = WarmUpWriter()
    told: list[float] = []
    rollouts = write(engine, advance=lambda done, total, note: told.append(done / total))
    counts = [sum(r.prompt_index == n for r in rollouts.responses) for n in range(len(PROMPTS))]
    assert sum(counts) * 10 == rollouts.generated_tokens >= 600 and max(counts) - min(counts) <= 1
    assert rollouts.prompts == tuple(PROMPTS)
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(set(seeds)) == len(seeds) > 1 and SAMPLING.seed not in seeds
    assert all(sampling.responses_per_prompt == 1 for _, sampling in engine.asked)
    assert told == sorted(told) and told[-1] == 1.0


def test_few_long_responses_do_not_take_all_the_tokens() -> None:
    engine = WarmUpWriter()
    write(engine, tokens=2400)
    assert {sampling.max_new_tokens for _, sampling in engine.asked} == {2400 // LEAST_PROMPTS}
    engine = WarmUpWriter()
    write(engine, tokens=10)
    assert {sampling.max_new_tokens for _, sampling in engine.asked} == {SHORTEST}


def test_responses_that_are_too_short_for_so_many_tokens_come_to_an_end() -> None:
    rollouts = write(WarmUpWriter(length=1), tokens=100_000)
    assert len(rollouts.responses) == MOST_ANSWERS * len(PROMPTS)
    assert write(WarmUpWriter(length=0), tokens=100_000).responses == ()


def test_no_round_is_begun_when_the_time_is_up() -> None:
    engine = WarmUpWriter()
    write(engine, tokens=100_000, seconds=2.0)
    assert len(engine.asked) == 2


def test_what_was_written_before_it_was_killed_is_not_written_again(tmp_path: Path) -> None:
    whole = write(WarmUpWriter(), tmp_path / "whole")

    class Dies(WarmUpWriter):
        def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
            if len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().generate(prompts, sampling)

    with pytest.raises(KeyboardInterrupt):
        write(Dies(), tmp_path / "cut")
    rest = WarmUpWriter()
    rest.asked += [(0, SAMPLING)] * 2
    found = write(rest, tmp_path / "cut")
    assert found.responses == whole.responses and len(rest.asked) > 2
    assert write(Dies(), tmp_path / "cut", tokens=10).responses  # Nothing is asked any more.


@pytest.mark.parametrize("changed", ["actor", "sampling", "prompts"])
def test_rounds_of_something_else_are_said_and_written_anew(
    tmp_path: Path, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(WarmUpWriter(), tmp_path)
    other = {
        "actor": {"actor": 8},
        "sampling": {"sampling": replace(SAMPLING, temperature=0.5)},
        "prompts": {"prompts": [*PROMPTS[1:], (1,)]},
    }
    engine = WarmUpWriter()
    write(engine, tmp_path, **other[changed])
    assert engine.asked and "generated again" in caplog.text


@pytest.mark.parametrize("damage", ["", "5", "[" * 100_000, '{"of": 1}', "torn"])
def test_a_damaged_round_is_said_and_written_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = write(WarmUpWriter(), tmp_path)
    file = tmp_path / "round-0000.json"
    text = file.read_text()
    file.write_text(text[: len(text) // 2] if damage == "torn" else damage)
    engine = WarmUpWriter()
    assert write(engine, tmp_path).responses == expected.responses and engine.asked
    assert "generated again" in caplog.text and json.loads(file.read_text())["responses"]


def test_a_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_ppo.plugin.warm_up.write_atomic", full)
    assert write(WarmUpWriter(), tmp_path).generated_tokens >= 600 and "No space" in caplog.text


# ---- the hook


class Warmed(RecordingCompanion):
    """Publishes the heads that it is given beforehand, when a warm-up was handed over."""

    def __init__(self, first: Path | None = None) -> None:
        super().__init__()
        self.first = first
        self.alive = True
        self.said = CompanionStatus(
            last_policy_version=0,
            serving=ReplayRow(1.1, (0.1,)),
            candidate=ReplayRow(1.9, (0.6,)),
        )

    def drain(self, timeout_s: float) -> bool:
        self.drained += 1
        return self.alive and super().drain(timeout_s)

    def status(self, timeout_s: float = 2.0) -> CompanionStatus:
        return replace(self.said, alive=self.alive, error="" if self.alive else "gone")


@pytest.fixture
def scene(tmp_path: Path) -> tuple[Any, DoubleEngine, Warmed, MedusaPlugin]:
    actor = tiny_actor()
    config = config_of()
    engine = DoubleEngine(actor, MedusaPlugin.prepare_heads(config, actor, tmp_path / "heads"))
    companion = Warmed()
    plugin = MedusaPlugin(engine, companion, heads=initial_heads(config, actor))
    return actor, engine, companion, plugin


def offer(companion: Warmed, engine: DoubleEngine, folder: Path) -> None:
    state = engine.heads.trainable_state()
    save_state(folder / "new.safetensors", state)
    companion.offer = PublishedHeads(1, str(folder / "new.safetensors"), checksum(state), 0, 1.9)


def scored(plugin: MedusaPlugin, actor: Any) -> Any:
    return lambda rollouts: score(plugin, actor, rollouts, range(len(rollouts.responses)))


def test_the_engine_has_warm_heads_before_the_first_step(scene: Any, tmp_path: Path) -> None:
    actor, engine, companion, plugin = scene
    offer(companion, engine, tmp_path)
    report = plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=200, seconds=40.0)
    assert not report.problem and engine.heads_version == 1
    assert (report.before, report.after, report.prompts) == (1.1, 1.9, len(PROMPTS))
    (batch,) = companion.batches
    assert batch.response_ids_M.numel() == report.tokens >= 200 and 0 < batch.rising_s <= 40.0
    training, holdout = hold_out(batch, 0.2, 0)
    assert holdout is not None
    assert not set(holdout.prompts_S.tolist()) & set(training.prompts_S.tolist())
    values = plugin.metrics()
    assert values[names.WARM_UP_TOKENS] == report.tokens and values[names.WARM_UP_AFTER] == 1.9
    assert set(values) <= set(names.describe()) and names.WARM_UP_S not in plugin.metrics()


def test_its_steps_are_not_counted_among_those_of_the_first_rollouts(
    scene: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the example's steps the report said that 45 % had no drafts: those of the warm-up."""
    actor, engine, companion, plugin = scene
    offer(companion, engine, tmp_path)
    taken = [[{"running": 1, "steps": [8234, 0, 0, 0, 0], "speedup": 2.0}]]
    monkeypatch.setattr(engine, "choices", lambda: taken.pop() if taken else [])
    plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    plugin.before_generation()
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, range(len(PROMPTS)))
    assert names.DRAFT_CHOICES not in plugin.metrics()


def test_the_steps_after_it_hand_over_as_ever(scene: Any, tmp_path: Path) -> None:
    actor, engine, companion, plugin = scene
    plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    plugin.before_generation()
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, range(len(PROMPTS)))
    assert [batch.rising_s is None for batch in companion.batches] == [False, True]


def test_too_few_prompts_are_said_and_nothing_is_asked(scene: Any) -> None:
    actor, engine, companion, plugin = scene
    engine.generate = None
    for prompts in ([], PROMPTS[: LEAST_PROMPTS - 1], PROMPTS[:3] * 40):
        report = plugin.warm_up(prompts, SAMPLING, scored(plugin, actor))
        assert "too few" in report.problem and str(LEAST_PROMPTS) in report.problem
    assert not companion.batches and names.WARM_UP_S not in plugin.metrics()


def test_none_is_wanted_or_there_is_no_companion(scene: Any) -> None:
    actor, engine, _, plugin = scene
    engine.generate = None
    assert plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=0).problem
    alone = MedusaPlugin(engine, None)
    assert alone.warm_up(PROMPTS, SAMPLING, scored(alone, actor)).problem


def test_a_loop_that_scores_outside_the_tap_is_told(scene: Any) -> None:
    *_, companion, plugin = scene
    report = plugin.warm_up(PROMPTS, SAMPLING, lambda rollouts: None, tokens=100)
    assert "actor_forward" in report.problem and not companion.batches


def test_a_companion_that_is_gone_or_brings_nothing_costs_no_more_than_the_warm_up(
    scene: Any,
) -> None:
    actor, engine, companion, plugin = scene
    companion.alive = False
    report = plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    assert "gone" in report.problem and engine.heads_version == 0
    companion.alive = True
    report = plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    assert "not significantly better" in report.problem and "No warm-up" in str(report)
    companion.said = CompanionStatus()
    report = plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    assert "heads.warm_up_s" in report.problem
    companion.said = CompanionStatus(restarts=1)
    report = plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    assert "restarted" in report.problem


def test_an_engine_that_refuses_the_heads_keeps_its_own(scene: Any, tmp_path: Path) -> None:
    actor, engine, companion, plugin = scene
    offer(companion, engine, tmp_path)
    engine.refuse = True
    report = plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=100)
    assert "did not accept" in report.problem and engine.heads_version == 0
    strict = MedusaPlugin(engine, companion, on_error="raise")
    with pytest.raises(SwapError):
        strict.warm_up(PROMPTS, SAMPLING, scored(strict, actor), tokens=100)


def test_of_the_fewest_prompts_as_many_are_held_out_as_the_gate_asks_for() -> None:
    lengths_S = torch.full((LEAST_PROMPTS,), 10)
    assert int(held_out(lengths_S, None, HOLDOUT_SHARE, 0).sum()) >= HOLDOUT_PROMPTS


def test_it_draws_no_random_number_of_the_loops(scene: Any, tmp_path: Path) -> None:
    actor, _, _, plugin = scene
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plugin.warm_up(PROMPTS, SAMPLING, scored(plugin, actor), tokens=60)
    assert torch.equal(before, torch.get_rng_state())


def test_ray_heads_that_begin_at_nothing_are_warm_before_the_first_step(
    ray_session: None, tmp_path: Path
) -> None:
    """Everything real but the engine."""
    actor = tiny_actor(cycle=True)
    config = config_of()
    engine = DoubleEngine(actor, MedusaPlugin.prepare_heads(config, actor, tmp_path / "heads"))
    plugin = MedusaPlugin.start(config, actor, engine, tmp_path / "run")
    cold = engine.generate(PROMPTS, Sampling(seed=9)).counters.mean_acceptance_length
    report = plugin.warm_up(
        PROMPTS, Sampling(seed=1), scored(plugin, actor), tokens=600, seconds=60.0
    )
    warm = engine.generate(PROMPTS, Sampling(seed=9)).counters.mean_acceptance_length
    assert plugin._companion.status().serving is not None
    first = plugin.metrics()
    assert names.WARM_UP_S in first and not set(REPLAYED) & set(first), "of heads before step 0"
    plugin.close()
    assert not report.problem and report.after > report.before and report.seconds < 120
    assert engine.heads_version == 1 and warm > cold + 0.25, (cold, warm)
