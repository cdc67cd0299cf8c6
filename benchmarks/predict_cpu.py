"""Rollouts on this CPU, predicted from microbenchmarks and measured on engines, cell by cell.

    medusa-ppo bench rollout --model DIR --heads HEADS --data FILE --template ... --dtype bfloat16
        --batches 1,4,16,64 --fixed 1,2,4 --others none --json CELLS/actor-bfloat16.json
    python benchmarks/predict_cpu.py CELLS/*.json

The measured files are those of `bench rollout`; each names its actor, heads, dtype and threads.
What was accepted is taken from them, since acceptance is given to a prediction; seconds are not. A
cell is a number of sequences: predicted is the ratio of each fixed number of drafts to vLLM's
defaults, and of the best of them, none included, where the measured engine chose for itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from medusa_ppo.predict.asking import Accepted, PredictOptions, question_of
from medusa_ppo.predict.rollout_model import ResponseLengths, RolloutModel
from medusa_ppo.predict.step_model import Steps
from medusa_ppo.predict.trained_heads import read_trained

FIXED, CHOSEN = "ours, K = ", "ours, K chosen"
PROMPT = 64
"""Tokens of a prompt, about: a cell does not say."""


def accepted_shares(rows: Sequence[Mapping[str, Any]], heads: int) -> tuple[float, ...]:
    """Shares of runs that reach each position, from the mean acceptance lengths of fixed numbers of
    drafts; what lies between two of them falls evenly.
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
    # Even parts of a sum stand in for falling ones; noise may make a later one the larger.
    for place in range(1, len(shares)):
        shares[place] = min(shares[place], shares[place - 1])
    return tuple(min(1.0, max(0.0, share)) for share in shares[:heads])


def predicted_ratios(
    steps: Steps, batch: int, shares: Sequence[float], tokens: int
) -> dict[int, float]:
    """Ratio to vLLM's defaults by number of drafts, at so many sequences that run together."""
    lengths = ResponseLengths((tokens,) * batch, "alike")
    model = RolloutModel(steps, lengths, batch, PROMPT, len(shares))
    prefill = steps.prefill(PROMPT * batch)
    plain = model.plain().seconds + prefill
    return {
        drafts: plain / (model.drafted(shares, drafts).seconds + prefill)
        for drafts in range(1, len(shares) + 1)
    }


def cells_of(measured: Mapping[str, Any], steps: Steps, heads: int) -> list[dict[str, Any]]:
    """Each number of sequences: measured and predicted."""
    found = []
    for batch in measured["batches"]:
        rows = [row for row in measured["rows"] if row["batch"] == batch]
        shares = accepted_shares(rows, heads)
        tokens = measured["settings"]["max_new_tokens"]
        ratios = predicted_ratios(steps, batch, shares, tokens)
        fixed = {
            int(row["arm"].removeprefix(FIXED)): row["ratio"]
            for row in rows
            if row["arm"].startswith(FIXED)
        }
        best = max(ratios, key=lambda drafts: ratios[drafts])
        best = best if ratios[best] > 1 else 0
        chosen = next((row["ratio"] for row in rows if row["arm"] == CHOSEN), None)
        nearest = min([0, *fixed], key=lambda drafts: abs(drafts - best))
        at_best = {0: 1.0, **fixed}[nearest]
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts on this CPU, predicted and measured.")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    import torch

    from medusa_ppo.engines.launch import read_model_config
    from medusa_ppo.predict.cpu_steps import CpuSteps
    from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear

    out = [
        "| cell | sequences | measured / predicted | chosen, and the best predicted | K predicted"
        " | its measured rate over the best |",
        "|---|---|---|---|---|---|",
    ]
    for file in options.files:
        measured = json.loads(file.read_text(encoding="utf-8"))
        settings = measured["settings"]
        torch.set_num_threads(settings["threads"])
        trained = read_trained(Path(settings["heads"]))
        raw = read_model_config(settings["model"])
        tokens = settings["max_new_tokens"]
        asked = PredictOptions(
            model=settings["model"], length_mean=tokens, length_spread=0.0, prompt=PROMPT
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
            PROMPT + tokens / 2,
        )
        cells = cells_of(measured, steps, trained.num_heads)
        out += markdown(f"{Path(settings['model']).name}, {dtype}", cells)
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
