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
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.slots import DraftSlots, KeptDrafts
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import Uniformity, add_rollouts
from medusa_ppo.engines.rollout_engine import check_state
from medusa_ppo.vllm_plugin.worker_calls import first_of
from tests.medusa_ppo.conftest import CPU, cpu_alone
from tests.medusa_ppo.engines.conftest import (
    HEADS,
    TIED,
    Actor,
    DrawnDrafts,
    assert_greedy,
    tokens,
    watch_drafts,
)

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


@pytest.fixture(scope="module", params=["context", "default"])
def context_heads(request: pytest.FixtureRequest, actor: Actor) -> MedusaHeads:
    """Random ones that read their context, alone or beside what they copy: what each says is as
    large as the state.
    """
    if request.param == "default":
        return actor.default_heads(3, size=1.0)
    heads = actor.random_heads(3, kind="hydra", context=PAIRS)
    heads.context_out.mul_(20)
    return heads


default_heads_alone = pytest.mark.parametrize("context_heads", ["default"], indirect=True)
"""For a test of what heads with a context have in common; those that copy have all of it."""


@pytest.fixture(scope="module")
def context_engine(
    actor: Actor,
    context_heads: MedusaHeads,
    engine_config: EngineConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ColocatedEngine]:
    folder = tmp_path_factory.mktemp("context") / "heads"
    save_heads(folder, context_heads, lm_head_VD=actor.lm_head_VD)
    # Fewer tokens in a step than long prompts have together, and a cache of prompts, which a CPU
    # has only where it is asked for.
    more = {"enable_prefix_caching": True, "max_num_batched_tokens": 1024}
    config = engine_config.model_copy(update={"extra": engine_config.extra | more})
    with ColocatedEngine(actor.path, folder, config) as engine:
        yield engine


def assert_drawn_as_replayed(
    actor: Actor, heads: MedusaHeads, seen: Sequence[DrawnDrafts], serving: str
) -> None:
    """Every q is what replay sees, and is another one without the context, or without copying."""
    near = 1e-2 if serving == CPU else 5e-2  # Its states come from Triton's attention.
    apart = []
    alone = []
    uncopied = []
    for drawn in seen:
        given = heads, drawn.prompt, drawn.response, drawn.ids_K

        def off(q_KV: torch.Tensor, drawn: DrawnDrafts = drawn) -> float:
            return float((q_KV - drawn.q_KV).abs().sum(-1).max())

        apart.append(off(actor.replayed_q(*given)))
        alone.append(off(actor.replayed_q(*given, pairs=1)))
        uncopied.append(off(actor.replayed_q(*given, copies=False)))
    assert len(apart) > 20 and max(apart) < near, (len(apart), sorted(apart)[-5:])
    assert sorted(alone)[len(alone) // 2] > 0.1
    assert not heads.config.copies or sorted(uncopied)[len(uncopied) // 2] > 0.1


def watch_cached(manager: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that fills with the prompt tokens that each new request finds in the cache."""
    found: list[int] = []
    original = manager.get_computed_blocks

    def get_computed_blocks(*given: Any) -> Any:
        result = original(*given)
        found.append(int(result[1]))
        return result

    monkeypatch.setattr(manager, "get_computed_blocks", get_computed_blocks)
    return found


@pytest.mark.parametrize("how", ["short prompts", "siblings", "long prompts", "known prompts"])
def test_with_a_context_the_engine_draws_from_the_q_that_replay_sees(
    context_engine: ColocatedEngine,
    actor: Actor,
    context_heads: MedusaHeads,
    serving: str,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Of every request at many steps, whatever was accepted before, whether its prompt came in one
    step, in several, or from the cache.
    """
    prompts = actor.prompts[:6]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    if how == "siblings":
        sampling = replace(sampling, responses_per_prompt=3, seed=4)
    elif how != "short prompts":
        prompts = [(prompt * 9)[:400] for prompt in prompts]
    context_engine._forget_prompts()
    context_engine.configure(num_drafts=HEADS, sampled=True, draft_temperature=1.0)
    if how == "known prompts":
        context_engine.generate(prompts, replace(sampling, max_new_tokens=1))
    scheduler = context_engine._running().llm_engine.engine_core.engine_core.scheduler
    cached = watch_cached(scheduler.kv_cache_manager, monkeypatch)
    seen = watch_drafts(context_engine, monkeypatch)
    context_engine.generate(prompts, sampling)
    if how == "long prompts":
        assert sum(map(len, prompts)) > scheduler.max_num_scheduled_tokens and not any(cached)
    elif how == "known prompts":
        assert len(cached) == len(prompts) and min(cached) > 200
    assert_drawn_as_replayed(actor, context_heads, seen[:: max(1, len(seen) // 40)], serving)


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


@default_heads_alone
def test_seeded_responses_are_the_same_in_any_company(
    context_engine: ColocatedEngine, actor: Actor, serving: str
) -> None:
    """With siblings, and with prompts that come in several steps or from the cache."""
    context_engine.configure(num_drafts=HEADS, sampled=True)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, responses_per_prompt=2, seed=9)
    prompts = [*actor.prompts[:8], *((prompt * 9)[:400] for prompt in actor.prompts[:8])]
    context_engine._forget_prompts()
    first = context_engine.generate(prompts, sampling)
    context_engine._forget_prompts()
    assert context_engine.generate(prompts, sampling).responses == first.responses
    known = context_engine.generate(prompts, sampling)
    assert len({response.token_ids for response in first.responses}) > 24
    assert first.counters.accepted > 20
    few = context_engine.generate(prompts[:4], sampling)
    if serving == CPU:  # On a GPU a product of another shape is rounded differently.
        # So is attention to a cached prompt, here and there to another token.
        other = [a != b for a, b in zip(tokens(known), tokens(first), strict=True)]
        assert not any(other[:16]) and sum(other) <= 4, other
        assert tokens(few) == tokens(first)[:8]


@default_heads_alone
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
    save_state(path, actor.default_heads(4, size=1.0).trainable_state())
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
