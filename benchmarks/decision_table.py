"""The decision table and the picture at the top of docs/choosing.md, from `medusa-ppo predict`'s
own model: what drafting gains, by size of the actor, running sequences and acceptance.

    pip install 'medusa-ppo[predict]'
    python benchmarks/decision_table.py            # writes docs/choosing.md and docs/choosing.svg
    python benchmarks/decision_table.py --check    # says whether they are as they would be written

Without the package a roofline is used, and the page says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from heads.heads_config import DRAFT_VOCABULARY
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.predict.gpus import find_gpu
from medusa_ppo.predict.prediction import Prediction, Question, predict_on_gpu
from medusa_ppo.predict.rollout_model import ResponseLengths
from medusa_ppo.reports.picture_files import draw_curves
from medusa_ppo.runtime.hardware import ModelSizes

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN = "<!-- begin: python benchmarks/decision_table.py -->"
END = "<!-- end -->"
GPU = "h100"
# The shapes of Qwen2.5 1.5B, Llama 3.1 8B, Qwen2.5 32B and Llama 3.1 70B, by their model cards.
ACTORS = {
    "1.5B on one H100": (ModelSizes(1536, 28, 12, 2, 128, 8960, 151936, tied=True), 1),
    "8B on one H100": (ModelSizes(4096, 32, 32, 8, 128, 14336, 128256), 1),
    "32B on two H100s": (ModelSizes(5120, 64, 40, 8, 128, 27648, 152064), 2),
    "70B on four H100s": (ModelSizes(8192, 80, 64, 8, 128, 28672, 128256), 4),
}
SEQUENCES = (1, 8, 32, 128)
ACCEPTED = {
    1.5: (0.35, 0.1, 0.04, 0.01),
    2.0: (0.53, 0.27, 0.13, 0.07),
    2.5: (0.64, 0.42, 0.27, 0.17),
    3.0: (0.73, 0.55, 0.41, 0.31),
}
"""Tokens per step -> shares by position, decreasing as with trained heads."""
PICTURED = "8B on one H100", 2.5
LENGTHS = ResponseLengths.log_normal(256, 2000, 0.7, 8192)


def predictions() -> dict[tuple[str, float], Prediction]:
    found = {}
    for name, (model, ranks) in ACTORS.items():
        for length, shares in ACCEPTED.items():
            question = Question(
                name,
                model,
                HeadsSection().sizes(model.hidden, model.vocab),
                shares,
                LENGTHS,
                sequences=max(SEQUENCES),
                ranks=ranks,
                width=DRAFT_VOCABULARY,
            )
            found[name, length] = predict_on_gpu(question, find_gpu(GPU))
    return found


def block(found: dict[tuple[str, float], Prediction]) -> list[str]:
    """The text between the marks of the page."""
    first = next(iter(found.values()))
    columns = [f"{count} running" for count in SEQUENCES]
    out = [
        BEGIN,
        "",
        f"| actor | tokens a step | {' | '.join(columns)} | a rollout with its long"
        " tail | pays from |",
        f"|{'---|' * (len(columns) + 4)}",
    ]
    for (name, length), prediction in found.items():
        rows = {row.sequences: row for row in prediction.rows}
        cells = []
        for count in SEQUENCES:
            row = rows.get(count)
            if row is None:
                cells.append("does not fit")
            elif row.best:
                cells.append(f"{row.speedups[row.best - 1]:.2f} (K = {row.best})")
            else:
                cells.append(f"**no**, {max(row.speedups):.2f}")
        pays = "never" if prediction.pays_from is None else f"{prediction.pays_from:.2f}"
        out.append(
            f"| {name} | {length:.1f} | {' | '.join(cells)} | {prediction.speedup} | {pays} |"
        )
    name, length = PICTURED
    out += [
        "",
        f"![Speed-up against running sequences, {name}, {length} tokens a step](choosing.svg)",
        "",
        f"Tokens/s over vLLM's plain step; the rollout has {len(LENGTHS.tokens)} responses,"
        f" {LENGTHS.said}, at most {max(SEQUENCES)} at once. Seconds: {first.source}.",
        END,
    ]
    return out


def picture(prediction: Prediction) -> str:
    rows = prediction.rows
    curves = {
        f"K = {drafts}": [row.speedups[drafts - 1] for row in rows]
        for drafts in range(1, len(rows[0].speedups) + 1)
    }
    name, length = PICTURED
    title = f"Tokens/s over vLLM's plain step, predicted: {name}, {length} tokens a step"
    return draw_curves(title, [row.sequences for row in rows], curves, "running sequences")


def written(page: str, lines: Sequence[str]) -> str:
    """The page with its block replaced by this one."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join(lines) + after


def main() -> None:
    parser = argparse.ArgumentParser(description="The decision table of docs/choosing.md.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = predictions()
    page, image = DOCS / "choosing.md", DOCS / "choosing.svg"
    new = {
        page: written(page.read_text(encoding="utf-8"), block(found)),
        image: picture(found[PICTURED]),
    }
    if options.check:
        stale = [file.name for file, text in new.items() if file.read_text() != text]
        sys.stdout.write(f"stale: {', '.join(stale) or 'nothing'}\n")
        sys.exit(bool(stale))
    for file, text in new.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
