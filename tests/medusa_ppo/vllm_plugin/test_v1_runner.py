"""What stands in the place of methods of vLLM's V1 model runner."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from medusa_ppo.drafting.verify import Proposed
from medusa_ppo.vllm_plugin import v1_runner
from tests.medusa_ppo.vllm_plugin.test_proposer import D, K, ProposerStep, V


@pytest.mark.parametrize(
    ("sampled", "drafted", "rows"),
    [
        ([[5], [6]], [0, 0], [0, 1]),
        ([[5, 6, 7], [8], []], [2, 1, 0], [2, 3, 5]),
        ([[5, 6]], [3], [1]),
    ],
)
def test_drafts_start_where_a_request_s_last_token_was_sampled(
    sampled: list[list[int]], drafted: list[int], rows: list[int]
) -> None:
    """Three rows where two were drafted and accepted; of two rows the first where the draft was
    refused; one where the prompt goes on.
    """
    hidden_TD = torch.arange(sum(drafted) + len(drafted)).unsqueeze(1).expand(-1, 4)
    assert v1_runner._last_states(hidden_TD, sampled, drafted)[:, 0].tolist() == rows


def test_rows_of_a_step_without_drafts_are_those_that_vllm_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own method as the reference, on the little of its runner that it reads."""
    runner_class = v1_runner.model_runner.GPUModelRunner
    original = inspect.unwrap(runner_class._calc_spec_decode_metadata)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=4,
        arange_np=np.arange(64),
        _arange_scratch=np.zeros(64, dtype=np.int64),
        input_ids=SimpleNamespace(gpu=torch.arange(64, dtype=torch.int32)),
    )
    runner._get_cumsum_and_arange = partial(runner_class._get_cumsum_and_arange, runner)
    counts = np.zeros(4, dtype=np.int32)
    ends = np.array([1, 8, 9, 13], dtype=np.int32)
    monkeypatch.setattr(v1_runner, "_is_ours", lambda _: True)
    ours = v1_runner.few_indices_without_drafts(lambda *_: pytest.fail("there are no drafts"))
    found, expected = ours(runner, counts, ends), original(runner, counts, ends)
    for field in dataclasses.fields(expected):
        value, wanted = getattr(found, field.name), getattr(expected, field.name)
        assert list(value) == list(wanted), field.name
    assert found.max_spec_len == expected.max_spec_len == 0


def a_runner(**changes: Any) -> SimpleNamespace:
    """What a step without drafts reads of vLLM's runner."""
    runner = SimpleNamespace(
        drafter=SimpleNamespace(memory=None, arrive=list),
        input_batch=SimpleNamespace(generators={}),
        use_async_scheduling=False,
        model_config=SimpleNamespace(is_hybrid=False),
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        speculative_config="speculation",
    )
    vars(runner).update(changes)
    return runner


def scheduled(**changes: Any) -> SimpleNamespace:
    found = SimpleNamespace(
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[],
        total_num_scheduled_tokens=2,
        num_scheduled_tokens={"a": 1, "b": 1},
        num_spec_tokens_to_schedule=4,
    )
    vars(found).update(changes)
    return found


@pytest.mark.parametrize(
    ("of_runner", "of_step"),
    [
        ({}, {"scheduled_spec_decode_tokens": {"a": [5]}, "total_num_scheduled_tokens": 3}),
        ({}, {"scheduled_new_reqs": [SimpleNamespace(req_id="b")]}),
        ({}, {"total_num_scheduled_tokens": 40}),
        ({"input_batch": SimpleNamespace(generators={0: "of a seed"})}, {}),
        ({"use_async_scheduling": True}, {}),
        ({"model_config": SimpleNamespace(is_hybrid=True)}, {}),
        ({"vllm_config": SimpleNamespace(kv_transfer_config="a connector")}, {}),
        ({"drafter": SimpleNamespace(memory="counts")}, {}),
    ],
)
def test_what_needs_speculation_keeps_it(
    monkeypatch: pytest.MonkeyPatch, of_runner: dict[str, Any], of_step: dict[str, Any]
) -> None:
    monkeypatch.setattr(v1_runner, "_is_ours", lambda _: True)
    seen = []
    run = v1_runner.with_plain_steps(lambda self, step: seen.append(self.speculative_config))
    run(a_runner(), scheduled())
    run(a_runner(**of_runner), scheduled(**of_step))
    assert seen == [None, "speculation"]


def test_the_drafter_hears_of_new_requests_whose_ids_may_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(v1_runner, "_is_ours", lambda _: True)
    heard: list[str] = []
    run = v1_runner.with_plain_steps(lambda self, step: None)
    runner = a_runner(drafter=SimpleNamespace(memory=None, arrive=heard.extend))
    run(runner, scheduled())
    run(runner, scheduled(scheduled_new_reqs=[SimpleNamespace(req_id=key) for key in "bc"]))
    assert heard == ["b", "c"]


@pytest.mark.parametrize("drafts", [[[], []], torch.tensor([[1, 2], [3, 4]]), [[7], []]])
def test_after_a_plain_step_drafts_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, drafts: Any
) -> None:
    """And the scheduler is told where there are any."""
    monkeypatch.setattr(v1_runner, "_is_ours", lambda _: True)
    monkeypatch.setattr(v1_runner, "_seat", lambda _: None)
    asked: list[Any] = []
    drafter = SimpleNamespace(
        memory=None,
        before_step=lambda *args: asked.append(args),
        propose=lambda *args: (asked.append(args), drafts)[1],
    )
    told: list[Any] = []
    runner = a_runner(drafter=drafter, _copy_draft_token_ids_to_cpu=told.append)
    runner.input_batch.sampling_metadata = "sampling"
    step = scheduled()
    hidden_BD = torch.zeros(2, 3)
    runner.execute_model_state = SimpleNamespace(
        scheduler_output=step, sample_hidden_states=hidden_BD
    )
    v1_runner.with_plain_steps(lambda *_: None)(runner, step)

    def sampled(self: Any, grammar: Any) -> Any:
        assert self.speculative_config is None
        return SimpleNamespace(sampled_token_ids=[[5], [6]])

    v1_runner.with_drafts_after_plain_steps(sampled)(runner, None)
    assert runner.speculative_config == "speculation"
    assert asked == [([[5], [6]], [0, 0], 2, hidden_BD, ()), (4, hidden_BD, "sampling")]
    empty = isinstance(drafts, list) and not any(drafts)
    assert told == ([] if empty else [step])
    if told:
        assert runner._draft_token_ids is drafts


@pytest.mark.parametrize(
    ("verified", "placeholders"),
    [
        ({"a": [4, 5], "b": [6]}, ()),
        ({"a": [4, 5], "b": [-1, -1]}, [0, 2]),
        ({"a": [7, -1]}, [1, 0]),
    ],
)
def test_placeholders_are_told_apart_from_drafts(
    monkeypatch: pytest.MonkeyPatch, verified: dict[str, list[int]], placeholders: list[int]
) -> None:
    """They have rows, as drafts have, but nobody drafted them."""
    monkeypatch.setattr(v1_runner, "_is_ours", lambda _: True)
    told: list[Any] = []
    monkeypatch.setattr(v1_runner, "_drafts_after", lambda *args: told.append(args[3:]))
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]))
    step = SimpleNamespace(scheduled_spec_decode_tokens=verified)

    def stock(self: Any, scheduler_output: Any, sampled_token_ids: Any, sample_hidden_states: Any):
        raise AssertionError("ours drafts")

    v1_runner.with_draft_context(stock)(runner, step, [[1], [2]], sample_hidden_states="states")
    counts = [len(verified.get(key, ())) for key in ("a", "b")]
    assert told == [(counts, "states", placeholders)]


def test_a_step_that_fails_leaves_speculation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1_runner, "_is_ours", lambda _: True)
    runner = a_runner()

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        v1_runner.with_plain_steps(fails)(runner, scheduled())
    assert runner.speculative_config == "speculation"


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("copy_parts", [0, 2])
def test_the_memory_profile_sees_a_full_batch_with_all_drafts(
    sampled: bool, copy_parts: int
) -> None:
    """vLLM's own has one draft a request, and no q."""
    batch = 4
    step = ProposerStep(batch, pairs=3 if copy_parts else 0, copy_parts=copy_parts)
    step.proposer.sampled = sampled
    step.proposer._use_vocabulary()
    verified: list[tuple[Any, ...]] = []
    sampling = SimpleNamespace(temperature=torch.ones(batch))

    def original(self: Any, hidden_ND: torch.Tensor) -> str:
        return self.rejection_sampler("one draft each", None, hidden_ND, sampling)

    runner = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        drafter=step.proposer,
        model=SimpleNamespace(compute_logits=step.logits),
        rejection_sampler=lambda *args: verified.append(args),
    )
    profiled = v1_runner.with_drafts_profiled(original)
    with torch.inference_mode():
        profiled(runner, torch.zeros(batch, D))
    assert [args[0] for args in verified[:1]] == ["one draft each"] and len(verified) == 2
    meta, proposed, logits_NV, asked = verified[1]
    assert meta.num_draft_tokens == [K] * batch and asked is sampling
    assert logits_NV.shape == (batch * (K + 1), V)
    assert isinstance(proposed, Proposed) == sampled
    if sampled:
        assert proposed.q.sampled_BK.all() and proposed.uniforms_BW.shape == (batch, K + 1)
        assert not (step.proposer._slots.stamps_R >= 0).any(), "nobody's drafts are kept"
    runner.device = SimpleNamespace(type="cpu")
    profiled(runner, torch.zeros(batch, D))
    assert len(verified) == 3, "vLLM's CPU build profiles nothing"
