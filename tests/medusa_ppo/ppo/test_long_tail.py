"""Prompts carried over: each token by the version that is said and weighed by it, every prompt
learned from once, whole and in time; the same numbers again, also after a stop; and what is
refused.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.errors import CheckpointError, ConfigError
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Response, Sampling
from medusa_ppo.engines.pieces import UNFINISHED, Partly
from medusa_ppo.engines.probe import Uniformity, add_response
from medusa_ppo.ppo.long_tail import FILE, Carried, LongTail, read_carried, save_carried
from medusa_ppo.ppo.loop import PPOLoop
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.ppo.run_state import read_position, saved_folder
from tests.medusa_ppo.ppo.test_loop import LETTERS, LoopScene, settings
from tests.medusa_ppo.ppo.test_rollout_maker import Snapshots, logprobs_by, run, same

NEW_TOKENS = 24


def carrying(tmp_path: Path, staleness: int, share: float = 0.5, **ppo: Any) -> RunConfig:
    """Responses that end by chance, so that there is a tail."""
    config = settings(tmp_path, importance_bound=2.0, actor_learning_rate=1e-2, **ppo)
    sampling = config.sampling.model_copy(
        update={"max_new_tokens": NEW_TOKENS, "responses_per_prompt": 2}
    )
    ppo_section = config.ppo.model_copy(update={"staleness": staleness, "carry_after": share})
    return config.model_copy(update={"ppo": ppo_section, "sampling": sampling})


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_every_token_is_of_its_version_and_every_prompt_is_learned_from_once(
    tmp_path: Path, tiny_actor, sampling_engine, staleness: int
):
    """With 2 and more the engine writes ahead as well."""
    scene = Snapshots(carrying(tmp_path, staleness, steps=7), tiny_actor(), sampling_engine)
    steps = scene.run()
    learned = Counter[int]()
    several = 0
    for line, (batch, scores, learner_state) in zip(steps, scene.learned, strict=True):
        rollouts = batch.rollouts
        versions_SR = torch.full(batch.mask_SR.shape, -1)
        versions_SR[batch.mask_SR] = torch.tensor(
            [version for response in rollouts.responses for version in response.versions]
        )
        written_SR = torch.zeros(batch.mask_SR.shape)
        for version in versions_SR[batch.mask_SR].unique().tolist():
            by_SR = logprobs_by(scene.learner.actor, scene.versions[version], batch)
            written_SR = torch.where(versions_SR == version, by_SR, written_SR)
        torch.testing.assert_close(written_SR, batch.behaviour_SR, rtol=1e-4, atol=1e-5)
        now_SR = logprobs_by(scene.learner.actor, learner_state, batch)
        torch.testing.assert_close(scores.logprobs_SR, now_SR, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            scores.weights_SR, (now_SR - written_SR).exp().clamp(max=2.0), rtol=1e-4, atol=1e-4
        )
        assert all(
            list(response.versions) == sorted(response.versions) for response in rollouts.responses
        )
        several += sum(len(set(response.versions)) > 1 for response in rollouts.responses)
        assert Counter(batch.prompts_S.tolist()) == dict.fromkeys(
            range(len(rollouts.prompts)), 2
        ), "siblings come together"
        learned.update(prompt[0] for prompt in rollouts.prompts)
        oldest = line[names.STEP] - int(versions_SR[batch.mask_SR].min())
        assert (
            line[names.POLICY_LAG_MAX] == oldest <= staleness
            and 0 <= line[names.POLICY_LAG] <= oldest
        )
    assert learned == dict.fromkeys(LETTERS, 7), "all four prompts of each of the seven steps"
    carried = [line[names.PROMPTS_CARRIED] for line in steps]
    assert max(carried[:-1]) >= 1 and carried[-1] == 0 and several > 3, (carried, several)
    assert len({len(batch) for batch, _, _ in scene.learned}) > 1, (
        "batches have as many responses as have ended"
    )
    assert scene.engine.policy_version == 7


def test_the_pit_of_each_token_is_uniform_by_its_writer_and_by_no_other(
    tmp_path: Path, tiny_actor, sampling_engine
):
    scene = Snapshots(
        carrying(tmp_path, 2, steps=14, prompts_per_step=8), tiny_actor(), sampling_engine
    )
    scene.run()
    right = Uniformity()
    wrong = Uniformity()
    writer = tiny_actor()
    for batch, _, _ in scene.learned:
        for response in batch.rollouts.responses:
            prompt = batch.rollouts.prompts[response.prompt_index]
            for version in sorted(set(response.versions)):
                first = response.versions.index(version)
                count = response.versions.count(version)
                part = Response(
                    0, response.token_ids[first : first + count], (0.0,) * count, "stop"
                )
                for test, by in ((right, version), (wrong, max(0, version - 3))):
                    writer.load_state_dict(scene.versions[by])
                    add_response(
                        test, writer, (*prompt, *response.token_ids[:first]), part, Sampling()
                    )
    assert right.honest and right.tokens > 1500, right.figures()
    assert not wrong.honest, "a version that is three updates off is seen"


def test_carried_over_the_run_repeats_itself(tmp_path: Path, tiny_actor, sampling_engine):
    found = [
        run(carrying(tmp_path / name, 1, steps=4), tiny_actor(), sampling_engine) for name in "ab"
    ]
    same(*found)
    assert any(line[names.PROMPTS_CARRIED] for line in found[0][0])
    for batch in found[0][2]:
        assert len(batch.hidden_MD) == len(batch.logprobs_M) == int(batch.lengths_S.sum()), (
            "heads learn whole responses"
        )


class Stops(ProgressSink):
    """Ctrl-C after a step."""

    def step_finished(self, values: Any) -> None:
        if values[names.STEP] == 2:
            raise KeyboardInterrupt


class Cut(LoopScene):
    def run_until_stopped(self) -> None:
        class Stopped(PPOLoop):
            def __init__(self, config: Any, parts: Any, progress: Any, position: Any) -> None:
                super().__init__(config, parts, Stops(), position)

        with pytest.raises(KeyboardInterrupt):
            self.run(cls=Stopped)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resumed_run_is_to_the_bit_the_run_that_never_stopped(
    tmp_path: Path, tiny_actor, sampling_engine, staleness: int
):
    """With 2 one step is written ahead: it is written again, and by the actor of the checkpoint."""
    whole = LoopScene(
        carrying(tmp_path / "whole", staleness, steps=5, checkpoint_every=2),
        tiny_actor(),
        sampling_engine,
    )
    expected = whole.run()
    config = carrying(tmp_path / "cut", staleness, steps=5, checkpoint_every=2)
    Cut(config, tiny_actor(), sampling_engine).run_until_stopped()
    position = read_position(config.run_dir, config)
    assert (
        position.next_step == 2 and len(position.carried) == expected[1][names.PROMPTS_CARRIED] > 0
    )
    rest = LoopScene(config, tiny_actor(), sampling_engine)
    rest.learner.load(saved_folder(config.run_dir))
    rest.sync(rest.learner.actor, position.policy_version)
    found = rest.run(position, resume_step=position.next_step)
    assert [s[names.STEP] for s in found] == [0, 1, 2, 3, 4] and found[2][names.POLICY_LAG_MAX] > 0
    if staleness == 1:
        for name in (
            names.REWARD_MEAN,
            names.POLICY_LAG,
            names.PROMPTS_CARRIED,
            names.RESPONSE_LENGTH,
        ):
            assert [s[name] for s in found] == [s[name] for s in expected], name
        assert torch.equal(rest.weights(), whole.weights())


class FarAhead(PPOLoop):
    """The engine has written all that it may write ahead when a step ends, as a quick one has."""

    def step(self, step: int) -> Any:
        values = super().step(step)
        while not self.maker.idle:
            time.sleep(0.001)
        return values


@pytest.mark.parametrize(
    "staleness",
    [*(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 2, 4)), 3],
)
def test_killed_after_any_step_no_prompt_is_lost_or_learned_from_twice(
    tmp_path: Path, tiny_actor, sampling_engine, staleness: int
):
    """What a killed run leaves is its last checkpoint: one of each step is kept, and gone on
    from.
    """
    steps = 8
    config = carrying(
        tmp_path / "whole", staleness, steps=steps, checkpoint_every=1, keep_checkpoints=steps
    )
    whole = Snapshots(config, tiny_actor(), sampling_engine)
    whole.run(cls=FarAhead)

    def learned(scene: Snapshots) -> list[Counter[int]]:
        return [
            Counter(prompt[0] for prompt in batch.rollouts.prompts) for batch, *_ in scene.learned
        ]

    before = learned(whole)
    carried = 0
    for killed_after in range(1, steps):
        again = carrying(tmp_path / str(killed_after), staleness, steps=steps)
        shutil.copytree(
            config.run_dir / "checkpoints" / f"step-{killed_after:06d}",
            again.run_dir / "checkpoint",
        )
        allowed = ("ppo.checkpoint_every", "ppo.keep_checkpoints")
        position = read_position(again.run_dir, again, allowed)
        assert position.next_step == killed_after
        carried += len(position.carried)
        rest = Snapshots(again, tiny_actor(), sampling_engine)
        rest.learner.load(saved_folder(again.run_dir))
        rest.sync(rest.learner.actor, position.policy_version)
        rest.run(position)
        total = sum([*before[:killed_after], *learned(rest)], Counter[int]())
        assert total == dict.fromkeys(LETTERS, steps), killed_after
    assert carried >= steps // 2


def test_it_goes_with_an_engine_that_sleeps(tmp_path: Path, tiny_actor, sampling_engine):
    found = []
    for name, level in (("awake", None), ("asleep", 2)):
        config = carrying(tmp_path / name, 1, steps=4)
        config = config.model_copy(
            update={"engine": config.engine.model_copy(update={"sleep_level": level})}
        )
        scene = LoopScene(config, tiny_actor(), sampling_engine)
        found.append(([line[names.REWARD_MEAN] for line in scene.run()], scene.weights()))
    assert (
        scene.engine.slept == [2] * 4
        and found[0][0] == found[1][0]
        and torch.equal(found[0][1], found[1][1])
    )


def test_it_learns(tmp_path: Path, tiny_actor, sampling_engine):
    config = carrying(tmp_path, 1, share=0.6, steps=30, epochs=4)
    config = config.model_copy(
        update={
            "sampling": config.sampling.model_copy(
                update={"max_new_tokens": 4, "responses_per_prompt": 4}
            )
        }
    )
    config = config.model_copy(
        update={"ppo": config.ppo.model_copy(update={"actor_learning_rate": 3e-3})}
    )
    steps = LoopScene(config, tiny_actor(), sampling_engine).run()
    rewards = [step[names.REWARD_MEAN] for step in steps]
    assert rewards[0] < 0.25 and sum(rewards[-3:]) / 3 > 0.5, rewards


# ---- files, and what is refused


CARRIED = Carried(
    3,
    1,
    (4, 5),
    (
        Response(0, (7, 8), (-0.1, -1 / 3), UNFINISHED, (2, 3)),
        Response(0, (9,), (-2e-9,), "stop", (3,)),
    ),
)


def test_what_is_carried_over_is_the_same_on_disk(tmp_path: Path):
    save_carried(tmp_path, [CARRIED, CARRIED])
    assert read_carried(tmp_path, wanted=True) == (CARRIED, CARRIED)
    with pytest.raises(ConfigError, match=r"ppo\.carry_after"):
        read_carried(tmp_path, wanted=False)
    (tmp_path / FILE).unlink()
    save_carried(tmp_path, [])
    assert not (tmp_path / FILE).exists() and read_carried(tmp_path, wanted=False) == ()


def test_hostile_files_are_checkpoint_errors(tmp_path: Path):
    save_carried(tmp_path, [CARRIED])
    row = json.loads((tmp_path / FILE).read_text())
    damaged: list[Any] = [
        5,
        {},
        row | {"responses": [{}]},
        row | {"step": "x"},
        row | {"responses": [row["responses"][0] | {"versions": [2]}]},
    ]
    for wrong in damaged:
        (tmp_path / FILE).write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="damaged"):
            read_carried(tmp_path, wanted=True)
    (tmp_path / FILE).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="damaged"):
        read_carried(tmp_path, wanted=True)


@pytest.mark.parametrize("changed", ["prompt", "place", "responses", "length"])
def test_what_is_not_of_this_run_is_refused_before_the_engine_is_asked(
    tmp_path: Path, tiny_actor, sampling_engine, changed: str
):
    scene = LoopScene(carrying(tmp_path, 1), tiny_actor(), sampling_engine)
    stream = scene.parts.prompts
    sampling = Sampling(max_new_tokens=8, responses_per_prompt=2, seed=0)
    sound = replace(CARRIED, prompt_ids=stream.batch(3, 4)[1].token_ids)

    def write(carried: Carried, given: Sampling) -> int:
        tail = LongTail(
            scene.engine, lambda step: stream.batch(step, 4), 1.0, 4, 4, carried=(4, [carried])
        )
        return len(tail.write(4, stream.batch(4, 4), given)[0])

    assert write(sound, sampling) == 5
    carried = {"prompt": CARRIED, "place": replace(sound, place=9)}.get(changed, sound)
    given = {
        "responses": replace(sampling, responses_per_prompt=3),
        "length": replace(sampling, max_new_tokens=2),
    }.get(changed, sampling)
    scene.engine.generate_partly = None
    with pytest.raises(CheckpointError, match="of step 3"):
        write(carried, given)


def test_when_a_call_is_over():
    asked = Partly((), 2, frozenset({0}))
    assert not asked.over({0: 1, 1: 0, 2: 0}), "one that is due has not ended"
    assert not asked.over({0: 0, 1: 1, 2: 1}) and asked.over({0: 0, 1: 1, 2: 0})
