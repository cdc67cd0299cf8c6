"""Patches of vLLM on stand-ins for what they replace: those of older releases hold with every
release that is installed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from medusa_ppo.drafting.verify import DraftRows, Proposed
from medusa_ppo.vllm_plugin import patches
from medusa_ppo.vllm_plugin.patches import (
    _gather_logprobs,
    drafts_as_lists,
    kind_of_heads_known,
    verification_in_one_pass,
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


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_our_drafts_are_verified_by_us_on_every_device(
    on_cpu: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test machine has a GPU: the platform says what it is, and vLLM's kernels are a stand-in.
    What asks for more than they share goes to those, with q as they read it.
    """
    monkeypatch.setattr(patches.current_platform, "is_cpu", lambda: on_cpu)
    monkeypatch.setattr(patches, "_is_plain", lambda sampler, metadata: plain)
    monkeypatch.setattr(patches, "_verify_in_one_pass", lambda *given: ("ours", given[2]))
    rows_TV = torch.ones(2, 3)
    dense = None if on_cpu else (lambda: rows_TV)
    ours = Proposed(None, torch.zeros(1, 3), dense)
    forward = verification_in_one_pass(lambda *given: ("vLLM's", given[2]))
    sampler = SimpleNamespace(synthetic_mode=False)

    def verified(draft_probs: Proposed | torch.Tensor | None) -> tuple[str, object]:
        return forward(sampler, None, draft_probs, torch.zeros(3, 3), None)

    if plain:
        assert verified(ours) == ("ours", ours)
    else:
        by, given = verified(ours)
        assert by == "vLLM's" and given is (ours if on_cpu else rows_TV)
    assert verified(None)[0] == ("ours" if plain and on_cpu else "vLLM's")
    assert verified(rows_TV)[0] == ("ours" if plain and on_cpu else "vLLM's")
