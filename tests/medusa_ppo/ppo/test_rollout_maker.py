"""Pieces scored while the engine writes: the same bits as afterwards, whatever ends first. Rollouts
written ahead: each token by the version that is said. Both really at the same time; and what goes
wrong.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.errors import EngineError, RunError
from medusa_ppo.config.companion_section import MOST_OF_PIECES
from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Response, Rollouts, Sampling
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.plugin.piece_states import PieceStates
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.loop import PPOLoop
from medusa_ppo.ppo.rewards import CallableReward
from medusa_ppo.ppo.run_progress import Timeline
from medusa_ppo.ppo.scores import Scores
from medusa_ppo.ppo.token_stats import token_stats
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.test_loop import LoopScene, Steps, settings

CLOCKED = ("_s", "idle_frac", "_gib", names.SYNC_BYTES)
WAIT_S = 60.0
"""Nothing here takes so long; what hangs shall fail."""


def telling(
    engine_class: type, tell: Callable[[Rollouts, Callable[[int, Response], None]], None]
) -> type:
    """The engine that samples with transformers, with its own way to tell of what has ended."""

    class Telling(engine_class):
        def generate_as_finished(self, prompts: Any, sampling: Any, finished: Any) -> Rollouts:
            rollouts = self.generate(prompts, sampling)
            tell(rollouts, finished)
            return rollouts

    return Telling


def in_any_order(seed: int) -> Callable[..., None]:
    draw = random.Random(seed)

    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        places = list(range(len(rollouts.responses)))
        draw.shuffle(places)
        for place in places:
            finished(place, rollouts.responses[place])

    return tell


def run(
    config: RunConfig, actor: Any, engine_class: type, most: int = 1 << 20
) -> tuple[list[dict], torch.Tensor, list]:
    """Figures that no clock gave, the actor's weights, and the companion's batches, of `most` rows.
    Where the engine writes ahead, the clock decides in which step a sync is counted.
    """
    recorder = RecordingCompanion()
    recorder.most = most
    scene = LoopScene(config, actor, engine_class, lambda engine: MedusaPlugin(engine, recorder))
    steps = [
        {key: value for key, value in step.items() if not key.endswith(CLOCKED)}
        for step in scene.run()
    ]
    return steps, scene.weights(), recorder.batches


def cut_to(top_k: int | None, config: RunConfig) -> RunConfig:
    return config.model_copy(
        update={"sampling": config.sampling.model_copy(update={"top_k": top_k})}
    )


def same(found: tuple, expected: tuple) -> None:
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    for ours, theirs in zip(found[2], expected[2], strict=True):
        for name in ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S", "prompts_S"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_what_ends_first_changes_no_bit(tmp_path: Path, tiny_actor, sampling_engine, prompts: int):
    """Against the same pieces after the generation: an engine that tells of all at the end."""
    afterwards = run(
        settings(tmp_path / "afterwards", piece_prompts=prompts, micro_batch_size=4),
        tiny_actor(),
        sampling_engine,
    )
    for seed in range(2):
        config = settings(tmp_path / str(seed), piece_prompts=prompts, micro_batch_size=4)
        same(run(config, tiny_actor(), telling(sampling_engine, in_any_order(seed))), afterwards)


@pytest.mark.parametrize("top_k", [None, 3])
def test_pieces_are_to_the_bit_the_whole_batch_where_each_sequence_is_computed_alone(
    tmp_path, tiny_actor, sampling_engine, top_k
):
    found = []
    for prompts in (None, 1, 3):
        config = cut_to(
            top_k, settings(tmp_path / str(prompts), piece_prompts=prompts, micro_batch_size=1)
        )
        found.append(run(config, tiny_actor(), telling(sampling_engine, in_any_order(0))))
    same(found[1], found[0])
    same(found[2], found[0])


def test_of_pieces_no_more_states_are_kept_than_may_be_in_the_sample(
    tmp_path: Path, tiny_actor, sampling_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states of a batch waited on the host until it was written, and of Megatron's ranks all
    went through the loop's process; then most of them were thrown away.
    """
    whole = run(settings(tmp_path / "whole", micro_batch_size=1), tiny_actor(), sampling_engine)
    tokens = [len(batch.hidden_MD) for batch in whole[2]]
    most = min(tokens) // 4
    kept = []
    put = PieceStates.put

    def counted(held: PieceStates, sequence: int, states_ND: torch.Tensor) -> None:
        put(held, sequence, states_ND)
        kept.append(held.kept)

    monkeypatch.setattr(PieceStates, "put", counted)
    config = settings(tmp_path / "pieces", piece_prompts=1, micro_batch_size=1)
    found = run(config, tiny_actor(), telling(sampling_engine, in_any_order(0)), most)
    assert found[0] == whole[0] and torch.equal(found[1], whole[1]), "the policy is as it was"
    for sampled, batch in zip(found[2], whole[2], strict=True):
        assert most / 2 < len(sampled.hidden_MD) <= most
        ends = set(map(tuple, batch.hidden_MD.tolist()))
        assert {tuple(row) for row in sampled.hidden_MD.tolist()} <= ends, "states of this batch"
    longest = max(int(batch.lengths_S.max()) for batch in whole[2])
    responses_of_a_piece = 4
    assert max(kept) <= MOST_OF_PIECES * most + longest * responses_of_a_piece < max(tokens)


def test_micro_batches_of_pieces_change_nothing_but_rounding(
    tmp_path: Path, tiny_actor, sampling_engine
):
    whole, pieces = (
        run(settings(tmp_path / str(n), piece_prompts=n, steps=1), tiny_actor(), sampling_engine)
        for n in (None, 1)
    )
    torch.testing.assert_close(pieces[1], whole[1], rtol=1e-4, atol=1e-5)


def test_a_piece_is_scored_while_the_engine_still_writes(
    tmp_path: Path, tiny_actor, sampling_engine
):
    """The engine ends the second half only when the first piece has gone through all models and the
    reward.
    """
    scored = threading.Event()
    rewarded = threading.Event()

    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        half = len(rollouts.responses) // 2
        for place, response in enumerate(rollouts.responses):
            if place == half:
                assert scored.wait(WAIT_S) and rewarded.wait(WAIT_S)
            finished(place, response)

    scene = LoopScene(
        settings(tmp_path, steps=1, piece_prompts=2), tiny_actor(), telling(sampling_engine, tell)
    )
    critic = scene.learner.critic
    critic.register_forward_hook(lambda *_: scored.set())
    scene.parts.reward = CallableReward(lambda prompt, response, row: rewarded.set() or 0.5, "half")
    (step,) = scene.run()
    spans = step[names.SPANS]
    assert set(spans) == {"engine", "actor", "reference", "critic", "reward", "update", "sync"}
    assert (
        len(spans["actor"]) == len(spans["reward"]) == 2
        and spans["actor"][0][1] <= spans["engine"][0][1]
    )
    assert 0 <= step[names.GENERATE_SCORE_IDLE] < 1 and step[names.GENERATE_SCORE_S] > 0


def test_responses_that_came_otherwise_in_the_end_are_scored_again(
    tmp_path: Path, tiny_actor, sampling_engine
):
    """As after an engine was lost: what it told is not what another one wrote."""

    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        for place, response in enumerate(rollouts.responses):
            other = Response(response.prompt_index, (5, 6), (-1.0, -2.0), "length")
            finished(place, other if place < 6 else response)
        finished(0, rollouts.responses[0])

    expected = run(cut_to(2, settings(tmp_path / "expected")), tiny_actor(), sampling_engine)
    same(
        run(
            cut_to(2, settings(tmp_path / "lost", piece_prompts=1)),
            tiny_actor(),
            telling(sampling_engine, tell),
        ),
        expected,
    )


@pytest.mark.parametrize("what", ["reward", "models"])
def test_what_fails_meanwhile_is_raised_before_the_engine_has_ended(
    tmp_path: Path, tiny_actor, sampling_engine, what: str
):
    gone = threading.Event()

    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        for place, response in enumerate(rollouts.responses[: len(rollouts.responses) // 2]):
            finished(place, response)
        assert gone.wait(WAIT_S)

    scene = LoopScene(
        settings(tmp_path, steps=1, piece_prompts=2), tiny_actor(), telling(sampling_engine, tell)
    )
    if what == "reward":
        scene.parts.reward = CallableReward(lambda prompt, response, row: float("nan"), "broken")
    else:
        scene.learner.reference.model.forward = lambda *_, **__: 1 / 0
    loop = PPOLoop(scene.config, scene.parts)
    with pytest.raises(RunError if what == "reward" else ZeroDivisionError):
        loop.step(0)
    gone.set()


def test_an_engine_that_fails_half_way_is_its_error(tmp_path: Path, tiny_actor, sampling_engine):
    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        finished(0, rollouts.responses[0])
        raise EngineError("The engine's process died.")

    scene = LoopScene(
        settings(tmp_path, piece_prompts=1), tiny_actor(), telling(sampling_engine, tell)
    )
    with pytest.raises(EngineError, match="died"):
        PPOLoop(scene.config, scene.parts).step(0)


def test_rewards_of_steps_come_by_pieces_too(tmp_path: Path, tiny_actor, sampling_engine):
    def each(prompt: str, response: str, row: dict) -> list[float]:
        return [
            float(word == "3") for word in [word for word in response.split("|") if word] or [""]
        ]

    found = []
    for prompts in (None, 1):
        scene = LoopScene(
            settings(
                tmp_path / str(prompts),
                step_separator="|",
                piece_prompts=prompts,
                micro_batch_size=1,
            ),
            tiny_actor(),
            sampling_engine,
        )
        scene.parts.tokenizer = Steps()
        scene.parts.reward = CallableReward(each, "each")
        found.append(([step[names.REWARD_MEAN] for step in scene.run()], scene.weights()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_a_paired_step_is_not_disturbed(tmp_path: Path, tiny_actor, sampling_engine):
    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        raise AssertionError("a timed generation has the machine for itself")

    config = settings(tmp_path, steps=1, piece_prompts=1)
    config = config.model_copy(
        update={"report": config.report.model_copy(update={"speed_every": 1})}
    )
    (step,) = LoopScene(config, tiny_actor(), telling(sampling_engine, tell)).run()
    assert (
        names.PAIR_SPEEDUP in step
        and step[names.SPANS]["actor"][0][0] >= step[names.SPANS]["engine"][0][1]
    )


def test_the_idle_share_by_hand():
    """Engine 0 to 10; scoring 4 to 6, 5 to 7 and 12 to 14, that is 5 of 14 seconds."""
    now = [0.0]
    timeline = Timeline(lambda: now[0])

    def work(role: str, began: float, ended: float) -> None:
        now[0] = began
        with timeline.at_work(role):
            now[0] = ended

    for span in (
        ("engine", 0, 10),
        ("actor", 4, 6),
        ("reward", 5, 7),
        ("critic", 12, 14),
        ("update", 14, 30),
    ):
        work(*span)
    found = timeline.figures()
    assert found[names.GENERATE_SCORE_S] == 14
    assert found[names.GENERATE_SCORE_IDLE] == pytest.approx(((14 - 10) / 14 + (14 - 5) / 14) / 2)
    assert found[names.SPANS]["reward"] == [[5, 7]] and list(found[names.SPANS]) == [
        "engine",
        "actor",
        "critic",
        "reward",
        "update",
    ]


def test_a_loop_that_waits_is_idle_for_half_of_its_time_at_least(
    tmp_path: Path, tiny_actor, sampling_engine
):
    (step,) = LoopScene(settings(tmp_path, steps=1), tiny_actor(), sampling_engine).run()
    assert step[names.GENERATE_SCORE_IDLE] >= 0.5


# ---- written ahead


def ahead(tmp_path: Path, staleness: int, **ppo) -> RunConfig:
    config = settings(tmp_path, importance_bound=2.0, **ppo)
    return config.model_copy(update={"ppo": config.ppo.model_copy(update={"staleness": staleness})})


class Snapshots(LoopScene):
    """Keeps the actor's weights of every version that the engine was given, what it wrote, and the
    importance weights.
    """

    collect_s = 0.0
    nbytes = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.versions = {0: self.snapshot()}
        self.learned: list[tuple[PPOBatch, Scores, dict]] = []
        update = self.learner.update

        def learn(batch: PPOBatch, scores: Scores, *rest: Any) -> dict:
            self.learned.append((batch, scores, self.snapshot()))
            return update(batch, scores, *rest)

        self.learner.update = learn
        self.parts.sync = self

    def __call__(self, actor: Any, version: int, *wake: Any) -> None:
        """In the place of the loop's sync."""
        self.sync(actor, version, *wake)
        self.versions[version] = self.snapshot()

    def snapshot(self) -> dict:
        return {name: value.clone() for name, value in self.learner.actor.state_dict().items()}


@torch.no_grad()
def logprobs_by(actor: Any, state: dict, batch: PPOBatch) -> torch.Tensor:
    own = {name: value.clone() for name, value in actor.state_dict().items()}
    actor.load_state_dict(state)
    found_SR = torch.zeros(batch.mask_SR.shape)
    for micro in batch.micro_batches(list(range(len(batch))), 16):
        batch.unpack(token_stats(actor, micro, Sampling()).logprobs_M, micro, found_SR)
    actor.load_state_dict(own)
    return found_SR


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_every_token_is_of_the_version_that_is_said_and_weighed_by_it(
    tmp_path: Path, tiny_actor, sampling_engine, staleness: int
):
    scene = Snapshots(
        ahead(tmp_path, staleness, steps=8, actor_learning_rate=1e-2), tiny_actor(), sampling_engine
    )
    steps = scene.run()
    lags = [step[names.POLICY_LAG] for step in steps]
    assert lags[0] == 0 and max(lags) <= staleness and lags[1] == 1, lags
    if staleness == 1:
        assert lags == [0, *[1] * 7] and [step[names.POLICY_VERSION] for step in steps] == [
            0,
            *range(7),
        ]
    for batch, scores, learner_state in scene.learned:
        written_SR = logprobs_by(
            scene.learner.actor, scene.versions[batch.rollouts.policy_version], batch
        )
        torch.testing.assert_close(written_SR, batch.behaviour_SR, rtol=1e-4, atol=1e-5)
        now_SR = logprobs_by(scene.learner.actor, learner_state, batch)
        torch.testing.assert_close(scores.logprobs_SR, now_SR, rtol=1e-4, atol=1e-5)
        expected_SR = (now_SR - written_SR).exp().clamp(max=2.0)
        torch.testing.assert_close(scores.weights_SR, expected_SR, rtol=1e-4, atol=1e-4)
    assert any(
        (scores.weights_SR[batch.mask_SR] - 1).abs().max() > 0.05
        for batch, scores, _ in scene.learned[1:]
    )


def test_the_engine_writes_while_the_loop_learns(tmp_path: Path, tiny_actor, sampling_engine):
    """Its second call ends only when the first update has begun."""
    learning = threading.Event()

    class WaitingEngine(sampling_engine):
        def generate(self, prompts: Any, sampling: Any) -> Rollouts:
            assert len(self.drafts) != 1 or learning.wait(WAIT_S)
            return super().generate(prompts, sampling)

    scene = LoopScene(ahead(tmp_path, 1, steps=3), tiny_actor(), WaitingEngine)
    update = scene.learner.update
    scene.learner.update = lambda *given: learning.set() or update(*given)
    steps = scene.run()
    assert len(steps) == 3 and "update" in steps[0][names.SPANS] and steps[0][names.SPANS]["engine"]
    assert scene.engine.policy_version == 3, "at the end it has the last actor"


def test_written_one_step_ahead_the_run_repeats_itself_and_learns(
    tmp_path: Path, tiny_actor, sampling_engine
):
    found = [
        run(ahead(tmp_path / name, 1, steps=4), tiny_actor(), sampling_engine) for name in "ab"
    ]
    same(*found)
    assert [batch.policy_version for batch in found[0][2]] == [
        0,
        0,
        1,
        2,
    ], "the companion's batches have the version that wrote them"
    scene = LoopScene(
        ahead(tmp_path / "long", 1, steps=30, epochs=4), tiny_actor(), sampling_engine
    )
    rewards = [step[names.REWARD_MEAN] for step in scene.run()]
    assert rewards[0] < 0.2 and sum(rewards[-3:]) / 3 > 0.5, rewards


def test_an_engine_that_dies_while_it_writes_ahead_is_the_next_steps_error(
    tmp_path: Path, tiny_actor, sampling_engine
):
    class Dying(sampling_engine):
        def generate(self, prompts: Any, sampling: Any) -> Rollouts:
            if len(self.drafts) == 1:
                raise EngineError("The engine's process died.")
            return super().generate(prompts, sampling)

    scene = LoopScene(ahead(tmp_path, 1, steps=3), tiny_actor(), Dying)
    with pytest.raises(EngineError, match="died"):
        scene.run()
    lines = (scene.config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1, "the finished step stays"
