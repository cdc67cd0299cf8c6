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
