"""Steps on this CPU: put together from what was timed, with sizes in between on a line. Timings
themselves decide nothing here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from heads.heads_config import HeadsConfig
from medusa_ppo.drafting.products import plain_linear
from medusa_ppo.predict import cpu_steps
from medusa_ppo.predict.cpu_steps import CpuSteps, HostCosts
from medusa_ppo.predict.prediction import Question, predict_on
from medusa_ppo.predict.rollout_model import ResponseLengths
from medusa_ppo.runtime.hardware import ModelSizes

MODEL = ModelSizes(64, 2, 2, 1, 32, 128, 96)
HEADS = HeadsConfig(
    64, 96, 4, "hydra", mlp_ratio=1, context=4, feed_forward=1, copy_parts=1, copy_tokens=2
)
HOST = HostCosts(0.001, 0.0, 0.002, 0.0001)


@pytest.fixture(scope="module")
def steps() -> CpuSteps:
    return CpuSteps(MODEL, HEADS, torch.float32, plain_linear, plain_linear, 16, 32.0, host=HOST)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CpuSteps:
    """As `steps`, but each microbenchmark takes a second: how they are put together."""
    monkeypatch.setattr(cpu_steps, "_seconds", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(cpu_steps, "PYTHON_REFERENCE_S", 0.5)
    return CpuSteps(MODEL, HEADS, torch.float32, plain_linear, plain_linear, 16, 32.0, host=HOST)


def test_a_step_is_the_sum_of_its_parts(counted: CpuSteps) -> None:
    # Python is half as fast here as where the host's costs were measured.
    assert counted.measured["python_over_reference"] == 2
    assert counted.plain(4, 32) == pytest.approx(2 * 0.001 + 4)
    drafted = 2 * (0.002 + 4 * 0.0001) + 5
    assert counted.drafted(4, 2, 32) == pytest.approx(drafted)
    # Between two timed numbers of drafts, and of sequences.
    assert counted.drafted(7, 3, 32) == pytest.approx(drafted + 2 * 3 * 0.0001)
    # A longer cache takes longer to attend to, and nothing else.
    assert counted.drafted(4, 2, 96) == pytest.approx(drafted + 2)
    assert counted.drafted(4, 0, 32) == counted.plain(4, 32)


def test_a_core_that_was_taken_for_a_moment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spoils one round of an operation, each time another one."""
    timed = itertools.count()
    spoiled = {(0, "layers"), (2, "logits")}

    def seconds(call: Callable[[], str]) -> float:
        done, name = next(timed) // (2 * cpu_steps.REPEATS), call()
        return 50.0 if (done, name) in spoiled else 1.0 + done

    monkeypatch.setattr(cpu_steps, "_seconds", seconds)
    step = {("layers", 1): lambda: "layers", ("logits", 1): lambda: "logits"}
    assert cpu_steps.seconds_of([step]) == {("layers", 1): 2.0, ("logits", 1): 1.0}


def test_each_operation_follows_the_one_before_it_in_a_step() -> None:
    """So that it finds the caches as an engine's step leaves them."""
    called: list[str] = []
    step = {(name,): partial(called.append, name) for name in ("layers", "logits", "draft")}
    cpu_steps.seconds_of([step])
    assert called == ["layers", "logits", "draft"] * (cpu_steps.ROUNDS * cpu_steps.REPEATS)


def test_prompts_are_read_at_the_largest_batch_s_pace(counted: CpuSteps) -> None:
    assert counted.prefill(160) == pytest.approx(2 * 160 / 80)


def test_everything_that_was_timed_is_told(steps: CpuSteps) -> None:
    measured = steps.measured
    assert set(measured["products_s"]) == {"1", "2", "3", "4", "5", "8", "12", "16", "20"} | {
        "32",
        "48",
        "80",
    }
    assert set(measured["drafting_s"]) == {f"{s}x{k}" for s in (1, 4, 16) for k in (1, 2, 4)}
    parts = ("products_s", "attention_s", "sampler_s", "verification_s", "drafting_s")
    assert all(seconds > 0 for part in parts for seconds in measured[part].values())
    assert steps.drafted(16, 4, 32) > steps.plain(16, 32) > 0


def test_a_prediction_is_made_of_it(steps: CpuSteps) -> None:
    question = Question(
        "tiny",
        MODEL,
        HEADS,
        (0.9, 0.8, 0.7, 0.6),
        ResponseLengths.log_normal(32, 40, 0.5),
        sequences=16,
        prompt=8,
    )
    found = predict_on(question, "this CPU", steps, steps.measured, 0.1)
    assert found.machine == "this CPU"
    assert [row.sequences for row in found.rows] == [1, 2, 4, 8, 16]
    assert found.step is None, "nobody said what the rest of a step takes"
    assert found.assumptions["measured"]["threads"] == torch.get_num_threads()


def test_a_large_actor_is_timed_by_a_part_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_steps, "MOST_WEIGHTS", 1)
    actor = cpu_steps._Actor(MODEL, torch.float32, plain_linear, 8, 1)
    assert actor.scale == 2
    actor.layers(3)
    actor.attention(1, 2)


@pytest.mark.parametrize(
    ("wanted_s", "said"), [(0.0, ""), (1e6, "repeat it when nothing else runs"), (math.nan, "")]
)
def test_a_busy_machine_is_said(
    wanted_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0.0, wanted_s])
    monkeypatch.setattr(cpu_steps, "cores_wanted_s", lambda: next(counts))
    steps = CpuSteps(MODEL, HEADS, torch.float32, plain_linear, plain_linear, 1, 32.0, host=HOST)
    assert (said in steps.source) if said else steps.source == "microbenchmarks on this CPU"
    assert (steps.measured["waited_frac"] is None) == math.isnan(wanted_s)
