"""Rollouts on this CPU, predicted from microbenchmarks and measured on engines, cell by cell.

    medusa-ppo bench rollout --model DIR --heads HEADS --data FILE --template ... --dtype bfloat16
        --batches 1,4,16,64 --fixed 1,2,4 --others none --json CELLS/actor-bfloat16.json
    python benchmarks/predict_cpu.py CELLS/*.json [--prompt 64]
    python benchmarks/predict_cpu.py --step-times ~/.cache/medusa-ppo/step-times/KEY.json

The measured files come from `bench rollout`; each names its actor, heads, dtype and threads.
Acceptance is taken from them, because a prediction needs it as input; seconds are not. A cell is a
number of sequences. Predicted are the ratio of each fixed number of drafts to vLLM's defaults, and
that of the best of them (including none) where the measured engine chose by itself.

Step times are those that an engine measured when it started with a chosen `num_drafts`; each of
them is predicted, from a calibration of the same sizes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from medusa_ppo.predict.asking import Accepted, PredictOptions, question_of
from medusa_ppo.predict.rollout_model import ResponseLengths, RolloutModel
from medusa_ppo.predict.step_model import Steps
from medusa_ppo.predict.trained_heads import read_trained
from medusa_ppo.runtime.hardware import ModelSizes

NEAR = 0.1
FIXED, CHOSEN = "ours, K = ", "ours, K chosen"
PROMPT = 64
"""Approximate tokens of a prompt, which a cell does not contain."""
STEP_CONTEXT = 120
"""Approximate tokens in the cache of each request while an engine measures its steps."""


def accepted_shares(rows: Sequence[Mapping[str, Any]], heads: int) -> tuple[float, ...]:
    """Shares of runs that reach each position, from the mean acceptance lengths of fixed numbers of
    drafts; shares between two of these decrease evenly.
    """
    lengths = {0: 1.0} | {
        int(row["arm"].removeprefix(FIXED)): row["mean_acceptance_length"]
        for row in rows
        if row["arm"].startswith(FIXED) and row["mean_acceptance_length"]
    }
    known = sorted(lengths)
    shares: list[float] = []
    for first, second in pairwise(known):
        each = (lengths[second] - lengths[first]) / (second - first)
        shares += [each] * (second - first)
    # Equal parts of a sum replace decreasing ones; because of noise a later one may be larger.
    for place in range(1, len(shares)):
        shares[place] = min(shares[place], shares[place - 1])
    return tuple(min(1.0, max(0.0, share)) for share in shares[:heads])


def predicted_ratios(
    steps: Steps, batch: int, shares: Sequence[float], tokens: int, prompt: int = PROMPT
) -> dict[int, float]:
    """Ratio to vLLM's defaults by number of drafts, with this many running sequences."""
    lengths = ResponseLengths((tokens,) * batch, "alike")
    model = RolloutModel(steps, lengths, batch, prompt, len(shares))
    prefill = steps.prefill(prompt * batch)
    plain = model.plain().seconds + prefill
    return {
        drafts: plain / (model.drafted(shares, drafts).seconds + prefill)
        for drafts in range(1, len(shares) + 1)
    }


def cells_of(
    measured: Mapping[str, Any], steps: Steps, heads: int, prompt: int = PROMPT
) -> list[dict[str, Any]]:
    """Each number of sequences: measured and predicted."""
    found = []
    for batch in measured["batches"]:
        rows = [row for row in measured["rows"] if row["batch"] == batch]
        shares = accepted_shares(rows, heads)
        tokens = measured["settings"]["max_new_tokens"]
        ratios = predicted_ratios(steps, batch, shares, tokens, prompt)
        fixed = {
            int(row["arm"].removeprefix(FIXED)): row["ratio"]
            for row in rows
            if row["arm"].startswith(FIXED)
        }
        best = max(ratios, key=lambda drafts: ratios[drafts])
        best = best if ratios[best] > 1 else 0
        chosen = next((row["ratio"] for row in rows if row["arm"] == CHOSEN), None)
        nearest = min([0, *fixed], key=lambda drafts: abs(drafts - best))
        # Whoever is told not to draft starts vLLM at its defaults, and not our engine with K = 0.
        at_best = {**fixed, 0: 1.0}[nearest]
        found.append(
            {
                "sequences": batch,
                "measured": fixed,
                "predicted": {drafts: ratios[drafts] for drafts in fixed if drafts in ratios},
                "chosen": chosen,
                "predicted_best": max(1.0, *ratios.values()),
                "best": best,
                "at_best": at_best / max(1.0, *fixed.values()),
            }
        )
    return found


def markdown(name: str, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    out = []
    for cell in cells:
        pairs = ", ".join(
            f"K = {drafts}: {ratio:.2f} / {cell['predicted'].get(drafts, float('nan')):.2f}"
            for drafts, ratio in sorted(cell["measured"].items())
        )
        chosen = (
            f"{cell['chosen']:.2f} / {cell['predicted_best']:.2f},"
            f" {100 * (cell['predicted_best'] / cell['chosen'] - 1):+.0f} %"
            if cell["chosen"]
            else ""
        )
        out.append(
            f"| {name} | {cell['sequences']} | {pairs} | {chosen} | {cell['best']} |"
            f" {cell['at_best']:.2f} |"
        )
    return out


def step_rows(kept: Mapping[str, Any], steps: Steps) -> list[str]:
    """By running sequences: an engine's plain step relative to its steps with drafts, measured and
    predicted.
    """
    measured = {(row["running"], row["drafts"]): row["seconds"] for row in kept["rows"]}
    out: list[str] = []
    errors: list[float] = []
    for running in sorted({running for running, _ in measured}):
        plain = measured[running, 0], steps.plain(running, STEP_CONTEXT)
        pairs = []
        for drafts in sorted(k for size, k in measured if size == running and k):
            real = plain[0] / measured[running, drafts]
            paper = plain[1] / steps.drafted(running, drafts, STEP_CONTEXT)
            errors.append(abs(paper / real - 1))
            pairs.append(f"K = {drafts}: {real:.2f} / {paper:.2f}")
        seconds = f"{1e3 * plain[0]:.2f} / {1e3 * plain[1]:.2f}"
        out.append(f"| {running} | {seconds} | {', '.join(pairs)} |")
    close = sum(error <= NEAR for error in errors)
    mean = 100 * sum(errors) / len(errors)
    out.append(f"\n{close} of {len(errors)} ratios within {100 * NEAR:.0f} %, mean {mean:.1f} %")
    return out


def _steps_of_kept(kept: Mapping[str, Any]) -> Steps:
    """A calibration for the sizes of an engine's saved step times."""
    import torch

    from heads.heads_config import HeadsConfig
    from medusa_ppo.predict.cpu_steps import CpuSteps
    from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear

    key = kept["key"]
    torch.set_num_threads(int(re.findall(r"(\d+) threads", key["machine"])[0]))
    return CpuSteps(
        ModelSizes.from_config(key["model"]),
        HeadsConfig(**key["heads"]),
        getattr(torch, key["dtype"].removeprefix("torch.")),
        onednn_product,
        packed_linear,
        key["max_num_seqs"],
        STEP_CONTEXT,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts on this CPU, predicted and measured.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--step-times", type=Path, help="an engine's kept step times")
    options = parser.parse_args()
    if options.step_times:
        kept = json.loads(options.step_times.read_text(encoding="utf-8"))
        out = [
            "| running | plain ms, measured / predicted | plain over drafted, the same |",
            "|---|---|---|",
            *step_rows(kept, _steps_of_kept(kept)),
        ]
    else:
        out = _cells(options.files, options.prompt)
    sys.stdout.write("\n".join(out) + "\n")


def _cells(files: Sequence[Path], prompt: int) -> list[str]:
    import torch

    from medusa_ppo.engines.launch import read_model_config
    from medusa_ppo.predict.cpu_steps import CpuSteps
    from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear

    out = [
        "| cell | sequences | measured / predicted | chosen, and the best predicted | K predicted"
        " | its measured rate over the best |",
        "|---|---|---|---|---|---|",
    ]
    for file in files:
        measured = json.loads(file.read_text(encoding="utf-8"))
        settings = measured["settings"]
        torch.set_num_threads(settings["threads"])
        trained = read_trained(Path(settings["heads"]))
        raw = read_model_config(settings["model"])
        tokens = settings["max_new_tokens"]
        asked = PredictOptions(
            model=settings["model"], length_mean=tokens, length_spread=0.0, prompt=prompt
        )
        question = question_of(asked, raw, Accepted((0.5,)), trained=trained)
        dtype = settings["dtype"] if settings["dtype"] != "auto" else "float32"
        steps = CpuSteps(
            question.model,
            trained,
            getattr(torch, dtype),
            onednn_product,
            packed_linear,
            max(measured["batches"]),
            prompt + tokens / 2,
        )
        cells = cells_of(measured, steps, trained.num_heads, prompt)
        out += markdown(f"{Path(settings['model']).name}, {dtype}", cells)
    return out


if __name__ == "__main__":
    main()
