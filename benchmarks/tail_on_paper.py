"""A rollout with a long tail, simulated by `medusa-ppo predict`'s model and run on a real engine.

    python benchmarks/tail_on_paper.py --model DIR [--responses 256] [--mean 100] [--spread 0.7]
        [--sequences 32] [--dtype bfloat16] [--threads 2] [--rounds 3]

Responses have log-normal lengths, on vLLM without speculation (compiled, in this process), each cut
at its length. First the CPU is calibrated (`medusa_ppo/predict/cpu_steps.py`), then the engine runs
the same lengths several times. The output is seconds of the whole, and of the part with fewer than
half of the slots in use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from medusa_ppo.config.heads_section import HeadsSection
from medusa_ppo.predict.prediction import read_sizes
from medusa_ppo.predict.rollout_model import ResponseLengths, RolloutModel, RolloutTime

PROMPT = 32


def simulated(options: argparse.Namespace, lengths: ResponseLengths) -> RolloutTime:
    """From microbenchmarks alone."""
    import torch

    from medusa_ppo.engines.launch import read_model_config
    from medusa_ppo.predict.cpu_steps import CpuSteps
    from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear

    torch.set_num_threads(options.threads)
    model, _ = read_sizes(read_model_config(options.model))
    steps = CpuSteps(
        model,
        HeadsSection().sizes(model.hidden, model.vocab),
        getattr(torch, options.dtype),
        onednn_product,
        packed_linear,
        options.sequences,
        PROMPT + lengths.mean / 2,
    )
    found = RolloutModel(steps, lengths, options.sequences, PROMPT, 0).plain()
    prefill = steps.prefill(PROMPT * len(lengths.tokens))
    return RolloutTime(found.seconds + prefill, found.tail_s, found.steps, found.drafts)


def measured(options: argparse.Namespace, lengths: ResponseLengths) -> tuple[float, float, int]:
    """Seconds of the whole, of its tail, and steps, on an engine: medians over rounds."""
    # In this process, so that steps can be counted.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = "none"
    import vllm

    engine = vllm.LLM(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.sequences,
        max_model_len=PROMPT + max(lengths.tokens),
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
    ).llm_engine
    rounds = [_run(engine, lengths, options.sequences) for _ in range(options.rounds + 1)]
    # The first one warms up.
    whole, tail, steps = zip(*rounds[1:], strict=True)
    return statistics.median(whole), statistics.median(tail), steps[0]


def _run(engine: Any, lengths: ResponseLengths, slots: int) -> tuple[float, float, int]:
    from vllm import SamplingParams

    for number, length in enumerate(lengths.tokens):
        # With the log-probs of its tokens, as PPO asks for them.
        sampling = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0)
        prompt = {"prompt_token_ids": [1 + (number + place) % 100 for place in range(PROMPT)]}
        engine.add_request(f"{time.monotonic_ns()}-{number}", prompt, sampling)
    began = time.perf_counter()
    steps = 0
    left = len(lengths.tokens)
    tail_began = 0.0
    while engine.has_unfinished_requests():
        left -= sum(output.finished for output in engine.step())
        steps += 1
        if not tail_began and left < slots / 2:
            tail_began = time.perf_counter()
    ended = time.perf_counter()
    return ended - began, ended - (tail_began or ended), steps


def main() -> None:
    parser = argparse.ArgumentParser(description="A rollout's long tail, simulated and real.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--mean", type=float, default=100)
    parser.add_argument("--spread", type=float, default=0.7)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths = ResponseLengths.log_normal(options.responses, options.mean, options.spread)
    paper = simulated(options, lengths)
    seconds, tail, steps = measured(options, lengths)
    sys.stdout.write(
        f"{len(lengths.tokens)} responses, {lengths.said}, longest {max(lengths.tokens)},"
        f" {options.sequences} at once, {options.dtype}\n"
        f"whole: simulated {paper.seconds:.2f} s, real {seconds:.2f} s,"
        f" {100 * (paper.seconds / seconds - 1):+.1f} %\n"
        f"tail:  simulated {paper.tail_s:.2f} s, real {tail:.2f} s\n"
        f"steps: simulated {paper.steps:.0f}, real {steps}\n"
    )


if __name__ == "__main__":
    main()
