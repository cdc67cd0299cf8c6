"""PPO with a Megatron actor on several processes does what PPO with a transformers actor in one process does.

Real megatron-core on gloo, ranks in Ray; what it needs to run without CUDA is imported into the ranks by `actor.imports`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heads.checkpoint import load_state
from heads.errors import ModelError, RunError
from medusa_ppo.config import RunConfig, build_config
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.ppo.batch import PPOBatch
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.models import Critic
from medusa_ppo.ppo.run_state import RunPosition, save_checkpoint, saved_folder
from medusa_ppo.types import Sampling

pytest.importorskip("megatron.core")
SHIM = os.pathsep.join((str(Path(__file__).parents[2] / "actors"), str(Path(__file__).parent)))
SAMPLING = Sampling(temperature=0.8, top_k=12, top_p=0.9)
VOCAB = 18  # Not a multiple of anything: the last rank's rows end in padding.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def shim_in_reach() -> Iterator[None]:
    """Ray's workers have the environment that Ray was started in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SHIM, prepend=os.pathsep)
        yield


@dataclass
class Pair:
    """The same actor, critic and settings twice: in this process, and on ranks."""

    config: RunConfig
    plain: Learner
    ranked: Any
    path: Path


def actor_of(folder: Path, family: str, **settings: Any) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, max_position_embeddings=64, **sizes, **ends, **({"tie_word_embeddings": False} | settings)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # Norms away from 1 and weights large enough that mistakes show.
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def pair_of(path: Path, **actor: Any) -> Iterator[Pair]:
    from medusa_ppo.ppo.megatron import MegatronLearner, RankTeam

    config = build_config(
        {
            "name": "run",
            "out": str(path / "runs"),
            "seed": 3,
            "model": {"path": str(path)},
            "actor": {"backend": "megatron", "imports": "ranks_on_cpu", **actor},
            # The clip is below the norms, so that a wrong norm shows in the weights.
            "ppo": {
                "minibatch_size": 4,
                "micro_batch_size": 2,
                "actor_learning_rate": 1e-3,
                "clip_norm": 0.05,
                "entropy_coefficient": 0.01,
            },
        }
    )
    model = AutoModelForCausalLM.from_pretrained(path).float()
    team = RankTeam(str(path), config, with_embedding=True)
    try:
        critic = Critic(model)
        ranked = MegatronLearner(team, str(path), copy.deepcopy(critic), config)
        yield Pair(config, Learner(model, critic, config.ppo, seed=config.seed), ranked, path)
    finally:
        team.close()


@pytest.fixture(scope="module")
def pair(shim_in_reach: None, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two tensor-parallel ranks."""
    with pair_of(actor_of(tmp_path_factory.mktemp("actor"), "llama"), tensor_parallel=2) as found:
        yield found


def check_steps(pair: Pair, make_rollouts: Callable[..., Any], steps: range, sequences: int = 9) -> None:
    """Scores, figures and weights of a few steps, one after the other."""
    for step in steps:
        rollouts = make_rollouts(sequences + 1, seed=step, vocab=VOCAB)
        rollouts = replace(rollouts, responses=rollouts.responses[:sequences])  # The last minibatch is short.
        batch, rewards_S = PPOBatch(rollouts), torch.linspace(-1, 1, sequences)
        plain, plain_report = pair.plain.score(batch, rewards_S, SAMPLING)
        ranked, ranked_report = pair.ranked.score(batch, rewards_S, SAMPLING)
        for name, expected in vars(plain).items():
            torch.testing.assert_close(getattr(ranked, name), expected, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        assert ranked_report == pytest.approx(plain_report, rel=1e-3, abs=1e-5)
        expected_update = pair.plain.update(batch, plain, SAMPLING, step)
        assert pair.ranked.update(batch, ranked, SAMPLING, step) == pytest.approx(expected_update, rel=5e-3, abs=1e-5)
    check_weights(pair)


def check_weights(pair: Pair) -> None:
    expected = {name: parameter.detach() for name, parameter in pair.plain.actor.named_parameters()}
    found = dict(pair.ranked.actor.tensors(torch.float32))
    assert found.keys() == expected.keys() == pair.ranked.actor.shapes().keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    view = pair.ranked.actor
    torch.testing.assert_close(view.lm_head_VD, pair.plain.actor.get_output_embeddings().weight.detach(), **CLOSE)
    torch.testing.assert_close(view.embedding_VD, pair.plain.actor.get_input_embeddings().weight.detach(), **CLOSE)


def test_two_tensor_parallel_ranks_do_what_one_process_does(pair: Pair, make_rollouts) -> None:
    check_steps(pair, make_rollouts, range(2))


def test_the_tap_gives_the_states_that_lm_head_reads(pair: Pair, make_rollouts) -> None:
    batch, seen = PPOBatch(make_rollouts(8, vocab=VOCAB)), {}

    @contextlib.contextmanager
    def tap(actor, mask_BT, sequences):
        with actor.tap() as held:
            yield
        for row, s in enumerate(sequences):
            assert int(mask_BT[row].sum()) == int(batch.lengths_S[s]) and not mask_BT[row, 0]
            seen[s] = held.hidden_BTD[row][mask_BT[row, 1:]]

    scores, _ = pair.ranked.score(batch, torch.zeros(8), Sampling(), tap)
    assert sorted(seen) == list(range(8))
    lm_head_VD = pair.ranked.actor.lm_head_VD
    for s, hidden_RD in seen.items():
        ids_R = torch.tensor(batch.rollouts.responses[s].token_ids)
        logprobs_R = (hidden_RD @ lm_head_VD.T).log_softmax(-1).gather(1, ids_R[:, None]).squeeze(1)
        torch.testing.assert_close(logprobs_R, scores.logprobs_SR[s, : len(ids_R)], **CLOSE)


def test_a_sync_carries_the_ranks_weights(pair: Pair) -> None:
    taken: list[dict[str, torch.Tensor]] = []
    engine: Any = SimpleNamespace(streams=False, sync_actor=lambda path, version: taken.append(load_state(path)))
    with ActorSync(engine) as sync:
        sync(pair.ranked.actor, 1)
        assert sync.nbytes == sum(tensor.numel() * 4 for tensor in taken[0].values()) and sync.collect_s > 0
    for name, tensor in pair.ranked.actor.tensors(torch.float32):
        assert torch.equal(taken[0][name], tensor)


def test_a_saved_actor_is_a_checkpoint_of_transformers(pair: Pair, tmp_path: Path) -> None:
    pair.ranked.save_actor(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in pair.ranked.actor.tensors(torch.float32):
        assert torch.equal(dict(model.named_parameters())[name], tensor)


def test_a_saved_run_goes_on_on_ranks_and_in_one_process(pair: Pair, make_rollouts) -> None:
    """The files are the same whoever wrote them, so a run may change its number of ranks on the way."""
    save_checkpoint(pair.config.run_dir, pair.ranked, RunPosition(2, 2, 1.0), pair.config)
    before = dict(pair.ranked.actor.tensors(torch.float32))
    batch = PPOBatch(make_rollouts(8, seed=7, vocab=VOCAB))
    scores, _ = pair.ranked.score(batch, torch.arange(8.0), SAMPLING)
    first = pair.ranked.update(batch, scores, SAMPLING, 7)
    assert any(not torch.equal(before[name], tensor) for name, tensor in pair.ranked.actor.tensors(torch.float32))
    pair.ranked.load(saved_folder(pair.config.run_dir))
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.ranked.actor.tensors(torch.float32))
    again = pair.ranked.update(batch, scores, SAMPLING, 7)
    assert again == first
    pair.plain.load(saved_folder(pair.config.run_dir))
    pair.plain.score(batch, torch.arange(8.0), SAMPLING)  # Who updates has seen which tokens top-k and top-p left.
    assert pair.plain.update(batch, scores, SAMPLING, 7) == pytest.approx(first, rel=5e-3, abs=1e-5)
    check_weights(pair)


def test_an_infinite_gradient_is_told_and_spoils_nothing(pair: Pair, make_rollouts) -> None:
    batch = PPOBatch(make_rollouts(8, vocab=VOCAB))
    scores, _ = pair.ranked.score(batch, torch.arange(8.0), SAMPLING)
    before = dict(pair.ranked.actor.tensors(torch.float32))
    with pytest.raises(RunError, match="gradient of the actor is not finite"):
        pair.ranked.update(batch, replace(scores, advantages_SR=scores.advantages_SR * float("inf")), SAMPLING, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.ranked.actor.tensors(torch.float32))


def test_a_hub_name_is_refused_before_anything_starts(pair: Pair) -> None:
    from medusa_ppo.ppo.megatron import RankTeam

    with pytest.raises(ModelError, match="from a folder"):
        RankTeam("owner/name", pair.config, with_embedding=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "cuts"),
    [
        ("llama", {}, {"pipeline_parallel": 2}),
        ("llama", {"tie_word_embeddings": True}, {"pipeline_parallel": 2}),
        ("llama", {}, {"data_parallel": 2}),
        ("llama", {"tie_word_embeddings": True}, {"tensor_parallel": 2, "data_parallel": 2}),
        ("qwen2", {}, {"tensor_parallel": 2}),
        ("qwen3", {}, {"tensor_parallel": 2}),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value,
)
def test_other_cuts_and_families(
    shim_in_reach: None, ray_session: None, tmp_path: Path, make_rollouts, family: str, settings: dict[str, Any], cuts: dict[str, int]
) -> None:
    with pair_of(actor_of(tmp_path, family, **settings), **cuts) as pair:
        # The last minibatch has one sequence: a replica without one takes the step all the same.
        check_steps(pair, make_rollouts, range(2))
