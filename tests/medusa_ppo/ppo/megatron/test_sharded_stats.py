"""What is said about response tokens from a rank's logits, against the plain formulas. Several
ranks: test_sharded_vocabulary.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from medusa_ppo.ppo.megatron.sharded_stats import sharded_stats
from medusa_ppo.ppo.megatron.sharded_vocabulary import ShardedVocabulary
from medusa_ppo.ppo.token_stats import NEVER


@pytest.mark.parametrize("cut", [False, True])
def test_values_and_gradients(cut: bool, alone: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_MV = torch.randn(5, 9, generator=generator, requires_grad=True)
    ids_M = torch.tensor([0, 3, 8, 3, 1])
    weights_M = torch.randn(5, generator=generator)
    left_MV = torch.ones(5, 9, dtype=torch.bool)
    if cut:
        left_MV = (torch.rand(5, 9, generator=generator) < 0.5).scatter(1, ids_M[:, None], True)
    cut_MV = logits_MV.masked_fill(~left_MV, NEVER)

    p_MV = logits_MV.exp() * left_MV
    p_MV = p_MV / p_MV.sum(-1, keepdim=True)
    plain_M = p_MV.gather(1, ids_M[:, None])[:, 0].log()
    entropy_M = -torch.where(left_MV, p_MV * p_MV.clamp(min=1e-30).log(), 0.0).sum(-1)
    (expected,) = torch.autograd.grad(
        (weights_M * plain_M).sum() - 0.3 * (weights_M * entropy_M).sum(), logits_MV
    )

    vocabulary = ShardedVocabulary(9, alone)
    found = sharded_stats(cut_MV, ids_M, vocabulary, entropy=True)
    assert found.entropy_M is not None
    torch.testing.assert_close(found.logprobs_M, plain_M)
    torch.testing.assert_close(found.entropy_M, entropy_M)
    (gradient,) = torch.autograd.grad(
        (weights_M * found.logprobs_M).sum() - 0.3 * (weights_M * found.entropy_M).sum(), logits_MV
    )
    torch.testing.assert_close(gradient, expected)


def test_what_is_not_asked_for_is_left_out(alone: dist.ProcessGroup) -> None:
    vocabulary = ShardedVocabulary(3, alone)
    assert sharded_stats(torch.zeros(2, 3), torch.tensor([0, 1]), vocabulary).entropy_M is None
