"""What is said about response tokens from a rank's logits, against the plain formulas. Several ranks: test_megatron_learner.py."""

from __future__ import annotations

import pytest
import torch

from heads.vocabulary import WHOLE
from medusa_ppo.ppo.megatron.megatron_rank import sharded_stats
from medusa_ppo.ppo.models import log_kept_mass
from medusa_ppo.types import Sampling


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=4, top_p=0.8)])
def test_values_and_gradients(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_MV = torch.randn(5, 9, generator=generator, requires_grad=True)
    ids_M, weights_M = torch.tensor([0, 3, 8, 3, 1]), torch.randn(5, generator=generator)

    logprobs_MV = (logits_MV / sampling.temperature).log_softmax(-1)
    plain_M, entropy_M = logprobs_MV.gather(1, ids_M[:, None])[:, 0], -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    (expected,) = torch.autograd.grad((weights_M * plain_M).sum() - 0.3 * (weights_M * entropy_M).sum(), logits_MV)

    found = sharded_stats(logits_MV, ids_M, WHOLE, sampling, entropy=True, kept=True)
    assert found.entropy_M is not None and found.log_kept_M is not None
    torch.testing.assert_close(found.logprobs_M, plain_M)
    torch.testing.assert_close(found.entropy_M, entropy_M)
    torch.testing.assert_close(found.log_kept_M, log_kept_mass(logprobs_MV.detach(), sampling.top_k, sampling.top_p))
    (gradient,) = torch.autograd.grad((weights_M * found.logprobs_M).sum() - 0.3 * (weights_M * found.entropy_M).sum(), logits_MV)
    torch.testing.assert_close(gradient, expected)


def test_what_is_not_asked_for_is_left_out() -> None:
    found = sharded_stats(torch.zeros(2, 3), torch.tensor([0, 1]), WHOLE, Sampling())
    assert found.entropy_M is None and found.log_kept_M is None
