"""What does a step cost on a GPU, by number of drafts and of running sequences, for an actor of a
given shape? Compared within rounds with vLLM without speculation, in an engine of its own.

    python benchmarks/gpu_steps.py --shape 8b --sequences 1,16,64,256 --drafts 0,1,2,4
        [--runner v2] [--rounds 3] [--json steps.jsonl] [--eager]

Actor and heads have random weights of the real sizes, so what is accepted means nothing and is
divided out: a step's seconds are those of a response over the steps that it took, and these are its
tokens over the tokens of a step. The default heads of a run draft from 8,192 tokens, as a
run's do with such a vocabulary. New heads into the engine (`swap`) are timed too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from heads.checkpoint import save_heads, save_state
from heads.modules import MedusaHeads
from medusa_ppo.bench.pairs import run_rounds
from medusa_ppo.bench.rollout_speed import NONE, running_arms
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.drafting.products import MIN_TOKENS_PER_ENTRY
from medusa_ppo.runtime.processes import local_ray

# As their model cards say; all as a Llama, so that only the sizes differ.
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
PROMPT, WRITTEN, WIDTH = 64, 128, 8192
SWAPS = 7


def write_actor(folder: Path, shape: str) -> None:
    """Only its config: vLLM makes the weights up (`load_format: dummy`)."""
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
    )
    config.save_pretrained(folder)


def write_heads(folder: Path, shape: str) -> MedusaHeads:
    torch.manual_seed(0)
    sizes = HeadsSection().sizes(SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"])
    heads = MedusaHeads(sizes).requires_grad_(False).to(torch.bfloat16)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter, dtype=torch.float32) * 0.02)
    save_heads(folder, heads)
    return heads


def measure(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    write_actor(scratch / "actor", options.shape)
    heads = write_heads(scratch / "heads", options.shape)
    save_state(scratch / "new.safetensors", heads.trainable_state())
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=max(options.sequences),
        max_model_len=PROMPT + WRITTEN + 64,
        memory_fraction=0.45,
        runner=options.runner,
        draft_vocab=WIDTH,
        enforce_eager=options.eager,
        extra={"load_format": "dummy"},
    )
    drawn = random.Random(0)
    vocab = SHAPES[options.shape]["vocab_size"]

    def prompts(count: int) -> list[list[int]]:
        return [[drawn.randrange(1, vocab) for _ in range(PROMPT)] for _ in range(count)]

    sampling = Sampling(1.0, max_new_tokens=WRITTEN, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    with (
        local_ray(),
        running_arms(
            str(scratch / "actor"),
            str(scratch / "heads"),
            "",
            config,
            0,
            scratch,
            others=(),
            fixed=options.drafts,
        ) as arms,
    ):
        ours = arms[-1].engine
        seen = 0
        while seen < MIN_TOKENS_PER_ENTRY * WIDTH:
            rollouts = ours.generate(prompts(max(options.sequences)), sampling)
            seen += rollouts.generated_tokens
        for count in options.sequences:
            lengths: dict[str, list[float]] = {arm.name: [] for arm in arms}

            def timed(arm: Any, count: int = count, lengths: Any = lengths) -> Any:
                def turn(number: int) -> float:
                    arm.prepare()
                    done = arm.engine.generate(prompts(count), sampling)
                    length = done.counters.mean_acceptance_length
                    # Requests of a step without drafts are not counted as drafting.
                    if arm.choose and done.counters.drafts:
                        steps = done.generated_tokens - done.counters.accepted
                        length = done.generated_tokens / steps
                    lengths[arm.name].append(length)
                    steps = done.generated_tokens / count / length
                    return steps / done.seconds

                return turn

            rates = run_rounds({arm.name: timed(arm) for arm in arms}, NONE, options.rounds)
            for arm in arms:
                ratios = [1 / ratio for ratio in rates.ratios(arm.name)]
                row = {
                    "shape": options.shape,
                    "runner": options.runner,
                    "sequences": count,
                    "arm": arm.name,
                    "step_ms": 1e3 / rates.median_rate(arm.name),
                    "step_ratio": statistics.median(ratios),
                    "step_ratio_low": min(ratios),
                    "step_ratio_high": max(ratios),
                    "tokens_a_step": statistics.median(lengths[arm.name]),
                    "gpu": torch.cuda.get_device_name(),
                }
                rows.append(row)
                sys.stdout.write(
                    f"{options.shape} {options.runner} {count:4d} {arm.name:16s}"
                    f" {row['step_ms']:8.3f} ms  x{row['step_ratio']:.3f}"
                    f" ({min(ratios):.3f} to {max(ratios):.3f})"
                    f"  {row['tokens_a_step']:.2f} tokens a step\n"
                )
                sys.stdout.flush()
        seconds = []
        for version in range(1, SWAPS + 1):
            began = time.monotonic()
            ours.swap_heads(scratch / "new.safetensors", version)
            seconds.append(time.monotonic() - began)
        size = (scratch / "new.safetensors").stat().st_size
        rows.append(
            {
                "shape": options.shape,
                "runner": options.runner,
                "arm": "swap",
                "bytes": size,
                "seconds": statistics.median(seconds),
            }
        )
        sys.stdout.write(
            f"{options.shape} {options.runner} swap of {size / 1e6:.0f} MB:"
            f" {1e3 * statistics.median(seconds):.1f} ms\n"
        )
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--sequences", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--drafts", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor graphs")
    parser.add_argument("--json", type=Path, help="append a line for each row")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="medusa-ppo-steps-") as scratch:
        rows = measure(options, Path(scratch))
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
