"""Milliseconds of the parts of an engine step: forward pass, sampling or verification, drafting,
and the rest of vLLM.

    python benchmarks/step_parts.py --drafts 0
    python benchmarks/step_parts.py --heads runs/demo/heads-final --drafts 4

The embedded actor and its task, a compiled engine in this very process (on a CPU nothing runs
behind a call's back). Each call below is timed without what it calls of the others. One number of
drafts a process: the share of a step is what is to be read, and ratios come from `medusa-ppo bench
rollout`, which takes turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from transformers import AutoTokenizer

from medusa_ppo.config.run_config import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.demo.actor_cache import ensure_demo_actor
from medusa_ppo.demo.pretraining import RECIPES
from medusa_ppo.demo.task import demo_rows
from medusa_ppo.engines.colocated import ColocatedEngine

PROMPTS, NEW_TOKENS, LONGEST = 48, 96, 160


class Clock:
    """Seconds by part; a part's own, without what it calls of the others."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner: list[float] = []

    def watch(self, holder: Any, name: str, part: str) -> None:
        original = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            result = original(*args, **kwargs)
            took = time.perf_counter() - began
            own = took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took
            self.seconds[part] += own
            return result

        setattr(holder, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-grown")
    parser.add_argument("--heads", default=None)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = (
        ensure_demo_actor(recipe=RECIPES[options.model])
        if options.model in RECIPES
        else options.model
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer(row["prompt"], add_special_tokens=False).input_ids
        for row in demo_rows(limit=PROMPTS)
    ]
    config = EngineConfig(
        dtype=options.dtype,
        max_num_seqs=options.sequences,
        max_model_len=LONGEST,
        threads=options.threads,
        enforce_eager=False,
        num_drafts=options.drafts or None,
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
    clock = Clock()
    steps = Counter[str]()
    with ColocatedEngine(model, options.heads, config, seed=0) as engine:
        core = engine._running().llm_engine
        runner = core.model_executor.driver_worker.worker.model_runner
        engine.generate(prompts[: 2 * options.sequences], sampling)
        for holder, name, part in (
            (core, "step", "the rest of vLLM"),
            (core.model_executor, "execute_model", "inputs"),
            (runner, "_model_forward", "forward pass"),
            (runner.model, "compute_logits", "logits"),
            (core.model_executor, "sample_tokens", "around sampling"),
            (runner, "_sample", "sampling, verification"),
            (runner, "propose_draft_token_ids", "drafting"),
        ):
            clock.watch(holder, name, part)
        step = core.step

        def counted() -> Any:
            steps["all"] += 1
            return step()

        core.step = counted
        tokens = sum(
            len(response.token_ids) for response in engine.generate(prompts, sampling).responses
        )
    parts = {
        part: round(1e3 * seconds / steps["all"], 2)
        for part, seconds in clock.seconds.most_common()
    }
    whole = 1e3 * sum(clock.seconds.values()) / steps["all"]
    line = {
        "drafts": options.drafts,
        "sequences": options.sequences,
        "step_ms": round(whole, 2),
        "tokens_per_step": tokens / steps["all"],
    }
    sys.stdout.write(json.dumps(line | {"parts_ms": parts}) + "\n")


if __name__ == "__main__":
    main()
