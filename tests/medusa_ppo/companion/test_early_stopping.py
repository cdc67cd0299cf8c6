"""Training for as long as the hold-out rises: where it stops, what is kept, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from medusa_ppo.companion.early_stopping import LOOK_STEPS, PATIENCE, train_while_rising
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.trainer import TrainReport
from medusa_ppo.contract.rollout_batch import RolloutBatch
from tests.medusa_ppo.companion.test_cycle import make

BATCH = RolloutBatch(
    torch.zeros(100, 2), torch.zeros(100, dtype=torch.int64), torch.zeros(100), torch.tensor([100])
)


@dataclass
class CountingTrainer:
    """Each look has another number as its state; a clock goes on with it."""

    problem_at: int = -1
    team: Any = None
    looks: int = 0
    passes: list[float] = field(default_factory=list)
    kept: int | None = None

    def train_batch(self, batch: RolloutBatch, *, epochs: float) -> TrainReport:
        self.passes.append(epochs)
        self.looks += 1
        problem = "Not finite." if self.looks == self.problem_at else ""
        return TrainReport(1.0 / self.looks, tokens=100, optimizer_steps=5, problem=problem, rows=9)

    def reset_to(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = int(state["look"])


def run(trainer: CountingTrainer, curve: list[float], seconds: float = 1e9) -> TrainReport:
    found, _ = train_while_rising(
        trainer,  # type: ignore[arg-type]
        BATCH,
        lambda: curve[min(trainer.looks, len(curve)) - 1],
        lambda: {"look": torch.tensor(trainer.looks)},
        3,
        seconds,
        clock=lambda: float(trainer.looks),
    )
    return found


def test_it_stops_when_nothing_rises_any_more_and_keeps_the_best() -> None:
    trainer = CountingTrainer()
    report = run(trainer, [0.1, 0.5, 0.9, 0.7, 0.6, 0.5, 0.95])
    assert trainer.looks == 3 + PATIENCE and trainer.kept == 3
    assert report.optimizer_steps == 5 * trainer.looks and report.rows == 9 * trainer.looks
    assert trainer.passes == [math.ceil(LOOK_STEPS / 3)] * trainer.looks


def test_a_rise_that_is_next_to_none_is_none_but_the_best_is_kept() -> None:
    trainer = CountingTrainer()
    run(trainer, [0.5, 0.501, 0.502, 0.503])
    assert trainer.looks == 1 + PATIENCE and trainer.kept == 4


def test_nothing_is_put_back_while_it_rises_and_the_time_is_up() -> None:
    trainer = CountingTrainer()
    run(trainer, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], seconds=4)
    assert trainer.looks == 4 and trainer.kept is None


def test_a_look_that_would_end_too_late_is_not_begun() -> None:
    """The loop waits for it: on a busy machine such a look made the warm-up's heads come late."""
    trainer = CountingTrainer()
    run(trainer, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], seconds=4.5)
    assert trainer.looks == 4


def test_the_time_of_all_is_up_when_that_of_one_worker_is() -> None:
    class OtherIsLate:
        def most(self, count: int) -> int:
            return 1

    trainer = CountingTrainer(team=OtherIsLate())
    run(trainer, [0.1, 0.2, 0.3])
    assert trainer.looks == 1


def test_a_batch_that_can_not_be_trained_on_says_so_and_what_was_learned_before_stays() -> None:
    assert run(CountingTrainer(problem_at=1), [0.1]).problem
    trainer = CountingTrainer(problem_at=3)
    report = run(trainer, [0.5, 0.1])
    assert not report.problem and report.optimizer_steps == 10 and trainer.kept == 1


def test_a_cycle_learns_from_one_batch_what_takes_several_otherwise(chain) -> None:
    task = chain()
    batch = task.batch(sequences=160)
    later = task.batch(sequences=64)
    once, warmed = (make(task, kind="hydra", learning_rate=2e-3) for _ in range(2))
    once.run(batch)
    report = warmed.run(replace(batch, rising_s=60.0))
    assert report.published and warmed.version == 1 and warmed.passes > once.passes
    tables = {"embedding_VD": task.lm_head_VD}

    def length(cycle: Any) -> float:
        return replay(cycle.serving, later, task.lm_head_VD, **tables).mean_acceptance_length

    assert length(warmed) > length(once) + 0.2
