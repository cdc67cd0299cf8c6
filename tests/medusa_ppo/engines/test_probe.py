"""The statistic that the doctor trusts: small for honest samples, large for a wrong temperature, top-k or top-p; and its verdict on an
engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.vocabulary import truncate_logits
from medusa_ppo.drafting.slots import DraftSlots
from medusa_ppo.drafting.uniformity import sentence
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import beginnings, honesty_z, judge, sample
from medusa_ppo.types import Sampling
from tests.medusa_ppo.engines.conftest import HEADS, Actor


def draw(logits_MV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    probs_MV = torch.softmax(truncate_logits(logits_MV / sampling.temperature, sampling.top_k, sampling.top_p), dim=-1)
    return torch.multinomial(probs_MV, 1, generator=torch.Generator().manual_seed(1))[:, 0]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_p=0.8), Sampling(0.9, top_k=5), Sampling(0.8, 0.9, 10)]
)
def test_honest_samples_pass_and_dishonest_ones_do_not(sampling: Sampling) -> None:
    logits_MV = 2 * torch.randn(4000, 50, generator=torch.Generator().manual_seed(0))
    ids_M = draw(logits_MV, sampling)
    assert abs(honesty_z(logits_MV, ids_M, sampling)) < 3
    hotter_M = draw(logits_MV, Sampling(sampling.temperature * 1.25, sampling.top_p, sampling.top_k))
    assert honesty_z(logits_MV, hotter_M, sampling) < -4


def test_truncation_keeps_the_likeliest_token_and_the_smallest_sufficient_set() -> None:
    logits_MV = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert torch.isfinite(truncate_logits(logits_MV, 0, 0.4)).tolist() == [[True, False, False, False]]
    assert torch.isfinite(truncate_logits(logits_MV, 0, 0.6)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncate_logits(logits_MV, 3, 1.0)).tolist() == [[True, True, True, False]]
    assert torch.isfinite(truncate_logits(logits_MV, 3, 0.6)).tolist() == [[True, True, False, False]]


@pytest.mark.engine
@pytest.mark.slow
def test_the_verdict_on_an_engine(engine: ColocatedEngine, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Honest as it is; wrong, and not for another reason, when q is not what drafts were drawn from."""
    sampling = Sampling(0.8, max_new_tokens=64, ignore_eos=True)
    engine.configure(sampled=True)
    torch.manual_seed(5)
    honest = sample(engine, beginnings(actor.model.config), sampling, 4000, lambda done: None)
    assert engine.num_drafts == HEADS and honest[0][0].counters.drafts and not honest[1][0].counters.drafts
    drafting, plain = judge(actor.model, honest, lambda done: None)
    assert plain is None and sentence(drafting, plain).startswith("Honest") and drafting.tokens >= 4000

    stamp = DraftSlots.stamp

    def flattened(slots: DraftSlots, *args: Any) -> None:
        stamp(slots, *args)
        slots.cumulative_KRX.pow_(0.5)  # The sums of another distribution.

    monkeypatch.setattr(DraftSlots, "stamp", flattened)
    runs = sample(engine, beginnings(actor.model.config), sampling, 4000, lambda done: None)
    drafting, plain = judge(actor.model, runs, lambda done: None)
    assert plain is not None and plain.honest and sentence(drafting, plain).startswith("WRONG")
