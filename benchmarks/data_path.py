"""What does it take to carry 1,000 responses from vLLM to the loop: as token ids over HTTP, or through Ray?

    python benchmarks/data_path.py [--prompts 250] [--responses 4] [--new 32] [--seqs 64] [--hidden 64] [--layers 2] [--rounds 3]

A small random Llama with the demo's words and two real engines, which take turns on the same prompts and seeds: `engine.backend=server`
(`/v1/completions` with token ids in and out, a connection for each request, as the product has it) and `colocated` (vLLM in a Ray actor,
whose answer is one pickled object). Neither drafts.

Printed for each: bytes that cross (HTTP: bodies and headers of questions and answers; Ray: the pickle of the call and of its answer),
seconds of the whole call, CPU seconds of the loop's own process in it, and seconds of reading the answers alone (JSON, or the pickle).
Medians over the rounds. Whether both wrote the same tokens is said for each round.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from pipeline import random_actor
from ray import cloudpickle

from medusa_ppo.config import EngineConfig
from medusa_ppo.demo.task import build_tokenizer, demo_rows
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.engines.ray_engine import make_engine
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.processes import local_ray
from medusa_ppo.types import Rollouts, Sampling

PROMPT_TOKENS = 64
ARMS = {"HTTP": "server", "Ray": "colocated"}


class Wire:
    """Counts what a server engine asks and is answered."""

    def __init__(self, engine: ServerEngine) -> None:
        self.sent = self.received = 0
        self.bodies: list[bytes] = []
        self._lock = threading.Lock()
        engine._client.event_hooks = {"request": [self._asked], "response": [self._answered]}
        request = engine._request

        def kept(verb: str, path: str, **kwargs: Any) -> httpx.Response:
            answer = request(verb, path, **kwargs)
            if path == "/v1/completions":
                with self._lock:
                    self.bodies.append(answer.content)
                    self.received += len(answer.content)
            return answer

        engine._request = kept  # type: ignore[method-assign]

    def _asked(self, request: httpx.Request) -> None:
        if request.url.path == "/v1/completions":
            with self._lock:
                self.sent += len(request.read()) + headers(request.headers)

    def _answered(self, response: httpx.Response) -> None:
        if response.request.url.path == "/v1/completions":
            with self._lock:
                self.received += headers(response.headers)

    def take(self) -> tuple[int, int, float]:
        """Bytes sent and received, and seconds of reading the bodies again."""
        began = time.perf_counter()
        for body in self.bodies:
            json.loads(body)
        found = self.sent, self.received, time.perf_counter() - began
        self.sent = self.received = 0
        self.bodies = []
        return found


def headers(given: httpx.Headers) -> int:
    """Bytes of a message's head, its first line not counted."""
    return sum(len(name) + len(value) + 4 for name, value in given.raw)


def pickled(prompts: Sequence[Sequence[int]], sampling: Sampling, rollouts: Rollouts) -> tuple[int, int, float]:
    """Bytes of the call and its answer as Ray's pickles, and seconds of reading the answer."""
    answer = cloudpickle.dumps(rollouts)
    began = time.perf_counter()
    cloudpickle.loads(answer)
    return len(cloudpickle.dumps((prompts, sampling))), len(answer), time.perf_counter() - began


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def rounds(engines: dict[str, RolloutEngine], prompts: list[tuple[int, ...]], options: argparse.Namespace) -> None:
    server = engines["HTTP"]
    assert isinstance(server, ServerEngine), "one engine, not supervised"
    wire = Wire(server)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ARMS}
    for engine in engines.values():
        engine.generate(prompts[:8], Sampling(max_new_tokens=options.new, seed=0))
    wire.take()
    for step in range(options.rounds):
        answers = {}
        for name in list(ARMS)[:: 1 if step % 2 else -1]:
            sampling = Sampling(max_new_tokens=options.new, responses_per_prompt=options.responses, seed=step, ignore_eos=True)
            wall, cpu = time.perf_counter(), time.process_time()
            answers[name] = engines[name].generate(prompts, sampling)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            found[name].append((*(wire.take() if name == "HTTP" else pickled(prompts, sampling, answers[name])), wall, cpu))
        first, second = ([response.token_ids for response in rollouts.responses] for rollouts in answers.values())
        same = sum(ours == theirs for ours, theirs in zip(first, second, strict=True))
        say(f"round {step}: {same} of {len(first)} responses have the same tokens in both")
    for name, lines in found.items():
        sent, received, read, wall, cpu = (statistics.median(column) for column in zip(*lines, strict=True))
        say(
            f"{name}: {len(first)} responses of {options.new} tokens: {sent / 1e6:.3f} MB there, {received / 1e6:.3f} MB back; the call "
            f"{wall:.2f} s, of the loop's process {cpu:.2f} s of a core; reading the answers alone {1000 * read:.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"prompts": 250, "responses": 4, "new": 32, "seqs": 64, "hidden": 64, "layers": 2, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = build_tokenizer()
    ids = [tuple(tokenizer(row["prompt"])["input_ids"]) for row in demo_rows(limit=4 * options.prompts)]
    prompts = [prompt for prompt in ids if len(prompt) <= PROMPT_TOKENS][: options.prompts]
    length = PROMPT_TOKENS + options.new
    section = {"max_num_seqs": options.seqs, "max_model_len": length, "dtype": "float32", "memory_fraction": 0.05, "threads": 1}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        random_actor(folder / "actor", options.hidden, options.layers)
        stack.enter_context(local_ray(cpus=2))
        engines = {}
        for name, backend in ARMS.items():
            config = EngineConfig.model_validate(section | {"backend": backend})
            engines[name] = stack.enter_context(make_engine(folder / "actor", None, config, 0))
        rounds(engines, prompts, options)


if __name__ == "__main__":
    main()
