"""The real engine: greedy equality, honest sampling, swaps and syncs that show in what is drafted
and sampled.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from heads.checkpoint import checksum, save_state
from heads.errors import ConfigError, EngineError, SwapError
from heads.modules import MedusaHeads
from medusa_ppo.contract.rollouts import Response, Rollouts, Sampling
from medusa_ppo.contract.status import Checked
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.pieces import UNFINISHED, Partly, SharedMemory
from medusa_ppo.engines.probe import Uniformity
from medusa_ppo.engines.rollout_engine import check_state
from medusa_ppo.runtime import files
from medusa_ppo.vllm_plugin import installation, patches, v1_runner
from medusa_ppo.vllm_plugin import registration as plugin
from medusa_ppo.vllm_plugin.vllm_versions import has_medusa, release, vllm_version
from tests.medusa_ppo.conftest import CPU, cpu_alone
from tests.medusa_ppo.engines.conftest import (
    NEAR,
    TIED,
    assert_greedy,
    drafted_nothing,
    honesty_z,
    most_placeholders,
    sampled_rows,
    tokens,
)
from tests.medusa_ppo.vllm_plugin.deep_sleep import tensors_of, throw_away

if TYPE_CHECKING:
    from tests.medusa_ppo.engines.conftest import Actor

pytestmark = pytest.mark.engine
# Its stand-in for a Triton kernel does not take USE_FP64_GUMBEL, which the sampler passes: any
# speculation ends in a TypeError.
stock_speculates = pytest.mark.skipif(
    release(vllm_version()) < (0, 26) or not has_medusa(vllm_version()),
    reason="vLLM's CPU build of this release can't without patches, or has no Medusa",
)
GREEDY = Sampling(temperature=0.0, max_new_tokens=64, ignore_eos=True)


def assert_as_greedy(
    actor: Actor,
    serving: str,
    found: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    model: Any = None,
) -> None:
    """Responses to the first of the actor's prompts: the same, up to ties on a GPU."""
    assert_greedy(model or actor.model, actor.prompts, found, expected, TIED[serving])


def swap(engine: ColocatedEngine, state: dict[str, torch.Tensor], path: Path, version: int) -> str:
    save_state(path, state)
    receipt = engine.swap_heads(path, version)
    assert receipt.version == version
    assert receipt.checksum == checksum(state) == engine.checksums()["heads"]
    return receipt.checksum


def drafted(actor: Actor, heads: MedusaHeads, hidden_BD: torch.Tensor) -> list[list[int]]:
    """What these heads must draft, computed outside the engine."""
    none_B = torch.zeros(len(hidden_BD), dtype=torch.int64)
    return (
        DraftingCore(heads, lambda f: f @ actor.lm_head_VD.T)
        .draft(hidden_BD, none_B, 4)
        .ids_BK.tolist()
    )


def test_the_plugin_is_active_where_the_model_runs(engine: ColocatedEngine, serving: str) -> None:
    report = engine.plugin_report()
    assert report["pid"] == os.getpid()
    assert report["drafter"] == "MedusaProposer"
    if serving == CPU:
        patched = {"temperatures of drafts", "top-k without drafts", "small AMX products"}
        assert patched <= set(report["patches"])


def test_greedy_tokens_are_the_same_with_and_without_drafting(
    engine: ColocatedEngine, actor: Actor, serving: str
) -> None:
    drafting = engine.generate(actor.prompts, GREEDY)
    engine.configure(num_drafts=0)
    results = {0: engine.generate(actor.prompts, GREEDY)}
    engine.configure(num_drafts=2)
    engine.configure(sampled=True)
    results[2] = engine.generate(actor.prompts[:16], GREEDY)
    assert_as_greedy(actor, serving, tokens(drafting), tokens(results[0]))
    assert_as_greedy(actor, serving, tokens(results[2]), tokens(results[0])[:16])
    assert sum(len(t) for t in tokens(drafting)) == 64 * 64
    assert drafting.counters.accepted > 50
    assert drafting.counters.accepted == sum(drafting.counters.accepted_per_position)
    assert drafted_nothing(results[0], serving)
    placeholders = results[2].counters.draft_tokens - 2 * results[2].counters.drafts
    assert 0 <= placeholders <= most_placeholders(results[2], serving)
    assert results[2].counters.accepted_per_position[2:] == (0, 0)
    assert (drafting.num_drafts, results[0].num_drafts) == (4, 0)


@contextmanager
def unpatched() -> Iterator[None]:
    """vLLM as it comes, under the running engine; our proposer stays with its heads."""
    installation.uninstall()
    try:
        yield
    finally:
        plugin.register()


SETTINGS = {
    "T=1": Sampling(1.0, max_new_tokens=48, ignore_eos=True, seed=11),
    "T=0.7": Sampling(0.7, max_new_tokens=48, ignore_eos=True, seed=12),
    "top-p": Sampling(1.0, top_p=0.8, max_new_tokens=48, ignore_eos=True, seed=13),
    "top-k": Sampling(0.9, top_k=10, max_new_tokens=48, ignore_eos=True, seed=14),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_with_drafts_is_honest(
    engine: ColocatedEngine, actor: Actor, serving: str, name: str, sampled: bool
) -> None:
    sampling = SETTINGS[name]
    engine.configure(sampled=sampled)
    rollouts = engine.generate(actor.prompts[:40], sampling)
    logits_MV, ids_M = sampled_rows(actor.model, rollouts)
    assert rollouts.counters.drafts > 1000
    assert abs(honesty_z(logits_MV, ids_M, sampling)) < 3
    if name in ("T=1", "T=0.7"):
        expected_M = torch.log_softmax(logits_MV / sampling.temperature, -1).gather(
            1, ids_M[:, None]
        )[:, 0]
        seen_M = torch.tensor(
            [value for response in rollouts.responses for value in response.logprobs]
        )
        assert float((expected_M - seen_M).abs().max()) < NEAR[serving]


@cpu_alone
@stock_speculates
def test_without_the_mend_the_same_statistic_fails(
    engine: ColocatedEngine, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SETTINGS["T=0.7"]
    sampling = Sampling(sampling.temperature, max_new_tokens=32, ignore_eos=True)
    with unpatched(), monkeypatch.context() as patch:
        patch.setattr(
            "medusa_ppo.engines.rollout_engine.math.isfinite", lambda value: True
        )  # It gives tokens a probability of 0, too.
        rollouts = engine.generate(actor.prompts[:32], sampling)
    logits_MV, ids_M = sampled_rows(actor.model, rollouts)
    assert abs(honesty_z(logits_MV, ids_M, sampling)) > 10
    again = engine.generate(actor.prompts[:32], sampling)
    assert abs(honesty_z(*sampled_rows(actor.model, again), sampling)) < 4


@cpu_alone
def test_without_the_mend_top_k_kills_the_step(engine: ColocatedEngine, actor: Actor) -> None:
    """Only the guard is taken out, at the place where vLLM calls it."""
    original = installation.INSTALLED.places[
        "vllm.v1.sample.rejection_sampler.apply_sampling_constraints"
    ][-1]
    metadata = type(
        "M",
        (),
        {
            "all_greedy": False,
            "temperature": torch.ones(2),
            "top_k": torch.tensor([3, 3]),
            "top_p": None,
        },
    )()
    empty = torch.empty(0, 8)
    ends = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        original(empty.clone(), ends, metadata)
    assert patches.rejection_sampler.apply_sampling_constraints(empty, ends, metadata).shape == (
        0,
        8,
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_seeded_calls_repeat_and_unseeded_ones_do_not(
    engine: ColocatedEngine, actor: Actor, alike: Callable[..., None], sampled: bool
) -> None:
    engine.configure(sampled=sampled)
    seeded = Sampling(1.0, max_new_tokens=24, responses_per_prompt=2, seed=5)
    alike(engine)
    first = engine.generate(actor.prompts[:10], seeded)
    alike(engine)
    second = engine.generate(actor.prompts[:10], seeded)
    assert first.responses == second.responses
    assert [r.prompt_index for r in first.responses] == [i for i in range(10) for _ in range(2)]
    assert all(
        a.token_ids != b.token_ids
        for a, b in zip(first.responses[::2], first.responses[1::2], strict=True)
    )
    free = Sampling(1.0, max_new_tokens=24)
    assert tokens(engine.generate(actor.prompts[:8], free)) != tokens(
        engine.generate(actor.prompts[:8], free)
    )


def test_responses_come_as_they_end_and_are_the_same(
    engine: ColocatedEngine, actor: Actor, serving: str, alike: Callable[..., None]
) -> None:
    """More requests than run at once: the short ones are told while others have not begun, and
    nobody's tokens change.
    """
    engine.configure(sampled=True)
    sampling = Sampling(1.0, max_new_tokens=48, responses_per_prompt=2, seed=5)
    alike(engine)
    whole = engine.generate(actor.prompts[:40], sampling)
    told = list[tuple[int, Response]]()
    alike(engine)
    again = engine.generate_as_finished(
        actor.prompts[:40], sampling, lambda place, response: told.append((place, response))
    )
    assert (
        again.responses == whole.responses
        and again.counters == whole.counters
        and again.counters.drafts > 0
    )
    assert sorted(place for place, _ in told) == list(range(80)) and dict(told) == dict(
        enumerate(whole.responses)
    )
    assert [place for place, _ in told] != list(range(80)), "in the order in which they ended"
    steps = engine.generate_in_steps(actor.prompts[:40], sampling)
    assert 0 < len(next(steps)) < 80
    steps.close()
    assert not engine._llm.llm_engine.has_unfinished_requests(), (
        "who goes away leaves nothing behind"
    )
    few = engine.generate(actor.prompts[:4], sampling).responses
    # In other company: the same numbers on a CPU alone.
    assert serving != CPU or few == whole.responses[:8]


def test_a_batch_stops_half_way_and_goes_on_with_another_actor(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path
) -> None:
    """The randomised PIT of each token against the version that wrote it; against the other one it
    fails.
    """
    sampling = Sampling(1.0, max_new_tokens=96, responses_per_prompt=2, seed=5)
    models = [actor.model, copy.deepcopy(actor.model)]
    models[1].lm_head.weight.data.mul_(0.8)
    for part in models[1].model.layers:
        part.mlp.down_proj.weight.data.mul_(1.2)
    engine.configure(sampled=True)
    nothing = tuple(Response(place // 2, (), (), UNFINISHED) for place in range(80))
    prompts = actor.prompts[:40]
    engine._forget_prompts()  # As after a sync: what is cached begins to be answered sooner.
    first = engine.generate_partly(prompts, sampling, Partly(nothing, 10))
    assert not engine._llm.llm_engine.has_unfinished_requests(), (
        "what was stopped leaves nothing behind"
    )
    answered = {
        i
        for i in range(40)
        if all(r.finish_reason != UNFINISHED for r in first.responses[2 * i :][:2])
    }
    assert 10 <= len(answered) < 40 and first.counters.drafts > 0 and first.policy_version == 0
    engine._forget_prompts()
    again = engine.generate_partly(prompts, sampling, Partly(nothing, 10))
    assert again.responses == first.responses, "it does not depend on the clock"

    save_state(tmp_path / "next.safetensors", models[1].state_dict())
    engine.sync_actor(tmp_path / "next.safetensors", 1)
    rest = engine.generate_partly(
        prompts, replace(sampling, seed=6), Partly(first.responses, 0, frozenset(range(40)))
    )
    begun = [len(response.token_ids) for response in first.responses]
    assert all(r.finish_reason != UNFINISHED and len(r.token_ids) <= 96 for r in rest.responses)
    assert rest.generated_tokens == sum(len(r.token_ids) for r in rest.responses) - sum(begun) > 500
    for was, now in zip(first.responses, rest.responses, strict=True):
        assert (
            now.token_ids[: len(was.token_ids)] == was.token_ids
            and now.logprobs[: len(was.logprobs)] == was.logprobs
        )
        assert was.finish_reason == UNFINISHED or now == was
    assert (
        sum(0 < count < len(r.token_ids) for count, r in zip(begun, rest.responses, strict=True))
        > 10
    ), "of both versions"
    tests = judged_by_writer(models, rest, begun, NEAR[serving])
    assert tests["writer"].honest and tests["writer"].tokens > 3000, tests["writer"].figures()
    assert not tests["other"].honest, "a wrong version would be seen"


@torch.no_grad()
def judged_by_writer(
    models: list[Any], rollouts: Rollouts, begun: list[int], near: float
) -> dict[str, Uniformity]:
    """All tokens against the model that wrote them, and against the other one; `begun`: so many of
    each are of the first model. `near`: of the writer's log-probs.
    """
    tests = {"writer": Uniformity(), "other": Uniformity()}
    for response, count in zip(rollouts.responses, begun, strict=True):
        prompt = rollouts.prompts[response.prompt_index]
        ids_M = torch.tensor(response.token_ids)
        logits = [
            model(input_ids=torch.tensor([[*prompt, *response.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
            for model in models
        ]
        for name, (early, late) in zip(tests, (logits, logits[::-1]), strict=True):
            logits_MV = torch.cat([early[:count], late[count:]])
            tests[name].add(logits_MV, ids_M, rollouts.sampling)
            if name == "writer":
                said_M = logits_MV.log_softmax(-1).gather(1, ids_M[:, None])[:, 0]
                torch.testing.assert_close(
                    torch.tensor(response.logprobs), said_M, rtol=0, atol=near
                )
    return tests


def test_the_number_of_drafts_holds_up_to_the_end_of_the_context(
    engine: ColocatedEngine, actor: Actor
) -> None:
    """Close to max_model_len vLLM has K drafts of token 0 for everyone, whatever was asked for."""
    longest = engine._llm.llm_engine.vllm_config.model_config.max_model_len
    prompts = [(prompt * 20)[: longest - 12] for prompt in actor.prompts[:6]]
    engine.configure(num_drafts=1, sampled=True)
    rollouts = engine.generate(prompts, Sampling(1.0, max_new_tokens=12, ignore_eos=True))
    assert all(len(response.token_ids) == 12 for response in rollouts.responses)
    assert (
        rollouts.counters.drafts > 0 and rollouts.counters.draft_tokens == rollouts.counters.drafts
    )
    engine.configure(num_drafts=0)
    assert (
        engine.generate(prompts, Sampling(1.0, max_new_tokens=12, ignore_eos=True)).counters.drafts
        == 0
    )


def test_top_k_beside_a_draft_vocabulary(engine: ColocatedEngine, actor: Actor) -> None:
    """A request without top-k counts in the whole vocabulary, and its neighbour with one brings the
    filter for both.
    """
    from vllm import SamplingParams

    engine.configure(sampled=True, draft_vocab=40)
    engine.generate(actor.prompts[:40], SETTINGS["T=1"])  # Enough tokens for the map.
    params = [
        SamplingParams(temperature=1.0, top_k=5 if index % 2 else 0, max_tokens=24, ignore_eos=True)
        for index in range(4)
    ]
    outputs = engine._llm.generate(
        [{"prompt_token_ids": prompt} for prompt in actor.prompts[:4]], params, use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * 4


def test_seeds_survive_chunked_prefill(engine: ColocatedEngine, actor: Actor) -> None:
    """More prompt tokens than one step takes: on the CPU build a seeded request there dies without
    the patch.
    """
    long = [prompt * 4 for prompt in actor.prompts if len(prompt) < 100][:24]
    limit = engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert sum(map(len, long)) > limit
    sampling = Sampling(1.0, max_new_tokens=8, seed=9)
    # Both from an empty cache: on some CPUs products of another shape are rounded differently.
    engine._forget_prompts()
    first = engine.generate(long, sampling)
    engine._forget_prompts()
    assert first.responses == engine.generate(long, sampling).responses


def test_responses_end_where_the_model_ends(engine: ColocatedEngine, actor: Actor) -> None:
    rollouts = engine.generate(actor.prompts[:12], Sampling(0.7, max_new_tokens=200, seed=1))
    reasons = {response.finish_reason for response in rollouts.responses}
    assert "stop" in reasons
    for response in rollouts.responses:
        assert (response.token_ids[-1] == 0) == (response.finish_reason == "stop")
        assert 0 not in response.token_ids[:-1]
        assert len(response.logprobs) == len(response.token_ids)
        assert max(response.logprobs) <= 0


def test_requests_with_penalties_and_min_tokens_go_through_vllms_own_path(
    engine: ColocatedEngine, actor: Actor, alike: Callable[..., None]
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0,
        max_tokens=40,
        min_tokens=40,
        repetition_penalty=1.3,
        stop_token_ids=[0],
        detokenize=False,
        seed=3,
    )
    requests = [{"prompt_token_ids": prompt} for prompt in actor.prompts[:16]]
    alike(engine)
    outputs = engine._llm.generate(requests, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
    alike(engine)
    repeated = engine._llm.generate(requests, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in repeated]


def test_new_heads_draft_at_once_and_the_counters_show_it(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    hidden_BD = torch.randn(6, actor.lm_head_VD.shape[1])
    before = engine.generate(actor.prompts[:16], GREEDY)
    first_drafts = engine.probe(hidden_BD.tolist(), [0] * 6)
    other = actor.random_heads(seed=8)
    swap(engine, other.trainable_state(), tmp_path / "a.safetensors", 1)
    assert (
        engine.probe(hidden_BD.tolist(), [0] * 6)
        == drafted(actor, other, hidden_BD)
        != first_drafts
    )
    during = engine.generate(actor.prompts[:16], GREEDY)
    trained = heads_that_know(actor, before)
    swap(engine, trained.trainable_state(), tmp_path / "b.safetensors", 2)
    after = engine.generate(actor.prompts[:16], GREEDY)
    assert_as_greedy(actor, serving, tokens(during), tokens(before))
    assert_as_greedy(actor, serving, tokens(after), tokens(before))
    assert after.counters.mean_acceptance_length > 1.5
    assert after.counters.mean_acceptance_length > before.counters.mean_acceptance_length + 0.3
    assert during.counters != before.counters
    assert (before.heads_version, during.heads_version, after.heads_version) == (0, 1, 2)
    swap(engine, actor.first_heads().trainable_state(), tmp_path / "c.safetensors", 3)
    assert engine.probe(hidden_BD.tolist(), [0] * 6) == first_drafts
    again = engine.generate(actor.prompts[:16], GREEDY)
    assert serving != CPU or again.counters == before.counters


@pytest.mark.parametrize("choose", [False, True])
def test_heads_that_learned_nothing_draft_nothing(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path, choose: bool
) -> None:
    """They cost as much as good ones: half of a run's first steps, before its first version."""
    expected = tokens(engine.generate(actor.prompts[:8], GREEDY))
    engine.configure(choose=choose)
    zeros = {
        name: torch.zeros_like(value)
        for name, value in actor.first_heads().trainable_state().items()
    }
    swap(engine, zeros, tmp_path / "zeros.safetensors", 1)
    silent = engine.generate(actor.prompts[:8], GREEDY)
    assert drafted_nothing(silent, serving) and silent.heads_version == 1
    assert_as_greedy(actor, serving, tokens(silent), expected)
    engine.configure(choose=False)
    swap(engine, actor.first_heads().trainable_state(), tmp_path / "first.safetensors", 2)
    assert engine.generate(actor.prompts[:8], GREEDY).counters.drafts > 0


def heads_that_know(actor: Actor, rollouts: Rollouts) -> object:
    """Heads trained for a few seconds on exactly these responses."""
    heads = actor.random_heads(0, scale=0.0).requires_grad_(True)
    hidden = []
    targets = []
    with torch.no_grad():
        for response in rollouts.responses:
            row = torch.tensor([[*rollouts.prompts[response.prompt_index], *response.token_ids]])
            states = actor.model.model(input_ids=row).last_hidden_state[0]
            start = len(rollouts.prompts[response.prompt_index]) - 1
            for t in range(start, row.shape[1] - 5):
                hidden.append(states[t])
                targets.append(row[0, t + 2 : t + 6])
    hidden_ND = torch.stack(hidden)
    targets_NK = torch.stack(targets)
    optimizer = torch.optim.Adam(heads.parameters(), lr=5e-3)
    torch.manual_seed(0)
    for _ in range(60):
        rows = torch.randperm(len(hidden_ND))[:256]
        logits_NKV = heads(hidden_ND[rows], actor.lm_head_VD)
        loss = torch.nn.functional.cross_entropy(
            logits_NKV.flatten(0, 1), targets_NK[rows].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.requires_grad_(False)


def in_flight(
    engine: ColocatedEngine, actor: Actor, change: Callable[[int], object]
) -> list[tuple[int, ...]]:
    """16 greedy responses of an engine that is stepped by hand; `change` is called at every third
    step, between two steps.
    """
    from vllm import SamplingParams

    core = engine._llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(actor.prompts[:16]):
        core.add_request(f"flight-{i}", {"prompt_token_ids": prompt}, params)
    finished = {}
    steps = 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[int(output.request_id.split("-")[1])] = tuple(output.outputs[0].token_ids)
        steps += 1
        if steps % 3 == 0:
            change(steps // 3)
    assert steps > 12
    return [finished[i] for i in range(16)]


def test_heads_swapped_in_flight_leave_the_responses_alone(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path
) -> None:
    reference = engine.generate(actor.prompts[:16], GREEDY)
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for i, file in enumerate(files):
        save_state(file, actor.random_heads(seed=i).trainable_state())
    found = in_flight(engine, actor, lambda number: engine.swap_heads(files[number % 2], number))
    assert_as_greedy(actor, serving, found, tokens(reference))


def test_an_actor_synced_in_flight_ends_no_request(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path
) -> None:
    """Running requests go on with the new weights, their keys and values computed anew; the aliased
    lm_head drafts on.
    """
    reference = engine.generate(actor.prompts[:16], GREEDY)
    moved = copy.deepcopy(actor.model)
    torch.manual_seed(3)
    for parameter in moved.parameters():
        parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    same = tmp_path / "same.safetensors"
    new = tmp_path / "new.safetensors"
    save_state(same, actor.model.state_dict())
    save_state(new, moved.state_dict())
    before = engine.counters()
    kept = in_flight(engine, actor, lambda number: engine.sync_actor(same, number))
    assert_as_greedy(actor, serving, kept, tokens(reference))
    after = engine.counters()
    assert after.drafts > before.drafts and after.accepted > before.accepted
    changed = in_flight(engine, actor, lambda number: engine.sync_actor(new, number))
    assert changed != tokens(reference) and all(len(response) == 64 for response in changed)
    assert engine.counters().drafts > after.drafts
    with torch.no_grad():  # What came after the first sync is what the new weights say.
        for prompt, response in zip(actor.prompts[:16], changed, strict=True):
            logits_TV = moved(input_ids=torch.tensor([[*prompt, *response]])).logits[0, -33:-1]
            best_T = logits_TV.max(-1).values
            taken_T = logits_TV.gather(1, torch.tensor(response[-32:])[:, None])[:, 0]
            assert float((best_T - taken_T).max()) < max(1e-3, TIED[serving])


@pytest.mark.parametrize("refreshed", [False, True])
def test_a_truncated_draft_vocabulary_is_lossless_and_follows_the_rollouts(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path, refreshed: bool
) -> None:
    plain = engine.generate(actor.prompts[:8], GREEDY)
    engine.configure(sampled=True, draft_vocab=40)
    engine.generate(actor.prompts[:40], SETTINGS["T=1"])  # Enough tokens for the first map.
    if refreshed:
        swap(
            engine,
            actor.random_heads(seed=3, scale=0.02).trainable_state(),
            tmp_path / "s.safetensors",
            1,
        )
    hidden = torch.randn(200, actor.lm_head_VD.shape[1])
    seen = {token for row in engine.probe(hidden.tolist(), [0] * 200) for token in row}
    assert 1 < len(seen) <= 40
    rollouts = engine.generate(actor.prompts[:40], SETTINGS["T=1"])
    logits_MV, ids_M = sampled_rows(actor.model, rollouts)
    assert abs(honesty_z(logits_MV, ids_M, SETTINGS["T=1"])) < 3
    assert rollouts.counters.accepted > 50 and len(set(ids_M.tolist())) > 40
    again = engine.generate(actor.prompts[:8], GREEDY)
    assert_as_greedy(actor, serving, tokens(again), tokens(plain))
    engine.configure(sampled=False, draft_vocab=0)
    with pytest.raises(ConfigError, match="truncated vocabulary"):
        engine.configure(draft_vocab=-3)


def test_weights_that_a_loop_loads_by_itself_reach_the_drafts(
    engine: ColocatedEngine, actor: Actor
) -> None:
    """By vLLM's own call, and nobody tells us."""
    engine.configure(sampled=True, draft_vocab=40)
    engine.generate(actor.prompts[:40], SETTINGS["T=1"])
    worker = engine._running().llm_engine.model_executor.driver_worker.worker
    drafter = worker.model_runner.drafter
    moved = actor.model.state_dict() | {"lm_head.weight": 2 * actor.lm_head_VD}
    units_DD = torch.eye(actor.lm_head_VD.shape[1], dtype=drafter.dtype, device=drafter.device)
    try:
        worker.reload_weights(weights_iterator=iter(moved.items()))
        engine.generate(actor.prompts[:2], SETTINGS["T=1"])
        vocabulary = drafter.draft_vocabulary
        rows_WD = vocabulary.product(units_DD).T.float().cpu()
        assert rows_WD.shape[0] == 40
        torch.testing.assert_close(
            rows_WD, 2 * actor.lm_head_VD[vocabulary.ids_W.cpu()].float(), atol=1e-2, rtol=1e-2
        )
    finally:
        worker.reload_weights(weights_iterator=iter(actor.model.state_dict().items()))


def test_responses_of_other_engines_are_drafted_from(engine: ColocatedEngine, actor: Actor) -> None:
    prompts = actor.prompts[:16]
    sharp = Sampling(0.3, max_new_tokens=32, seed=5)
    memory = SharedMemory(1 << 20)
    memory.hear(None, engine.generate(prompts, replace(sharp, responses_per_prompt=3)), 0)
    assert engine.remember(memory.rows()) == 0, "it has no memory"
    engine.configure(sampled=True, memory_bytes=1 << 20)
    alone = engine.generate(prompts, replace(sharp, seed=6))
    engine.configure(memory_bytes=0)
    engine.configure(memory_bytes=1 << 20)
    assert engine.remember(memory.rows()) == memory.nbytes
    told = engine.generate(prompts, replace(sharp, seed=6))
    assert told.counters.mean_acceptance_length > alone.counters.mean_acceptance_length + 0.3
    logits_MV, ids_M = sampled_rows(actor.model, told)
    assert abs(honesty_z(logits_MV, ids_M, sharp)) < 3


def test_heads_bring_their_draft_temperatures(
    engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    """The probe after the swap compares the q that serves with the file's; what comes without has
    none.
    """
    engine.configure(sampled=True)
    heads = actor.random_heads(seed=3, scale=0.02)
    heads.temperatures_K.copy_(torch.tensor([0.75, 1.0, 1.5, 2.0]))
    swap(engine, heads.trainable_state(), tmp_path / "own.safetensors", 1)
    rollouts = engine.generate(actor.prompts[:40], SETTINGS["T=1"])
    logits_MV, ids_M = sampled_rows(actor.model, rollouts)
    assert abs(honesty_z(logits_MV, ids_M, SETTINGS["T=1"])) < 3
    heads.temperatures_K.fill_(1.0)
    swap(engine, heads.trainable_state(), tmp_path / "plain.safetensors", 2)
    wrong = {**heads.trainable_state(), "temperatures": torch.zeros(4)}
    save_state(tmp_path / "wrong.safetensors", wrong)
    with pytest.raises(SwapError, match="temperatures"):
        engine.swap_heads(tmp_path / "wrong.safetensors", 3)
    assert engine.heads_version == 2 and engine.checksums()["heads"] == checksum(
        heads.trainable_state()
    )


def test_bad_swap_files_are_refused_and_the_heads_stay(
    engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    good = actor.random_heads(seed=4)
    swap(engine, good.trainable_state(), tmp_path / "good.safetensors", 5)
    hidden = torch.randn(3, actor.lm_head_VD.shape[1])
    state = good.trainable_state()
    name = "blocks.1.layers.0.weight"
    nan = {**state, name: torch.full_like(state[name], torch.nan)}
    cases = {
        "missing": {key: value for key, value in state.items() if key != name},
        "unknown": {**state, "blocks.9.layers.0.weight": state[name].clone()},
        "shape": {**state, name: state[name][:-1].clone()},
        "dtype": {**state, name: state[name].to(torch.int32)},
    }
    for case, bad in cases.items():
        save_state(tmp_path / f"{case}.safetensors", bad)
        with pytest.raises(SwapError):
            engine.swap_heads(tmp_path / f"{case}.safetensors", 6)
    from safetensors.torch import save_file

    save_file(nan, tmp_path / "nan.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-100])
    (tmp_path / "text.safetensors").write_text("no tensors here")
    for case in ("nan", "torn", "text", "absent"):
        with pytest.raises(SwapError):
            engine.swap_heads(tmp_path / f"{case}.safetensors", 6)
    assert engine.probe(hidden.tolist(), [0] * 3) == drafted(actor, good, hidden)
    assert engine.heads_version == 5
    assert engine.checksums()["heads"] == checksum(state)


def test_a_file_that_was_checked_elsewhere_is_confirmed_not_checked_again(
    engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    good = actor.random_heads(seed=7)
    other = actor.random_heads(seed=8)
    hidden = torch.randn(3, actor.lm_head_VD.shape[1])
    swap(engine, good.trainable_state(), tmp_path / "good", 1)
    save_state(tmp_path / "other", other.trainable_state())
    found = check_state(tmp_path / "other", "new heads")
    wrong = Checked(checksum(good.trainable_state()))
    with pytest.raises(SwapError, match="not the one that was checked"):
        engine.swap_heads(tmp_path / "other", 2, wrong)
    assert engine.probe(hidden.tolist(), [0] * 3) == drafted(actor, good, hidden)
    assert (
        engine.swap_heads(tmp_path / "other", 2, found).checksum
        == checksum(other.trainable_state())
        == engine.checksums()["heads"]
    )
    assert engine.probe(hidden.tolist(), [0] * 3) == drafted(actor, other, hidden)

    save_state(tmp_path / "actor", actor.model.state_dict())
    found = check_state(tmp_path / "actor", "the actor's weights")
    with pytest.raises(SwapError, match="not the one that was checked"):
        engine.sync_actor(tmp_path / "actor", 1, wrong)
    assert engine.sync_actor(tmp_path / "actor", 1, found).checksum == checksum(
        actor.model.state_dict()
    )


def test_nothing_reads_the_file_of_an_actor_after_its_sync(
    engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    """The next actor overwrites it while this one generates."""
    file = tmp_path / "actor"
    save_state(file, actor.model.state_dict())
    engine.sync_actor(file, 1)
    before = tokens(engine.generate(actor.prompts[:8], GREEDY))
    size = file.stat().st_size
    with file.open("r+b") as overwritten:
        overwritten.write(b"\xff" * size)
    assert file.stat().st_size == size
    assert engine._forget_prompts()
    assert tokens(engine.generate(actor.prompts[:8], GREEDY)) == before


def drafter_of(engine: ColocatedEngine) -> object:
    return engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter


def test_a_swap_with_the_right_checksum_and_a_wrong_copy_is_caught(
    engine: ColocatedEngine,
    actor: Actor,
    serving: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy puts the heads in another order, and the read-back reads them in that order too:
    only what is drafted shows it.
    """
    reference = engine.generate(actor.prompts[:8], GREEDY)
    good = actor.random_heads(seed=4)
    save_state(tmp_path / "heads.safetensors", good.trainable_state())
    views = MedusaHeads.trainable_views

    def turned(self: MedusaHeads) -> dict[str, torch.Tensor]:
        found = views(self)
        return dict(zip(found, reversed(found.values()), strict=True))

    with monkeypatch.context() as patch:
        patch.setattr(MedusaHeads, "trainable_views", turned)
        with pytest.raises(SwapError, match="does not draft with the heads") as caught:
            engine.swap_heads(tmp_path / "heads.safetensors", 3)
    assert "head 1" in str(caught.value)
    assert engine.heads_version == -1 and engine.checksums()["heads"] == ""
    without = engine.generate(actor.prompts[:8], GREEDY)
    assert drafted_nothing(without, serving) and without.heads_version == -1
    assert_as_greedy(actor, serving, tokens(without), tokens(reference))
    swap(engine, good.trainable_state(), tmp_path / "heads.safetensors", 4)
    assert (
        engine.generate(actor.prompts[:8], GREEDY).counters.drafts > 0 and engine.heads_version == 4
    )


def test_the_probe_leaves_the_engines_random_numbers_alone(
    engine: ColocatedEngine, actor: Actor, device: torch.device, tmp_path: Path
) -> None:
    state = actor.random_heads(seed=4).trainable_state()
    engine.configure(sampled=True)
    of_device = torch.get_rng_state if device.type == "cpu" else torch.cuda.get_rng_state
    before = of_device()
    swap(engine, state, tmp_path / "heads.safetensors", 4)
    assert torch.equal(of_device(), before)


@pytest.fixture
def throwing_sleep(serving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep that loses what a sleep loses: CUDA's own on a GPU. vLLM's CPU build keeps all
    memory, so there the test throws away what CUDA's allocator would.
    """
    if serving != CPU:
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    def asleep(self: CPUWorker, level: int = 1) -> None:
        if level == 2:
            ours = self.model_runner.drafter
            vocabulary = ours.draft_vocabulary
            on_the_host = vocabulary._counts_V, vocabulary._chosen_W, ours._seating
            throw_away(tensors_of(ours, (ours._target, *on_the_host)))

    monkeypatch.setattr(CPUWorker, "sleep", asleep)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_drafts_only_with_heads_that_are_there(
    engine: ColocatedEngine,
    actor: Actor,
    serving: str,
    tmp_path: Path,
    throwing_sleep: None,
    level: int,
) -> None:
    state = actor.random_heads(seed=4).trainable_state()
    swap(engine, state, tmp_path / "heads.safetensors", 3)
    reference = engine.generate(actor.prompts[:8], GREEDY)
    free = 0 if serving == CPU else torch.cuda.mem_get_info()[0]
    engine.sleep(level)
    assert serving == CPU or torch.cuda.mem_get_info()[0] > free, "its memory is given back"
    for call in (
        lambda: engine.generate(actor.prompts[:1], GREEDY),
        engine.checksums,
        lambda: engine.configure(num_drafts=1),
    ):
        with pytest.raises(EngineError, match="asleep"):
            call()
    engine.wake()
    engine.wake()
    if level == 2:
        assert engine.heads_version == -1 and engine.checksums()["heads"] == ""
        with pytest.raises(EngineError, match="no complete actor"):
            engine.generate(actor.prompts[:1], GREEDY)
        save_state(tmp_path / "actor.safetensors", actor.model.state_dict())
        engine.sync_actor(tmp_path / "actor.safetensors", 1)
        without = engine.generate(actor.prompts[:8], GREEDY)
        assert drafted_nothing(without, serving)
        assert_as_greedy(actor, serving, tokens(without), tokens(reference))
        swap(engine, state, tmp_path / "heads.safetensors", 3)
    assert engine.heads_version == 3
    again = engine.generate(actor.prompts[:8], GREEDY)
    assert_as_greedy(actor, serving, tokens(again), tokens(reference))
    assert again.counters.drafts > 0
    assert serving != CPU or again.counters == reference.counters


def test_a_loop_that_wakes_its_own_engine_does_not_draft_with_lost_heads(
    engine: ColocatedEngine, actor: Actor
) -> None:
    """The hook around CUDA's worker, with this engine's worker in the place of one that has just
    been woken.
    """
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    wake_up = v1_runner.with_heads_looked_at(lambda self, tags: "woken")
    assert wake_up(worker) == "woken" and drafter_of(engine).fed
    next(drafter_of(engine).heads.parameters()).data.fill_(7.0)
    wake_up(worker, ["kv_cache"])
    assert drafter_of(engine).fed, "the weights still sleep"
    wake_up(worker, ["weights"])
    assert not drafter_of(engine).fed
    assert engine.generate(actor.prompts[:2], GREEDY).counters.drafts == 0


@cpu_alone
def test_no_entry_of_openmp_is_left_in_shared_memory(engine: ColocatedEngine) -> None:
    entry = files.SHARED_MEMORY / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}"
    entry.touch()  # As the library makes it where it is loaded before torch.
    engine.plugin_report()
    assert not entry.exists()


def test_a_synced_actor_is_what_samples_and_what_drafts(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path
) -> None:
    torch.manual_seed(6)
    moved = copy.deepcopy(actor.model)
    for parameter in moved.parameters():
        parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    greedy_before = engine.generate(actor.prompts[:12], GREEDY)
    hidden = torch.randn(4, actor.lm_head_VD.shape[1])
    save_state(tmp_path / "actor.safetensors", moved.state_dict())
    receipt = engine.sync_actor(tmp_path / "actor.safetensors", 1)
    assert receipt.checksum == checksum(moved.state_dict()) == engine.checksums()["actor"]
    assert engine.policy_version == 1
    sampling = Sampling(1.0, max_new_tokens=48, ignore_eos=True, seed=2)
    rollouts = engine.generate(actor.prompts[:24], sampling)
    logits_MV, ids_M = sampled_rows(moved, rollouts)
    seen_M = torch.tensor([value for response in rollouts.responses for value in response.logprobs])
    new_M = logits_MV.log_softmax(-1).gather(1, ids_M[:, None])[:, 0]
    old_M = sampled_rows(actor.model, rollouts)[0].log_softmax(-1).gather(1, ids_M[:, None])[:, 0]
    assert float((new_M - seen_M).abs().max()) < NEAR[serving]
    assert float((old_M - seen_M).abs().mean()) > 0.05
    assert tokens(engine.generate(actor.prompts[:12], GREEDY)) != tokens(greedy_before)
    # Zero-start heads are the lm_head: what they draft must be the new lm_head's argmax, for every
    # head.
    assert engine.probe(hidden.tolist(), [0] * 4) == [
        [int(i)] * 4 for i in (hidden @ moved.lm_head.weight.T).argmax(-1)
    ]


def test_a_foreign_or_broken_actor_file_is_refused(
    engine: ColocatedEngine, actor: Actor, serving: str, tmp_path: Path
) -> None:
    state = actor.model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    for case, bad in {
        "missing": {k: v for k, v in state.items() if k != name},
        "shape": {**state, name: state[name][:8].clone()},
    }.items():
        save_state(tmp_path / f"{case}.safetensors", bad)
        with pytest.raises(SwapError):
            engine.sync_actor(tmp_path / f"{case}.safetensors", 1)
    from safetensors.torch import save_file

    save_file(
        {**state, name: torch.full_like(state[name], torch.inf)}, tmp_path / "inf.safetensors"
    )
    with pytest.raises(SwapError, match="NaN or infinity"):
        engine.sync_actor(tmp_path / "inf.safetensors", 1)
    assert engine.policy_version == 0
    first = engine.generate(actor.prompts[:4], GREEDY)
    expected = [
        actor.model.generate(
            torch.tensor([p]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )[0, len(p) :]
        for p in actor.prompts[:4]
    ]
    expected = [tuple(row.tolist()) for row in expected]
    assert_as_greedy(actor, serving, [t[:12] for t in tokens(first)], expected)


def test_more_drafts_than_the_engine_has(engine: ColocatedEngine) -> None:
    for count in (-1, 5):
        with pytest.raises(ConfigError):
            engine.configure(num_drafts=count)


@cpu_alone
@pytest.mark.slow
@stock_speculates
def test_stock_vllm_drafts_the_same_from_a_native_folder(
    engine: ColocatedEngine, actor: Actor, tmp_path: Path
) -> None:
    """vLLM without our plugin loads the folder as method=medusa, and its greedy counters are those
    of our own proposer.
    """
    from heads.checkpoint import save_heads

    heads = actor.random_heads(seed=21, scale=0.02)
    save_heads(tmp_path / "heads", heads, lm_head_VD=actor.lm_head_VD)
    swap(engine, heads.trainable_state(), tmp_path / "s.safetensors", 1)
    ours = engine.generate(actor.prompts[:16], GREEDY)
    env = os.environ | {"VLLM_PLUGINS": "none", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    arguments = [
        sys.executable,
        str(Path(__file__).with_name("stock_medusa.py")),
        str(actor.path),
        str(tmp_path / "heads"),
        json.dumps(actor.prompts[:16]),
    ]
    done = subprocess.run(
        arguments, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stock = json.loads(done.stdout.splitlines()[-1])
    assert stock["drafter"] == "vllm.v1.spec_decode.medusa"
    assert [tuple(t) for t in stock["tokens"]] == tokens(ours)
    assert tuple(stock["accepted"]) == ours.counters.accepted_per_position
    assert stock["drafts"] == ours.counters.drafts


def test_a_closed_engine_says_so(actor: Actor, engine_config: object) -> None:
    closed = object.__new__(ColocatedEngine)
    closed._llm = None
    closed.max_drafts = 4
    closed._asleep = False
    with pytest.raises(EngineError, match="closed"):
        closed.counters()
    closed.close()
