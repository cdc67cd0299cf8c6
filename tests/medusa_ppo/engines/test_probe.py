"""The test that the doctor trusts: honest samples pass, dishonest ones fail, its p-values are
scipy's; and its verdict on an engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from heads.vocabulary import truncate_logits
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.drafting.slots import DraftSlots, KeptDrafts
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import Uniformity, beginnings, judge, sample, sentence
from tests.medusa_ppo.engines.conftest import HEADS, Actor, honesty_z

M, V = 20_000, 50
SETTINGS = [
    Sampling(1.0),
    Sampling(0.7, top_p=0.9),
    Sampling(1.3, top_k=7),
    Sampling(0.5, top_p=0.8, top_k=20),
]


def draw(logits_MV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    probs_MV = torch.softmax(
        truncate_logits(logits_MV / sampling.temperature, sampling.top_k, sampling.top_p), dim=-1
    )
    return torch.multinomial(probs_MV, 1, generator=torch.Generator().manual_seed(1))[:, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7),
        Sampling(1.0, top_p=0.8),
        Sampling(0.9, top_k=5),
        Sampling(0.8, 0.9, 10),
    ],
)
def test_honest_samples_pass_and_dishonest_ones_do_not(sampling: Sampling) -> None:
    logits_MV = 2 * torch.randn(4000, 50, generator=torch.Generator().manual_seed(0))
    ids_M = draw(logits_MV, sampling)
    assert abs(honesty_z(logits_MV, ids_M, sampling)) < 3
    hotter_M = draw(
        logits_MV, Sampling(sampling.temperature * 1.25, sampling.top_p, sampling.top_k)
    )
    assert honesty_z(logits_MV, hotter_M, sampling) < -4


def test_truncation_keeps_the_likeliest_token_and_the_smallest_sufficient_set() -> None:
    logits_MV = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert torch.isfinite(truncate_logits(logits_MV, 0, 0.4)).tolist() == [
        [True, False, False, False]
    ]
    assert torch.isfinite(truncate_logits(logits_MV, 0, 0.6)).tolist() == [
        [True, True, False, False]
    ]
    assert torch.isfinite(truncate_logits(logits_MV, 3, 1.0)).tolist() == [
        [True, True, True, False]
    ]
    assert torch.isfinite(truncate_logits(logits_MV, 3, 0.6)).tolist() == [
        [True, True, False, False]
    ]


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(M, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def samples(logits_MV: torch.Tensor, sampling: Sampling, seed: int = 1) -> torch.Tensor:
    p_MV = truncate_logits(
        logits_MV / sampling.temperature, sampling.top_k, sampling.top_p
    ).softmax(-1)
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


CUTS = [Sampling(0.7, top_p=0.9), Sampling(1.2, top_k=3), Sampling(1.0, top_p=0.8, top_k=4)]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_rounding_at_a_cut_is_no_fault(sampling: Sampling) -> None:
    """Logits that differ in the fifth digit, as a GPU's do. Without ties they disagree about a few
    tokens only; here two tokens of every row are next to each other.
    """
    exact_MV = logits()
    exact_MV[:, 1] = exact_MV[:, 0] + 1e-6
    noise_MV = 1e-5 * torch.randn(M, V, generator=torch.Generator().manual_seed(9))
    ids_M = samples(exact_MV + noise_MV, sampling)
    test = of(exact_MV, ids_M, sampling)
    assert test.honest and test.at_edge > 0 and test.tokens == M, test.figures()


@pytest.mark.parametrize("sampling", CUTS[:2], ids=str)
def test_an_engine_that_keeps_one_token_too_many_fails(sampling: Sampling) -> None:
    whole_MV = logits() / sampling.temperature
    kept_MV = truncate_logits(whole_MV, sampling.top_k, sampling.top_p) > -torch.inf
    more_MV = kept_MV.sum(1, keepdim=True) >= torch.arange(V)
    order_MV = whole_MV.sort(descending=True).indices
    kept_MV = torch.zeros_like(kept_MV).scatter_(1, order_MV, more_MV)
    p_MV = whole_MV.masked_fill(~kept_MV, -torch.inf).softmax(-1)
    ids_M = torch.multinomial(p_MV, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    test = of(logits(), ids_M, sampling)
    assert test.outside > 10 * test.at_edge and not test.honest


def test_drafts_verified_against_another_q_fail() -> None:
    """Rejection sampling with a q that is one row old, as a stale q would be."""
    p_MV = logits().softmax(-1)
    generator = torch.Generator().manual_seed(2)
    q_MV = (logits() + logits(5)).softmax(-1)
    drafts_M = torch.multinomial(q_MV, 1, generator=generator)
    stale_MV = q_MV.roll(1, 0)
    accepted_M = torch.rand(M, 1, generator=generator) * stale_MV.gather(1, drafts_M) < p_MV.gather(
        1, drafts_M
    )
    rest_MV = (p_MV - stale_MV).clamp_min(0)
    ids_M = torch.where(accepted_M, drafts_M, torch.multinomial(rest_MV, 1, generator=generator))[
        :, 0
    ]
    assert not of(logits(), ids_M, Sampling(1.0)).honest
    right_M = torch.rand(M, 1, generator=generator) * q_MV.gather(1, drafts_M) < p_MV.gather(
        1, drafts_M
    )
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
    honest = of(logits(), samples(logits(), Sampling(1.0)), Sampling(1.0))
    wrong = of(logits(), samples(logits(3), Sampling(1.0)), Sampling(1.0))
    assert sentence(honest, honest).startswith("Honest") and f"{M:,}" in sentence(honest, honest)
    assert sentence(wrong, honest).startswith("WRONG") and sentence(wrong, wrong).startswith(
        "Not the drafts"
    )


@pytest.mark.engine
@pytest.mark.slow
def test_the_verdict_on_an_engine(
    engine: ColocatedEngine, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest as it is; wrong, and not for another reason, when q is not what drafts were drawn
    from.
    """
    sampling = Sampling(0.8, max_new_tokens=64, ignore_eos=True)
    engine.configure(sampled=True)
    torch.manual_seed(5)
    honest = sample(engine, beginnings(actor.model.config), sampling, 4000, lambda done: None)
    assert (
        engine.num_drafts == HEADS
        and honest[0][0].counters.drafts
        and not honest[1][0].counters.drafts
    )
    drafting, plain = judge(actor.model, honest, lambda done: None)
    assert (
        plain is None and sentence(drafting, plain).startswith("Honest") and drafting.tokens >= 4000
    )

    look_up = DraftSlots.look_up

    def dishonest(slots: DraftSlots, *args: Any) -> KeptDrafts:
        kept = look_up(slots, *args)
        return replace(
            kept, q_BK=kept.q_BK * 1e-3
        )  # Accepted by a thousandth of the q that they were drawn from: nearly always.

    monkeypatch.setattr(DraftSlots, "look_up", dishonest)
    runs = sample(engine, beginnings(actor.model.config), sampling, 4000, lambda done: None)
    drafting, plain = judge(actor.model, runs, lambda done: None)
    assert plain is not None and plain.honest and sentence(drafting, plain).startswith("WRONG")
