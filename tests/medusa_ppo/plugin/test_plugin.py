"""The plugin's hooks around a real tiny actor.

The engine here is a double that samples with the actor itself, drafts by replay with the heads that
were really swapped in, and can be told to refuse them. The real engine is covered by the tests
under engines/ and end to end. The companion is real where it says `ray`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import checksum, load_heads, load_state
from heads.errors import CheckpointError, ConfigError, DataError, EngineError, SwapError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.actors.hf import HiddenTap, lm_head_weight
from medusa_ppo.companion.budget import AHEAD, Decision
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.wire import table_rows
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import PublishedHeads, ReplayRow, SwapReceipt
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.loops.check_loop import Watch
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin, initial_heads
from tests.medusa_ppo.conftest import RecordingCompanion

VOCAB, PAD = 24, 0
PROMPTS = tuple(tuple(range(1, 2 + n % 4)) for n in range(12))


def tiny_actor(cycle: bool = False) -> LlamaForCausalLM:
    """A random Llama; with `cycle` its lm_head makes each token call for the next one, so that
    there is something to learn.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    if cycle:
        model.lm_head.weight.data = model.get_input_embeddings().weight.data.roll(1, 0).clone()
    return model


def config_of(**companion) -> RunConfig:
    return build_config(
        {
            "heads": {"num_heads": 3, "kind": "medusa"},
            "engine": {"draft_temperature": 0},
            "companion": {"batch_positions": 64, "learning_rate": 2e-2, **companion},
        }
    )


class DoubleEngine(RolloutEngine):
    """Samples with the actor in this process; acceptance counters are those of a replay with the
    heads it holds.
    """

    def __init__(self, actor: LlamaForCausalLM, heads_path: Path, sharpness: float = 60.0) -> None:
        self.actor = actor
        self.sharpness = sharpness
        self.heads, _ = load_heads(heads_path)
        self.max_drafts = self.num_drafts = self.heads.config.num_heads
        self.refuse = self.corrupt = False
        self.calls: list[tuple[str, int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        generator = torch.Generator().manual_seed(sampling.seed or 0)
        responses = []
        states = []
        for index, prompt in enumerate(prompts):
            ids = list(prompt)
            logprobs = []
            length = 6 + (index * 5 + (sampling.seed or 0)) % 9
            for _ in range(length):
                with torch.no_grad():
                    logits_V = (
                        self.actor(input_ids=torch.tensor([ids])).logits[0, -1] * self.sharpness
                    )
                token = int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))
                logprobs.append(float(logits_V.log_softmax(-1)[token]))
                ids.append(token)
            with torch.no_grad(), HiddenTap(self.actor) as tap:
                self.actor(input_ids=torch.tensor([ids]))
            states.append(tap.hidden_BTD[0, len(prompt) - 1 : -1])
            responses.append(Response(index, tuple(ids[len(prompt) :]), tuple(logprobs), "length"))
        ids_M = torch.tensor([t for r in responses for t in r.token_ids])
        logprobs_M = torch.tensor([p for r in responses for p in r.logprobs])
        self.last = RolloutBatch(
            torch.cat(states),
            ids_M,
            logprobs_M,
            torch.tensor([len(r.token_ids) for r in responses]),
            self.policy_version,
        )
        result = replay(self.heads, self.last, lm_head_weight(self.actor).detach())
        drafts = round(result.drafts)
        accepted = tuple(round(n) for n in result.accepted_per_position)
        counters = Counters(drafts, drafts * self.num_drafts, sum(accepted), accepted)
        frozen_prompts = tuple(tuple(p) for p in prompts)
        return Rollouts(
            frozen_prompts,
            tuple(responses),
            counters,
            0.1,
            sampling,
            self.policy_version,
            self.heads_version,
            self.num_drafts,
        )

    def swap_heads(self, path: str | Path, version: int, checked: Any = None) -> SwapReceipt:
        self.calls.append(("swap", version))
        if self.refuse:
            raise SwapError("The engine is out of sorts.")
        state = load_state(path)
        self.heads.load_trainable_state(state)
        self.heads_version = version
        return SwapReceipt(version, "wrong" if self.corrupt else checksum(state), 0.01)

    def sync_actor(self, path: str | Path, version: int, checked: Any = None) -> SwapReceipt:
        self.policy_version = version
        return SwapReceipt(version, "", 0.0)

    def configure(self, **settings: Any) -> None:
        self.calls.append(("drafting", int(bool(settings.get("sampled")))))

    def checksums(self) -> dict[str, str]:
        return {"heads": checksum(self.heads.trainable_state()), "actor": ""}

    def counters(self) -> Counters:
        return Counters()

    def plugin_report(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.calls.append(("close", 0))


def padded(
    rollouts: Rollouts, order: Sequence[int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input ids, attention mask and response mask of some rows: each row padded on both sides by
    other amounts.
    """
    rows = [
        (rollouts.prompts[rollouts.responses[s].prompt_index], rollouts.responses[s].token_ids)
        for s in order
    ]
    width = max(len(p) + len(r) for p, r in rows) + 3
    ids_BT = torch.full((len(rows), width), PAD)
    attention_BT = torch.zeros_like(ids_BT)
    response_BT = torch.zeros_like(ids_BT)
    for row, (prompt, response) in enumerate(rows):
        left = rng.randint(0, width - len(prompt) - len(response))
        ids_BT[row, left : left + len(prompt) + len(response)] = torch.tensor([*prompt, *response])
        attention_BT[row, left : left + len(prompt) + len(response)] = 1
        response_BT[row, left + len(prompt) : left + len(prompt) + len(response)] = 1
    return ids_BT, attention_BT, response_BT


def score(
    plugin: MedusaPlugin | None,
    actor: LlamaForCausalLM,
    rollouts: Rollouts,
    order: Sequence[int],
    size: int = 5,
) -> None:
    """A loop's log-prob pass, in micro-batches."""
    rng = random.Random(1)
    for start in range(0, len(order), size):
        part = list(order[start : start + size])
        ids_BT, attention_BT, response_BT = padded(rollouts, part, rng)
        positions_BT = (attention_BT.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            if plugin is None:
                actor(input_ids=ids_BT, attention_mask=attention_BT, position_ids=positions_BT)
                continue
            with plugin.actor_forward(actor, response_BT, part):
                actor(input_ids=ids_BT, attention_mask=attention_BT, position_ids=positions_BT)


@pytest.fixture
def parts(
    tmp_path: Path,
) -> tuple[LlamaForCausalLM, DoubleEngine, RecordingCompanion, MedusaPlugin]:
    actor = tiny_actor()
    path = MedusaPlugin.prepare_heads(config_of(), actor, tmp_path / "heads")
    engine = DoubleEngine(actor, path)
    companion = RecordingCompanion()
    return (
        actor,
        engine,
        companion,
        MedusaPlugin(engine, companion, heads=initial_heads(config_of(), actor)),
    )


def test_batch_holds_the_states_that_lm_head_reads(parts) -> None:
    actor, engine, companion, plugin = parts
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    order = list(range(12))
    random.Random(5).shuffle(order)
    plugin.before_generation()
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, order[:10])
    assert not companion.batches
    score(plugin, actor, rollouts, order[10:])
    assert len(companion.batches) == 1, (
        "handed over as soon as all rows were seen, before the update"
    )
    batch = companion.batches[0]
    assert torch.equal(batch.response_ids_M, engine.last.response_ids_M) and torch.equal(
        batch.lengths_S, engine.last.lengths_S
    )
    assert torch.allclose(batch.logprobs_M, engine.last.logprobs_M)
    assert torch.allclose(batch.hidden_MD, engine.last.hidden_MD, atol=1e-5)
    logprobs_MV = (
        batch.hidden_MD @ lm_head_weight(actor).detach().T * engine.sharpness
    ).log_softmax(-1)
    assert torch.allclose(
        logprobs_MV.gather(1, batch.response_ids_M[:, None])[:, 0], batch.logprobs_M, atol=1e-3
    )
    score(plugin, actor, rollouts, order)
    plugin.policy_updated(actor, 1)
    assert len(companion.batches) == 1 and companion.tables[0][1] == 1


@pytest.mark.parametrize(
    ("ppo", "engine_section", "asked"),
    [
        ({}, {}, True),
        ({}, {"num_drafts": 2}, False),
        ({"staleness": 1, "importance_bound": 2}, {}, True),
        ({"staleness": 2, "importance_bound": 2}, {}, False),
    ],
)
def test_an_engine_that_chooses_is_asked_when_it_rests(
    parts, tmp_path: Path, ppo: dict, engine_section: dict, asked: bool
) -> None:
    actor, engine, _, _ = parts
    rows = [{"running": 1, "steps": [1, 0, 0, 0], "speedup": 1.0}]
    engine.choices = lambda: rows
    config = build_config(
        {
            "heads": {"num_heads": 3, "kind": "medusa"},
            "companion": {"enabled": False},
            "engine": engine_section,
            "ppo": ppo,
        }
    )
    plugin = MedusaPlugin.start(config, actor, engine, tmp_path)
    plugin.rollout_ready(engine.generate(PROMPTS, Sampling(seed=1)))
    assert plugin._step.choices == (rows if asked else [])


def test_what_check_loop_watches_is_there(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole run on a real engine is a slow test of
    tests/medusa_ppo/loops/test_check_loop.py.
    """
    actor, engine, companion, plugin = parts
    for name in ("__init__", "before_generation", "rollout_ready", "tables_updated", "close"):
        monkeypatch.setattr(
            MedusaPlugin, name, getattr(MedusaPlugin, name)
        )  # What stands beside them goes with the test.
    monkeypatch.setattr(CompanionClient, "submit", CompanionClient.submit)
    watch = Watch(_model=actor)
    watch.install()
    plugin.policy_updated(actor, 0)
    plugin.before_generation()
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, range(12))
    watch._submitted(None, companion.batches[0])
    plugin.policy_updated(actor, 1)
    assert watch.calls == [
        "policy_updated",
        "before_generation",
        "rollout_ready",
        "policy_updated",
    ] and watch.versions == [0, 1]
    assert watch.wrong_tables == 0 and [fit["responses"] for fit in watch.fits] == [12]
    assert watch._table is not None and torch.equal(watch._table, lm_head_weight(actor))


def test_no_forward_pass_is_added(parts) -> None:
    actor, engine, _, plugin = parts
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    calls: list[int] = []
    handle = actor.base_model.register_forward_hook(lambda *_: calls.append(1))
    score(None, actor, rollouts, range(12))
    without = len(calls)
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, range(12))
    plugin.policy_updated(actor, 1)
    handle.remove()
    assert len(calls) == 2 * without == 6


def test_actor_gradients_are_bit_identical() -> None:
    def gradients(with_plugin: bool, folder: str) -> list[torch.Tensor]:
        actor = tiny_actor()
        path = MedusaPlugin.prepare_heads(config_of(), actor, folder)
        engine = DoubleEngine(actor, path)
        rollouts = engine.generate(PROMPTS, Sampling(seed=2))
        plugin = (
            MedusaPlugin(engine, RecordingCompanion(), heads=initial_heads(config_of(), actor))
            if with_plugin
            else None
        )
        torch.manual_seed(4)
        if plugin is not None:
            plugin.before_generation()
            plugin.rollout_ready(rollouts)
        ids_BT, attention_BT, response_BT = padded(rollouts, range(12), random.Random(0))
        context = (
            plugin.actor_forward(actor, response_BT, range(12))
            if plugin is not None
            else torch.enable_grad()
        )
        with context:
            logits_BTV = actor(input_ids=ids_BT, attention_mask=attention_BT).logits
        noise = torch.rand(
            logits_BTV.shape[:2]
        )  # the loop's own random numbers must not move either
        picked_BT = logits_BTV[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
        (-(picked_BT * response_BT[:, 1:] * noise[:, 1:]).sum()).backward()
        if plugin is not None:
            plugin.policy_updated(actor, 1)
        return [p.grad for p in actor.parameters()]

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        left = gradients(True, folder + "/a")
        right = gradients(False, folder + "/b")
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True)) and any(
        bool(g.abs().sum() > 0) for g in left
    )


def test_partly_scored_batch_goes_with_the_update(parts) -> None:
    actor, engine, companion, plugin = parts
    rollouts = engine.generate(PROMPTS, Sampling(seed=3))
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, [7, 2])
    plugin.policy_updated(actor, 1)
    assert companion.batches[0].lengths_S.tolist() == [
        len(rollouts.responses[s].token_ids) for s in (2, 7)
    ]
    plugin.rollout_ready(rollouts)
    plugin.policy_updated(actor, 2)
    assert len(companion.batches) == 1, (
        "nothing scored: nothing to hand over, and no error in the loop"
    )


def test_empty_responses_are_dropped_and_counted(parts) -> None:
    actor, engine, companion, plugin = parts
    rollouts = engine.generate(PROMPTS[:3], Sampling(seed=3))
    responses = (rollouts.responses[0], Response(1, (), (), "stop"), rollouts.responses[2])
    rollouts = Rollouts(rollouts.prompts, responses, Counters(), 1.0, Sampling())
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, [2, 1, 0])
    assert companion.batches[0].lengths_S.numel() == 2 and plugin.empty_responses == 1
    only_empty = Rollouts(
        rollouts.prompts, (Response(0, (), (), "stop"),), Counters(), 1.0, Sampling()
    )
    plugin.rollout_ready(only_empty)
    score(plugin, actor, only_empty, [0])
    plugin.policy_updated(actor, 1)
    assert len(companion.batches) == 1


def test_rollouts_without_a_response_end_no_loop(parts, caplog: pytest.LogCaptureFixture) -> None:
    """As a remote loop announces its rollouts: the workers have the tokens, and may have found no
    usable row.
    """
    actor, engine, companion, plugin = parts
    for version in (1, 2):
        plugin.rollout_ready(Rollouts((), (), Counters(), 0.0, Sampling()))
        plugin.tables_updated(None, version)
    warnings = [r for r in caplog.records if "the companion gets nothing" in r.message]
    assert companion.batches == [] and len(warnings) == 2
    rollouts = engine.generate(PROMPTS, Sampling(seed=3))
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, list(range(len(PROMPTS))))
    assert len(companion.batches) == 1


def test_misuse_of_the_tap_is_told(parts) -> None:
    actor, engine, _, plugin = parts
    rollouts = engine.generate(PROMPTS[:2], Sampling(seed=3))
    plugin.rollout_ready(rollouts)
    with (
        pytest.raises(DataError, match="exactly one forward pass"),
        plugin.actor_forward(actor, torch.ones(1, 4), [0]),
    ):
        pass
    with pytest.raises(ZeroDivisionError), plugin.actor_forward(actor, torch.ones(1, 4), [0]):
        raise ZeroDivisionError
    assert not actor.base_model._forward_hooks


def offer_of(
    plugin_heads: MedusaHeads, folder: Path, version: int, seed: int = 0
) -> PublishedHeads:
    from heads.checkpoint import save_state

    torch.manual_seed(seed)
    state = {
        name: torch.randn_like(value) for name, value in plugin_heads.trainable_state().items()
    }
    path = folder / f"offer-{version}.safetensors"
    save_state(path, state)
    return PublishedHeads(version, str(path), checksum(state), 3, 1.5)


def test_newer_heads_are_swapped_once(parts, tmp_path: Path) -> None:
    _, engine, companion, plugin = parts
    companion.offer = offer_of(engine.heads, tmp_path, 4)
    plugin.before_generation()
    plugin.before_generation()
    assert engine.calls == [("swap", 4)]
    assert engine.checksums()["heads"] == companion.offer.checksum
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    engine.policy_version = 5
    plugin.rollout_ready(Rollouts(**{**rollouts.__dict__, "policy_version": 5}))
    values = plugin.metrics()
    assert (
        values[names.HEADS_VERSION] == 4
        and values[names.STALENESS] == 2
        and values[names.SWAP_S] == pytest.approx(0.01)
    )
    assert values[names.MAL_SERVING] == rollouts.counters.mean_acceptance_length
    assert plugin.metrics()[names.SWAP_S] == 0, "figures are of the step"


@pytest.mark.parametrize("fault", ["refuse", "corrupt"])
def test_failed_swap_keeps_the_old_heads(parts, tmp_path: Path, fault: str) -> None:
    _, engine, companion, plugin = parts
    companion.offer = good = offer_of(engine.heads, tmp_path, 1)
    plugin.before_generation()
    setattr(engine, fault, True)
    companion.offer = newer = offer_of(engine.heads, tmp_path, 2, seed=9)
    plugin.before_generation()
    assert engine.checksums()["heads"] == good.checksum and plugin.installer.installed == good
    setattr(engine, fault, False)
    plugin.before_generation()
    assert engine.checksums()["heads"] == newer.checksum and plugin.installer.installed == newer


def test_failed_swap_raises_when_asked_to(parts, tmp_path: Path) -> None:
    _, engine, companion, _ = parts
    plugin = MedusaPlugin(engine, companion, on_error="raise")
    companion.offer = offer_of(engine.heads, tmp_path, 1)
    engine.refuse = True
    with pytest.raises(SwapError):
        plugin.before_generation()


def accepted(engine: DoubleEngine, extra: float) -> Rollouts:
    """Rollouts of the heads that the engine holds, with counters as asked for."""
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    return Rollouts(
        **{
            **rollouts.__dict__,
            "counters": Counters(1000, 3000, round(1000 * extra), (round(1000 * extra), 0, 0)),
        }
    )


def test_heads_that_are_accepted_next_to_never_make_way_for_those_before(
    parts, tmp_path: Path
) -> None:
    """Version 1 works, version 2 does not: version 1 comes back under its number, 2 is never asked
    for again, 3 is welcome.
    """
    _, engine, companion, plugin = parts
    companion.offer = good = offer_of(engine.heads, tmp_path, 1)
    plugin.before_generation()
    plugin.rollout_ready(accepted(engine, 0.4))
    assert plugin.metrics()[names.SWAP_ALARMS] == 0
    companion.offer = offer_of(engine.heads, tmp_path, 2, seed=9)
    plugin.before_generation()
    plugin.rollout_ready(accepted(engine, 0.001))
    assert engine.heads_version == 2, "the engine may not be idle here"
    assert plugin.metrics()[names.SWAP_ALARMS] == 1
    plugin.before_generation()
    plugin.before_generation()
    assert engine.calls == [("swap", 1), ("swap", 2), ("swap", 1)]
    assert engine.checksums()["heads"] == good.checksum and engine.heads_version == 1
    ((version, state, serving),) = companion.taken_back
    assert version == 2 and checksum(state) == good.checksum, (
        "the companion goes on from what the engine has, with newer numbers"
    )
    assert serving == engine.heads_version
    plugin.rollout_ready(accepted(engine, 0.4))
    assert plugin.metrics()[names.STALENESS] == engine.policy_version - good.policy_version
    companion.offer = newer = offer_of(engine.heads, tmp_path, 3, seed=10)
    plugin.before_generation()
    assert engine.checksums()["heads"] == newer.checksum


def test_the_heads_of_the_start_come_back_too(parts, tmp_path: Path) -> None:
    _, engine, companion, plugin = parts
    first = engine.checksums()["heads"]
    plugin.before_generation()
    plugin.rollout_ready(accepted(engine, 0.4))
    companion.offer = offer_of(engine.heads, tmp_path, 1)
    plugin.before_generation()
    saved, metadata = load_heads(plugin.save_heads(tmp_path / "saved"))
    assert metadata.version == 1 and checksum(saved.trainable_state()) == companion.offer.checksum
    plugin.rollout_ready(accepted(engine, 0.0))
    plugin.before_generation()
    assert engine.checksums()["heads"] == first and engine.heads_version == 0
    saved, metadata = load_heads(plugin.save_heads(tmp_path / "again"))
    assert metadata.version == 0 and checksum(saved.trainable_state()) == first


def test_rows_of_an_actor_in_another_process_go_with_their_batch(parts, tmp_path: Path) -> None:
    actor, engine, companion, plugin = parts
    table_VD = lm_head_weight(actor).detach()
    plugin._tables = table_VD, table_VD  # Those of the start, as a RemoteAttachment's plugin has.
    plugin.rollout_ready(engine.generate(PROMPTS, Sampling(seed=1)))
    batch = RolloutBatch(
        torch.zeros(2, 16), torch.tensor([1, 2]), torch.zeros(2), torch.tensor([2])
    )
    rows = table_rows(table_VD, None, batch.response_ids_M, torch.tensor([3]))
    plugin.batch_ready(batch, rows)
    assert companion.batches == [batch] and companion.rows == [rows] and not companion.tables
    _, metadata = load_heads(plugin.save_heads(tmp_path / "failed"))
    assert not metadata.has_lm_head, "the start's is not that of the trained actor"
    plugin.tables_updated((2 * table_VD, table_VD), 1)
    _, metadata = load_heads(plugin.save_heads(tmp_path / "ended"))
    assert metadata.has_lm_head


def test_what_a_workers_sample_leaves_out_is_counted_once(parts) -> None:
    """A driver that has no tokens counts it with the batch; one that has them drew the sample, and
    counted then.
    """
    _, engine, companion, plugin = parts
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    batch = RolloutBatch(
        torch.zeros(2, 16), torch.tensor([1, 2]), torch.zeros(2), torch.tensor([2]), left_out=70
    )
    for responses, counted in ((rollouts.responses, 0), ((), 70)):
        plugin.rollout_ready(dataclasses.replace(rollouts, responses=responses))
        plugin.batch_ready(batch)
        assert companion.left_out == counted
    assert len(companion.batches) == 2


@pytest.mark.parametrize("resume_from", ["a folder", ""])
def test_an_earlier_runs_training_is_not_the_first_steps(
    parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_from: str
) -> None:
    actor, engine, companion, _ = parts
    companion.train_s = 500.0 if resume_from else 0.0
    monkeypatch.setattr(
        "medusa_ppo.plugin.medusa_plugin.CompanionClient", lambda *given, **more: companion
    )
    plugin = MedusaPlugin.start(config_of(), actor, engine, tmp_path, resume_from=resume_from)
    companion.train_s += 3.0
    assert plugin.metrics()[names.COMPANION_TRAIN_S] == 3.0


@pytest.mark.parametrize(("published", "steps"), [(7, 1), (0, 1 + AHEAD)])
def test_only_untrained_heads_are_advanced_seconds_however_often_a_run_is_resumed(
    parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: int, steps: int
) -> None:
    """Each time they would be paid to heads that were trained long ago."""
    actor, engine, companion, _ = parts
    monkeypatch.setattr(
        "medusa_ppo.plugin.medusa_plugin.CompanionClient", lambda *given, **more: companion
    )
    companion.reported = {"versions_published": published, "candidates_rejected": 30}
    config = config_of(share=0.05)
    plugin = MedusaPlugin.start(config, actor, engine, tmp_path, resume_from="a folder")
    now = [0.0]
    plugin._clock = lambda: now[0]
    plugin.before_generation()
    plugin.rollout_ready(engine.generate(PROMPTS, Sampling(seed=1)))
    now[0] = 10.0
    plugin.metrics()
    assert plugin.budget is not None
    # More than AHEAD steps' income is never kept.
    assert plugin.budget.left_s == pytest.approx(min(steps, AHEAD) * 0.05 * 10.0)


def test_heads_that_cannot_be_put_back_stay(parts, tmp_path: Path) -> None:
    _, engine, companion, plugin = parts
    plugin.rollout_ready(accepted(engine, 0.4))
    companion.offer = offer_of(engine.heads, tmp_path, 1)
    plugin.before_generation()
    plugin.rollout_ready(accepted(engine, 0.0))
    engine.refuse = True
    plugin.before_generation()
    plugin.before_generation()
    assert engine.calls == [("swap", 1), ("swap", 0)] and engine.heads_version == 1


def test_an_engine_that_lost_its_heads_gets_those_that_it_should_have(
    parts, tmp_path: Path
) -> None:
    """First those of the start, then the installed ones, then, where their file is gone, those of
    the start again.
    """
    _, engine, companion, plugin = parts
    first = engine.checksums()["heads"]

    def lose() -> None:
        for parameter in engine.heads.parameters():
            parameter.data.fill_(7.0)
        engine.heads_version = -1

    lose()
    plugin.before_generation()
    assert engine.checksums()["heads"] == first and engine.heads_version == 0
    companion.offer = offer = offer_of(engine.heads, tmp_path, 2)
    plugin.before_generation()
    lose()
    plugin.before_generation()
    plugin.before_generation()
    assert engine.checksums()["heads"] == offer.checksum and engine.calls == [
        ("swap", 0),
        ("swap", 2),
        ("swap", 2),
    ]
    lose()
    engine.refuse = True
    plugin.before_generation()
    assert engine.heads_version == -1
    engine.refuse = False
    Path(offer.path).unlink()
    plugin.before_generation()
    assert engine.checksums()["heads"] == first and engine.heads_version == 0
    lose()
    companion.offer = newer = offer_of(engine.heads, tmp_path, 3, seed=5)
    plugin.before_generation()
    assert engine.calls[-1] == ("swap", 3) and engine.checksums()["heads"] == newer.checksum, (
        "newer ones first: one swap is enough"
    )


def test_seconds_exposed_and_hidden(parts) -> None:
    _, engine, _, _ = parts
    now = [0.0]

    class Slow(RecordingCompanion):
        def drain(self, timeout_s: float) -> bool:
            now[0] += 2.0
            return True

    slow = Slow()
    plugin = MedusaPlugin(engine, slow, wait=True, clock=lambda: now[0])
    slow.train_s = 5.0
    plugin.before_generation()
    values = plugin.metrics()
    assert values[names.PLUGIN_EXPOSED_S] == 2.0
    assert values[names.COMPANION_TRAIN_S] == 5.0 and values[names.COMPANION_HIDDEN_S] == 3.0
    slow.train_s = 6.0
    values = plugin.metrics()
    assert values[names.COMPANION_TRAIN_S] == 1.0 and values[names.COMPANION_HIDDEN_S] == 1.0
    assert names.COMPANION_LOSS not in values and names.REPLAY_SERVING not in values


def test_what_a_loop_does_for_the_plugin_is_exposed_and_counts_once(parts) -> None:
    actor, engine, _, _ = parts
    now = [0.0]

    class Slow(RecordingCompanion):
        def update_lm_head(self, *args: object, **kwargs: object) -> None:
            now[0] += 2.0

    slow = Slow()
    plugin = MedusaPlugin(engine, slow, heads=engine.heads, clock=lambda: now[0])
    plugin.before_generation()
    with plugin.exposed():
        assert slow.gave_way[-1], "between generation and the first hook it is still to wait"
        now[0] += 1.0
        with plugin.exposed():
            now[0] += 4.0
        plugin.policy_updated(actor, 1)
        assert not slow.gave_way[-1]
    assert plugin.metrics()[names.PLUGIN_EXPOSED_S] == 7.0
    with pytest.raises(KeyError), plugin.exposed():
        now[0] += 1.0
        raise KeyError
    now[0] += 8.0
    plugin.policy_updated(actor, 2)
    assert plugin.metrics()[names.PLUGIN_EXPOSED_S] == 3.0


def test_hooks_of_another_thread_are_exposed_as_well(parts) -> None:
    _, engine, companion, _ = parts
    now = [0.0]
    plugin = MedusaPlugin(engine, companion, clock=lambda: now[0])

    def other() -> None:
        with plugin.exposed():
            now[0] += 2.0

    with plugin.exposed(), ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    assert plugin.metrics()[names.PLUGIN_EXPOSED_S] == 4.0


def test_without_companion_only_acceptance_is_reported(parts) -> None:
    actor, engine, _, _ = parts
    plugin = MedusaPlugin(engine, None)
    rollouts = engine.generate(PROMPTS, Sampling(seed=1))
    plugin.before_generation()
    plugin.rollout_ready(rollouts)
    score(plugin, actor, rollouts, range(12))
    plugin.policy_updated(actor, 1)
    values = plugin.metrics()
    assert names.MAL_SERVING in values and names.COMPANION_TRAIN_S not in values
    assert set(values) <= set(names_in_file())
    plugin.close()


def names_in_file() -> list[str]:
    return list(names.describe())


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_initial_heads_are_the_same_at_every_call_and_leave_the_loops_randomness(
    kind: str, lm_head: str, tmp_path: Path
) -> None:
    actor = tiny_actor()
    config = build_config({"heads": {"kind": kind, "lm_head": lm_head}})
    before = torch.get_rng_state()
    first = initial_heads(config, actor)
    second = initial_heads(config, actor)
    assert torch.equal(before, torch.get_rng_state())
    assert checksum(first.trainable_state()) == checksum(second.trainable_state())
    written, _ = load_heads(
        MedusaPlugin.prepare_heads(config, actor, tmp_path / "heads"),
        hidden_size=32,
        vocab_size=VOCAB,
    )
    assert checksum(written.trainable_state()) == checksum(first.trainable_state())


def test_heads_of_another_actor_are_refused(tmp_path: Path) -> None:
    actor = tiny_actor()
    MedusaPlugin.prepare_heads(config_of(), actor, tmp_path / "heads")
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(CheckpointError, match="another actor"):
        MedusaPlugin.prepare_heads(
            build_config({"heads": {"path": str(tmp_path / "heads")}}), other, tmp_path / "again"
        )


def test_first_heads_do_not_replace_a_companions_versions(tmp_path: Path) -> None:
    """A folder of heads is replaced whole, and a loop that was started again lost them all."""
    actor = tiny_actor()
    versions = tmp_path / "heads"
    MedusaPlugin.prepare_heads(config_of(), actor, versions)
    for number in (6, 7):
        MedusaPlugin.prepare_heads(config_of(), actor, versions / f"v{number:06d}")
    with pytest.raises(CheckpointError, match="versions") as refused:
        MedusaPlugin.prepare_heads(config_of(), actor, versions)
    assert refused.value.given == versions / "v000007" and "resume_from" in refused.value.do
    load_heads(versions / "v000007")
    MedusaPlugin.prepare_heads(config_of(), actor, versions / "v000007")


def test_a_run_does_not_begin_with_a_version_that_its_companion_removes(
    parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again with the same settings, it would not find it."""
    actor, engine, companion, _ = parts
    monkeypatch.setattr(
        "medusa_ppo.plugin.medusa_plugin.CompanionClient", lambda *given, **more: companion
    )
    version = MedusaPlugin.prepare_heads(config_of(), actor, tmp_path / "heads" / "v000123")
    config = build_config({"heads": {"path": str(version)}})
    with pytest.raises(ConfigError, match="would replace the heads") as refused:
        MedusaPlugin.start(config, actor, engine, tmp_path)
    assert f"cp -r {version} {tmp_path / 'heads-start'}" in refused.value.do
    MedusaPlugin.start(config, actor, engine, tmp_path / "another")


def test_ray_acceptance_rises_and_the_heads_are_saved(ray_session: None, tmp_path: Path) -> None:
    """Everything real but the engine: PPO-like steps on an actor whose text can be learned and that
    the zero start gets wrong.
    """
    actor = tiny_actor(cycle=True)
    config = config_of(wait=True, epochs=6)
    engine = DoubleEngine(actor, MedusaPlugin.prepare_heads(config, actor, tmp_path / "heads"))
    plugin = MedusaPlugin.start(config, actor, engine, tmp_path / "run")
    history = []
    for step in range(10):
        plugin.before_generation()
        rollouts = engine.generate(PROMPTS * 2, Sampling(seed=step))
        plugin.rollout_ready(rollouts)
        score(plugin, actor, rollouts, range(24), size=12)
        plugin.policy_updated(actor, step + 1)
        history.append(plugin.metrics())
    plugin.before_generation()
    lengths = [values[names.MAL_SERVING] for values in history]
    assert sum(lengths[-3:]) / 3 > lengths[0] + 0.25, lengths
    last = history[-1]
    assert (
        last[names.HEADS_VERSION] >= 1
        and last[names.COMPANION_DROPPED] == 0
        and last[names.STALENESS] >= 0
    )
    assert set(last) <= set(names_in_file())
    assert last[names.REPLAY_SERVING] >= last[names.REPLAY_FROZEN] - 0.2
    assert plugin.save(tmp_path / "state")
    saved, metadata = load_heads(plugin.save_heads(tmp_path / "final"))
    assert (
        checksum(saved.trainable_state()) == engine.checksums()["heads"]
        and metadata.version == engine.heads_version
    )
    plugin.close()
    again = MedusaPlugin.start(
        config, actor, engine, tmp_path / "run2", resume_from=tmp_path / "state"
    )
    again.before_generation()
    assert (
        engine.checksums()["heads"] == checksum(saved.trainable_state())
        and engine.heads_version == metadata.version
    )
    again.close()


def test_the_companion_stands_still_while_responses_are_generated(parts) -> None:
    actor, engine, companion, plugin = parts
    plugin.before_generation()
    assert companion.gave_way[-1] is True
    rollouts = engine.generate([[3, 4], [5, 6]], Sampling(max_new_tokens=6, seed=1))
    plugin.rollout_ready(rollouts)
    assert companion.gave_way[-1] is False
    score(plugin, actor, rollouts, range(len(rollouts.responses)))
    assert companion.gave_way[-1] is False and len(companion.batches) == 1


def test_a_companion_on_the_loops_cores_has_a_turn_as_long_as_its_budget(parts) -> None:
    """Before generation, if it was given something; the seconds count for the budget once."""
    actor, engine, companion, _ = parts
    companion.takes_turns = True
    clock = itertools.count(step=0.5)
    heads = MedusaHeads(HeadsConfig(32, 64, num_heads=2))
    plugin = MedusaPlugin(
        engine, companion, heads=heads, passes=2.0, share=0.1, clock=lambda: next(clock)
    )
    assert plugin.budget is not None
    rollouts = engine.generate([[3, 4], [5, 6]], Sampling(max_new_tokens=6, seed=1))

    def step(passes: float) -> dict[str, Any]:
        plugin.budget._decide = lambda: Decision(passes, "training" if passes else "waiting")
        plugin.before_generation()
        plugin.rollout_ready(rollouts)
        score(plugin, actor, rollouts, range(len(rollouts.responses)))
        return plugin.metrics()

    step(0.5)
    assert companion.turns == [], "nothing was given before the first step"
    left_s = plugin.budget.left_s
    assert left_s > 0
    values = step(0.0)
    assert companion.turns == [left_s] and companion.gave_way[-1] is False
    turn_s = 0.5  # Of the clock, which is read before and after.
    assert values[names.COMPANION_TAKEN] == turn_s / plugin.budget._loop_s
    step(0.0)
    assert len(companion.turns) == 1, "it is done with what it was given"
    plugin.budget.left_s = -1.0
    step(0.5)
    plugin.budget.left_s = -1.0
    step(0.0)
    assert len(companion.turns) == 1, "there is no budget"


def test_a_loop_need_not_ask_for_figures_nor_after_each_generation(parts) -> None:
    """Its seconds bring in a budget all the same, each of them once."""
    actor, engine, companion, _ = parts
    companion.takes_turns = True
    now = [0.0]
    heads = MedusaHeads(HeadsConfig(32, 64, num_heads=2))
    plugin = MedusaPlugin(
        engine, companion, heads=heads, passes=2.0, share=0.1, clock=lambda: now[0]
    )
    rollouts = engine.generate([[3, 4], [5, 6]], Sampling(max_new_tokens=6, seed=1))
    for generations in range(3):
        plugin.before_generation()
        assert plugin.budget._loop_s == 10.0 * generations
        assert len(companion.turns) == generations, "each batch has its turn"
        plugin.rollout_ready(rollouts)
        score(plugin, actor, rollouts, range(len(rollouts.responses)))
        now[0] += 10.0
    assert plugin.metrics()[names.COMPANION_REASON] and plugin.budget._loop_s == 30.0
    plugin.before_generation()
    assert plugin.budget._loop_s == 30.0, "these were asked for"


def test_a_companion_that_does_not_pay_is_handed_nothing(parts) -> None:
    """Not a state is copied, not a table sent; when it is worth it again, the tables come first."""
    actor, engine, companion, _ = parts
    plugin = MedusaPlugin(
        engine, companion, heads=MedusaHeads(HeadsConfig(32, 64, num_heads=2)), passes=2.0
    )
    rollouts = engine.generate([[3, 4], [5, 6]], Sampling(max_new_tokens=6, seed=1))

    def step(version: int) -> dict[str, Any]:
        plugin.before_generation()
        plugin.rollout_ready(rollouts)
        score(plugin, actor, rollouts, range(len(rollouts.responses)))
        plugin.policy_updated(actor, version)
        return plugin.metrics()

    assert plugin.budget is not None
    decide = plugin.budget._decide
    passes = [2.0, 0.0, 0.0, 0.5]
    plugin.budget._decide = lambda: dataclasses.replace(decide(), passes=passes.pop(0))
    values = [step(version) for version in range(1, 5)]
    assert [batch.passes for batch in companion.batches] == [2.0, 0.5]
    assert [version for _, version in companion.tables] == [1, rollouts.policy_version, 4], (
        "the second time with the batch that needs them"
    )
    assert [value[names.COMPANION_PASSES] for value in values] == [2.0, 0.0, 0.0, 0.5]
    assert all(
        names.COMPANION_SAVED_S in value and value[names.COMPANION_LOST_S] > 0 for value in values
    )


def test_a_step_whose_batch_nobody_judged_saves_as_much_as_its_heads_did_before(
    parts, tmp_path: Path
) -> None:
    """Of few prompts not every batch is judged, and what is published is not judged again before it
    drafts.
    """
    _, engine, companion, _ = parts
    heads = MedusaHeads(HeadsConfig(32, 64, num_heads=3))
    plugin = MedusaPlugin(engine, companion, heads=heads, passes=2.0)

    def saved_frac(version: int, **reported: Any) -> float:
        companion.reported = {"versions_published": version, **reported}
        plugin.before_generation()
        rollouts = dataclasses.replace(accepted(engine, 0.4), seconds=10.0)
        plugin.rollout_ready(rollouts)
        return plugin.metrics()[names.COMPANION_SAVED_S] / 10.0

    def row(length: float) -> ReplayRow:
        return ReplayRow(length, ())

    companion.offer = offer_of(engine.heads, tmp_path, 2)
    judged = {"serving": row(2.2), "frozen": row(2.0), "replayed_version": 2}
    assert saved_frac(2, **judged, candidate=row(2.1)) == pytest.approx(0.1)
    assert saved_frac(2) == pytest.approx(0.1), "the same heads"
    published = judged | {"candidate": row(2.5), "fresh": True}
    assert saved_frac(3, **published) == pytest.approx(0.1), "they drafted before it"
    companion.offer = offer_of(engine.heads, tmp_path, 3, seed=9)
    assert saved_frac(3, fresh=True) == pytest.approx(0.25)
    companion.offer = offer_of(engine.heads, tmp_path, 5, seed=10)
    assert saved_frac(5) == 0.0, "nobody knows what these are worth"


def test_a_server_that_drafted_for_somebody_else_gets_the_heads_of_the_start(parts) -> None:
    _, engine, _, plugin = parts
    first = engine.checksums()["heads"]
    plugin.installer.begin_on_a_server(named=True)
    assert not engine.calls, "it has these heads already, as version 0"
    for parameter in engine.heads.parameters():
        parameter.data.fill_(7.0)
    engine.heads_version = 16
    plugin.installer.begin_on_a_server(named=True)
    assert engine.checksums()["heads"] == first and engine.heads_version == 0
    engine.heads_version = 16  # The same, but rollouts would tell somebody else's number.
    plugin.installer.begin_on_a_server(named=True)
    assert engine.calls == [("swap", 0)] * 2
    assert plugin.installer.take_seconds() == 0, "this was before the first step"


@pytest.mark.parametrize("published", [0, 7])
def test_of_a_resumed_run_a_server_is_told_nothing_of_heads_that_it_will_never_use(
    parts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    published: int,
) -> None:
    """What the run has published comes before the first rollouts; the warning said that it begins
    with the heads of its very first start.
    """
    actor, engine, companion, _ = parts
    monkeypatch.setattr(
        "medusa_ppo.plugin.medusa_plugin.CompanionClient", lambda *given, **more: companion
    )
    companion.reported = {"versions_published": published}
    plugin = MedusaPlugin.start(config_of(), actor, engine, tmp_path, resume_from="a folder")
    for parameter in engine.heads.parameters():
        parameter.data.fill_(7.0)
    engine.heads_version = 7
    plugin.installer.begin_on_a_server(named=False)
    assert bool(caplog.records) == (published == 0)
    plugin.installer.begin_on_a_server(named=True)
    assert bool(engine.calls) == (published == 0)


def test_servers_that_hold_different_heads_get_those_of_the_start(
    parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, _, plugin = parts

    def apart() -> dict[str, str]:
        raise EngineError("The engines hold different weights.")

    monkeypatch.setattr(engine, "checksums", apart)
    plugin.installer.begin_on_a_server(named=True)
    assert engine.calls == [("swap", 0)]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_server_with_other_heads_than_the_runs_own_is_told_of(
    parts, caplog: pytest.LogCaptureFixture, num_drafts: int
) -> None:
    """The run's own are new and draft nothing yet, so the server keeps those that it has."""
    _, engine, _, plugin = parts
    engine.num_drafts = num_drafts
    first = engine.checksums()["heads"]
    plugin.installer.begin_on_a_server(named=False)
    assert not caplog.records
    for parameter in engine.heads.parameters():
        parameter.data.fill_(7.0)
    engine.heads_version = 16
    plugin.installer.begin_on_a_server(named=False)
    told = [r.getMessage() for r in caplog.records if "heads.path" in r.getMessage()]
    assert len(told) == (num_drafts > 0) and not engine.calls
    assert all(first[:16] in text and "version 16" in text for text in told)
