"""What a warm-up before a run's first step reads and writes: responses to the run's own prompts,
kept in a folder round by round, so that an interrupted warm-up can continue.

FOLDER/round-0000.json    a round's responses, and what they were asked for with; written whole or
                          not at all
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.runtime.files import write_atomic

logger = logging.getLogger(__name__)

FOLDER = "warm-up"
TOKENS = 12_288
SECONDS = 300.0
LEAST_PROMPTS = 18
"""Different prompts that a warm-up needs: with fewer, too few would be left to train on besides
those held out for the gate.
"""
MOST_ANSWERS = 8
"""Maximum number of responses to one prompt; more would teach almost nothing."""
SHORTEST = 64
"""Responses are cut so that a few long ones don't take all the tokens, but never below this many
tokens.
"""
WRITING_SHARE = 0.5
"""Share of the seconds for generating responses; the rest is for training."""
BEGIN = "medusa-ppo warm-up 1"

Advance = Callable[[float, float, str], None]
"""Receives how much is done, out of how much, and a note."""


def silent(done: float, total: float, note: str) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True)
class WarmUpReport:
    """What a warm-up cost and gained.

    Attributes:
        tokens, prompts: what the heads were trained and judged on.
        seconds: duration of all of it.
        before, after: mean acceptance length by replay on the held-out prompts, of the heads that
            the engine had and of those that it got; None: unknown.
        problem: why the engine kept its heads; empty if it has better ones.
    """

    tokens: int = 0
    prompts: int = 0
    seconds: float = 0.0
    before: float | None = None
    after: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"No warm-up: {self.problem}"
        return (
            f"Warm-up: {self.tokens} tokens to {self.prompts} prompts in {self.seconds:.0f} s;"
            f" tokens a step on held-out prompts: {self.before or 1:.2f} -> {self.after or 1:.2f}"
        )


def warm_up_figures(report: WarmUpReport) -> dict[str, float]:
    """Figures under the names of contract/metrics.py, for the first step; unknown ones are left
    out.
    """
    found = {
        names.WARM_UP_S: report.seconds,
        names.WARM_UP_TOKENS: report.tokens,
        names.WARM_UP_BEFORE: report.before,
        names.WARM_UP_AFTER: report.after,
    }
    return {name: value for name, value in found.items() if value is not None}


class WarmUpFolder:
    """The rounds of responses written so far, from one policy with one sampling."""

    def __init__(self, folder: Path | None, of: dict[str, Any]) -> None:
        """
        Args:
            folder: where they are kept; None: nowhere.
            of: plain data that describes how they were generated. Rounds of anything else are
                generated again.
        """
        self._folder = folder
        self._of = {"format": BEGIN, **of}

    def rounds(self) -> list[tuple[Response, ...]]:
        """The usable rounds, in order, up to the first that is not."""
        found: list[tuple[Response, ...]] = []
        while self._folder is not None and (file := self._file(len(found))).is_file():
            try:
                kept = json.loads(file.read_text(encoding="utf-8"))
                if kept["of"] != self._of:
                    raise ValueError("it comes from another actor, other sampling or other prompts")
                found.append(tuple(_response(row) for row in kept["responses"]))
            except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
                logger.warning(
                    "%s of an interrupted warm-up can't be used, and is generated again: %s",
                    file,
                    error,
                )
                break
        return found

    def write(self, number: int, responses: Sequence[Response]) -> None:
        """Save a round. If the disk is full, it will only have to be generated again."""
        if self._folder is None:
            return
        rows = [asdict(response) for response in responses]
        try:
            write_atomic(self._file(number), json.dumps({"of": self._of, "responses": rows}) + "\n")
        except OSError as error:
            logger.warning("Responses of the warm-up could not be kept: %s", error)

    def _file(self, number: int) -> Path:
        assert self._folder is not None, "only called if there is one"
        return self._folder / f"round-{number:04d}.json"


def _response(row: dict[str, Any]) -> Response:
    ids = tuple(map(int, row["token_ids"]))
    logprobs = tuple(map(float, row["logprobs"]))
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs")
    return Response(int(row["prompt_index"]), ids, logprobs, str(row["finish_reason"]))


def different(prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Each prompt once, in order: answers to the same one must not be trained and judged on."""
    seen: dict[tuple[int, ...], Sequence[int]] = {}
    for prompt in prompts:
        seen.setdefault(tuple(prompt), prompt)
    return list(seen.values())


def write_responses(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    tokens: int,
    seconds: float,
    folder: Path | None,
    actor: int,
    advance: Advance,
    clock: Callable[[], float] = time.monotonic,
) -> Rollouts:
    """Responses of this many tokens to different prompts, one to each before any gets a second one.

    Args:
        sampling: the run's own. Long responses are cut, so that there are several.
        seconds: after this many no new round begins.
        folder: where rounds are kept.
        actor: a checksum of the actor; rounds of another actor are generated again.
    """
    most = min(sampling.max_new_tokens, max(SHORTEST, tokens // LEAST_PROMPTS))
    sampling = replace(sampling, responses_per_prompt=1, max_new_tokens=most)
    ends = clock() + seconds
    kept = WarmUpFolder(
        folder,
        {
            "sampling": asdict(sampling),
            "prompts": zlib.crc32(json.dumps([list(prompt) for prompt in prompts]).encode()),
            "policy_version": engine.policy_version,
            "actor": actor,
        },
    )
    rounds = kept.rounds()
    responses = [response for part in rounds for response in part]
    number = len(rounds)
    total = sum(len(response.token_ids) for response in responses)
    if number:
        logger.info("The warm-up continues: it already has %d tokens of responses.", total)
    counters = Counters()
    took_s = 0.0
    while total < tokens and len(responses) < MOST_ANSWERS * len(prompts):
        if responses and clock() >= ends:
            break
        length = total / len(responses) if responses else float(most)
        wanted = max(LEAST_PROMPTS, math.ceil((tokens - total) / max(1.0, length)))
        wanted = min(wanted, MOST_ANSWERS * len(prompts) - len(responses), len(prompts))
        places = [(len(responses) + n) % len(prompts) for n in range(wanted)]
        found = engine.generate([prompts[place] for place in places], _seeded(sampling, number))
        part = [
            replace(response, prompt_index=places[response.prompt_index])
            for response in found.responses
            if response.token_ids
        ]
        kept.write(number, part)
        number += 1
        responses += part
        counters = counters + found.counters
        took_s += found.seconds
        total = sum(len(response.token_ids) for response in responses)
        advance(min(total, tokens), tokens, f"{total} tokens written")
        if not part:
            break
    return Rollouts(
        tuple(tuple(prompt) for prompt in prompts),
        tuple(responses),
        counters,
        took_s,
        sampling,
        engine.policy_version,
        engine.heads_version,
        engine.num_drafts,
    )


def _seeded(sampling: Sampling, number: int) -> Sampling:
    """A different seed for each round, and never that of a step."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + 715_827_883 + number) % 2**31)
