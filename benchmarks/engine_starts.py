"""How long does an engine take to start on a CPU, when another one with other settings has compiled
the same actor before?

    python benchmarks/engine_starts.py MODEL [--dtype bfloat16] [--rounds 1]

Each start is a process of its own. From empty caches an engine for one sequence starts, then one
for two sequences, then the first again; once with vLLM's way of keeping what `torch.compile` made
(VLLM_USE_AOT_COMPILE=1), once with ours (0). The output is the seconds from plain arguments to an
engine that is ready, without the imports.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.engines.launch import AHEAD_OF_TIME, KERNELS, plan_launch, process_environment
from medusa_ppo.runtime.files import OwnedFolder

SEQUENCES = (1, 2, 1)
"""Of the engines that start one after the other; those of other numbers are other engines."""
READY = "ready after"


def start(model: str, dtype: str, sequences: int) -> None:
    """Start an engine in this process, and say how long it took."""
    config = EngineConfig(
        dtype=dtype, max_num_seqs=sequences, max_model_len=256, enforce_eager=False
    )
    plan = plan_launch(model, None, config, 0)
    from vllm import LLM

    began = time.perf_counter()
    LLM(**plan.engine_args)
    sys.stdout.write(f"{READY} {time.perf_counter() - began:.1f}\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM takes seconds to end, which nobody waits for here.


def seconds_of_starts(model: str, dtype: str, ahead_of_time: str) -> list[float]:
    """Seconds of each start, from empty caches on."""
    caches = OwnedFolder("medusa-ppo-bench-")
    environment = os.environ | process_environment(EngineConfig(), has_gpu=False)
    environment |= {
        AHEAD_OF_TIME: ahead_of_time,
        KERNELS: str(caches.path / "torch"),
        "VLLM_CACHE_ROOT": str(caches.path / "vllm"),
    }
    seconds = []
    for sequences in SEQUENCES:
        words = [sys.executable, __file__, model, "--dtype", dtype, "--start", str(sequences)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        said = [line for line in done.stdout.splitlines() if line.startswith(READY)]
        if not said:
            raise SystemExit(f"The engine did not start:\n{done.stderr[-2000:]}")
        seconds.append(float(said[0].removeprefix(READY)))
    caches.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(options.model, options.dtype, options.start)
    for number in range(options.rounds):
        for ahead_of_time in ("1", "0") if number % 2 else ("0", "1"):
            seconds = seconds_of_starts(options.model, options.dtype, ahead_of_time)
            told = ", ".join(
                f"{took:.1f} s for {count}" for took, count in zip(seconds, SEQUENCES, strict=True)
            )
            sys.stdout.write(f"{AHEAD_OF_TIME}={ahead_of_time}: {told} sequences\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
