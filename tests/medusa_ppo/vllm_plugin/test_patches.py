"""Patches of vLLM on stand-ins for what they replace: those of older releases hold with every
release that is installed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from medusa_ppo.drafting.verify import DraftRows
from medusa_ppo.vllm_plugin.patches import (
    _gather_logprobs,
    drafts_as_lists,
    kind_of_heads_known,
)


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_log_probs_of_sampled_tokens_are_those_that_vllm_itself_reports(num_logprobs: int) -> None:
    counts = [2, 0, 1]
    ids_BW = torch.tensor([[5, 1, 7], [2, -1, -1], [9, 3, -1]], dtype=torch.int32)
    drafts = DraftRows.build(torch.tensor([5, 1, 9]), counts)
    logprobs_NV = torch.randn(
        sum(counts) + len(counts), 11, generator=torch.Generator().manual_seed(0)
    ).log_softmax(-1)
    found = _gather_logprobs(
        SimpleNamespace(sampler=Sampler), logprobs_NV, ids_BW, drafts, num_logprobs
    )
    own_NV = logprobs_NV[[0, 1, 2, 3, 3, 3, 4, 5, 5]]
    ids_N = ids_BW.flatten().clamp_min(0).long()
    with torch.compiler.set_stance("force_eager"):
        wanted = Sampler.gather_logprobs(own_NV, num_logprobs, ids_N)
    for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        mine = getattr(found, name)
        theirs = getattr(wanted, name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


@pytest.mark.parametrize("count", [0, 2, 4])
def test_drafts_leave_as_lists_of_as_many_as_were_drafted(count: int) -> None:
    ids_BK = torch.arange(3 * count).reshape(3, count)
    assert drafts_as_lists(lambda runner: ids_BK)(None) == ids_BK.tolist()
    assert drafts_as_lists(lambda runner: [[1], []])(None) == [[1], []]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("medusa_ppo", "medusa"),
        ("dummy_medusa_ppo", "dummy_medusa"),
        ("medusa", "medusa"),
        ("llama", "llama"),
    ],
)
def test_our_kinds_of_heads_are_medusa_to_vllm(given: str, seen: str) -> None:
    asked = []

    def original(config: SimpleNamespace) -> SimpleNamespace:
        asked.append(config.model_type)
        return config

    assert kind_of_heads_known(original)(SimpleNamespace(model_type=given)).model_type == seen
    assert asked == [seen]
