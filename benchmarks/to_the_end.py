"""How near are the heads that a run serves to heads trained to the end on the same tokens?

    medusa-ppo ppo --config demo ppo.steps=1 report.compare_pairs=0 run_dir=WARM
    medusa-ppo ppo --config demo ppo.steps=5 heads.warm_up_tokens=0 report.keep_rollouts=5 \\
        report.compare_pairs=0 run_dir=COLD
    python benchmarks/to_the_end.py WARM --model ACTOR --heads WARM/heads/v000001
    python benchmarks/to_the_end.py COLD --model ACTOR --heads COLD/heads/v000003 --steps 4

The same tokens are the responses of the run's warm-up and of its first `--steps` steps. For each of
`--epochs` `medusa-ppo train` learns them with its own defaults, but 256 positions in an optimizer
step, as the embedded example has; the best of these heads are those trained to the end. All are
replayed on what ACTOR writes to 150 questions of the example's split `eval`, which nobody saw.
Compared are extra tokens: those of an engine step beyond the one that it writes without drafts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from medusa_ppo.config.run_config import RunConfig
from medusa_ppo.demo.task import demo_rows
from medusa_ppo.offline.evaluate import evaluate_heads
from medusa_ppo.offline.options import EvalOptions, TrainOptions
from medusa_ppo.offline.train import train_heads
from medusa_ppo.plugin.warm_up import FOLDER
from medusa_ppo.ppo.generation import PromptStream
from medusa_ppo.ppo.run_warm_up import prompts_of
from medusa_ppo.reports.run_files import LOGPROBS, PROMPT_IDS, RESPONSE_IDS, ROLLOUTS_FOLDER
from medusa_ppo.reports.store import read_run
from medusa_ppo.runtime.console import OfflineProgress, say

NEW_TOKENS = 112
QUESTIONS = 150


def learned(run: Path, model: str, steps: int) -> Iterator[dict[str, Any]]:
    """What the run's heads were trained on, as rows that `medusa-ppo train` reads."""
    if (run / FOLDER).is_dir():
        config = RunConfig.model_validate(read_run(run).config)
        stream = PromptStream.load(
            config.data, AutoTokenizer.from_pretrained(model), seed=config.seed
        )
        prompts = [prompt.token_ids for prompt in prompts_of(config, stream)]
        for file in sorted((run / FOLDER).glob("round-*.json")):
            for response in json.loads(file.read_text())["responses"]:
                yield {
                    PROMPT_IDS: prompts[response["prompt_index"]],
                    RESPONSE_IDS: response["token_ids"],
                    LOGPROBS: response["logprobs"],
                }
    for file in sorted((run / ROLLOUTS_FOLDER).glob("step-*.jsonl"))[:steps]:
        yield from map(json.loads, file.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", required=True, help="the actor before the first step")
    parser.add_argument("--heads", required=True, help="the heads that the run served")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--epochs", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = list(learned(args.run, args.model, args.steps))
    tokens = sum(len(row[RESPONSE_IDS]) for row in rows)
    say(f"{tokens} tokens to {len(rows)} prompts")
    with tempfile.TemporaryDirectory() as name, OfflineProgress(quiet=True) as progress:
        folder = Path(name)
        for file, found in (
            ("learned", rows),
            ("asked", [{"prompt": row["prompt"]} for row in demo_rows("eval", limit=QUESTIONS)]),
        ):
            lines = "".join(f"{json.dumps(row)}\n" for row in found)
            (folder / f"{file}.jsonl").write_text(lines)

        def extra(heads: str) -> tuple[float, list[float]]:
            figures = evaluate_heads(
                EvalOptions(
                    model=args.model,
                    heads=heads,
                    data=str(folder / "asked.jsonl"),
                    template="{prompt}",
                    max_new_tokens=NEW_TOKENS,
                    limit=QUESTIONS,
                    seed=args.seed,
                ),
                progress,
            )
            low, high = figures["confidence_interval"]
            return figures["mean_acceptance_length"] - 1, [low - 1, high - 1]

        here, interval = extra(args.heads)
        say(f"the run's heads: {here:.3f} extra tokens ({interval[0]:.3f} to {interval[1]:.3f})")
        best = 0.0
        for epochs in args.epochs:
            out = folder / f"epochs-{epochs}"
            train_heads(
                TrainOptions(
                    model=args.model,
                    data=str(folder / "learned.jsonl"),
                    out=out,
                    epochs=epochs,
                    batch_positions=256,
                    max_train_tokens=10 * tokens,
                    max_new_tokens=NEW_TOKENS,
                    seed=args.seed,
                ),
                progress,
            )
            found, interval = extra(str(out))
            best = max(best, found)
            say(
                f"{epochs:3d} passes: {found:.3f} ({interval[0]:.3f} to {interval[1]:.3f});"
                f" the run's / these {here / found:.3f}"
            )
        say(f"the run's heads / the best: {here / best:.3f} of the extra tokens")


if __name__ == "__main__":
    main()
