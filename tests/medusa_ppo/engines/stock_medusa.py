"""Run by a test in a process of its own, without our plugin: greedy responses and counters of
stock vLLM's Medusa, as JSON.

Arguments: model folder, heads folder, prompts (JSON).
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str, heads: str, prompts: str) -> None:
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 27,
        disable_log_stats=False,
        speculative_config={"method": "medusa", "model": heads, "num_speculative_tokens": 4},
    )
    requests = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    outputs = llm.generate(
        requests, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False
    )
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    result = {
        "drafter": type(drafter).__module__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
        "drafts": metrics["vllm:spec_decode_num_drafts"].value,
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
