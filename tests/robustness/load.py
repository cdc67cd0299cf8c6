"""A vLLM server with our drafts under load, while its heads are swapped every second and its actor
every ten.

    python tests/robustness/load.py                          # 10,000 requests
    python tests/robustness/load.py --requests 2000 --at-once 8 --json load.json
    python tests/robustness/load.py --stretch 10 --swap-every 0     # syncs alone, in more stretches
    python tests/robustness/load.py --sync-every 0                  # swaps alone

Stretches with swaps and stretches without take turns, so that latencies are compared within one
run. Two actors take turns too. The heads that are swapped are those of the actor that serves (two
versions of each): others would be accepted less, and requests would wait for that and not for
swaps. Before the load each actor answers every prompt without drafts and undisturbed; under load an
answer must be, token for token,

    that of the actor that served from the request's first second to its last, or
    where a sync came in between, that of the first up to some token, and from there on what the
    second would write (by transformers)

Exit code 1 when a request failed or an answer is another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from watched import make_tiny_actor

from heads.checkpoint import save_heads, save_state
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.contract.status import SwapReceipt
from medusa_ppo.demo.task import TEMPLATE, demo_rows
from medusa_ppo.engines.http_server import ServerEngine
from medusa_ppo.runtime.data import render_prompts

HEADS = 3
PROMPTS = 200
NEW_TOKENS = 24
GREEDY = Sampling(0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
PERCENTILES = (50, 95, 99)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class LoadAnswer:
    """One request's: which prompt, from when to when (seconds), its tokens, what failed, and
    whether swaps went on.
    """

    prompt: int
    began: float
    ended: float
    tokens: Tokens
    error: str
    swapping: bool


@dataclass(frozen=True)
class Change:
    """Heads or an actor that came in: from when to when, seconds of it in the engine's worker, and
    which actor (-1: heads).
    """

    began: float
    ended: float
    seconds: float
    actor: int


class Actors:
    """Two actors, as models, as files to sync, and as what they answer."""

    def __init__(self, folder: Path) -> None:
        self.path = make_tiny_actor(folder / "actor")
        self.models = [
            AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            .eval()
            .requires_grad_(False)
            for _ in range(2)
        ]
        torch.manual_seed(1)
        head_VD = self.models[1].lm_head.weight
        head_VD.copy_(head_VD[torch.randperm(head_VD.shape[0])])  # Other successors of every token.
        self.files = [folder / f"actor-{index}.safetensors" for index in range(2)]
        for model, file in zip(self.models, self.files, strict=True):
            save_state(file, model.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        texts = render_prompts(demo_rows("train", limit=PROMPTS), template=TEMPLATE)
        self.prompts: list[list[int]] = tokenizer(texts)["input_ids"]
        self.expected: list[list[Tokens]] = []

    @torch.no_grad()
    def continues(self, actor: int, prompt: int, tokens: Tokens, start: int) -> bool:
        """Whether from token `start` on these are what an actor writes, greedily."""
        ids = self.prompts[prompt] + list(tokens)
        likeliest = self.models[actor](torch.tensor([ids])).logits[0].argmax(-1).tolist()
        first = len(self.prompts[prompt])
        return all(
            likeliest[first + place - 1] == tokens[place] for place in range(start, len(tokens))
        )

    def is_right(self, answer: LoadAnswer, served: Sequence[int]) -> bool:
        """Whether it is an answer of these actors, one after the other."""
        expected = [self.expected[actor][answer.prompt] for actor in served]
        if len(answer.tokens) != NEW_TOKENS or len(served) == 1:
            return answer.tokens == expected[0]
        same = next(
            (
                i
                for i, pair in enumerate(zip(answer.tokens, expected[0], strict=True))
                if pair[0] != pair[1]
            ),
            NEW_TOKENS,
        )
        return any(
            self.continues(served[-1], answer.prompt, answer.tokens, start) for start in {0, same}
        )


def trained_heads(
    model: Any, prompts: Sequence[Sequence[int]], expected: Sequence[Tokens], steps: int
) -> MedusaHeads:
    """Heads that have seen what the actor writes."""
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(model.config.hidden_size, model.config.vocab_size, HEADS))
    optimizer = torch.optim.Adam(heads.parameters(), 1e-2)
    states = []
    targets = []
    with torch.no_grad():
        for prompt, tokens in list(zip(prompts, expected, strict=True))[:50]:
            ids = list(prompt) + list(tokens)
            first = len(prompt)
            hidden_TD = model.model(torch.tensor([ids])).last_hidden_state[0]
            for place in range(first, len(ids) - HEADS - 1):
                states.append(hidden_TD[place])
                targets.append(ids[place + 2 : place + 2 + HEADS])
    hidden_BD = torch.stack(states)
    ids_BK = torch.tensor(targets)
    for _ in range(steps):
        logits_BKV = heads.features(hidden_BD) @ model.lm_head.weight.T
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits_BKV.flatten(0, 1), ids_BK.flatten()).backward()
        optimizer.step()
    return heads.requires_grad_(False)


class Swapper(threading.Thread):
    """Swaps heads and syncs actors while `on` is set, each every so many seconds (0: never)."""

    def __init__(
        self,
        engine: ServerEngine,
        actors: Actors,
        heads: Sequence[Sequence[Path]],
        swap_s: float,
        sync_s: float,
    ) -> None:
        super().__init__(daemon=True)
        self.on = threading.Event()
        self.over = threading.Event()
        self.syncs = [Change(0.0, 0.0, 0.0, 0)]
        self.swaps: list[Change] = []
        self.error: BaseException | None = None
        self._engine = engine
        self._actors = actors
        self._heads = heads
        self._version = 2
        self._swap_s = swap_s or math.inf
        self._sync_s = sync_s or math.inf

    def run(self) -> None:
        swap_at = sync_at = 0.0
        try:
            while not self.over.is_set():
                if not self.on.wait(0.1):
                    swap_at = time.monotonic() + self._swap_s / 2
                    sync_at = time.monotonic() + self._sync_s / 2
                    continue
                if time.monotonic() >= swap_at:
                    swap_at += self._swap_s
                    self._swap()
                if time.monotonic() >= sync_at:
                    sync_at = sync_at + self._sync_s
                    actor = (self.syncs[-1].actor + 1) % 2
                    self.syncs.append(
                        self._change(self._engine.sync_actor, self._actors.files[actor], actor)
                    )
                    self._swap()
                time.sleep(0.02)
        except BaseException as error:
            self.error = error

    def _swap(self) -> None:
        """The other version of the heads of the actor that serves."""
        file = self._heads[self.syncs[-1].actor][len(self.swaps) % 2]
        self.swaps.append(self._change(self._engine.swap_heads, file, -1))

    def _change(self, call: Callable[[Path, int], SwapReceipt], file: Path, actor: int) -> Change:
        self._version += 1
        began = time.monotonic()
        seconds = call(file, self._version).seconds
        return Change(began, time.monotonic(), seconds, actor)

    def served(self, answer: LoadAnswer) -> list[int]:
        """The actors that may have served a request, in their order."""
        before = [sync.actor for sync in self.syncs if sync.ended <= answer.began][-1:]
        return before + [
            sync.actor
            for sync in self.syncs
            if sync.ended > answer.began and sync.began < answer.ended
        ]


async def ask(
    client: httpx.AsyncClient,
    engine: ServerEngine,
    prompts: Sequence[Sequence[int]],
    index: int,
    swapper: Swapper,
) -> LoadAnswer:
    """One request."""
    prompt = index % len(prompts)
    began = time.monotonic()
    swapping = swapper.on.is_set()
    body = {
        "model": engine._model_name,
        "prompt": list(prompts[prompt]),
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
    }
    body |= {"ignore_eos": True, "return_token_ids": True}
    tokens = ()
    error = ""
    try:
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        tokens = tuple(answer.json()["choices"][0]["token_ids"])
    except (httpx.HTTPError, LookupError, ValueError) as problem:
        error = repr(problem)
    return LoadAnswer(prompt, began, time.monotonic(), tokens, error, swapping)


async def load(
    engine: ServerEngine,
    actors: Actors,
    swapper: Swapper,
    requests: int,
    at_once: int,
    stretch_s: float,
) -> list[LoadAnswer]:
    """So many requests, `at_once` of them on their way at any time; swaps go on in every second
    stretch.
    """
    answers: list[LoadAnswer] = []
    numbers = iter(range(requests))
    over = asyncio.Event()

    async def turns() -> None:
        while not over.is_set():
            await asyncio.wait([asyncio.create_task(over.wait())], timeout=stretch_s)
            (swapper.on.clear if swapper.on.is_set() else swapper.on.set)()

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            answers.append(await ask(client, engine, actors.prompts, number, swapper))

    headers = dict(engine._client.headers)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(
        base_url=engine._client.base_url,
        headers=headers,
        limits=limits,
        timeout=120.0,
        trust_env=False,
    ) as client:
        clock = asyncio.create_task(turns())
        await asyncio.gather(*(work(client) for _ in range(at_once)))
        over.set()
        await clock
    return answers


def percentiles(answers: Sequence[LoadAnswer]) -> list[float]:
    """Milliseconds at PERCENTILES."""
    if len(answers) < 2:
        return [math.nan] * len(PERCENTILES)
    cuts = statistics.quantiles(
        [1000 * (answer.ended - answer.began) for answer in answers], n=100, method="inclusive"
    )
    return [cuts[percentile - 1] for percentile in PERCENTILES]


def beside(answers: Sequence[LoadAnswer], changes: Sequence[Change]) -> list[LoadAnswer]:
    """Those that were on their way when something came in."""
    return [
        answer
        for answer in answers
        if any(change.began < answer.ended and answer.began < change.ended for change in changes)
    ]


def pairs(answers: Sequence[LoadAnswer], stretch_s: float) -> list[tuple[list[float], list[float]]]:
    """Percentiles of each stretch without swaps and of the one after it, with them; short ones at
    the end are left out.
    """
    stretches: list[list[LoadAnswer]] = [[]]
    for answer in sorted(answers, key=lambda answer: answer.began):
        if stretches[-1] and stretches[-1][-1].swapping != answer.swapping:
            stretches.append([])
        stretches[-1].append(answer)
    whole = [
        stretch
        for stretch in stretches
        if stretch[-1].ended - stretch[0].began > stretch_s / 2 and len(stretch) > 50
    ]
    return [(percentiles(a), percentiles(b)) for a, b in zip(whole[::2], whole[1::2], strict=False)]


def took(name: str, changes: Sequence[Change]) -> str:
    """How long something came in for, and how much of it the worker was at it."""
    whole, inside = (
        [1000 * value for value in values]
        for values in zip(*((c.ended - c.began, c.seconds) for c in changes), strict=True)
    )
    middles = (
        f"{statistics.median(whole):.0f} ms a {name} (at most {max(whole):.0f}), of which"
        f" {statistics.median(inside):.0f} ms"
    )
    return f"- {middles} (at most {max(inside):.0f}) as the receipt has it"


def report(
    answers: Sequence[LoadAnswer],
    swapper: Swapper,
    actors: Actors,
    accepted: float,
    stretch_s: float,
) -> dict[str, Any]:
    """Figures, and the table that is printed."""
    failed = [answer for answer in answers if answer.error]
    well = [answer for answer in answers if not answer.error]
    mixed = [answer for answer in well if len(swapper.served(answer)) > 1]
    wrong = [answer for answer in well if not actors.is_right(answer, swapper.served(answer))]
    sides = {
        name: percentiles([a for a in well if a.swapping == on])
        for name, on in (("without swaps", False), ("with swaps", True))
    }
    syncs = swapper.syncs[1:]
    beside_swaps = beside(well, swapper.swaps)
    beside_syncs = beside(well, syncs)
    either = {id(answer) for answer in (*beside_swaps, *beside_syncs)}
    neither = [answer for answer in well if id(answer) not in either]
    parts = {
        "beside a swap": beside_swaps,
        "beside a sync": beside_syncs,
        "beside neither": neither,
    }
    sides |= {
        f"{name} ({len(found):,} requests)": percentiles(found) for name, found in parts.items()
    }
    found = pairs(well, stretch_s)
    ratios = [[b[i] / a[i] for a, b in found] for i in range(len(PERCENTILES))]
    lines = [
        f"| ms at percentile | {' | '.join(map(str, PERCENTILES))} |",
        "|---|" + "---|" * len(PERCENTILES),
    ]
    lines += [
        f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |"
        for name, values in sides.items()
    ]
    if found:
        middle = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios]
        lines.append(
            f"| with over without, median of {len(found)} pairs of stretches |"
            f" {' | '.join(middle)} |"
        )
    lines += [""] + [
        took(name, changes)
        for name, changes in (("swap", swapper.swaps), ("sync", syncs))
        if changes
    ]
    seconds = max(answer.ended for answer in answers) - min(answer.began for answer in answers)
    lines += [
        "",
        (
            f"{len(answers):,} requests in {seconds:.0f} s, {len(swapper.swaps)} swaps,"
            f" {len(syncs)} syncs: {len(failed)} failed, {len(wrong)} wrong ({len(mixed)} had two"
            f" actors); {accepted:.2f} tokens per engine step"
        ),
        *(f"- {answer.error}" for answer in failed[:5]),
        *(
            f"- prompt {answer.prompt}, actors {swapper.served(answer)}: {answer.tokens}"
            for answer in wrong[:5]
        ),
        *([f"- the swapper: {swapper.error!r}"] if swapper.error else []),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    figures = {
        "requests": len(answers),
        "failed": len(failed),
        "wrong": len(wrong),
        "two_actors": len(mixed),
        "swaps": len(swapper.swaps),
    }
    return {**figures, "syncs": len(syncs), "seconds": seconds, "ms": sides, "pairs": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument(
        "--stretch", type=float, default=20.0, help="seconds with swaps, and without"
    )
    parser.add_argument("--swap-every", type=float, default=1.0, help="seconds; 0: never")
    parser.add_argument("--sync-every", type=float, default=10.0, help="seconds; 0: never")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        actors = Actors(folder)
        first = MedusaHeads(
            HeadsConfig(
                actors.models[0].config.hidden_size, actors.models[0].config.vocab_size, HEADS
            )
        )
        save_heads(folder / "heads", first, lm_head_VD=actors.models[0].lm_head.weight)
        config = EngineConfig(
            backend="server",
            dtype="float32",
            max_num_seqs=16,
            max_model_len=256,
            threads=1,
            memory_fraction=0.02,
            num_drafts=HEADS,
        )
        with ServerEngine(actors.path, folder / "heads", config) as engine:
            engine.configure(num_drafts=0)
            for version, file in ((1, actors.files[1]), (2, actors.files[0])):
                engine.sync_actor(file, version)
                actors.expected.insert(
                    0,
                    [
                        response.token_ids
                        for response in engine.generate(actors.prompts, GREEDY).responses
                    ],
                )
            engine.configure(num_drafts=HEADS)
            files = [
                [folder / f"heads-{actor}-{version}.safetensors" for version in range(2)]
                for actor in range(2)
            ]
            for model, expected, versions in zip(
                actors.models, actors.expected, files, strict=True
            ):
                for steps, file in zip((60, 61), versions, strict=True):
                    save_state(
                        file,
                        trained_heads(model, actors.prompts, expected, steps).trainable_state(),
                    )
            engine.swap_heads(files[0][1], 1)
            swapper = Swapper(engine, actors, files, options.swap_every, options.sync_every)
            before = engine.counters()
            swapper.start()
            answers = asyncio.run(
                load(engine, actors, swapper, options.requests, options.at_once, options.stretch)
            )
            swapper.over.set()
            swapper.on.set()
            swapper.join()
            length = (engine.counters() - before).mean_acceptance_length
        figures = report(answers, swapper, actors, length, options.stretch)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(bool(figures["failed"] or figures["wrong"] or swapper.error))


if __name__ == "__main__":
    sys.exit(main())
