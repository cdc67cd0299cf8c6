"""Are responses with drafts like those without, as a reward sees them? The embedded example's
prompts, answered by one actor in an engine that drafts and in one that doesn't, one after the
other.

    python benchmarks/same_responses.py ACTOR HEADS [--responses 1500] [--sequences 8]
        [--dtype bfloat16] [--seed 1]

Token by token that is tested elsewhere (benchmarks/distribution.py); here it is whole responses:
their length, their reward (`medusa_ppo.demo.task:graded`), the share that was cut off, and the mean
log-prob of their tokens. Each figure comes with its 95 % interval, and the difference with its own:
with no difference it covers 0 in 95 of 100 runs. ACTOR: a folder, such as that of a run of the
example; HEADS: heads of that actor.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance

from medusa_ppo.actors.hf import load_tokenizer
from medusa_ppo.config.config_file import preset
from medusa_ppo.config.run_config import load_config
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.demo.task import demo_rows, graded
from medusa_ppo.offline.scene import running_engine

TOGETHER = 100
"""Prompts of a call."""
WIDE = 1.96
FIGURES = ("length", "reward", "log-prob", "cut off")


def answered(args: argparse.Namespace, heads: Path | None) -> Mapping[str, Sequence[float]]:
    """The figures of each response."""
    config = load_config(preset("demo"), [f"engine.max_num_seqs={args.sequences}"])
    engine_config = config.engine.model_copy(
        update={"dtype": args.dtype, "num_drafts": 4 if heads else 0}
    )
    tokenizer = load_tokenizer(args.actor)
    rows = demo_rows(limit=args.responses)
    prompts = [tuple(tokenizer(row["prompt"]).input_ids) for row in rows]
    sampling = Sampling(temperature=1.0, max_new_tokens=config.sampling.max_new_tokens)
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    with running_engine(str(args.actor), str(heads or ""), engine_config, args.seed) as engine:
        for start in range(0, len(prompts), TOGETHER):
            seed = 1_000_003 * args.seed + start
            rollouts = engine.generate(
                prompts[start : start + TOGETHER], replace(sampling, seed=seed)
            )
            for response in rollouts.responses:
                row = rows[start + response.prompt_index]
                text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
                values = (
                    len(response.token_ids),
                    graded(row["prompt"], text, row),
                    fmean(response.logprobs),
                    response.finish_reason == "length",
                )
                for name, value in zip(FIGURES, values, strict=True):
                    found[name].append(float(value))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("actor", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("--responses", type=int, default=1500)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    without, drafted = (answered(args, heads) for heads in (None, args.heads))
    lines = ["| | without drafts | with | difference |", "|---|---|---|---|"]
    for name in FIGURES:
        sides = without[name], drafted[name]
        errors = [variance(side) / len(side) for side in sides]
        cells = [
            f"{fmean(side):.4f} ± {WIDE * math.sqrt(error):.4f}"
            for side, error in zip(sides, errors, strict=True)
        ]
        apart = fmean(drafted[name]) - fmean(without[name])
        cells.append(f"{apart:+.4f} ± {WIDE * math.sqrt(sum(errors)):.4f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
