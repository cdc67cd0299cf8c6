"""How do responses come from an engine to the loop: as token ids over HTTP, or as Ray's serialized
objects? Bytes and seconds of both.

    python benchmarks/data_path.py --model ../shared/actors/gsm8k-4m --data
    ../shared/data/gsm8k/train.jsonl [--responses 1000] [--pairs 6]

The same actor in two engines, a vLLM server on this node (`engine.backend=server`) and vLLM in a
Ray actor (`colocated`), without heads, takes turns at the same seeded prompts. Printed for each:

    seconds           of `generate`, median over the pairs; the pairs' ratio beside
    here              seconds of work in this process, where the loop is
    at the engine     seconds of work in processes that only carry (the server's API; Ray's are the node's, and are not counted)
    on loopback       bytes that /proc/net/dev counted meanwhile on `lo`, headers and all that Ray's own processes say in it
    an object         the answer's size as Ray serializes it, and the median seconds to get it from another process
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import ray
from transformers import AutoTokenizer

from medusa_ppo.config.run_config import COLOCATED, SERVER, EngineConfig
from medusa_ppo.contract.rollouts import Rollouts, Sampling
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import Prompts, RolloutEngine
from medusa_ppo.runtime.data import load_rows
from medusa_ppo.runtime.processes import local_ray

BACKENDS = (SERVER, COLOCATED)
PROMPT_TOKENS = 128
FETCHES = 20


class Turn(NamedTuple):
    """One batch through one engine."""

    seconds: float
    here_s: float
    carrying_s: float
    bytes: int


class Holder:
    """In a process of its own: holds an answer, and gives it."""

    def __init__(self, answer: Rollouts) -> None:
        self._answer = answer

    def give(self) -> Rollouts:
        return self._answer


def loopback_bytes() -> int:
    """Received on `lo` since the machine started; what is sent there is received there."""
    line = next(
        line
        for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
        if line.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[0])


def carriers(engine: RolloutEngine) -> list[psutil.Process]:
    """Processes between the one with the model and this one: those above it, as far as this one."""
    above = psutil.Process(int(engine.plugin_report()["pid"])).parents()
    return above[: above.index(psutil.Process())] if psutil.Process() in above else []


def work_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def take(engine: RolloutEngine, prompts: Prompts, sampling: Sampling) -> tuple[Turn, Rollouts]:
    """A batch, and what it took."""
    between = carriers(engine)
    before = loopback_bytes(), work_s(between), time.process_time(), time.perf_counter()
    rollouts = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - before[3]
    here_s = time.process_time() - before[2]
    return (
        Turn(seconds, here_s, work_s(between) - before[1], loopback_bytes() - before[0]),
        rollouts,
    )


def fetch(answer: Rollouts) -> tuple[int, float]:
    """Bytes of an answer as Ray serializes it, and median seconds to get it."""
    remote: Any = ray.remote(num_cpus=0)(Holder)
    holder = remote.remote(answer)
    seconds = []
    for _ in range(FETCHES + 1):
        started = time.perf_counter()
        ray.get(holder.give.remote())
        seconds.append(time.perf_counter() - started)
    ray.kill(holder)
    return len(ray.cloudpickle.dumps(answer)), median(seconds[1:])


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="rows with a question")
    for name, value in {"responses": 1000, "each": 8, "new": 112, "seqs": 64, "pairs": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_rows(args.data, limit=2 * args.responses)
    every = (tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"] for row in rows)
    prompts = [ids for ids in every if len(ids) <= PROMPT_TOKENS][: args.responses // args.each]
    found: dict[str, list[Turn]] = {name: [] for name in BACKENDS}
    with ExitStack() as stack:
        stack.enter_context(local_ray(cpus=2))
        config = EngineConfig(
            max_num_seqs=args.seqs,
            max_model_len=PROMPT_TOKENS + args.new,
            dtype="float32",
            threads=1,
        )
        engines = {
            name: stack.enter_context(
                make_engine(args.model, None, config.model_copy(update={"backend": name}))
            )
            for name in BACKENDS
        }
        for number in range(args.pairs + 1):  # The first one warms up.
            answers = {}
            sampling = Sampling(
                max_new_tokens=args.new, responses_per_prompt=args.each, seed=number
            )
            for name in BACKENDS[:: 1 if number % 2 else -1]:
                turn, answers[name] = take(engines[name], prompts, sampling)
                found[name] += [turn] if number else []
            server, colocated = (
                [response.token_ids for response in answers[name].responses] for name in BACKENDS
            )
            same = sum(one == other for one, other in zip(server, colocated, strict=True))
            say(
                f"pair {number}: {len(server)} responses, {sum(map(len, server))} tokens, {same}"
                " the same in both"
            )
        size, fetch_s = fetch(answers[COLOCATED])
    for name, turns in found.items():
        seconds, here_s, carrying_s, count = (median(values) for values in zip(*turns, strict=True))
        say(
            f"{name}: {seconds:.2f} s, here {here_s:.2f} s, at the engine {carrying_s:.2f} s,"
            f" {count / 1e6:.2f} MB on loopback"
        )
    ratios = [one.seconds / other.seconds for one, other in zip(*found.values(), strict=True)]
    say(
        f"{SERVER} / {COLOCATED}, seconds: median {median(ratios):.3f} of {len(ratios)}"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    say(f"an object of Ray's: {size / 1e6:.2f} MB, {fetch_s * 1e3:.1f} ms to get it")


if __name__ == "__main__":
    main()
