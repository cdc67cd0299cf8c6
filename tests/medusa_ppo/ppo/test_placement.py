"""Roles that take turns on one device: the same bits as with a place for each, less memory, and no
use of what is not there.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from heads.errors import ConfigError
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.plugin.no_plugin import NoPlugin
from medusa_ppo.ppo.generation import Prompt, PromptStream
from medusa_ppo.ppo.placement import ACTOR, CRITIC, ENGINE, REFERENCE, REWARD, UNFREED, Turns
from medusa_ppo.ppo.rewards import ModelReward
from medusa_ppo.ppo.run_state import RunPosition
from medusa_ppo.reports.store import read_run
from medusa_ppo.reports.summary import build_summary
from medusa_ppo.reports.tables import summary_rows
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.conftest import SamplingEngine
from tests.medusa_ppo.ppo.test_loop import LoopScene, Saved, settings
from tests.medusa_ppo.ppo.test_rollout_maker import in_any_order, same, telling

GIB = 2**30


def placed(tmp_path: Path, placement: str, **ppo: object) -> RunConfig:
    config = settings(tmp_path / placement, placement="separate", **ppo)
    if placement == "separate":
        return config
    engine = config.engine.model_copy(update={"sleep_level": 1})
    return config.model_copy(
        update={"engine": engine, "ppo": config.ppo.model_copy(update={"placement": placement})}
    )


def scene_of(
    config: RunConfig, actor, engine_class, judge: Path | None = None, plugin_of=None
) -> LoopScene:
    """With an engine of as many bytes as the actor's weights, and a reward model that is a role
    too.
    """
    scene = LoopScene(config, actor, engine_class, plugin_of)
    turns = scene.learner.turns
    turns.engine_started(sum(p.nbytes for p in actor.parameters()))
    if judge is not None:
        scene.parts.reward = ModelReward(str(judge))
        turns.add(REWARD, scene.parts.reward.model)
    scene.parts.tokenizer = Saved()
    scene.parts.evaluation = (
        PromptStream([Prompt(str(i), (i,), {}) for i in range(5, 9)], seed=0)
        if config.ppo.eval_every
        else None
    )
    return scene


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_actor, save_judge
) -> dict[str, tuple[LoopScene, list[dict]]]:
    """The same run in both placements: a reward model, an evaluation, checkpoints, two passes."""
    folder = tmp_path_factory.mktemp("placed")
    save_judge(folder / "judge", hidden=32)
    found = {}
    for placement in ("separate", "shared"):
        scene = scene_of(
            placed(folder, placement, eval_every=2, checkpoint_every=1),
            tiny_actor(),
            SamplingEngine,
            folder / "judge",
        )
        found[placement] = scene, scene.run()
    return found


def test_turns_change_no_bit(runs):
    separate, plain = runs["separate"]
    shared, found = runs["shared"]
    same = (
        names.REWARD_MEAN,
        names.VALUE_LOSS,
        names.POLICY_LOSS,
        names.KL_REFERENCE,
        names.ACTOR_GRAD_NORM,
        names.EVAL_REWARD,
    )
    assert [[step.get(name) for name in same] for step in found] == [
        [step.get(name) for name in same] for step in plain
    ]
    for name in ("actor", "actor_optimizer", "critic", "critic_optimizer"):
        ours, theirs = (
            scene.config.run_dir / "checkpoint" / f"{name}.safetensors"
            for scene in (shared, separate)
        )
        assert ours.read_bytes() == theirs.read_bytes(), name
    ours, theirs = (
        scene.config.run_dir / "best" / "model.safetensors" for scene in (shared, separate)
    )
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_ledger_has_the_roles_and_shared_needs_less(runs):
    separate, plain = runs["separate"]
    shared, found = runs["shared"]
    weights = {
        role: sum(p.nbytes for p in module.parameters()) / GIB
        for role, module in modules(separate).items()
    }
    for steps in (plain, found):
        roles = steps[-1][names.LEDGER_ROLES]
        assert set(roles) == {ENGINE, ACTOR, REFERENCE, CRITIC, REWARD}
        assert roles[ACTOR] == pytest.approx(4 * weights[ACTOR]) and roles[
            REFERENCE
        ] == pytest.approx(weights[REFERENCE])
    assert plain[-1][names.LEDGER_PEAK] == pytest.approx(
        weights[ACTOR]
        + 4 * weights[ACTOR]
        + 3 * weights[CRITIC]
        + weights[REFERENCE]
        + weights[REWARD],
        rel=0.02,
    ), "gradients are there for one of the two at a time"
    assert found[-1][names.LEDGER_PEAK] == pytest.approx(4 * weights[ACTOR], rel=0.02)
    assert found[-1][names.LEDGER_PEAK] / plain[-1][names.LEDGER_PEAK] <= 0.6
    assert (
        names.OFFLOAD_S not in plain[-1]
        and found[-1][names.OFFLOAD_S] > 0
        and found[-1][names.OFFLOAD_BYTES] > 0
    )
    rows = dict(summary_rows(build_summary(read_run(shared.config.run_dir))))
    assert "actor" in rows["Peak memory of all roles on devices, and of each role, GiB"]
    assert "MiB" in rows["Roles to host memory and back, in each step"]


@pytest.mark.parametrize("seed", [0, 1])
def test_pieces_come_beside_an_engine_that_is_awake_and_change_no_bit(
    tmp_path: Path, tiny_actor, save_judge, seed: int
):
    """Actor, reference and critic in one thread and the reward model in another take turns while
    responses still come, in any order; the companion gets the same states.
    """
    save_judge(tmp_path / "judge", hidden=32)
    found = {}
    for placement in ("separate", "shared"):
        recorder = RecordingCompanion()
        config = placed(
            tmp_path / placement, placement, piece_prompts=1, micro_batch_size=4, steps=3
        )
        scene = scene_of(
            config,
            tiny_actor(),
            telling(SamplingEngine, in_any_order(seed)),
            tmp_path / "judge",
            lambda engine, recorder=recorder: MedusaPlugin(engine, recorder),
        )
        steps = scene.run()
        figures = [
            [step[name] for name in (names.REWARD_MEAN, names.KL_REFERENCE, names.VALUE_LOSS)]
            for step in steps
        ]
        weights = {name: value.clone() for name, value in scene.learner.critic.state_dict().items()}
        turns = scene.learner.turns
        with turns.on(ACTOR):
            found[placement] = figures, scene.weights(), recorder.batches
        peak = steps[-1][names.LEDGER_PEAK]
        assert scene.engine.slept == ([1] * 3 if placement == "shared" else [])
    same(found["shared"], found["separate"])
    # An actor that learns has four times its weights; beside the engine one role has its own once.
    actor = sum(p.nbytes for p in tiny_actor().parameters()) / GIB
    assert peak == pytest.approx(4 * actor, rel=0.02) and weights


@pytest.mark.parametrize(("piece_prompts", "level"), [(None, 1), (None, 2), (1, 1)])
def test_a_reward_model_judges_an_evaluation_while_the_engine_sleeps(
    tmp_path: Path, tiny_actor, save_judge, piece_prompts: int | None, level: int
):
    """The engine was awake there, and nothing had looked whether both fit; with pieces they do, or
    the run would not have begun.
    """
    save_judge(tmp_path / "judge", hidden=32)
    config = placed(
        tmp_path,
        "shared",
        eval_every=1,
        piece_prompts=piece_prompts,
        micro_batch_size=4,
        steps=2,
    )
    engine = config.engine.model_copy(update={"sleep_level": level})
    config = config.model_copy(update={"engine": engine})
    engine_class = telling(SamplingEngine, in_any_order(0)) if piece_prompts else SamplingEngine
    scene = scene_of(config, tiny_actor(), engine_class, tmp_path / "judge")
    reward = scene.parts.reward
    judge, asleep = reward.score, []

    def score(texts: list[str], *more: object) -> torch.Tensor:
        if len(texts) == len(scene.parts.evaluation.prompts):
            asleep.append(scene.engine.asleep)
            assert scene.learner.turns.ledger.now.get(ENGINE, 0) == (0 if asleep[-1] else weights)
        return judge(texts, *more)

    weights = sum(p.nbytes for p in scene.learner.actor.parameters())
    reward.score = score
    steps = scene.run()
    assert [names.EVAL_REWARD in step for step in steps] == [True, True]
    assert not scene.engine.asleep
    assert scene.engine.slept == [level] * (2 if piece_prompts else 4)
    assert set(asleep) == {0 if piece_prompts else level}


class ReadsTables(NoPlugin):
    """Compares the actor's table with the engine's when rollouts are ready, as a companion reads
    it.
    """

    def __init__(self, engine: SamplingEngine) -> None:
        self.engine = engine
        self.read = 0

    def rollout_ready(self, rollouts: Rollouts) -> None:
        assert torch.equal(self.actor.lm_head.weight, self.engine.actor.lm_head.weight)
        self.read += 1


@pytest.mark.parametrize(
    ("placement", "level", "piece_prompts"),
    [("shared", 1, None), ("shared", 1, 1), ("in_turn", None, None), ("in_turn", None, 1)],
)
def test_a_plugin_can_read_the_actors_tables_when_rollouts_are_ready(
    tmp_path: Path, tiny_actor, placement: str, level: int | None, piece_prompts: int | None
):
    """The actor waits on the host then, and with pieces it may be at work."""
    config = placed(tmp_path, placement, piece_prompts=piece_prompts, micro_batch_size=4, steps=3)
    engine = config.engine.model_copy(update={"sleep_level": level})
    config = config.model_copy(update={"engine": engine})
    engine_class = telling(SamplingEngine, in_any_order(0)) if piece_prompts else SamplingEngine
    scene = scene_of(config, tiny_actor(), engine_class, plugin_of=ReadsTables)
    scene.parts.plugin.actor = scene.learner.actor
    scene.run()
    assert scene.parts.plugin.read == 3


def test_what_an_engine_leaves_to_passes_is_looked_at_before_it_starts():
    turns = Turns("shared")
    first = linear(0)
    turns.add(ACTOR, first, torch.optim.AdamW(first.parameters()))
    turns.add(REFERENCE, linear(1))
    weights = sum(p.nbytes for p in first.parameters())
    turns.check_room(4 * weights, 3 * weights)
    with pytest.raises(ConfigError, match="memory_fraction"):
        turns.check_room(4 * weights, 4 * weights)


def test_a_process_without_roles_has_room() -> None:
    """Its ranks have them all, and look for themselves."""
    Turns("shared").check_room(GIB, GIB // 2)


def modules(scene: LoopScene) -> dict[str, torch.nn.Module]:
    learner = scene.learner
    return {
        ACTOR: learner.actor,
        REFERENCE: learner.reference,
        CRITIC: learner.critic,
        REWARD: scene.parts.reward.model,
    }


def test_after_a_run_nothing_is_on_the_device_and_whoever_uses_it_fails(runs):
    scene, _ = runs["shared"]
    turns = scene.learner.turns
    turns.clear()
    assert {role: count for role, count in turns.ledger.now.items() if count} == {
        ENGINE: turns.ledger.now[ENGINE]
    }
    for role, module in modules(scene).items():
        assert all(p.untyped_storage().nbytes() == 0 for p in module.parameters()), role
    with pytest.raises(RuntimeError):
        scene.learner.actor(input_ids=torch.tensor([[1, 2]]))
    with turns.on(ACTOR):
        scene.learner.actor(input_ids=torch.tensor([[1, 2]]))


def test_a_shared_run_goes_on_where_it_was_saved(tmp_path: Path, tiny_actor, sampling_engine):
    whole = scene_of(
        placed(tmp_path / "whole", "shared", steps=3, checkpoint_every=1),
        tiny_actor(),
        sampling_engine,
    )
    whole.run()
    first = scene_of(
        placed(tmp_path / "cut", "shared", steps=2, checkpoint_every=1),
        tiny_actor(),
        sampling_engine,
    )
    first.run()
    rest = scene_of(
        placed(tmp_path / "rest", "shared", steps=3, checkpoint_every=1),
        tiny_actor(),
        sampling_engine,
    )
    rest.learner.turns.clear()
    rest.learner.load(first.config.run_dir / "checkpoint")
    with rest.learner.turns.aside(ACTOR):
        rest.sync(rest.learner.actor, 2)
    rest.run(RunPosition(2, 2))
    ours, theirs = (
        scene.config.run_dir / "checkpoint" / "actor_optimizer.safetensors"
        for scene in (rest, whole)
    )
    assert ours.read_bytes() == theirs.read_bytes()


def linear(seed: int, size: int = 8, device: torch.device | str = "cpu") -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(size, size).to(device)


def pair(device: torch.device) -> tuple[Turns, torch.nn.Linear, torch.nn.Linear]:
    turns = Turns("shared")
    first = linear(0, device=device)
    second = linear(1, device=device)
    turns.add(CRITIC, first)
    turns.add(REWARD, second)
    turns.clear()
    return turns, first, second


def test_who_comes_takes_the_place_of_who_leaves(device: torch.device):
    turns, first, second = pair(device)
    expected = linear(1, device=device).weight
    with turns.on(CRITIC):
        place = first.weight.data_ptr()
        assert first.weight.device.type == device.type
    with turns.on(REWARD):
        assert second.weight.data_ptr() == place and torch.equal(second.weight, expected)
        assert turns.ledger.now == {CRITIC: 0, REWARD: 4 * (64 + 8)}


def test_what_nobody_changed_is_not_copied_again(device: torch.device):
    turns, first, _ = pair(device)
    moved = []
    before = turns._moved
    for training in (False, True):
        with turns.on(CRITIC, training=training):
            if training:
                first.weight.data.add_(1.0)
        turns.clear()
        moved.append(turns._moved - before)
    assert moved == [4 * 72, 4 * 72 * 3], "once there; once there and once back"
    with turns.aside(CRITIC):
        assert first.weight.device.type == "cpu", "read where it waits"
        torch.testing.assert_close(first.weight, linear(0).weight + 1.0, rtol=0, atol=1e-6)
    assert first.weight.numel() == 0


def test_what_somebody_still_holds_is_not_booked_as_freed(device: torch.device):
    turns, first, _ = pair(device)
    with turns.on(CRITIC):
        held = first.weight.detach()
    turns.clear()
    assert turns.ledger.now[UNFREED] == held.nbytes
    del held
    with turns.on(REWARD):
        assert turns.ledger.now[UNFREED] == 0


def test_moments_leave_with_the_weights_and_an_update_goes_on(device: torch.device):
    """Three steps of AdamW with a turn of another role between them are three steps in a row."""
    states = []
    for away in (False, True):
        turns = Turns("shared")
        learns, other = linear(0, device=device), linear(1, device=device)
        optimizer = torch.optim.AdamW(learns.parameters(), lr=0.1)
        turns.add(ACTOR, learns, optimizer)
        turns.add(REFERENCE, other)
        for _ in range(3):
            with turns.on(ACTOR, training=True):
                learns(torch.ones(2, 8, device=device)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if away:
                with turns.on(REFERENCE):
                    other(torch.ones(2, 8, device=device))
                assert turns.ledger.now[ACTOR] == 0
        with turns.on(ACTOR, training=True):
            states.append([p.detach().cpu().clone() for p in learns.parameters()])
    for plain, moved in zip(*states, strict=True):
        assert torch.equal(plain, moved)


@pytest.mark.parametrize(
    ("placement", "given"),
    [
        ("separate", "4.00 at once"),
        ("swapped", "4.00 at once"),
        ("in_turn", "2.00 at once"),
        ("shared", "2.00 at once"),
    ],
)
def test_roles_without_room_are_refused(placement: str, given: str):
    turns = Turns(placement)
    for role in (ACTOR, REFERENCE):
        turns._roles[role] = SimpleNamespace(full_bytes=lambda: 2 * GIB)
    turns.check_room(4 * GIB)
    with pytest.raises(ConfigError, match="don't fit") as told:
        turns.check_room(GIB)
    assert given.split()[0] in str(told.value) and "actor 2.00" in str(told.value)
    assert f"ppo.placement={placement}" in str(told.value)


@pytest.mark.parametrize(
    "more",
    [
        {"engine": {"sleep_level": None}},
        {"engine": {"sleep_level": 1, "transfer": "broadcast"}},
        {"engine": {"sleep_level": 1}, "actor": {"backend": "megatron"}},
        {"engine": {"sleep_level": 1, "replicas": 2}, "actor": {"backend": "megatron"}},
        {"engine": {"sleep_level": 1}, "report": {"compare_pairs": 2}},
    ],
)
def test_placements_that_do_not_fit_the_devices_are_refused(more: dict):
    with pytest.raises(ConfigError, match=r"ppo\.placement"):
        build_config({"ppo": {"placement": "shared"}, **more})
    for several in ({}, {"replicas": 2}, {"extra": {"tensor_parallel_size": 2}}):
        build_config({"ppo": {"placement": "shared"}, "engine": {"sleep_level": 1, **several}})
