"""What does a step without drafts cost compared with a step of an engine without speculation?

    python benchmarks/steps_without_drafts.py MODEL HEADS [--dtype float32] [--sequences 1,4]
        [--rounds 30] [--before]

One engine, in this process, so that both have the same pace: its model runner is alternately vLLM's
own without speculation, and ours without any drafts. With `--before` ours prepares what vLLM
prepares for drafts in each step even without any, as it did until 0.4. The output is medians over
rounds of the milliseconds of a step, and of their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

STEPS = 200
PROMPT = list(range(5, 45))

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("heads")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", default="1,4")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--before", action="store_true")
    options = parser.parse_args()
    from medusa_ppo.config.engine_section import EngineConfig
    from medusa_ppo.engines.launch import plan_launch, process_environment

    batches = [int(text) for text in options.sequences.split(",")]
    config = EngineConfig(
        dtype=options.dtype, max_num_seqs=max(batches), max_model_len=512, enforce_eager=False
    )
    os.environ.update(process_environment(config, has_gpu=False))
    plan = plan_launch(options.model, options.heads, config, 0)
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    engine = LLM(**plan.engine_args)
    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = runner.model_runner
    runner.drafter.num_drafts = 0
    runner.drafter.choose = False
    names = ("execute_model", "sample_tokens")
    ours = {name: getattr(GPUModelRunner, name) for name in names}
    stock = {name: method.__wrapped__ for name, method in ours.items()}
    speculation = runner.speculative_config
    sampling = SamplingParams(temperature=1.0, max_tokens=STEPS, ignore_eos=True, detokenize=False)

    def step_ms(methods: dict[str, Any], speculative_config: Any, batch: int) -> float:
        for name, method in methods.items():
            setattr(GPUModelRunner, name, method)
        runner.speculative_config = speculative_config
        prompts = [{"prompt_token_ids": PROMPT[row % 8 :]} for row in range(batch)]
        began = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return (time.perf_counter() - began) / STEPS * 1e3

    for batch in batches:
        pairs = []
        for _ in range(options.rounds + 2):
            plain = step_ms(stock, None, batch)
            pairs.append((plain, step_ms(stock if options.before else ours, speculation, batch)))
        pairs = pairs[2:]
        plain, own = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(second / first for first, second in pairs)
        sys.stdout.write(
            f"{batch:3} sequences: {plain:.3f} ms without speculation, {own:.3f} without drafts, "
            f"{ratio:.3f}\n"
        )


if __name__ == "__main__":
    main()
