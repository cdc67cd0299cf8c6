"""Is the number of drafts that an engine chooses the best one, and what does choosing none cost?

    python benchmarks/choice_by_cell.py run OUT --actor NAME=DIR --heads NAME=DIR [--heads ...] \
        --data FILE --template T [--dtypes float32,bfloat16] [--tokens 96] [--rounds 6]
    python benchmarks/choice_by_cell.py table OUT

Each cell is one `medusa-ppo bench rollout` with no speculation, K = 0, 1, 2, 4 and the chosen K, in
turn on the same prompts; no speculation has its own engine. Existing files of cells are not made
again. The table has, for each number of sequences, the medians over rounds of tokens per second
relative to vLLM's defaults, and of the chosen K relative to the best arm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from medusa_ppo.bench.rollout_speed import CHOSEN, FIXED, NONE

FIXED_DRAFTS = (0, 1, 2, 4)


def named(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"given {text!r}, expected NAME=FOLDER")
    return name, folder


def run(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    actor, model = options.actor
    for dtype in options.dtypes.split(","):
        for heads, folder in options.heads:
            file = options.out / f"{actor}-{dtype}-{heads}.json"
            if file.exists():
                continue
            subprocess.run(
                [
                    *(sys.executable, "-m", "medusa_ppo", "bench", "rollout"),
                    *("--model", model, "--heads", folder),
                    *("--data", options.data, "--template", options.template),
                    *("--batches", options.batches, "--rounds", str(options.rounds)),
                    *("--max-new-tokens", str(options.tokens), "--dtype", dtype),
                    *("--others", "none", "--fixed", ",".join(map(str, FIXED_DRAFTS))),
                    *("--json", str(file)),
                ],
                check=True,
            )


def table(options: argparse.Namespace) -> None:
    fixed = [FIXED.format(k) for k in FIXED_DRAFTS]
    head = ["cell", "sequences", *(f"K = {k}" for k in FIXED_DRAFTS), "chosen", "chosen / best"]
    sys.stdout.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}" + "\n")
    for file in sorted(options.out.glob("*-*-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        for batch in found["batches"]:
            ratios = {row["arm"]: row["ratio"] for row in found["rows"] if row["batch"] == batch}
            best = max(ratios[arm] for arm in (NONE, *fixed))
            cells = [*(ratios[arm] for arm in (*fixed, CHOSEN)), ratios[CHOSEN] / best]
            sys.stdout.write(
                f"| {file.stem} | {batch} | {' | '.join(f'{cell:.2f}' for cell in cells)} |" + "\n"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="measure the cells of one actor")
    runs.set_defaults(work=run)
    runs.add_argument("--actor", type=named, required=True)
    runs.add_argument("--heads", type=named, action="append", required=True)
    runs.add_argument("--data", required=True)
    runs.add_argument("--template", required=True)
    runs.add_argument("--dtypes", default="float32,bfloat16")
    runs.add_argument("--batches", default="1,4,16,64")
    runs.add_argument("--tokens", type=int, default=96)
    runs.add_argument("--rounds", type=int, default=6)
    tables = commands.add_parser("table", help="show the cells that were measured")
    tables.set_defaults(work=table)
    for command in (runs, tables):
        command.add_argument("out", type=Path)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
