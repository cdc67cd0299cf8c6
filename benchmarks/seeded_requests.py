"""Seconds of an engine's decode step with and without a seed in each request, in turns.

    python benchmarks/seeded_requests.py --model DIR [--sequences 64] [--tokens 64] [--rounds 5]

vLLM without our plugin, eager, in this process: in each step all sequences run, and each draws its
token from all tokens at temperature 1. The output is the medians over all rounds' steps, and the
ratio of the rounds with its spread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

PROMPT_TOKENS = 16


def steps_of(engine: Any, sequences: int, tokens: int, seeded: bool) -> list[float]:
    """Seconds of each decode step of one call; the prompts' own steps are left out."""
    from vllm import SamplingParams

    for number in range(sequences):
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            seed=1 + number if seeded else None,
        )
        ids = [1 + (number + place) % 100 for place in range(PROMPT_TOKENS)]
        engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": ids}, sampling)
    seconds = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds[-(tokens - 1) :]


def main() -> None:
    """Print the two medians and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    # In this process, so that steps can be timed.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = "none"
    import vllm

    engine = vllm.LLM(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.sequences,
        max_model_len=PROMPT_TOKENS + options.tokens,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        enforce_eager=True,
    ).llm_engine
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    # The first round warms up.
    for number in range(options.rounds + 1):
        for seeded in (False, True) if number % 2 else (True, False):
            steps = steps_of(engine, options.sequences, options.tokens, seeded)
            found[seeded] += [steps] if number else []
    plain, seeded = (
        statistics.median(second for steps in found[way] for second in steps)
        for way in (False, True)
    )
    ratios = [
        statistics.median(with_seeds) / statistics.median(without)
        for without, with_seeds in zip(found[False], found[True], strict=True)
    ]
    sys.stdout.write(
        f"{options.sequences} sequences, {options.dtype}: {1e3 * plain:.2f} ms a step without"
        f" seeds, {1e3 * seeded:.2f} ms with; ratio {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f} in {options.rounds} rounds)\n"
    )


if __name__ == "__main__":
    main()
