"""A batch in parts is learned by a team as one worker learns the whole: the same positions in each step, the same verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.errors import DataError
from heads.heads_config import HeadsConfig
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.handover import pack, unpack
from medusa_ppo.companion.positions import look_up
from medusa_ppo.config import CompanionConfig
from medusa_ppo.meeting import Meeting
from medusa_ppo.types import RolloutBatch

InATeam = Callable[..., list[Any]]


def with_prompts(batch: RolloutBatch, answers: int = 3) -> RolloutBatch:
    return dataclasses.replace(batch, prompts_S=torch.arange(batch.lengths_S.numel()) // answers)


def make(task, kind: str = "medusa", draft_temperature: float = 0.0, **settings) -> Cycle:
    config = CompanionConfig(**{"batch_positions": 64, "learning_rate": 2e-2, **settings})
    heads = HeadsConfig(task.hidden, task.vocab, num_heads=3, kind=kind, rank=4)
    embedding_VD = task.lm_head_VD if kind == "hydra" else None
    return Cycle(heads, config, task.lm_head_VD, seed=0, embedding_VD=embedding_VD, draft_temperature=draft_temperature)


def same(left: RolloutBatch, right: RolloutBatch) -> bool:
    names = ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S", "prompts_S")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_parts_are_stretches_of_about_as_many_tokens(chain, count: int) -> None:
    batch = with_prompts(chain().batch(24))
    parts = batch.split(count)
    assert len(parts) == count and same(RolloutBatch.join(parts), batch)
    assert [part.whole.first for part in parts] == [sum(p.lengths_S.numel() for p in parts[:index]) for index in range(count)]
    for part in parts:
        assert abs(part.lengths_S.sum() - batch.lengths_S.sum() / count) <= batch.lengths_S.max()
        assert part.nbytes == batch.nbytes and torch.equal(part.whole.lengths_S, batch.lengths_S)
        inside = part.hidden_MD.data_ptr() - batch.hidden_MD.data_ptr()
        assert not part.lengths_S.numel() or 0 <= inside < batch.hidden_MD.nbytes, "nothing is copied"
    assert (count == 40) == any(part.lengths_S.numel() == 0 for part in parts)
    for part in parts:
        back = unpack(pack(part))
        assert same(back, part) and back.whole.first == part.whole.first and torch.equal(back.whole.prompts_S, batch.prompts_S)


@pytest.mark.parametrize("count", [2, 5, 40])
def test_parts_hold_out_what_the_whole_holds_out(chain, count: int) -> None:
    batch = with_prompts(chain().batch(24))
    training, holdout = batch.hold_out(0.25, seed=7)
    halves = [part.hold_out(0.25, seed=7) for part in batch.split(count)]
    for index, whole in enumerate((training, holdout)):
        parts = [half[index] for half in halves]
        assert same(RolloutBatch.join(parts), whole)
        assert all(torch.equal(part.whole.lengths_S, whole.lengths_S) for part in parts)
        assert [part.whole.first for part in parts] == [sum(p.lengths_S.numel() for p in parts[:i]) for i in range(count)]


def test_an_empty_batch_is_refused_and_an_empty_part_is_not(chain) -> None:
    batch = chain().batch(2)
    assert [part.lengths_S.numel() for part in batch.split(3)].count(0) == 1
    with pytest.raises(DataError, match="no response token"):
        batch.select(torch.tensor([], dtype=torch.int64))


def test_each_position_is_in_one_part_at_the_place_that_it_has_in_the_whole(chain) -> None:
    batch = with_prompts(chain().batch(24))
    whole = look_up(batch, 3, True)
    for count in (2, 3, 30):
        found = torch.zeros_like(whole.usable_N)
        for part in batch.split(count):
            rows = look_up(part, 3, True)
            here = rows.usable_N >= 0
            assert rows.usable_N.shape == whole.usable_N.shape
            assert torch.equal(rows.batch.hidden_MD[rows.usable_N[here]], whole.batch.hidden_MD[whole.usable_N[here]])
            assert torch.equal(rows.targets_MK[rows.usable_N[here]], whole.targets_MK[whole.usable_N[here]])
            found += here
        assert bool((found == 1).all())


@pytest.mark.parametrize(
    ("size", "kind", "settings"),
    [
        (2, "medusa", {"replay_versions": 2, "upper_mark_every": 2}),
        (2, "hydra", {"loss": "ce_tv", "draft_temperature": 0.8, "batch_positions": 128}),
        (3, "markov", {"loss": "kl"}),
        (2, "medusa", {"schedule": "drift", "epochs": 3}),
    ],
    ids=["medusa", "hydra", "markov", "drift"],
)
def test_a_team_learns_what_one_worker_learns(
    chain, in_a_team: InATeam, monkeypatch: pytest.MonkeyPatch, size: int, kind: str, settings: dict[str, Any]
) -> None:
    task = chain()
    monkeypatch.setattr("medusa_ppo.companion.trainer.LOGITS_BYTES", 4 * task.vocab * 64)  # Two micro-batches of 128 positions.
    # The last one has fewer responses than there are workers: somebody has none, and somebody only held-out ones.
    batches = [*(with_prompts(task.batch()) for _ in range(5)), task.batch(2, 9)]
    alone, cycles = make(task, kind, **settings), [make(task, kind, **settings) for _ in range(size)]
    reports = [alone.run(batch) for batch in batches]

    def work(team: Meeting, rank: int) -> list[Any]:
        cycles[rank].join(team)
        return [cycles[rank].run(batch.split(size)[rank]) for batch in batches]

    together = in_a_team(work, size)
    assert len({cycle.digest() for cycle in cycles}) == 1, "all hold the same state, to the bit"
    assert alone.version == cycles[0].version > 0
    for report, other in zip(reports, together[0], strict=True):
        assert (report.published, report.problem, report.train.tokens) == (other.published, other.problem, other.train.tokens)
        assert report.train.optimizer_steps == other.train.optimizer_steps
        torch.testing.assert_close(report.train.losses, other.train.losses, rtol=1e-4, atol=1e-5)
        assert (report.verdict is None) == (other.verdict is None)
        if report.verdict is not None:
            assert report.verdict.candidate.mean_acceptance_length == pytest.approx(
                other.verdict.candidate.mean_acceptance_length, abs=1e-3
            )
    left, right = alone.state_dict(), cycles[0].state_dict()
    assert left.keys() == right.keys() and ("rows.upper" in left) == ("upper_mark_every" in settings)
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_counts_are_pooled_over_all_parts(chain, in_a_team: InATeam) -> None:
    task = chain()
    heads = make(task).trainer.heads
    holdout = task.batch(7)
    whole = replay(heads, holdout, task.lm_head_VD)
    for result in in_a_team(lambda team, rank: replay(heads, holdout.split(2)[rank], task.lm_head_VD, team=team)):
        assert torch.equal(result.drafts_S, whole.drafts_S) and torch.equal(result.accepted_SK, whole.accepted_SK)
        assert torch.equal(result.unseen_S, whole.unseen_S)


def test_states_that_are_not_finite_in_one_part_pass_the_batch_over_everywhere(chain, in_a_team: InATeam) -> None:
    task = chain()
    spoiled = task.batch()
    spoiled.logprobs_M[-1] = float("inf")
    cycles = [make(task), make(task)]

    def work(team: Meeting, rank: int) -> str:
        cycles[rank].join(team)
        return cycles[rank].run(spoiled.split(2)[rank]).problem

    assert all("not finite" in problem for problem in in_a_team(work))
    assert cycles[0].digest() == cycles[1].digest() and cycles[0].trainer.batches_trained == 0
