"""Images on Megatron's ranks: PPO with a vision-language actor on several processes does what PPO
with the same actor in one process does, and its tower's work is shared.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.checkpoint import load_state
from medusa_ppo.actors.hf import HFActor, load_actor, load_tokenizer
from medusa_ppo.actors.megatron_layout import SEEING_FAMILIES
from medusa_ppo.actors.vision import FeatureStore, ImageReader, load_tower, tower_of
from medusa_ppo.config.run_config import build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.engines.actor_sync import ActorSync, actor_state
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.run_state import RunPosition, save_checkpoint, saved_folder
from tests.medusa_ppo.ppo.megatron.test_megatron_learner import CLOSE, UPDATES

pytest.importorskip("megatron.core")
SAMPLING = Sampling(temperature=0.8)
IMAGES = 4  # In the rollouts below, all different.


class Seeing:
    """The same actor and critic twice, in this process and on ranks, and the images that the
    ranks' towers have computed.
    """

    def __init__(self, folder: Path, out: Path, notes: Path, actor: dict[str, Any]) -> None:
        from medusa_ppo.ppo.megatron.megatron_learner import MegatronLearner, RankTeam

        self.folder = folder
        self.notes = notes
        self.config = build_config(
            {
                "name": "run",
                "out": str(out),
                "seed": 3,
                "model": {"path": str(folder)},
                "data": {"images": "image"},
                "actor": {
                    "backend": "megatron",
                    "imports": "ranks_on_cpu",
                    "roles": "critic",
                    **actor,
                },
                "ppo": UPDATES,
            }
        )
        self.reader = ImageReader.load(folder, load_tokenizer(folder))
        model = load_actor(folder)
        self.plain = Learner(
            model,
            Critic(model),
            self.config.ppo,
            seed=self.config.seed,
            features=FeatureStore(model, self.reader),
        )
        self.team = RankTeam(str(folder), self.config, with_embedding=True)
        self.ranked = MegatronLearner(self.team, str(folder), None, self.config, self.reader)

    def computed(self) -> dict[str, Counter[str]]:
        """Images by rank, and how often each was computed there."""
        return {
            path.name: Counter(path.read_text().split()) for path in sorted(self.notes.iterdir())
        }

    def batch(self, picture: Callable[..., bytes]) -> PPOBatch:
        """Answers to prompts with one image, with two and with none, and one that has an image
        token of its own.
        """
        images = [(picture(0, 60, 90),), (picture(1), picture(2, 120, 60)), (picture(3),), ()]
        prompts = tuple(self.reader.prompts(["a", "bb", "c", "ddd"], images))
        answers = [(65 + i, self.reader.image_id, 66, 67)[: 2 + i % 3] for i in range(8)]
        responses = tuple(
            Response(i // 2, ids, (-1.0,) * len(ids), "stop") for i, ids in enumerate(answers)
        )
        return PPOBatch(Rollouts(prompts, responses, Counters(), 1.0, SAMPLING))


def rough(folder: Path, tmp_path: Path) -> Path:
    """The same actor with norms away from 1 and weights large enough that mistakes show. AdamW
    makes whole steps of gradients that are nothing but rounding, and there are many beside weights
    near zero.
    """
    found = shutil.copytree(folder, tmp_path / "rough")
    actor = load_actor(folder)
    # transformers never trains the embedding of a padding token, but prompts have this one.
    actor.config.get_text_config().pad_token_id = None
    torch.manual_seed(0)
    for parameter in actor.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    actor.save_pretrained(found)
    return found


@contextlib.contextmanager
def seeing(folder: Path, tmp_path: Path, notes: Path, **actor: Any) -> Iterator[Seeing]:
    for path in notes.iterdir():
        path.unlink()
    pair = Seeing(folder, tmp_path / "runs", notes, actor)
    try:
        yield pair
    finally:
        pair.team.close()


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where ranks note what their towers compute; Ray's workers learn it when Ray starts."""
    folder = tmp_path_factory.mktemp("computed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK_IMAGES", str(folder))
        yield folder


@pytest.fixture(scope="module")
def ranks(notes: Path, shim_in_reach: Path, ray_session: None) -> Path:
    """A Ray whose workers can be ranks, and their notes."""
    return notes


def check_states(pair: Seeing, batch: PPOBatch) -> None:
    """The states that the heads learn from are those that the answers' log-probs come from, and
    transformers'.
    """
    found: list[dict[int, torch.Tensor]] = []
    for learner in (pair.plain, pair.ranked):
        seen: dict[int, torch.Tensor] = {}

        @contextlib.contextmanager
        def tap(
            actor: Any, mask_BT: torch.Tensor, sequences: Any, seen: dict[int, Any] = seen
        ) -> Iterator[None]:
            view = actor if hasattr(actor, "hold") else HFActor(actor)
            with view.tap() as held:
                yield
            for row, s in enumerate(sequences):
                mask_T = mask_BT[row, 1:]
                seen[s] = held.hidden_BTD[row, : len(mask_T)][mask_T]

        learner.read(batch, SAMPLING, tap)
        found.append(seen)
    plain, ranked = found
    assert sorted(plain) == sorted(ranked) == list(range(len(batch)))
    for s, states_RD in plain.items():
        torch.testing.assert_close(ranked[s], states_RD, **CLOSE)


def check_steps(pair: Seeing, batch: PPOBatch, steps: int = 2) -> None:
    """Scores, values, figures and weights, step after step."""
    rewards_S = torch.linspace(-1, 1, len(batch))
    for step in range(steps):
        plain, plain_report = pair.plain.score(batch, rewards_S, SAMPLING)
        ranked, ranked_report = pair.ranked.score(batch, rewards_S, SAMPLING)
        for name, expected in vars(plain).items():
            torch.testing.assert_close(getattr(ranked, name), expected, **CLOSE, msg=name)
        assert ranked_report == pytest.approx(plain_report, rel=1e-3, abs=1e-5)
        expected_update = untimed(pair.plain.update(batch, plain, SAMPLING, step))
        update = untimed(pair.ranked.update(batch, ranked, SAMPLING, step))
        # Each replica computes them, in the first step.
        expected_update[names.TOWER_RUNS] *= pair.config.actor.data_parallel
        assert update == pytest.approx(expected_update, rel=5e-3, abs=1e-5)
        assert (update[names.IMAGES], bool(update[names.TOWER_RUNS])) == (IMAGES, step == 0)


def untimed(report: dict[str, float]) -> dict[str, float]:
    """An update's figures without the seconds of the tower."""
    return {name: value for name, value in report.items() if name != names.TOWER_S}


def check_weights(pair: Seeing) -> dict[str, torch.Tensor]:
    """By the names in the actor's files, which are those that vLLM loads and compares; the tower
    has not moved.
    """
    first = load_state(pair.folder / "model.safetensors")
    expected = actor_state(pair.plain.actor)
    found = dict(pair.ranked.actor.tensors(torch.float32))
    assert found.keys() == expected.keys() == first.keys() == pair.ranked.actor.shapes().keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE, msg=name)
        same = torch.equal(found[name], first[name])
        assert same == name.startswith("visual."), name
    return found


def check_shared(pair: Seeing) -> None:
    """Each image went through one rank's tower of each replica, once, and all had work."""
    replicas = pair.config.actor.data_parallel
    runs = pair.computed()
    assert len(runs) == pair.config.actor.ranks, "every rank had an image"
    total = sum(runs.values(), Counter[str]())
    assert len(total) == IMAGES and set(total.values()) == {replicas}
    assert max(map(Counter.total, runs.values())) <= IMAGES * replicas // len(runs) + 1


def test_two_ranks_see_what_one_process_sees(
    ranks: Path, vision_actor: Callable[..., Path], picture: Callable[..., bytes], tmp_path: Path
) -> None:
    """Actor, reference and critic, with tensor and sequence parallelism; then the weights on their
    way to an engine, to a folder, and into a run's checkpoint and back.
    """
    folder = rough(vision_actor(groups=2), tmp_path)
    with seeing(folder, tmp_path, ranks, tensor_parallel=2, sequence_parallel=True) as pair:
        batch = pair.batch(picture)
        pair.ranked.prefetch_images(batch.rollouts.prompts)
        check_states(pair, batch)
        check_steps(pair, batch)
        check_shared(pair)
        held = check_weights(pair)
        check_sent(pair, held)
        check_saved(pair, held, tmp_path / "actor", picture)
        check_resumed(pair, batch, held)


def check_sent(pair: Seeing, held: dict[str, torch.Tensor]) -> None:
    taken: list[dict[str, torch.Tensor]] = []
    engine: Any = SimpleNamespace(
        streams=False, sync_actor=lambda path, *_: taken.append(load_state(path))
    )
    with ActorSync(engine) as sync:
        sync(pair.ranked.actor, 1)
    assert taken[0].keys() == held.keys()
    assert all(torch.equal(taken[0][name], tensor) for name, tensor in held.items())


def check_saved(
    pair: Seeing, held: dict[str, torch.Tensor], folder: Path, picture: Callable[..., bytes]
) -> None:
    """A folder of transformers, with the tower and what reads images."""
    pair.ranked.save_actor(folder)
    state = actor_state(load_actor(folder))
    assert state.keys() == held.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in held.items())
    again = ImageReader.load(folder, pair.reader._tokenizer)
    assert again.count(picture(0, 60, 90)) == pair.reader.count(picture(0, 60, 90))


def check_resumed(pair: Seeing, batch: PPOBatch, held: dict[str, torch.Tensor]) -> None:
    """A run goes on on ranks and in one process with what ranks have saved, and the other way
    round.
    """
    run_dir = pair.config.run_dir
    save_checkpoint(run_dir, pair.ranked, RunPosition(2, 2, 1.0), pair.config)
    scores, _ = pair.ranked.score(batch, torch.arange(8.0), SAMPLING)
    first = untimed(pair.ranked.update(batch, scores, SAMPLING, 7))
    saved = saved_folder(run_dir)
    pair.ranked.load(saved)
    pair.plain.load(saved)
    for name, tensor in pair.ranked.actor.tensors(torch.float32):
        assert torch.equal(held[name], tensor), name
    assert untimed(pair.ranked.update(batch, scores, SAMPLING, 7)) == first
    again = untimed(pair.plain.update(batch, scores, SAMPLING, 7))
    assert again == pytest.approx(first, rel=5e-3, abs=1e-5)
    save_checkpoint(run_dir, pair.plain, RunPosition(3, 3, 1.0), pair.config)
    pair.ranked.load(saved_folder(run_dir))
    expected = actor_state(pair.plain.actor)
    for name, tensor in pair.ranked.actor.tensors(torch.float32):
        assert torch.equal(expected[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("qwen2_5_vl", {"pipeline_parallel": 2}),
        ("qwen2_vl", {"tensor_parallel": 2}),
        ("qwen2_5_vl", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("qwen2_5_vl", {"data_parallel": 2, "distributed_optimizer": True}),
    ],
    ids=lambda value: (
        "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    ),
)
def test_other_cuts_and_families(
    ranks: Path,
    vision_actor: Callable[..., Path],
    picture: Callable[..., bytes],
    tmp_path: Path,
    family: str,
    cuts: dict[str, Any],
) -> None:
    folder = rough(vision_actor(family, groups=2), tmp_path)
    with seeing(folder, tmp_path, ranks, **cuts) as pair:
        batch = pair.batch(picture)
        pair.ranked.prefetch_images(batch.rollouts.prompts)
        check_states(pair, batch)
        check_steps(pair, batch)
        check_shared(pair)
        check_weights(pair)


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_tower_alone_computes_what_it_computes_in_its_actor(
    vision_actor: Callable[..., Path], picture: Callable[..., bytes], family: str
) -> None:
    """And only the tower has memory."""
    folder = vision_actor(family)
    reader = ImageReader.load(folder, load_tokenizer(folder))
    actor = load_tower(folder, torch.device("cpu"))
    (found,) = FeatureStore(actor, reader)._compute([picture()])
    (expected,) = FeatureStore(load_actor(folder), reader)._compute([picture()])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    tower = set(tower_of(actor).parameters())
    assert {p.is_meta for p in tower} == {False} and not any(p.requires_grad for p in tower)
    assert all(p.is_meta for p in actor.parameters() if p not in tower)
