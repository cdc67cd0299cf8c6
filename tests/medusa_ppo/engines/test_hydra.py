"""Conditioned heads in the real engine: what it drafts is what the heads draft, after every swap;
with a context, what replay sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import save_heads, save_state
from heads.modules import Context, MedusaHeads
from heads.targets import context_rows
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.slots import DraftSlots, KeptDrafts
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import Uniformity, add_rollouts
from medusa_ppo.engines.rollout_engine import check_state
from medusa_ppo.vllm_plugin.worker_calls import first_of
from tests.medusa_ppo.conftest import CPU, cpu_alone
from tests.medusa_ppo.engines.conftest import HEADS, TIED, Actor, assert_greedy

# Slow, because an engine that ends in this process takes the shared engine's process groups with
# it; test_ray_engine.py has a quick one.
pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def hydra_engine(
    actor: Actor, engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("hydra") / "heads"
    save_heads(folder, actor.random_heads(1, kind="hydra"), lm_head_VD=actor.lm_head_VD)
    with ColocatedEngine(actor.path, folder, engine_config) as engine:
        yield engine


def test_the_engine_drafts_what_the_heads_draft_before_and_after_a_swap(
    hydra_engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    hidden_BD = torch.randn(
        5, actor.model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    ids_B = torch.arange(5)
    seen = []
    for version, seed in enumerate((1, 2)):
        heads = actor.random_heads(seed, kind="hydra")
        save_state(tmp_path / f"{seed}", heads.trainable_state())
        hydra_engine.swap_heads(tmp_path / f"{seed}", version + 1)
        core = DraftingCore(
            heads,
            lambda f: f @ actor.lm_head_VD.T,
            lambda ids_B: actor.model.model.embed_tokens.weight[ids_B],
        )
        expected_BK = core.draft(hidden_BD, ids_B, HEADS).ids_BK
        assert hydra_engine.probe(hidden_BD.tolist(), ids_B.tolist()) == expected_BK.tolist()
        seen.append(expected_BK.tolist())
    assert seen[0] != seen[1]


PAIRS = 16
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def context_heads(actor: Actor) -> MedusaHeads:
    """Random ones that read their context: what it says is as large as the state."""
    heads = actor.random_heads(3, kind="hydra", context=PAIRS)
    heads.context_out.mul_(20)
    return heads


@pytest.fixture(scope="module")
def context_engine(
    actor: Actor,
    context_heads: MedusaHeads,
    engine_config: EngineConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("context") / "heads"
    save_heads(folder, context_heads, lm_head_VD=actor.lm_head_VD)
    with ColocatedEngine(actor.path, folder, engine_config) as engine:
        yield engine


def drafter_of(engine: ColocatedEngine) -> Any:
    return engine._running().llm_engine.model_executor.driver_worker.worker.model_runner.drafter


def expected_q(
    actor: Actor,
    heads: MedusaHeads,
    prompt: Sequence[int],
    response: Sequence[int],
    at: int,
    drafts_K: torch.Tensor,
    cut: int = 0,
):
    """q of every head at a row of a response, as replay sees it: its context are the pairs of the
    response alone.
    """
    text = torch.tensor([[*prompt, *response]])
    hidden_TD = actor.model.model(input_ids=text).last_hidden_state[0, len(prompt) - 1 : -1]
    ids_T = torch.tensor(response)
    rows_1n = context_rows(torch.zeros_like(ids_T), PAIRS)[at : at + 1].clone()
    rows_1n[:, : PAIRS - cut if cut else 0] = -1
    condition_1K = torch.cat([ids_T[at : at + 1], drafts_K[:-1]])[None]
    table_VD = actor.model.model.embed_tokens.weight
    context = Context.of(rows_1n, hidden_TD, ids_T)
    logits = heads(
        hidden_TD[at : at + 1],
        actor.lm_head_VD,
        condition=condition_1K,
        embedding_VD=table_VD,
        context=context,
    )
    return logits[0].softmax(-1)


def test_with_a_context_the_engine_draws_from_the_q_that_replay_sees(
    context_engine: ColocatedEngine,
    actor: Actor,
    context_heads: MedusaHeads,
    serving: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every request at many steps, whatever was accepted before; and another q where it looks at
    its own pair alone.
    """
    drafter = drafter_of(context_engine)
    honest = drafter._core.draft
    seen = []

    def draft(*given: Any, **named: Any) -> Any:
        drafted = honest(*given, **named)
        seats = drafter._seats
        rows_B = torch.arange(len(drafted.ids_BK), device=drafted.ids_BK.device)
        q_BKV = torch.stack(
            [drafter._slots.q(rows_B, torch.full_like(rows_B, k)) for k in range(HEADS)], 1
        )
        found = seats.requests_B.clone(), drafter._positions_B.clone(), drafted.ids_BK, q_BKV
        seen.append(tuple(tensor.cpu() for tensor in found))
        return drafted

    monkeypatch.setattr(drafter._core, "draft", draft)
    context_engine.configure(sampled=True, draft_temperature=1.0)
    prompts = actor.prompts[:6]
    rollouts = context_engine.generate(
        prompts, Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    )
    first = min(int(requests_B.min()) for requests_B, *_ in seen)
    apart = []
    alone = []
    for requests_B, positions_B, ids_BK, q_BKV in seen[3::7]:
        for row, (request, position) in enumerate(
            zip(requests_B.tolist(), positions_B.tolist(), strict=True)
        ):
            prompt = prompts[request - first]
            response = rollouts.responses[request - first].token_ids
            at = position - len(prompt) - 1
            if 0 <= at < len(response):
                for cut, found in ((0, apart), (1, alone)):
                    q_KV = expected_q(actor, context_heads, prompt, response, at, ids_BK[row], cut)
                    found.append(float((q_KV - q_BKV[row]).abs().sum(-1).max()))
    near = 1e-2 if serving == CPU else 5e-2  # Its states come from Triton's attention.
    assert len(apart) > 20 and max(apart) < near, (len(apart), max(apart))
    assert sorted(alone)[len(alone) // 2] > 0.1


def tokens(rollouts: Rollouts) -> list[tuple[int, ...]]:
    return [response.token_ids for response in rollouts.responses]


def test_with_a_context_greedy_tokens_are_those_without_drafts(
    context_engine: ColocatedEngine, actor: Actor, serving: str
) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    context_engine.configure(num_drafts=0)
    expected = tokens(context_engine.generate(actor.prompts, greedy))
    for sampled in (False, True):
        context_engine.configure(num_drafts=HEADS, sampled=sampled)
        rollouts = context_engine.generate(actor.prompts, greedy)
        assert rollouts.counters.drafts > 1000
        assert_greedy(actor.model, actor.prompts, tokens(rollouts), expected, TIED[serving])


def test_with_a_context_sampled_tokens_have_the_models_distribution(
    context_engine: ColocatedEngine, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The randomised PIT; drafts that are accepted by a thousandth of the q that they were drawn
    from fail it.
    """
    context_engine.configure(num_drafts=HEADS, sampled=True, draft_temperature=0.7)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    right = Uniformity()
    wrong = Uniformity()
    add_rollouts(right, actor.model, context_engine.generate(actor.prompts, sampling))
    honest = DraftSlots.look_up

    def dishonest(
        slots: DraftSlots, slots_B: torch.Tensor, stamps_B: torch.Tensor, count: int
    ) -> KeptDrafts:
        kept = honest(slots, slots_B, stamps_B, count)
        return replace(kept, q_BK=kept.q_BK * 1e-3)

    monkeypatch.setattr(DraftSlots, "look_up", dishonest)
    add_rollouts(wrong, actor.model, context_engine.generate(actor.prompts, sampling))
    assert right.honest and right.tokens > 3000, right.figures()
    assert not wrong.honest, wrong.figures()


@cpu_alone
def test_an_actor_synced_while_heads_are_prepared_is_the_one_that_they_draft_for(
    context_engine: ColocatedEngine,
    actor: Actor,
    context_heads: MedusaHeads,
    tmp_path: Path,
) -> None:
    """The worker's calls of a feed, with a sync between them."""
    core = context_engine._running().llm_engine.engine_core.engine_core
    greedy = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    hidden_BD = torch.randn(
        5, actor.model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    path = str(tmp_path / "heads")
    save_state(path, actor.random_heads(4, kind="hydra", context=PAIRS).trainable_state())
    found = check_state(path, "heads")

    def prepare() -> None:
        first_of(core.collective_rpc("medusa_feed_ahead", args=(path, [found.checksum])))
        while not first_of(core.collective_rpc("medusa_feed_ready"))["ready"]:
            pass

    def load(version: int) -> list[list[int]]:
        arguments = (path, version, [found.checksum])
        assert first_of(core.collective_rpc("medusa_feed_heads", args=arguments))
        said = context_engine.generate(actor.prompts[:8], greedy)
        assert said.counters.drafts > 0
        return context_engine.probe(hidden_BD.tolist(), list(range(5)))

    state = actor.model.state_dict()
    changed = {
        name: tensor.flip(0) if "embed_tokens" in name else tensor for name, tensor in state.items()
    }
    save_state(tmp_path / "changed", changed)
    save_state(tmp_path / "as before", state)
    context_engine.configure(num_drafts=HEADS, sampled=False)
    try:
        prepare()
        context_engine.sync_actor(tmp_path / "changed", 1)
        fed = load(11)
        context_engine.swap_heads(tmp_path / "heads", 12)
        assert context_engine.probe(hidden_BD.tolist(), list(range(5))) == fed
    finally:
        context_engine.sync_actor(tmp_path / "as before", 2)
        save_state(tmp_path / "first", context_heads.trainable_state())
        context_engine.swap_heads(tmp_path / "first", 13)
    assert context_engine.probe(hidden_BD.tolist(), list(range(5))) != fed
