"""`train` and `eval` know that engines draft from some tokens only: heads are trained and measured
on those that an engine would draft from.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import heads_config
from heads.checkpoint import save_heads
from heads.errors import ConfigError, EngineError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.bench import rollout_speed
from medusa_ppo.bench.bench_options import RolloutBench
from medusa_ppo.companion.gate import Served, replay
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.demo.task import build_tokenizer
from medusa_ppo.drafting.products import DraftVocabulary
from medusa_ppo.offline import evaluate, scene
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.data_parallel import TrainingWorker
from medusa_ppo.offline.draft_tokens import draft_ids, draft_width, until_chosen
from medusa_ppo.offline.options import EvalOptions, TrainOptions
from medusa_ppo.runtime.console import OfflineProgress

V = len(build_tokenizer())
W = 12


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the actor's vocabulary were a large one."""
    monkeypatch.setattr(heads_config, "LARGE_VOCABULARY", V)
    monkeypatch.setattr(heads_config, "DRAFT_VOCABULARY", W)


def texts(count: int) -> list[tuple[int, ...]]:
    """A few tokens are frequent, and all occur."""
    generator = torch.Generator().manual_seed(3)
    rare = torch.randint(1, V, (count, 8), generator=generator)
    frequent = torch.randint(20, 20 + W, (count, 24), generator=generator)
    return [tuple(row) for row in torch.cat([frequent, rare], 1).tolist()]


def test_they_are_those_that_an_engine_chooses(large: None) -> None:
    heads = HeadsConfig(64, V, 2)
    written = texts(30)
    engine = DraftVocabulary(W, V)
    engine.observe(written)
    chosen = draft_ids(heads, -1, written)
    assert chosen is not None and chosen.tolist() == list(range(20, 20 + W))
    assert chosen.tolist() == sorted(
        torch.sort(engine._counts_V, descending=True, stable=True).indices[:W].tolist()
    )
    assert draft_ids(heads, 0, written) is None
    asked = draft_ids(heads, 5, written)
    assert asked is not None and len(asked) == 5 and set(asked.tolist()) < set(chosen.tolist())


def test_small_vocabularies_and_heads_with_an_lm_head_draft_from_all_tokens() -> None:
    heads = HeadsConfig(64, V, 2)
    assert draft_width(heads, -1) == 0 == draft_width(heads, V)
    own = replace(heads, lm_head="own")
    assert draft_width(own, -1) == 0
    with pytest.raises(ConfigError, match="lm_head=own"):
        draft_width(own, 5)


def test_the_plan_of_a_training_counts_the_tokens_that_are_drafted_from(
    large: None, chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large vocabulary the training took several times less than was said."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1"}\n')
    options = TrainOptions(
        model=str(chain_actor), data=str(data), out=tmp_path / "heads", column="question"
    )
    counted: list[int] = []
    monkeypatch.setattr(
        scene, "training_operations", lambda heads, drafted: float(not counted.append(drafted))
    )
    for asked in (-1, 5, 0):
        plan = dict(scene.plan_training(replace(options, draft_vocab=asked)))
    assert counted == [W, 5, V]
    parameters = sum(p.numel() for p in MedusaHeads(options.sizes(64, V)).parameters())
    assert plan["heads, optimizer, gradients"] == f"{7 * 4 * parameters / 2**20:.0f} MiB"


def test_heads_are_trained_and_judged_on_them(
    large: None, chain_actor: Path, tmp_path: Path
) -> None:
    options = TrainOptions(
        model=str(chain_actor), data="", out=tmp_path, num_heads=2, loss="kl_tv", batch_positions=64
    )
    samples = [Sample(ids, ((1, len(ids)),), number) for number, ids in enumerate(texts(20))]
    worker = TrainingWorker(options, samples[:16], samples[16:])
    ids_W = draft_ids(HeadsConfig(64, V, 2), -1, [sample.ids for sample in samples[:16]])
    assert ids_W is not None and torch.equal(worker._trainer.ids_W, ids_W)
    report, _ = worker.train([list(range(worker.groups))], 0)
    assert not report.problem
    trainer = worker._trainer
    holdout = worker._holdout
    assert holdout is not None

    def judged(served: Served) -> float:
        tables = trainer.lm_head_VD, trainer.embedding_VD
        found = replay(trainer.heads, holdout, tables[0], embedding_VD=tables[1], served=served)
        return found.mean_acceptance_length

    of_some = judged(Served(options.draft_temperature, ids_W=ids_W))
    assert worker.judge().mean_acceptance_length == of_some
    assert of_some != judged(Served(options.draft_temperature))
    everything = TrainingWorker(replace(options, draft_vocab=0), samples[:16], samples[16:])
    assert everything._trainer.ids_W is None


def test_a_token_that_no_engine_drafts_is_no_accepted_draft(
    large: None, chain_actor: Path, tmp_path: Path
) -> None:
    options = EvalOptions(model=str(chain_actor), heads=str(tmp_path), data="")
    prompts = [(5, 6, 7), (8, 9)]
    responses = [Response(0, ids, (-2.0,) * len(ids), "length") for ids in texts(6)]
    rounds = [Rollouts(tuple(prompts), tuple(responses), Counters(), 1.0, Sampling())]
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(64, V, 2))

    def measured(options: EvalOptions) -> float:
        quiet = OfflineProgress(quiet=True)
        group = evaluate.PromptGroup("", prompts)
        ((found,),) = evaluate._replayed(options, [heads], [group], [], [rounds], quiet, texts(6))
        return found.result.mean_acceptance_length

    assert measured(replace(options, draft_vocab=V)) == measured(replace(options, draft_vocab=0))
    assert measured(options) != measured(replace(options, draft_vocab=0))


class EngineOnV2:
    """Its host counts prompts, and one token per request and step, of which each writes five."""

    def __init__(self) -> None:
        self.vocabulary = DraftVocabulary(W, V)
        self.settings: dict[str, object] = {}
        self.calls = 0

    def configure(self, **settings: object) -> None:
        self.settings |= settings

    def generate(self, prompts: list[tuple[int, ...]], sampling: Sampling) -> Rollouts:
        self.calls += 1
        steps = 2 * len(prompts)
        self.vocabulary.expect(sum(map(len, prompts)) + steps)
        found = [Response(n, (5,) * 10, (-1.0,) * 10, "length") for n in range(len(prompts))]
        counters = Counters(steps, 4 * steps, 4 * steps, (steps,) * 4)
        return Rollouts(tuple(prompts), tuple(found), counters, 1.0, sampling)


def test_eval_waits_until_v2_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineOnV2()
    monkeypatch.setattr(evaluate, "running_engine", lambda *_: nullcontext(engine))
    due: list[bool] = []
    real = engine.generate

    def generate(prompts: list[tuple[int, ...]], sampling: Sampling) -> Rollouts:
        due.append(engine.vocabulary.due)
        return real(prompts, sampling)

    monkeypatch.setattr(engine, "generate", generate)
    options = EvalOptions(model="", heads="", data="", engine="vllm")
    groups = [evaluate.PromptGroup("", [(1, 2)]), evaluate.PromptGroup("", [(3, 4)])]
    evaluate._generate(options, groups, "HEADS", OfflineProgress(quiet=True), W)
    assert due[-2:] == [True, True], "both calls that are measured"
    assert not due[-3], "and no call before them is too many"


def test_a_replay_chooses_them_from_other_text_than_it_measures(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each token that is measured could be drafted."""
    measured, counted = set(range(40, 40 + W)), set(range(20, 20 + W))
    calls: list[int | None] = []

    class Engine:
        def generate(self, prompts: list[tuple[int, ...]], sampling: Sampling) -> Rollouts:
            ids = tuple(measured if sampling.seed == 0 else counted)
            calls.append(sampling.seed)
            found = [Response(n, ids, (-2.0,) * W, "length") for n in range(len(prompts))]
            return Rollouts(tuple(prompts), tuple(found), Counters(), 1.0, sampling)

    used: list[set[int]] = []

    def spied(*arguments: Any, served: Served, **others: Any) -> Any:
        used.append(set() if served.ids_W is None else set(served.ids_W.tolist()))
        return replay(*arguments, served=served, **others)

    monkeypatch.setattr(evaluate, "running_engine", lambda *_: nullcontext(Engine()))
    monkeypatch.setattr(evaluate, "replay", spied)
    save_heads(tmp_path / "heads", MedusaHeads(HeadsConfig(64, V, 1, "medusa")))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1"}\n')
    options = EvalOptions(
        model=str(chain_actor),
        heads=str(tmp_path / "heads"),
        data=str(data),
        template="{question}",
        draft_vocab=W,
    )
    evaluate.evaluate_heads(options, OfflineProgress(quiet=True))
    # A prompt's own tokens are among those that are counted.
    assert len(used[0] & counted) >= W // 2 and not used[0] & measured
    calls.clear()
    evaluate.evaluate_heads(replace(options, draft_vocab=0), OfflineProgress(quiet=True))
    assert calls == [0], "nothing is chosen from all tokens"


def test_bench_rollout_waits_until_v2_has_chosen() -> None:
    engine = EngineOnV2()
    bench = RolloutBench(model="m", heads="h", data="d", template="t", batches=(1,))
    arm = rollout_speed.Arm("ours", engine, 4, choose=True)
    until_chosen(W, rollout_speed._counting_calls(bench, arm, [(1, 2)]))
    assert engine.vocabulary.due
    assert engine.settings == {"num_drafts": 4, "choose": False}, "so that it drafts"


@pytest.mark.parametrize("trained", [False, True])
def test_of_untrained_heads_nothing_is_counted(
    large: None, chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    """An engine drafts nothing with them. `eval` and `bench rollout` waited for it for minutes, and
    then asked for longer responses.
    """
    engine = EngineOnV2()
    draft = engine.generate
    if not trained:
        monkeypatch.setattr(
            engine, "generate", lambda *asked: replace(draft(*asked), counters=Counters())
        )
    heads = MedusaHeads(HeadsConfig(64, V, 4, "medusa"))
    if trained:
        heads.blocks[0].data.fill_(0.1)
    save_heads(tmp_path / "heads", heads)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1"}\n')
    given = {
        "model": str(chain_actor),
        "heads": str(tmp_path / "heads"),
        "data": str(data),
        "template": "{question}",
        "draft_vocab": W,
    }
    monkeypatch.setattr(evaluate, "running_engine", lambda *_: nullcontext(engine))
    figures = evaluate.evaluate_heads(
        EvalOptions(**given, engine="vllm"), OfflineProgress(quiet=True)
    )
    assert (figures["mean_acceptance_length"] == 1.0) == (not trained)
    assert (engine.calls > 1) == trained, "one is measured"
    engine.calls = 0
    arm = rollout_speed.Arm("ours", engine, 4, choose=True)
    monkeypatch.setattr(rollout_speed, "local_ray", lambda **_: nullcontext())
    monkeypatch.setattr(rollout_speed, "running_arms", lambda *_, **__: nullcontext([arm]))
    monkeypatch.setattr(rollout_speed, "_run_batch", lambda *_: [])
    rollout_speed.run_rollout(RolloutBench(**given), OfflineProgress(quiet=True))
    assert (engine.calls > 0) == trained


def test_an_engine_that_never_drafts_chooses_nothing() -> None:
    engine = EngineOnV2()
    nothing = replace(engine.generate([(1,)], Sampling()), counters=Counters())
    with pytest.raises(EngineError, match="drafted nothing"):
        until_chosen(W, iter([nothing] * 100))
    until_chosen(0, iter([]))
