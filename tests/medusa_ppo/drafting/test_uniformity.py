"""The randomised PIT: honest samples pass, each kind of dishonest ones fails, and the p-values are scipy's."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from heads.vocabulary import truncate_logits
from medusa_ppo.drafting.uniformity import Uniformity, sentence
from medusa_ppo.types import Sampling

M, V = 20_000, 50
SETTINGS = [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=7), Sampling(0.5, top_p=0.8, top_k=20)]


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(M, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def samples(logits_MV: torch.Tensor, sampling: Sampling, seed: int = 1) -> torch.Tensor:
    p_MV = truncate_logits(logits_MV / sampling.temperature, sampling.top_k, sampling.top_p).softmax(-1)
    return torch.multinomial(p_MV, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def of(logits_MV: torch.Tensor, ids_M: torch.Tensor, sampling: Sampling) -> Uniformity:
    test = Uniformity()
    for part in torch.arange(len(ids_M)).split(3_000):
        test.add(logits_MV[part], ids_M[part], sampling)
    return test


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_honest_samples_pass(sampling: Sampling) -> None:
    test = of(logits(), samples(logits(), sampling), sampling)
    assert test.honest and test.tokens == M, test.figures()


def test_many_settings_go_into_one_test() -> None:
    test = Uniformity()
    for number, sampling in enumerate(SETTINGS):
        test.add(logits(number), samples(logits(number), sampling, seed=10 + number), sampling)
    assert test.honest and test.tokens == len(SETTINGS) * M


def test_another_temperature_fails() -> None:
    test = of(logits(), samples(logits(), Sampling(0.97)), Sampling(1.0))
    assert not test.honest and test.z > 3


def test_tokens_outside_of_the_support_fail() -> None:
    test = of(logits(), samples(logits(), Sampling(1.0)), Sampling(1.0, top_k=3))
    assert test.outside > 0 and not test.honest


def test_drafts_verified_against_another_q_fail() -> None:
    """Rejection sampling with a q that is one row old, as a stale q would be."""
    p_MV, generator = logits().softmax(-1), torch.Generator().manual_seed(2)
    q_MV = (logits() + logits(5)).softmax(-1)
    drafts_M = torch.multinomial(q_MV, 1, generator=generator)
    stale_MV = q_MV.roll(1, 0)
    accepted_M = torch.rand(M, 1, generator=generator) * stale_MV.gather(1, drafts_M) < p_MV.gather(1, drafts_M)
    rest_MV = (p_MV - stale_MV).clamp_min(0)
    ids_M = torch.where(accepted_M, drafts_M, torch.multinomial(rest_MV, 1, generator=generator))[:, 0]
    assert not of(logits(), ids_M, Sampling(1.0)).honest
    right_M = torch.rand(M, 1, generator=generator) * q_MV.gather(1, drafts_M) < p_MV.gather(1, drafts_M)
    rest_MV = (p_MV - q_MV).clamp_min(0)
    ids_M = torch.where(right_M, drafts_M, torch.multinomial(rest_MV, 1, generator=generator))[:, 0]
    assert of(logits(), ids_M, Sampling(1.0)).honest


def test_the_p_values_are_scipys() -> None:
    test = of(logits(), samples(logits(), Sampling(1.0)), Sampling(1.0))
    u = torch.cat(test._u).numpy()
    counts = [((u >= b / 20) & (u < (b + 1) / 20)).sum() for b in range(20)]
    assert test.chi_square_p == pytest.approx(stats.chisquare(counts).pvalue, rel=1e-6)
    assert test.kolmogorov_p == pytest.approx(stats.kstest(u, "uniform").pvalue, abs=5e-3)


def test_the_verdict_says_whose_fault_it_is() -> None:
    honest, wrong = (
        of(logits(), samples(logits(), Sampling(1.0)), Sampling(1.0)),
        of(logits(), samples(logits(3), Sampling(1.0)), Sampling(1.0)),
    )
    assert sentence(honest, honest).startswith("Honest") and f"{M:,}" in sentence(honest, honest)
    assert sentence(wrong, honest).startswith("WRONG") and sentence(wrong, wrong).startswith("Not the drafts")
