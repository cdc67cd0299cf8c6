"""Patches of vLLM on stand-ins for what they replace: those of older releases hold with every
release that is installed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from medusa_ppo.drafting.noise import draw
from medusa_ppo.drafting.verify import (
    DraftRows,
    Proposed,
    Rule,
    WholeRows,
    assemble,
    verify_rows,
)
from medusa_ppo.vllm_plugin import v1_runner
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


@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [3, 0, 1, 2]])
def test_our_drafts_are_verified_as_a_block_on_every_device(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's V1 asks us for the rows of drafts alone, and vLLM's sampler for the tokens behind
    them; the CPU build asks for all rows at once. Of the same numbers both make the same. Drafts of
    others are verified by vLLM's kernels, but for its CPU build, which reads outside its input.
    """
    torch.manual_seed(0)
    vocab, batch = 6, len(counts)
    drafted = sum(counts)
    q_BKV = torch.randn(batch, 3, vocab).softmax(-1)
    numbers_BW = torch.rand(batch, 4, dtype=torch.float64)
    ours = Proposed(WholeRows(q_BKV), numbers_BW)
    drafts = torch.multinomial(q_BKV.view(-1, vocab), 1).view(batch, 3)
    ids_T = torch.cat([ids[:count] for ids, count in zip(drafts, counts, strict=True)])
    logits_NV = torch.randn(drafted + batch, vocab)
    rows = DraftRows.build(ids_T, counts)
    ends_B = rows.starts_B + rows.counts_B
    of_drafts_N = torch.ones(drafted + batch, dtype=torch.bool).index_fill(0, ends_B, False)
    rule = Rule()
    run_B, last_B = verify_rows(logits_NV, None, rows, counts, ours, rule)
    bonus_B = draw(logits_NV[ends_B].softmax(-1), numbers_BW[:, -1:])
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=None, generators={})
    verified = v1_runner.with_our_verification(lambda *_: "vLLM's")
    given = (ids_T, counts, max(counts), None)
    more = (logits_NV[of_drafts_N], bonus_B, sampling)
    for on_the_cpu in (True, False):
        platform = SimpleNamespace(is_cpu=lambda found=on_the_cpu: found)
        monkeypatch.setattr(v1_runner, "current_platform", platform)
        found = verified(*given, ours, *more)
        assert torch.equal(found, assemble(rows, run_B, last_B))
        for others in (None, torch.cat([q_KV[:k] for q_KV, k in zip(q_BKV, counts, strict=True)])):
            found = verified(*given, others, *more)
            assert torch.is_tensor(found) if on_the_cpu else found == "vLLM's"
