"""The same TRL script with and without draft heads: seconds of generation, rewards, acceptance. One process for each run.

    python benchmarks/trl_pairs.py run --arm medusa --seed 0 --steps 12 --out pairs/     (and --arm plain; in turn, for some seeds)
    python benchmarks/trl_pairs.py compare --out pairs/

The plain arm is TRL's own GRPOTrainer. On vLLM's CPU build its weight sync does not work, so there (and only there) the plain arm reloads
the weights through the model runner, as ours does.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "trl_grpo.py"
SKIPPED_CALLS = 8
"""Generate calls in which the arms do not yet differ: the heads are trained for the first time, and caches are filled."""


def mend_cpu_sync() -> None:
    """Let TRL's own trainer sync its weights on vLLM's CPU build."""
    from trl.generation.vllm_generation import VLLMGeneration

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync_weights


def run(arm: str, seed: int, steps: int, out: Path, *, fixed: bool = False, settings: dict[str, Any] | None = None) -> None:
    """One training; its figures go to out/ARM-SEED.json."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    from medusa_ppo.serving.versions import is_cpu_build

    if arm == "plain" and is_cpu_build():
        mend_cpu_sync()
    generations: list[dict[str, float]] = []
    whole = GRPOTrainer._generate_single_turn

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        answer = whole(self, *args, **kwargs)
        generations.append({"seconds": time.perf_counter() - began, "tokens": sum(map(len, answer[0]))})
        return answer

    GRPOTrainer._generate_single_turn = timed  # What the plugin adds (sync, swap, waiting) is inside.
    example = runpy.run_path(str(EXAMPLE))
    began = time.perf_counter()
    medusa = example["MEDUSA"] | ({"engine": {}} if fixed else {})
    trainer = example["main"](steps, str(out / f"{arm}-{seed}"), medusa=medusa if arm == "medusa" else None, seed=seed, **(settings or {}))
    history = [row for row in trainer.state.log_history if "reward" in row]
    record = {
        "arm": arm,
        "seed": seed,
        "wall_s": time.perf_counter() - began,
        "generations": generations,
        "rewards": [row["reward"] for row in history],
        "acceptance": [row.get("medusa/mal_serving") for row in history],
        "serving": [row.get("medusa/replay_mal_serving") for row in history],
        "frozen": [row.get("medusa/replay_mal_frozen") for row in history],
    }
    (out / f"{arm}-{seed}.json").write_text(json.dumps(record), encoding="utf-8")


def compare(out: Path) -> dict[str, Any]:
    """Ratios of paired generate calls (same seed, same call, so the same prompts), and the difference of the rewards."""
    runs = {(record["arm"], record["seed"]): record for record in (json.loads(p.read_text()) for p in sorted(out.glob("*-*.json")))}
    seeds = sorted(seed for arm, seed in runs if arm == "medusa" and ("plain", seed) in runs)
    ratios, differences = [], []
    for seed in seeds:
        medusa, plain = runs["medusa", seed], runs["plain", seed]
        pairs = list(zip(medusa["generations"], plain["generations"], strict=True))[SKIPPED_CALLS:]
        ratios += [(m["tokens"] / m["seconds"]) / (p["tokens"] / p["seconds"]) for m, p in pairs]
        differences += [m - p for m, p in zip(medusa["rewards"], plain["rewards"], strict=True)]
    last = [(runs["medusa", seed]["serving"][-1], runs["medusa", seed]["frozen"][-1]) for seed in seeds]
    return {
        "seeds": seeds,
        "paired_calls": len(ratios),
        "speedup_median": median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "reward_difference": fmean(differences),
        "reward_difference_standard_error": stdev(differences) / len(differences) ** 0.5,
        "acceptance_first": [runs["medusa", seed]["acceptance"][0] for seed in seeds],
        "acceptance_last": [runs["medusa", seed]["acceptance"][-1] for seed in seeds],
        "serving_and_frozen_last": last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "compare"))
    parser.add_argument("--arm", choices=("plain", "medusa"), default="medusa")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fixed", action="store_true", help="draft with all heads in every step, instead of choosing the number")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: arguments of GRPOConfig in the place of the example's")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "run":
        run(options.arm, options.seed, options.steps, options.out, fixed=options.fixed, settings=options.settings)
    else:
        sys.stdout.write(json.dumps(compare(options.out), indent=2) + "\n")


if __name__ == "__main__":
    main()
