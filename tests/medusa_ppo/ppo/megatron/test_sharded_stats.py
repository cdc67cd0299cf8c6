"""What is said about response tokens from a rank's logits, against the plain formulas. Several
ranks: test_sharded_vocabulary.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.ppo.batch import MicroBatch
from medusa_ppo.ppo.megatron.sharded_stats import ShardedSupport, sharded_stats
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary
from medusa_ppo.ppo.token_stats import NEVER, TokenStats
from tests.medusa_ppo.ppo.test_recompute import LiveBytes


@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize("cut", [False, True])
def test_values_and_gradients(cut: bool, chunk_rows: int | None, alone: dist.ProcessGroup) -> None:
    """Of rows between others, with columns of padding, at a temperature."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(8, 12, generator=generator, requires_grad=True)
    rows_M = torch.tensor([0, 2, 3, 6, 7])
    ids_M = torch.tensor([0, 3, 8, 3, 1])
    weights_M = torch.randn(5, generator=generator)
    left_MV = torch.ones(5, 9, dtype=torch.bool)
    if cut:
        left_MV = (torch.rand(5, 9, generator=generator) < 0.5).scatter(1, ids_M[:, None], True)

    p_MV = (logits_NV[rows_M, :9] / 0.8).exp() * left_MV
    p_MV = p_MV / p_MV.sum(-1, keepdim=True)
    plain_M = p_MV.gather(1, ids_M[:, None])[:, 0].log()
    entropy_M = -torch.where(left_MV, p_MV * p_MV.clamp(min=1e-30).log(), 0.0).sum(-1)
    (expected,) = torch.autograd.grad(
        (weights_M * plain_M).sum() - 0.3 * (weights_M * entropy_M).sum(),
        logits_NV,
        retain_graph=True,
    )
    (expected_alone,) = torch.autograd.grad((weights_M * plain_M).sum(), logits_NV)

    def stats(entropy: bool) -> TokenStats:
        return sharded_stats(
            logits_NV,
            rows_M,
            ids_M,
            ShardedVocabulary(9, alone, rows_per_rank=12),
            temperature=0.8,
            cut=lambda logits_CV, first: logits_CV.masked_fill(
                ~left_MV[first : first + len(logits_CV)], NEVER
            ),
            entropy=entropy,
            chunk_rows=chunk_rows,
        )

    found = stats(entropy=True)
    assert found.entropy_M is not None
    torch.testing.assert_close(found.logprobs_M, plain_M)
    torch.testing.assert_close(found.entropy_M, entropy_M)
    (gradient,) = torch.autograd.grad(
        (weights_M * found.logprobs_M).sum() - 0.3 * (weights_M * found.entropy_M).sum(), logits_NV
    )
    torch.testing.assert_close(gradient, expected)
    alone_M = stats(entropy=False).logprobs_M
    torch.testing.assert_close(alone_M, plain_M)
    (gradient,) = torch.autograd.grad((weights_M * alone_M).sum(), logits_NV)
    torch.testing.assert_close(gradient, expected_alone)


@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
def test_chunks_change_no_bit(chunk_rows: int | None, alone: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(7, 9, generator=generator).bfloat16().requires_grad_()
    ids_M = torch.randint(9, (7,), generator=generator)
    found = []
    for rows in (7, chunk_rows):
        vocabulary = ShardedVocabulary(9, alone)
        stats = sharded_stats(
            logits_NV, torch.arange(7), ids_M, vocabulary, entropy=True, chunk_rows=rows
        )
        assert stats.entropy_M is not None
        total = (stats.logprobs_M - 0.3 * stats.entropy_M).sum()
        (gradient,) = torch.autograd.grad(total, logits_NV)
        found.append((stats.logprobs_M.detach(), stats.entropy_M.detach(), gradient))
    for whole, parts in zip(*found, strict=True):
        assert torch.equal(whole, parts)


def test_what_is_not_asked_for_is_left_out(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("only an entropy takes a sum over the vocabulary")

    monkeypatch.setattr(ShardedVocabulary, "total", never)
    vocabulary = ShardedVocabulary(3, alone)
    found = sharded_stats(torch.zeros(2, 3), torch.arange(2), torch.tensor([0, 1]), vocabulary)
    assert found.entropy_M is None


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("learns", [False, True])
def test_memory_does_not_grow_with_the_micro_batch(
    learns: bool, top_p: float, alone: dist.ProcessGroup
) -> None:
    """Apart from the logits that the model made, and in the update their gradient."""
    width = 500
    found = []
    for count in (64, 256):
        torch.manual_seed(0)
        logits_NV = torch.randn(count, width).bfloat16()
        ids_M = torch.randint(width, (count,))
        ids_BT = torch.cat([torch.zeros(1, dtype=torch.long), ids_M])[None]
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        mask_BT[0, 0] = False
        micro = MicroBatch((0,), ids_BT, mask_BT)
        vocabulary = ShardedVocabulary(width, alone)
        support = ShardedSupport(Sampling(top_p=top_p), vocabulary)

        def stats(
            logits_NV: torch.Tensor,
            *,
            ids_M: torch.Tensor = ids_M,
            micro: MicroBatch = micro,
            support: ShardedSupport = support,
            vocabulary: ShardedVocabulary = vocabulary,
        ) -> torch.Tensor:
            return sharded_stats(
                logits_NV,
                torch.arange(len(logits_NV)),
                ids_M,
                vocabulary,
                cut=lambda logits_CV, first: support.cut(logits_CV, micro, first),
                entropy=not learns,
                chunk_rows=16,
            ).logprobs_M

        if learns:
            with torch.no_grad():
                stats(logits_NV)  # Decides what is cut off.
            logits_NV.requires_grad_()
        with LiveBytes(torch.nn.Module()) as live:
            logprobs_M = stats(logits_NV)
            if learns:
                logprobs_M.sum().backward()
        beside = (1 + learns) * logits_NV.nbytes + support.nbytes
        found.append((live.peak - beside) / (4 * width * 16))
    few, many = found
    assert many < 1.1 * few, (
        "beside them there are float32 copies of 16 rows, however many there are"
    )
    assert few < (10.5 if top_p < 1 and not learns else 5.5), "what `medusa-ppo plan` counts"
