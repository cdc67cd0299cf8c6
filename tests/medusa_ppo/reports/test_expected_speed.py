"""A run on a known GPU is held against the prediction for it; one elsewhere is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_ppo.reports.expected_speed import expected_speed
from medusa_ppo.reports.run_files import Run, read_run
from tests.medusa_ppo.reports.test_findings import codes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SHARES = [0.6, 0.4, 0.41, 0.2]


@pytest.fixture
def on_a_gpu(make_run: Callable[..., Path], tmp_path: Path) -> Callable[..., Run]:
    """A made-up run of an 8B actor on such GPUs whose rollouts gained so much."""

    def make(
        gpus: Any = ("NVIDIA H100 80GB HBM3",),
        speedup: float = 1.0,
        engine: dict[str, Any] | None = None,
        vllm: str = "0.32.0",
    ) -> Run:
        actor = tmp_path / "actor"
        actor.mkdir(exist_ok=True)
        (actor / "config.json").write_text(json.dumps(LLAMA))
        folder = make_run(
            tmp_path / "run", 12, overrides={"model": {"path": str(actor)}, "ppo": {"steps": 12}}
        )
        meta = json.loads((folder / "run.json").read_text())
        meta["hardware"]["gpus"] = gpus
        meta["config"].setdefault("engine", {}).update(engine or {})
        meta["versions"]["vllm"] = vllm
        (folder / "run.json").write_text(json.dumps(meta))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["pair_speedup"] = speedup
            line["acceptance_per_position"] = SHARES
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_run(folder)

    return make


def test_a_run_on_a_known_gpu_is_predicted_from_what_it_had(
    on_a_gpu: Callable[..., Run],
) -> None:
    found = expected_speed(on_a_gpu(), SHARES)
    assert found is not None
    assert found.machine == "one H100 (vLLM's V2 runner)"
    # Measured shares wander; a prediction asks for falling ones.
    assert found.question.acceptance == (0.6, 0.4, 0.4, 0.2)
    assert 50 < found.question.lengths.mean < 60
    assert found.question.model.hidden == 4096


def test_rollouts_below_the_prediction_are_said(on_a_gpu: Callable[..., Run]) -> None:
    expected = expected_speed(on_a_gpu(), SHARES)
    assert expected is not None
    low = expected.speedup.low
    assert "slower_than_predicted" in codes(on_a_gpu(speedup=0.9 * low))
    assert "slower_than_predicted" not in codes(on_a_gpu(speedup=1.05 * low))


def test_a_run_on_v1_is_held_against_the_costs_of_v1(on_a_gpu: Callable[..., Run]) -> None:
    v1 = expected_speed(on_a_gpu(engine={"sleep_level": 1}), SHARES)
    v2 = expected_speed(on_a_gpu(), SHARES)
    assert v1 is not None and v2 is not None and v1.speedup.value < v2.speedup.value
    between = (v1.speedup.low + v2.speedup.low) / 2
    assert "slower_than_predicted" in codes(on_a_gpu(speedup=between))
    run = on_a_gpu(speedup=between, engine={"runner": "v1"})
    assert "slower_than_predicted" not in codes(run)


@pytest.mark.parametrize(
    "given",
    [
        {"engine": {"stop_below": 0.1, "num_drafts": 4, "draft_temperature": 1.0}},
        {"engine": {"extra": {"async_scheduling": False}}},
        {"engine": {"memory_bytes": 1 << 30, "draft_temperature": 1.0}},
        {"engine": {"runner": "v2"}, "vllm": "0.29.0"},
    ],
)
def test_engines_on_v2_that_do_not_work_as_predicted_are_not_predicted(
    on_a_gpu: Callable[..., Run], given: dict[str, Any]
) -> None:
    """The report told to look for other programs on the GPU."""
    run = on_a_gpu(**given, speedup=0.1)
    assert expected_speed(run, SHARES) is None
    assert "slower_than_predicted" not in codes(run)


@pytest.mark.parametrize("gpus", [(), ("NVIDIA GeForce RTX 3090",), None])
def test_nothing_is_predicted_of_other_machines(on_a_gpu: Callable[..., Run], gpus: Any) -> None:
    assert expected_speed(on_a_gpu(gpus), SHARES) is None
    assert "slower_than_predicted" not in codes(on_a_gpu(gpus, speedup=0.1))


def test_what_is_not_known_predicts_nothing(on_a_gpu: Callable[..., Run]) -> None:
    run = on_a_gpu()
    assert expected_speed(run, None) is None
    (Path(run.setting("model", "path")) / "config.json").unlink()
    assert expected_speed(run, SHARES) is None
