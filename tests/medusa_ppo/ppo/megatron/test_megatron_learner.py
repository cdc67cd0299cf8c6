"""PPO with a Megatron actor on several processes does what PPO with a transformers actor in one
process does.

Real megatron-core on gloo, ranks in Ray; what it needs to run without CUDA is imported into the
ranks by `actor.imports`.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heads.checkpoint import load_state
from heads.errors import ModelError, RunError
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.ppo.batch import PPOBatch, text_batch
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.learner import Learner
from medusa_ppo.ppo.run_progress import Timeline
from medusa_ppo.ppo.run_state import RunPosition, save_checkpoint, saved_folder
from medusa_ppo.ppo.scores import Measured

pytest.importorskip("megatron.core")
SAMPLING = Sampling(temperature=0.8, top_k=12, top_p=0.9)
VOCAB = 18  # Not a multiple of anything: the last rank's rows end in padding.
# The clip is below the norms, so that a wrong norm shows in the weights.
UPDATES = {
    "minibatch_size": 4,
    "micro_batch_size": 2,
    "actor_learning_rate": 1e-3,
    "clip_norm": 0.05,
    "entropy_coefficient": 0.01,
}
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@dataclass
class Pair:
    """The same actor, critic and settings twice: in this process, and on ranks."""

    config: RunConfig
    plain: Learner
    ranked: Any
    path: Path


def actor_of(folder: Path, family: str, **settings: Any) -> Path:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    settings = sizes | ends | {"tie_word_embeddings": False} | settings
    config = AutoConfig.for_model(family, vocab_size=VOCAB, max_position_embeddings=64, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for (
        parameter
    ) in model.parameters():  # Norms away from 1 and weights large enough that mistakes show.
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def pair_of(
    path: Path, ppo: dict[str, Any] | None = None, dtype: str = "float32", **actor: Any
) -> Iterator[Pair]:
    from medusa_ppo.ppo.megatron.megatron_learner import MegatronLearner, RankTeam

    config = build_config(
        {
            "name": "run",
            "out": str(path / "runs"),
            "seed": 3,
            "model": {"path": str(path), "dtype": dtype},
            "actor": {"backend": "megatron", "imports": "ranks_on_cpu", **actor},
            # Not read here: whoever has texts hands them to the update.
            "data": {"ptx_path": "texts.jsonl" if (ppo or {}).get("ptx_coefficient") else None},
            "ppo": {**UPDATES, **(ppo or {})},
        }
    )
    model = AutoModelForCausalLM.from_pretrained(path).float()
    team = RankTeam(str(path), config, with_embedding=True)
    try:
        critic = Critic(model)
        own = copy.deepcopy(critic) if config.actor.roles == "policy" else None
        ranked = MegatronLearner(team, str(path), own, config)
        yield Pair(config, Learner(model, critic, config.ppo, seed=config.seed), ranked, path)
    finally:
        team.close()


@pytest.fixture(scope="module")
def begun(
    shim_in_reach: None, ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pair, Path]]:
    """Two tensor-parallel ranks, and the state that they begin with."""
    with pair_of(actor_of(tmp_path_factory.mktemp("actor"), "llama"), tensor_parallel=2) as found:
        yield (
            found,
            save_checkpoint(
                tmp_path_factory.mktemp("begin"), found.ranked, RunPosition(0, 0, 0.0), found.config
            ),
        )


@pytest.fixture
def pair(begun: tuple[Pair, Path]) -> Pair:
    """As it began, whatever the tests before did to one of the two."""
    found, state = begun
    found.ranked.load(state)
    found.plain.load(state)
    return found


def check_steps(
    pair: Pair,
    make_rollouts: Callable[..., Any],
    steps: range,
    sequences: int = 9,
    sampling: Sampling = SAMPLING,
) -> None:
    """Scores, figures and weights of a few steps, one after the other."""
    for step in steps:
        rollouts = make_rollouts(sequences + 1, seed=step, vocab=VOCAB)
        rollouts = replace(
            rollouts, responses=rollouts.responses[:sequences]
        )  # They are not a multiple of the minibatches' size.
        batch = PPOBatch(rollouts)
        rewards_S = torch.linspace(-1, 1, sequences)
        plain, plain_report = pair.plain.score(batch, rewards_S, sampling)
        ranked, ranked_report = pair.ranked.score(batch, rewards_S, sampling)
        for name, expected in vars(plain).items():
            torch.testing.assert_close(
                getattr(ranked, name),
                expected,
                **CLOSE,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        assert ranked_report == pytest.approx(plain_report, rel=1e-3, abs=1e-5)
        expected_update = pair.plain.update(batch, plain, sampling, step)
        assert pair.ranked.update(batch, ranked, sampling, step) == pytest.approx(
            expected_update, rel=5e-3, abs=1e-5
        )
    check_weights(pair)


def check_weights(pair: Pair) -> None:
    expected = {name: parameter.detach() for name, parameter in pair.plain.actor.named_parameters()}
    found = dict(pair.ranked.actor.tensors(torch.float32))
    assert found.keys() == expected.keys() == pair.ranked.actor.shapes().keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )
    view = pair.ranked.actor
    torch.testing.assert_close(
        view.lm_head_VD, pair.plain.actor.get_output_embeddings().weight.detach(), **CLOSE
    )
    torch.testing.assert_close(
        view.embedding_VD, pair.plain.actor.get_input_embeddings().weight.detach(), **CLOSE
    )


def test_two_tensor_parallel_ranks_do_what_one_process_does(pair: Pair, make_rollouts) -> None:
    check_steps(pair, make_rollouts, range(2))


def test_the_tap_gives_the_states_that_lm_head_reads(pair: Pair, make_rollouts) -> None:
    batch = PPOBatch(make_rollouts(8, vocab=VOCAB))
    seen = {}

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


def test_ranks_hand_in_the_states_of_the_sample_alone(pair: Pair, make_rollouts) -> None:
    """All states of a replica were padded on its GPU and sent through Ray, and most were thrown
    away then.
    """
    from medusa_ppo.plugin.medusa_plugin import StatesTap

    batch = PPOBatch(make_rollouts(8, vocab=VOCAB))
    tokens = int(batch.lengths_S.sum())
    collectors = [
        BatchCollector(batch.rollouts),
        BatchCollector(batch.rollouts, EarlySample(tokens // 2, 0.2, 0, ahead=2)),
    ]
    crossed = [0, 0]

    class Taken(StatesTap):
        """Into one of the collectors; None: nothing is trained in this step."""

        def __init__(self, n: int | None) -> None:
            self.n = n

        @property
        def wanted(self) -> tuple[torch.Tensor, ...] | None:
            return None if self.n is None else collectors[self.n].wanted

        def put(self, states: Mapping[int, torch.Tensor]) -> None:
            assert self.n is not None, "none were asked for"
            crossed[self.n] += sum(values.shape[0] for values in states.values())
            for sequence, values in states.items():
                collectors[self.n].put(sequence, values)

    for n, collector in enumerate(collectors):
        pair.ranked.score(batch, torch.zeros(8), Sampling(), Taken(n))
        assert collector.complete
    assert crossed == [tokens, collectors[1].kept] and 0 < crossed[1] <= tokens // 2
    wanted_M = torch.cat(collectors[1].wanted)
    whole = collectors[0].batch()
    torch.testing.assert_close(
        collectors[1].batch().hidden_MD, whole.hidden_MD[wanted_M], rtol=0, atol=0
    )
    lm_head_VD = pair.ranked.actor.lm_head_VD
    logprobs_MV = (whole.hidden_MD @ lm_head_VD.T).log_softmax(-1)
    scores, _ = pair.ranked.score(batch, torch.zeros(8), Sampling(), Taken(None))
    first = int(batch.rollouts.responses[0].token_ids[0])
    torch.testing.assert_close(logprobs_MV[0, first], scores.logprobs_SR[0, 0], **CLOSE)


def test_a_sync_carries_the_ranks_weights(pair: Pair) -> None:
    taken: list[dict[str, torch.Tensor]] = []
    engine: Any = SimpleNamespace(
        streams=False, sync_actor=lambda path, *_: taken.append(load_state(path))
    )
    with ActorSync(engine) as sync:
        sync(pair.ranked.actor, 1)
        assert (
            sync.nbytes == sum(tensor.numel() * 4 for tensor in taken[0].values())
            and sync.collect_s > 0
        )
    for name, tensor in pair.ranked.actor.tensors(torch.float32):
        assert torch.equal(taken[0][name], tensor)


def test_a_saved_actor_is_a_checkpoint_of_transformers(pair: Pair, tmp_path: Path) -> None:
    pair.ranked.save_actor(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in pair.ranked.actor.tensors(torch.float32):
        assert torch.equal(dict(model.named_parameters())[name], tensor)


def test_a_saved_run_goes_on_on_ranks_and_in_one_process(pair: Pair, make_rollouts) -> None:
    check_resumed(pair, make_rollouts)


def check_resumed(
    pair: Pair, make_rollouts: Callable[..., Any], sampling: Sampling = SAMPLING
) -> None:
    """The files are the same whoever wrote them, so a run may change its number of ranks on the
    way.
    """
    save_checkpoint(pair.config.run_dir, pair.ranked, RunPosition(2, 2, 1.0), pair.config)
    before = dict(pair.ranked.actor.tensors(torch.float32))
    batch = PPOBatch(make_rollouts(8, seed=7, vocab=VOCAB))
    scores, _ = pair.ranked.score(batch, torch.arange(8.0), sampling)
    first = pair.ranked.update(batch, scores, sampling, 7)
    assert any(
        not torch.equal(before[name], tensor)
        for name, tensor in pair.ranked.actor.tensors(torch.float32)
    )
    pair.ranked.load(saved_folder(pair.config.run_dir))
    assert all(
        torch.equal(before[name], tensor)
        for name, tensor in pair.ranked.actor.tensors(torch.float32)
    )
    again = pair.ranked.update(batch, scores, sampling, 7)
    assert again == first
    pair.plain.load(saved_folder(pair.config.run_dir))
    pair.plain.score(
        batch, torch.arange(8.0), sampling
    )  # Who updates has seen which tokens top-k and top-p left.
    assert pair.plain.update(batch, scores, sampling, 7) == pytest.approx(first, rel=5e-3, abs=1e-5)
    check_weights(pair)


def test_pieces_of_a_batch_are_scored_one_after_the_other(pair: Pair, make_rollouts) -> None:
    rollouts = make_rollouts(10, seed=5, vocab=VOCAB)
    batch = PPOBatch(rollouts)
    pieces = []
    whole = pair.ranked.conclude(
        batch,
        (pair.ranked.begin_batch(SAMPLING), pair.ranked.measure(batch, SAMPLING))[1],
        torch.ones(10),
    )
    pair.ranked.begin_batch(SAMPLING)
    for first, end in ((6, 10), (0, 6)):  # As they end, not as they stand.
        piece = PPOBatch(replace(rollouts, responses=rollouts.responses[first:end]), first=first)
        pieces.append((first, pair.ranked.measure(piece, SAMPLING)))
    scores, report = pair.ranked.conclude(batch, Measured.join(batch, pieces), torch.ones(10))
    for name in ("logprobs_SR", "reference_SR", "values_SR"):
        torch.testing.assert_close(getattr(scores, name), getattr(whole[0], name), **CLOSE)
    assert report == pytest.approx(whole[1], rel=1e-3, abs=1e-5)
    assert pair.ranked.update(batch, scores, SAMPLING, 0)[names.STEPS_SKIPPED] == 0


def test_an_infinite_gradient_is_told_and_spoils_nothing(pair: Pair, make_rollouts) -> None:
    batch = PPOBatch(make_rollouts(8, vocab=VOCAB))
    scores, _ = pair.ranked.score(batch, torch.arange(8.0), SAMPLING)
    before = dict(pair.ranked.actor.tensors(torch.float32))
    with pytest.raises(RunError, match="gradient of the actor is not finite"):
        pair.ranked.update(
            batch, replace(scores, advantages_SR=scores.advantages_SR * float("inf")), SAMPLING, 0
        )
    assert all(
        torch.equal(before[name], tensor)
        for name, tensor in pair.ranked.actor.tensors(torch.float32)
    )


def check_texts_and_stop(pair: Pair, make_rollouts: Callable[..., Any]) -> None:
    """Texts of all lengths, fewer than the update asks for, so that they begin again."""
    batch = PPOBatch(make_rollouts(10, seed=3, vocab=VOCAB))
    drawn = torch.Generator().manual_seed(4)
    texts = text_batch(
        [
            tuple(torch.randint(1, VOCAB, (length,), generator=drawn).tolist())
            for length in (2, 9, 5, 12, 3)
        ],
        torch.device("cpu"),
        0,
    )
    sampling = Sampling(temperature=0.8)
    stopped = []
    for step in range(2):
        rewards_S = torch.linspace(-1, 1, 10)
        plain, _ = pair.plain.score(batch, rewards_S, sampling)
        ranked, _ = pair.ranked.score(batch, rewards_S, sampling)
        expected = pair.plain.update(batch, plain, sampling, step, texts)
        found = pair.ranked.update(batch, ranked, sampling, step, texts)
        assert found == pytest.approx(expected, rel=5e-3, abs=1e-5)
        assert found[names.PTX_LOSS] > 1.0
        stopped.append(found[names.ACTOR_STEPS])
    # Six passes of three minibatches.
    assert all(1 < steps < 18 for steps in stopped), stopped
    check_weights(pair)


TEXTS_AND_STOP = {"ptx_coefficient": 0.5, "kl_stop": 0.025, "epochs": 6}


def test_texts_and_an_early_stop_are_those_of_one_process(
    shim_in_reach: None, ray_session: None, tmp_path: Path, make_rollouts
) -> None:
    path = actor_of(tmp_path, "llama")
    with pair_of(path, TEXTS_AND_STOP, tensor_parallel=2) as pair:
        check_texts_and_stop(pair, make_rollouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    [
        {"data_parallel": 2},
        {"pipeline_parallel": 2},
        {"context_parallel": 2},
        {"data_parallel": 2, "distributed_optimizer": True},
    ],
    ids="-".join,
)
def test_texts_and_an_early_stop_however_it_is_cut(
    shim_in_reach: None, ray_session: None, tmp_path: Path, make_rollouts, cuts: dict[str, Any]
) -> None:
    path = actor_of(tmp_path, "llama", tie_word_embeddings="pipeline_parallel" in cuts)
    with pair_of(path, TEXTS_AND_STOP, **cuts) as pair:
        check_texts_and_stop(pair, make_rollouts)


def test_a_critic_in_the_loops_process_computes_in_the_models_dtype(
    tiny_actor: Callable[..., Any],
    make_rollouts: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with the learner on transformers, if this machine is quick with it; its weights stay
    float32.
    """
    from medusa_ppo.ppo.megatron import megatron_learner
    from medusa_ppo.ppo.megatron.megatron_learner import MegatronLearner

    team: Any = SimpleNamespace(sizes=SimpleNamespace(mrope_section=()), critic_sizes=None, count=2)
    critic = Critic(tiny_actor())
    for parameter in critic.parameters():  # A new one's values are all 0.
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    batch = PPOBatch(make_rollouts(4))
    (micro,) = batch.micro_batches(list(range(4)), 4)
    for dtype, able in (("bfloat16", True), ("bfloat16", False), ("float32", True)):
        monkeypatch.setattr(megatron_learner, "cpu_has_bfloat16", lambda able=able: able)
        half = dtype == "bfloat16" and (able or torch.cuda.is_available())
        config = build_config(
            {
                "name": "run",
                "model": {"path": "unread", "dtype": dtype},
                "actor": {"backend": "megatron", "tensor_parallel": 2},
            }
        )
        one = MegatronLearner(team, "unread", critic, config)
        with torch.no_grad():
            found_SR = one._begin_values(batch, Timeline())()
            expected_M = critic(micro, half)
            other_M = critic(micro, not half)
        found_M = batch.pack(found_SR, micro)
        assert torch.equal(found_M, expected_M) and not torch.equal(found_M, other_M)


def test_a_hub_name_is_refused_before_anything_starts(pair: Pair) -> None:
    from medusa_ppo.ppo.megatron.megatron_learner import RankTeam

    with pytest.raises(ModelError, match="from a folder"):
        RankTeam("owner/name", pair.config, with_embedding=False)


SEQUENCES = {"tensor_parallel": 2, "sequence_parallel": True}
SHARES = {"data_parallel": 2, "distributed_optimizer": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "cuts", "ppo"),
    [
        ("llama", {}, {"pipeline_parallel": 2}, {}),
        ("llama", {"tie_word_embeddings": True}, {"pipeline_parallel": 2}, {}),
        ("llama", {}, {"data_parallel": 2}, {"minibatch_size": 2}),
        ("llama", {"tie_word_embeddings": True}, {"tensor_parallel": 2, "data_parallel": 2}, {}),
        ("qwen2", {}, {"tensor_parallel": 2}, {}),
        ("qwen3", {}, {"tensor_parallel": 2}, {}),
        ("llama", {}, SEQUENCES, {"recompute": True}),
        ("qwen3", {}, SEQUENCES, {"recompute": "attention", "micro_batch_tokens": 40}),
        ("llama", {}, SHARES, {"micro_batch_tokens": 40, "minibatch_size": 2}),
        (
            "llama",
            {"tie_word_embeddings": True},
            {"pipeline_parallel": 2, "distributed_optimizer": True},
            {"recompute": True},
        ),
        ("llama", {}, {"context_parallel": 2}, {}),
        (
            "llama",
            {},
            {"context_parallel": 2, "distributed_optimizer": True},
            {"recompute": "attention"},
        ),
    ],
    ids=lambda value: (
        "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value
    ),
)
def test_other_cuts_and_families(
    shim_in_reach: None,
    ray_session: None,
    tmp_path: Path,
    make_rollouts,
    family: str,
    settings: dict[str, Any],
    cuts: dict[str, Any],
    ppo: dict[str, Any],
) -> None:
    # Ranks that share sequences do not know what top-k and top-p left: refused where a run is
    # configured.
    sampling = Sampling(temperature=0.8) if "context_parallel" in cuts else SAMPLING
    with pair_of(actor_of(tmp_path, family, **settings), ppo, **cuts) as pair:
        # Of nine sequences in minibatches of two the last has one: a replica without one takes the
        # step all the same.
        check_steps(pair, make_rollouts, range(2), sampling=sampling)
        check_resumed(pair, make_rollouts, sampling)


# ---- bfloat16, and what each option saves


@dataclass
class RankSteps:
    """What some steps of ranks left behind."""

    logprobs: list[torch.Tensor]
    reports: list[dict[str, float]]
    change: dict[str, torch.Tensor]
    peak: int


def steps_of(path: Path, peaks: Path, ppo: dict[str, Any], dtype: str, **actor: Any) -> RankSteps:
    """Two PPO steps on sequences that are long for so small a model: its activations are what
    counts.
    """
    ppo = {"minibatch_size": 16, "micro_batch_size": 16, "clip_norm": 1.0, "epochs": 1, **ppo}
    for file in peaks.iterdir():
        file.unlink()
    with pair_of(path, ppo, dtype, **actor) as pair:
        before = dict(pair.ranked.actor.tensors(torch.float32))
        logprobs = []
        reports = []
        assert all(
            torch.equal(before[name], tensor)
            for name, tensor in pair.plain.actor.named_parameters()
        ), "float32, whatever computes"
        for step in range(2):
            ids_ST = torch.randint(
                1, VOCAB, (16, 56), generator=torch.Generator().manual_seed(step)
            ).tolist()
            responses = tuple(
                Response(s, tuple(ids[8 : 56 - s]), (-1.0,) * (48 - s), "stop")
                for s, ids in enumerate(ids_ST)
            )
            batch = PPOBatch(
                Rollouts(
                    tuple(tuple(ids[:8]) for ids in ids_ST), responses, Counters(), 1.0, SAMPLING
                )
            )
            scores, report = pair.ranked.score(batch, torch.linspace(-1, 1, 16), SAMPLING)
            logprobs.append(scores.logprobs_SR)
            reports.append(report | pair.ranked.update(batch, scores, SAMPLING, step))
        after = dict(pair.ranked.actor.tensors(torch.float32))
    change = {name: after[name] - before[name] for name in before}
    return RankSteps(
        logprobs, reports, change, max(json.loads(file.read_text()) for file in peaks.iterdir())
    )


def distance(one: RankSteps, other: RankSteps) -> float:
    """How far apart the changes of the weights are, as a share of their length."""
    apart = torch.cat([(one.change[name] - other.change[name]).flatten() for name in one.change])
    return float(
        apart.norm() / torch.cat([part.flatten() for part in other.change.values()]).norm()
    )


ALONE: dict[str, dict[str, Any]] = {
    "sequence parallelism": {"actor": {"sequence_parallel": True}},
    "recompute=attention": {"ppo": {"recompute": "attention"}},
    "recompute": {"ppo": {"recompute": True}},
    "sequence parallelism, recompute": {
        "actor": {"sequence_parallel": True},
        "ppo": {"recompute": True},
    },
}
SHARED: dict[str, dict[str, Any]] = {
    "distributed optimizer": {"actor": {"distributed_optimizer": True}},
    "distributed optimizer, recompute": {
        "actor": {"distributed_optimizer": True},
        "ppo": {"recompute": True},
    },
}
ALL = {
    "all three": {
        "actor": {"sequence_parallel": True, "distributed_optimizer": True},
        "ppo": {"recompute": True},
    }
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cuts", "arms"),
    [
        ({"tensor_parallel": 2}, ALONE),
        ({"data_parallel": 2}, SHARED),
        ({"tensor_parallel": 2, "data_parallel": 2}, ALL),
    ],
    ids=["tensors", "copies", "both"],
)
def test_options_change_nothing_but_rounding_and_save_memory(
    shim_in_reach: Path,
    ray_session: None,
    tmp_path: Path,
    cuts: dict[str, int],
    arms: dict[str, dict[str, Any]],
) -> None:
    """In bfloat16: the loop with each option is as near to the loop without as that is to float32.
    `pytest -s` prints the bytes.
    """
    shim_in_reach.mkdir(exist_ok=True)
    # Eight queries share a key, as in many actors: recomputed attention saves their copies.
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6}
    groups = {"num_attention_heads": 16, "num_key_value_heads": 2}
    path = actor_of(tmp_path, "llama", **sizes, **groups)
    exact = steps_of(path, shim_in_reach, {}, "float32", **cuts)
    plain = steps_of(path, shim_in_reach, {}, "bfloat16", **cuts)
    rounding = distance(plain, exact)
    print(
        f"\n{cuts}: float32 {exact.peak} bytes; bfloat16 {plain.peak}, changes {rounding:.3f} of"
        " what is learned"
    )
    for name, options in arms.items():
        steps = steps_of(
            path,
            shim_in_reach,
            options.get("ppo", {}),
            "bfloat16",
            **cuts,
            **options.get("actor", {}),
        )
        print(
            f"{name}: {steps.peak} bytes, {steps.peak / plain.peak:.2f}; changes"
            f" {distance(steps, plain):.3f}"
        )
        assert distance(steps, plain) <= rounding, name
        for ours, theirs in zip(steps.logprobs, plain.logprobs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.06)
        assert steps.peak < plain.peak, name
