"""Only what is surely better is published; noise, NaN, zeros and other sizes never are."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.gate import Verdict, judge, replay
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config import CompanionConfig


def judged(candidate, serving, frozen, lm_head_VD, holdout, **how) -> Verdict:
    return judge(candidate, serving, frozen, lambda heads: replay(heads, holdout, lm_head_VD, **how))


def zero_heads(task, kind: str = "medusa", num_heads: int = 3) -> MedusaHeads:
    torch.manual_seed(1)
    return MedusaHeads(HeadsConfig(task.hidden, task.vocab, num_heads=num_heads, kind=kind, rank=4))


def trained(task, batches: int = 12, kind: str = "medusa") -> MedusaHeads:
    config = CompanionConfig(batch_positions=64, learning_rate=2e-2)
    trainer = HeadsTrainer(zero_heads(task, kind), task.lm_head_VD, config, 0, embedding_VD=task.lm_head_VD if kind == "hydra" else None)
    for _ in range(batches):
        trainer.train_batch(task.batch())
    return trainer.heads


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_better_heads_pass(chain, kind: str, draft_temperature: float) -> None:
    task = chain()
    good, start = trained(task, kind=kind), zero_heads(task, kind)
    verdict = judged(good, start, None, task.lm_head_VD, task.batch(30), draft_temperature=draft_temperature, embedding_VD=task.lm_head_VD)
    assert verdict.publish and not verdict.worse and verdict.difference.low > 0
    assert verdict.candidate.mean_acceptance_length > 2 > verdict.serving.mean_acceptance_length
    assert verdict.frozen == verdict.serving and "Better" in verdict.reason


def test_worse_heads_are_named_worse(chain) -> None:
    task = chain()
    good = trained(task)
    verdict = judged(zero_heads(task), good, good, task.lm_head_VD, task.batch(30))
    assert not verdict.publish and verdict.worse
    assert verdict.frozen == verdict.serving


def test_the_same_heads_are_neither(chain) -> None:
    task = chain()
    good = trained(task)
    verdict = judged(copy.deepcopy(good), good, None, task.lm_head_VD, task.batch(30))
    assert not verdict.publish and not verdict.worse and verdict.difference.value == 0


def poison(heads: MedusaHeads, how: str) -> MedusaHeads:
    bad = copy.deepcopy(heads)
    with torch.no_grad():
        for parameter in bad.parameters():
            if how == "noise":
                parameter.copy_(torch.randn_like(parameter))
            elif how == "zeros":
                parameter.zero_()
            elif how == "one-nan":
                parameter.view(-1)[3] = float("nan")
            elif how == "infinity":
                parameter.view(-1)[-1] = float("inf")
            elif how == "huge":
                parameter.mul_(1e30)
            elif how == "shuffled":
                parameter.copy_(parameter.flip(0))
    return bad


@pytest.mark.parametrize("kind", ["medusa", "markov", "hydra"])
@pytest.mark.parametrize("how", ["noise", "zeros", "one-nan", "infinity", "huge"])
def test_poison_never_passes(chain, how: str, kind: str) -> None:
    """Not against good heads, and not against the zero start either."""
    task = chain()
    good = trained(task, kind=kind)
    for temperature in (0.0, 1.0):
        for serving in (good, zero_heads(task, kind)):
            for seed in range(2):
                torch.manual_seed(seed)
                tables = {"lm_head_VD": task.lm_head_VD, "embedding_VD": task.lm_head_VD}
                verdict = judged(poison(good, how), serving, good, holdout=task.batch(30), draft_temperature=temperature, **tables)
                if serving is good:
                    assert not verdict.publish and verdict.worse, (how, verdict)
                elif verdict.publish:  # by chance better than heads that accept nothing; then it must be so on fresh rollouts too
                    fresh = task.batch(200)
                    kwargs = {"embedding_VD": task.lm_head_VD, "draft_temperature": temperature}
                    after = replay(poison(good, how), fresh, task.lm_head_VD, **kwargs).mean_acceptance_length
                    assert after > replay(serving, fresh, task.lm_head_VD, **kwargs).mean_acceptance_length - 0.05


def test_other_sizes_never_pass(chain) -> None:
    task = chain()
    good = trained(task)
    for other in (zero_heads(task, num_heads=4), zero_heads(chain(hidden=20)), zero_heads(task, kind="markov")):
        verdict = judged(other, good, good, task.lm_head_VD, task.batch(30))
        assert not verdict.publish and verdict.worse and "other sizes" in verdict.reason


def test_a_holdout_without_draft_steps_decides_nothing(chain) -> None:
    task = chain()
    batch = task.batch(4)
    single = dataclasses.replace(
        batch,
        hidden_MD=batch.hidden_MD[:3],
        response_ids_M=batch.response_ids_M[:3],
        logprobs_M=batch.logprobs_M[:3],
        lengths_S=torch.ones(3, dtype=torch.int64),
    )
    verdict = judged(trained(task), zero_heads(task), None, task.lm_head_VD, single)
    assert not verdict.publish and not verdict.worse and "no draft step" in verdict.reason


def test_rarely_wrong_when_nothing_differs(chain) -> None:
    """Two equally good sets of heads, trained on different data: the gate may pick one now and then, not most of the time."""
    task = chain(sure=0.8)
    left, right = trained(task, 25), trained(task, 25)
    passed = sum(judged(left, right, None, task.lm_head_VD, task.batch(20)).publish for _ in range(25))
    turned = sum(judged(right, left, None, task.lm_head_VD, task.batch(20)).publish for _ in range(25))
    assert min(passed, turned) <= 6
