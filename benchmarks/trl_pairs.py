"""The same TRL script with and without draft heads: seconds of generation, rewards, acceptance. One
process for each run.

    python benchmarks/trl_pairs.py pairs --seeds 5 --steps 12 --out pairs/
    python benchmarks/trl_pairs.py pairs --seeds 3 --steps 30 --out pairs/
        --processes 2 --form fsdp2
    python benchmarks/trl_pairs.py compare --out pairs/

`pairs` runs both arms of each seed in turn, with `--processes 2` as a training on two processes,
and then compares them; `compare` only compares.

The plain arm is TRL's own GRPOTrainer. On vLLM's CPU build its weight sync does not work, so there
(and only there) the plain arm reloads the weights as ours does. Seconds of a call are everything
that TRL waits for: sync, newer heads, generation, and what the plugin does afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "trl_grpo.py"
SKIPPED_CALLS = 8
"""Generate calls in which the arms do not yet differ: the heads are trained for the first time, and
caches are filled.
"""
PARTS = {"plain": ("generate",), "medusa": ("generate", "before_generation", "rollout_ready")}


def mend_cpu_sync() -> None:
    """Let TRL's own trainer sync its weights on vLLM's CPU build."""
    from trl.generation.vllm_generation import VLLMGeneration

    def sync_weights(self: Any) -> None:
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": self._iter_named_params()}
        )
        # Keys and values in it were computed with the old weights.
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync_weights


def set_dtype(dtype: str) -> None:
    """Set the dtype of both arms' vLLM: TRL has no option for it, and `auto` turns a float32 actor
    into bfloat16.
    """
    from trl.generation import vllm_generation

    # The class that TRL imported: TRL constructs it by this name.
    class TypedLLM(vllm_generation.LLM):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{"dtype": dtype, **settings})

    vllm_generation.LLM = TypedLLM


def cut_by_fsdp2() -> None:
    """Shard both arms' actor over the processes with FSDP2. Accelerate does this on GPUs only; this
    does the same on a CPU.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from trl import GRPOTrainer

    create = GRPOTrainer.create_optimizer

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        # accelerate would wrap the sharded model in DDP.
        self.accelerator.prepare_model = lambda model, **_: model
        # TRL uses this to decide how to gather weights for vLLM; accelerate has not set it.
        self.vllm_generation._dist.fsdp_version = 2
        return create(self, *args, **kwargs)

    GRPOTrainer.create_optimizer = create_optimizer


def clocked(owner: Any, name: str, parts: dict[str, float]) -> None:
    """Add the seconds of each call of a method to `parts`."""
    method = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - began

    setattr(owner, name, call)


def clock_generations(generations: list[dict[str, Any]]) -> None:
    """One entry for each call of TRL's generation: seconds, tokens, and the seconds of its
    parts.
    """
    from trl.generation import vllm_generation
    from trl.trainer.grpo_trainer import GRPOTrainer

    from medusa_ppo.plugin.medusa_plugin import MedusaPlugin

    whole = GRPOTrainer._generate_single_turn
    parts = {}
    for owner, name in (
        (vllm_generation.LLM, "generate"),
        (MedusaPlugin, "before_generation"),
        (MedusaPlugin, "rollout_ready"),
    ):
        clocked(owner, name, parts)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts.clear()
        began = time.perf_counter()
        answer = whole(self, *args, **kwargs)
        generations.append(
            {
                "seconds": time.perf_counter() - began,
                "tokens": sum(map(len, answer[0])),
                "parts": dict(parts),
            }
        )
        return answer

    GRPOTrainer._generate_single_turn = timed


def run(options: argparse.Namespace) -> None:
    """One training; its figures go to out/ARM-SEED.json."""
    from medusa_ppo.vllm_plugin.vllm_versions import is_cpu_build

    arm = options.arm
    seed = options.seed
    out = options.out
    if arm == "plain" and is_cpu_build():
        mend_cpu_sync()
    set_dtype(options.dtype)
    if options.form == "fsdp2":
        cut_by_fsdp2()
    generations: list[dict[str, Any]] = []
    clock_generations(generations)
    # The example as a user has it, because the documented script is what is measured.
    example = runpy.run_path(str(EXAMPLE))
    began = time.perf_counter()
    fixed = {"engine": {"num_drafts": example["MEDUSA"]["heads"]["num_heads"]}}
    medusa = example["MEDUSA"] | (fixed if options.fixed else {})
    for section, values in options.medusa.items():
        medusa[section] = {**medusa.get(section, {}), **values}
    trainer = example["main"](
        options.steps,
        str(out / f"{arm}-{seed}"),
        options.actor,
        medusa if arm == "medusa" else None,
        seed=seed,
        **options.settings,
    )
    # The last row summarises the training and has no reward.
    history = [row for row in trainer.state.log_history if "reward" in row]
    record = {
        "arm": arm,
        "seed": seed,
        "form": options.form if options.processes > 1 else "",
        "wall_s": time.perf_counter() - began,
        "generations": generations,
        "rewards": [row["reward"] for row in history],
        "acceptance": [row.get("medusa/mal_serving") for row in history],
        "serving": [row.get("medusa/replay_mal_serving") for row in history],
        "frozen": [row.get("medusa/replay_mal_frozen") for row in history],
    }
    if trainer.accelerator.is_main_process:
        (out / f"{arm}-{seed}.json").write_text(json.dumps(record), encoding="utf-8")


def run_pairs(options: argparse.Namespace, arguments: list[str]) -> None:
    """Both arms of every seed, each in its own process; which arm goes first alternates."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.processes)]
        if options.processes > 1
        else []
    )
    environment = os.environ | (
        # Both processes' engines would bind their threads to the same cores.
        {"ACCELERATE_USE_CPU": "true", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if launch else {}
    )
    for seed in range(options.seeds):
        for arm in ("plain", "medusa") if seed % 2 else ("medusa", "plain"):
            if (options.out / f"{arm}-{seed}.json").exists():
                # An earlier call made it.
                continue
            command = [
                sys.executable,
                *launch,
                __file__,
                "run",
                *arguments,
                "--arm",
                arm,
                "--seed",
                str(seed),
            ]
            with open(options.out / f"{arm}-{seed}.log", "wb") as log:
                subprocess.run(
                    command, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT
                )


def per_token(record: dict[str, Any], part: str) -> float:
    """Milliseconds of a part of generation per token, over the calls that count."""
    calls = record["generations"][SKIPPED_CALLS:]
    return (
        1000
        * sum(call["parts"].get(part, 0.0) for call in calls)
        / sum(call["tokens"] for call in calls)
    )


def compare(out: Path) -> dict[str, Any]:
    """Ratios of paired generate calls (same seed, same call, so the same prompts), and the rewards
    of paired runs.
    """
    from scipy.stats import ttest_1samp

    runs = {
        (record["arm"], record["seed"]): record
        for record in (json.loads(p.read_text()) for p in sorted(out.glob("*-*.json")))
    }
    seeds = sorted(seed for arm, seed in runs if arm == "medusa" and ("plain", seed) in runs)
    ratios = []
    by_seed = []
    differences = []
    for seed in seeds:
        medusa = runs["medusa", seed]
        plain = runs["plain", seed]
        # The same call of the same seed has the same prompts in both arms.
        pairs = list(zip(medusa["generations"], plain["generations"], strict=True))[SKIPPED_CALLS:]
        found = [(m["tokens"] / m["seconds"]) / (p["tokens"] / p["seconds"]) for m, p in pairs]
        ratios += found
        by_seed.append(round(median(found), 3))
        differences.append(fmean(medusa["rewards"]) - fmean(plain["rewards"]))
    result = {
        "seeds": seeds,
        "paired_calls": len(ratios),
        "speedup_median": median(ratios),
        "speedup_quartiles": quantiles(ratios, n=4)[::2],
        "speedup_by_seed": by_seed,
        "reward_difference_by_seed": [round(value, 4) for value in differences],
        "reward_difference": fmean(differences),
        "milliseconds_per_token": {
            arm: {
                part: fmean(per_token(runs[arm, seed], part) for seed in seeds)
                for part in PARTS[arm]
            }
            for arm in PARTS
        },
        "acceptance_first": [runs["medusa", seed]["acceptance"][0] for seed in seeds],
        "acceptance_last": [runs["medusa", seed]["acceptance"][-1] for seed in seeds],
        "serving_and_frozen_last": [
            (runs["medusa", seed]["serving"][-1], runs["medusa", seed]["frozen"][-1])
            for seed in seeds
        ],
    }
    # One mean per run: the steps of a run are not independent.
    if len(seeds) > 1:
        result["reward_difference_standard_error"] = stdev(differences) / len(differences) ** 0.5
        result["reward_difference_p"] = float(ttest_1samp(differences, 0.0).pvalue)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "pairs", "compare"))
    parser.add_argument("--arm", choices=("plain", "medusa"), default="medusa")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="pairs: number of seeds, from 0 on")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--actor", default="", help="folder of the actor instead of the demo's")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="vLLM's dtype in both arms; float32 where a CPU has no bfloat16 units",
    )
    parser.add_argument(
        "--fixed",
        action="store_true",
        help="draft with all heads in every step, instead of choosing the number",
    )
    parser.add_argument(
        "--settings",
        type=json.loads,
        default={},
        help="JSON: arguments of GRPOConfig instead of the example's",
    )
    parser.add_argument(
        "--medusa",
        type=json.loads,
        default={},
        help="JSON: sections of the plugin's settings, over the example's",
    )
    parser.add_argument("--processes", type=int, default=1, help="processes of each training")
    parser.add_argument(
        "--form",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="how several processes hold the actor",
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "run":
        run(options)
        return
    if options.what == "pairs":
        run_pairs(options, sys.argv[2:])
    sys.stdout.write(json.dumps(compare(options.out), indent=2) + "\n")


if __name__ == "__main__":
    main()
