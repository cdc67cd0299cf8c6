"""Pieces scored on the ranks while the engine writes, one role at a time in a rank's memory: the
bits of the whole batch, and the memory of one role.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Response, Rollouts
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin
from medusa_ppo.plugin.piece_states import PieceTap
from medusa_ppo.ppo.rewards import RewardSource
from medusa_ppo.ppo.run_state import RunPosition, save_checkpoint
from tests.medusa_ppo.conftest import RecordingCompanion
from tests.medusa_ppo.ppo.test_loop import LoopScene, Numbers
from tests.medusa_ppo.ppo.test_rollout_maker import WAIT_S, in_any_order, same, telling

pytest.importorskip("megatron.core")

PROMPTS = 4
STEPS = 2
ROLES = {"actor", "reference", "critic", "reward"}


class Letters(Numbers):
    """A tokenizer whose text is what the reward model reads."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join("abc"[i % 3] for i in row) for row in ids]


class Ranks:
    """Two tensor-parallel ranks with all four roles in turn, and the state that they begin with."""

    def __init__(self, folder: Path, actor: Any, placement: str) -> None:
        from medusa_ppo.ppo.megatron.megatron_learner import MegatronLearner, RankedReward, RankTeam

        self.actor = actor
        self.placement = placement
        self.path = str(folder / "actor")
        self.judge = str(folder / "judge")
        actor.save_pretrained(self.path)
        config = self.config(folder / "begin", None)
        self.team = RankTeam(self.path, config, with_embedding=True)
        self.learner = MegatronLearner(self.team, self.path, None, config)
        self.reward = RankedReward(config.ppo)
        self.reward.attach(self.team)
        self.begun = save_checkpoint(folder, self.learner, RunPosition(0, 0, 0.0), config)

    def config(self, out: Path, piece_prompts: int | None) -> RunConfig:
        return build_config(
            {
                "name": "run",
                "out": str(out),
                "model": {"path": self.path},
                "actor": {
                    "backend": "megatron",
                    "imports": "ranks_on_cpu",
                    "tensor_parallel": 2,
                    "roles": "all",
                },
                # As many as ranks, for `shared`; the tests have one that stands for both.
                "engine": {"sleep_level": 1, "replicas": 2},
                "sampling": {"max_new_tokens": 6, "responses_per_prompt": 2, "seeded": True},
                "ppo": {
                    "steps": STEPS,
                    "prompts_per_step": PROMPTS,
                    "piece_prompts": piece_prompts,
                    "placement": self.placement,
                    "reward": self.judge,
                    "minibatch_size": 4,
                    "micro_batch_size": 1,
                    "actor_learning_rate": 1e-3,
                    "critic_learning_rate": 1e-3,
                    "checkpoint_every": None,
                },
            }
        )

    def run(
        self,
        out: Path,
        piece_prompts: int | None,
        engine_class: type,
        reward: RewardSource | None = None,
        most: int = 1 << 20,
    ) -> tuple[list[dict[str, Any]], torch.Tensor, list[Any], LoopScene]:
        """Each run begins with the same weights and moments."""
        self.learner.load(self.begun)
        recorder = RecordingCompanion()
        recorder.most = most
        scene = LoopScene(
            self.config(out, piece_prompts),
            self.actor,
            engine_class,
            lambda engine: MedusaPlugin(engine, recorder),
        )
        scene.learner = self.learner
        scene.parts = replace(
            scene.parts,
            learner=self.learner,
            reward=reward or self.reward,
            tokenizer=Letters(),
        )
        steps = scene.run()
        weights = dict(self.learner.actor.tensors(torch.float32))
        flat = torch.cat([weights[name].flatten() for name in sorted(weights)])
        return steps, flat, recorder.batches, scene


@pytest.fixture(scope="module", params=["in_turn", "shared"])
def ranks(
    request: pytest.FixtureRequest,
    shim_in_reach: None,
    ray_session: None,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_actor: Callable[..., Any],
    save_judge: Callable[..., None],
) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    save_judge(folder / "judge", hidden=32)
    found = Ranks(folder, tiny_actor(), request.param)
    yield found
    found.team.close()


def learned(steps: list[dict[str, Any]]) -> list[list[float]]:
    figures = (
        names.REWARD_MEAN,
        names.KL_REFERENCE,
        names.ENTROPY,
        names.VALUE_LOSS,
        names.POLICY_LOSS,
        names.ACTOR_GRAD_NORM,
    )
    return [[step[name] for name in figures] for step in steps]


def test_pieces_in_turn_on_ranks_are_to_the_bit_the_whole_batch(
    tmp_path: Path, ranks: Ranks, sampling_engine: type
) -> None:
    """Each sequence is computed alone, whatever ends first; the engine sleeps afterwards, and the
    companion gets the same states.
    """
    found = {}
    for prompts in (None, 1, 3):
        engine_class = telling(sampling_engine, in_any_order(prompts or 0))
        steps, weights, batches, scene = ranks.run(tmp_path / str(prompts), prompts, engine_class)
        found[prompts] = learned(steps), weights, batches
        assert scene.engine.slept == [1] * STEPS
        roles = steps[-1][names.LEDGER_ROLES]
        assert set(roles) == ROLES and steps[-1][names.LEDGER_PEAK] == max(roles.values())
        passes = len(steps[-1][names.SPANS]["critic"])
        assert passes == (1 if prompts is None else -(-PROMPTS // prompts))
    same(found[1], found[None])
    same(found[3], found[None])
    assert len({figures[0] for figures in found[None][0]}) == STEPS, "rewards of these texts"


def test_ranks_hand_in_only_what_may_be_in_the_sample(
    tmp_path: Path, ranks: Ranks, sampling_engine: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch in pieces they handed in all states: 137 GB of a 70B actor's, of which less than a
    hundredth was wanted.
    """
    crossed: list[int] = []
    put = PieceTap.put

    def counted(tap: PieceTap, states: Mapping[int, torch.Tensor]) -> None:
        crossed.extend(len(states_ND) for states_ND in states.values())
        put(tap, states)

    monkeypatch.setattr(PieceTap, "put", counted)
    most = 8
    engine_class = telling(sampling_engine, in_any_order(0))
    _, _, batches, _ = ranks.run(tmp_path, 1, engine_class, most=most)
    assert len(batches) == STEPS and all(0 < len(b.hidden_MD) <= most for b in batches)
    tokens = [len(b.hidden_MD) + b.left_out for b in batches]
    assert sum(crossed) < 0.75 * sum(tokens)


def test_all_roles_take_their_turns_while_the_engine_writes(
    tmp_path: Path, ranks: Ranks, sampling_engine: type
) -> None:
    """The engine ends its second half only when the first piece has gone through all four roles."""
    measured = threading.Event()
    rewarded = threading.Event()

    class Watched(RewardSource):
        def score(self, *given: Any) -> torch.Tensor:
            rewards_S = ranks.reward.score(*given)
            rewarded.set()
            return rewards_S

        def score_steps(self, *given: Any) -> list[list[float]]:
            return ranks.reward.score_steps(*given)

    def tell(rollouts: Rollouts, finished: Callable[[int, Response], None]) -> None:
        half = len(rollouts.responses) // 2
        for place, response in enumerate(rollouts.responses):
            if place == half:
                assert measured.wait(WAIT_S) and rewarded.wait(WAIT_S)
            finished(place, response)

    measure = ranks.learner.measure

    def watched(*given: Any) -> Any:
        found = measure(*given)
        measured.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.learner, "measure", watched)
        steps, *_ = ranks.run(tmp_path, PROMPTS // 2, telling(sampling_engine, tell), Watched())
    spans = steps[0][names.SPANS]
    written = spans["engine"][0][1]
    for role in ("actor", "critic", "reward"):
        assert len(spans[role]) == 2 and spans[role][0][1] <= written, role
