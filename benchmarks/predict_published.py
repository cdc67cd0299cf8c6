"""Published speed-ups, predicted: `medusa-ppo predict`'s step model is fitted on the first half of
benchmarks/published_cases.json and predicts the second half blind.

    pip install 'medusa-ppo[predict]'
    python benchmarks/predict_published.py            # fit, then both halves case by case
    python benchmarks/predict_published.py --no-fit   # with the costs as they stand in the code

The list was fixed before anything was fitted (in its own commit). The fit covers the three host
times of `StepCosts`, which no table of operators has. The model is compared with a baseline that
guesses the mean speed-up of the first half for every case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_ppo.predict.draft_work import LayeredDrafter
from medusa_ppo.predict.gpus import find_gpu
from medusa_ppo.predict.measured_tables import operator_times
from medusa_ppo.predict.rollout_model import ResponseLengths, RolloutModel
from medusa_ppo.predict.step_costs import StepCosts
from medusa_ppo.predict.step_model import GpuSteps
from medusa_ppo.runtime.hardware import ModelSizes

CASES = Path(__file__).with_name("published_cases.json")
FITTED = ("plain_host_s", "draft_host_s", "pass_host_s")
ROLLOUT = {"mean": 3000.0, "spread": 0.7, "longest": 8192, "prompt": 512.0}
"""Lengths of a case that is a whole rollout, from its note."""


def read_cases(path: Path = CASES) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def steps_of(case: Mapping[str, Any], listed: Mapping[str, Any], costs: StepCosts) -> GpuSteps:
    """The step model of a case's GPU, actor and drafter."""
    model = ModelSizes.from_config(listed["models"][case["model"]])
    kind = listed["drafters"][case["drafter"]]
    drafter = LayeredDrafter(model, kind["layers"], kind["vocab"], one_pass=kind["passes"] == 1)
    # What was published is from V1, beside a plain step of V1.
    times = operator_times(find_gpu(case["gpu"]), costs)
    return GpuSteps(model, drafter, times, runner="v1", least_host=False)


def predicted(case: Mapping[str, Any], listed: Mapping[str, Any], costs: StepCosts) -> float:
    """The speed-up on paper."""
    steps = steps_of(case, listed, costs)
    if case["unit"] == "s":
        accepted = case["acceptance_length"] - 1
        shares = _falling(accepted, case["drafts"])
        lengths = ResponseLengths.log_normal(
            case["sequences"], ROLLOUT["mean"], ROLLOUT["spread"], int(ROLLOUT["longest"])
        )
        rollout = RolloutModel(steps, lengths, case["sequences"], ROLLOUT["prompt"], case["drafts"])
        drafted = rollout.drafted(shares, case["drafts"])
        return rollout.plain().seconds / drafted.seconds
    plain = steps.plain(case["sequences"], case["context"])
    drafted_s = steps.drafted(case["sequences"], case["drafts"], case["context"])
    return case["acceptance_length"] * plain / drafted_s


def _falling(accepted: float, drafts: int) -> list[float]:
    """Shares at each position with this sum, where each draft is equally likely after the previous
    one.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        odds = (low + high) / 2
        low, high = (
            (odds, high) if sum(odds**k for k in range(1, drafts + 1)) < accepted else (low, odds)
        )
    return [low**k for k in range(1, drafts + 1)]


def fit(cases: Sequence[Mapping[str, Any]], listed: Mapping[str, Any]) -> StepCosts:
    """The host times with the smallest squared error: of the logarithm of each speed-up, and of the
    plain step if it was published in seconds or in tokens/s of one sequence.
    """
    from scipy.optimize import least_squares

    def costs_of(logs: Sequence[float]) -> StepCosts:
        values = dict(zip(FITTED, (math.exp(value) for value in logs), strict=True))
        return dataclasses.replace(StepCosts(), **values)

    def errors(logs: Sequence[float]) -> list[float]:
        costs = costs_of(logs)
        found = [math.log(predicted(case, listed, costs) / case["speedup"]) for case in cases]
        for case in cases:
            seconds = case["plain"] / 1e3 if case["unit"] == "ms" else 1 / case["plain"]
            plain = steps_of(case, listed, costs).plain(case["sequences"], case["context"])
            found.append(math.log(plain / seconds))
        return found

    start = [math.log(getattr(StepCosts(), name)) for name in FITTED]
    bounds = ([math.log(1e-5)] * len(FITTED), [math.log(5e-3)] * len(FITTED))
    found = least_squares(errors, start, bounds=bounds)
    return costs_of(list(found.x))


def table(listed: Mapping[str, Any], costs: StepCosts) -> list[dict[str, Any]]:
    """Each case with what was measured and predicted, and the baseline's guess."""
    cases = listed["cases"]
    mean = statistics.fmean(case["speedup"] for case in cases if case["half"] == "fit")
    rows = []
    for case in cases:
        found = predicted(case, listed, costs)
        rows.append(
            {
                **case,
                "predicted": found,
                "error": found / case["speedup"] - 1,
                "baseline_error": mean / case["speedup"] - 1,
            }
        )
    return rows


def mean_errors(rows: Sequence[Mapping[str, Any]], half: str) -> tuple[float, float]:
    """Mean absolute error of the model and of the baseline."""
    chosen = [row for row in rows if row["half"] == half]
    return (
        statistics.fmean(abs(row["error"]) for row in chosen),
        statistics.fmean(abs(row["baseline_error"]) for row in chosen),
    )


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    out = [
        "| half | source | actor, GPU | drafter, K | sequences | MAL | measured | predicted | error"
        " | the mean's error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        out.append(
            f"| {row['half']} | {row['source']} | {row['model']}, {row['gpu']} |"
            f" {row['drafter']}, {row['drafts']} | {row['sequences']} |"
            f" {row['acceptance_length']:.2f} | {row['speedup']:.2f} | {row['predicted']:.2f} |"
            f" {100 * row['error']:+.0f} % | {100 * row['baseline_error']:+.0f} % |"
        )
    for half in ("fit", "blind"):
        model, baseline = mean_errors(rows, half)
        out.append(
            f"\n{half}: mean absolute error {100 * model:.1f} %, of the mean {100 * baseline:.1f} %"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Published speed-ups, predicted.")
    parser.add_argument("--no-fit", action="store_true", help="costs as they stand in the code")
    options = parser.parse_args()
    listed = read_cases()
    costs = StepCosts()
    if not options.no_fit:
        costs = fit([case for case in listed["cases"] if case["half"] == "fit"], listed)
        found = ", ".join(f"{name} {1e3 * getattr(costs, name):.3f} ms" for name in FITTED)
        sys.stdout.write(f"Fitted: {found}\n\n")
    sys.stdout.write("\n".join(markdown(table(listed, costs))) + "\n")


if __name__ == "__main__":
    main()
