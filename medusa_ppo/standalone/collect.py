"""What heads are trained and measured on: sequences of tokens, written by the model itself or taken from texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from heads.errors import DataError
from medusa_ppo.console import Advance
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.types import Counters, Rollouts, Sampling

PROMPTS_PER_ROUND = 128

Prompt = TypeVar("Prompt")


@dataclass(frozen=True)
class Sample:
    """One sequence of tokens, and which of them count as written by the model.

    Attributes:
        ids: all tokens, those that were given included.
        spans: (first, end) of each stretch of written tokens, in order; at least one token stands before each.
        prompt: samples of one number are much alike (answers to one prompt, windows of one text) and are never parted by a hold-out.
        logprobs: behaviour log-probs of the written tokens; None: the actor's own are taken.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    prompt: int
    logprobs: tuple[float, ...] | None = None

    @property
    def written(self) -> int:
        """Number of written tokens."""
        return sum(end - first for first, end in self.spans)


def take_prompts(prompts: Sequence[Prompt], start: int, count: int) -> list[Prompt]:
    """`count` prompts from position `start` on, beginning again at the end of the list."""
    return [prompts[i % len(prompts)] for i in range(start, start + count)]


def response_rounds(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_tokens: int,
    advance: Advance,
    per_round: int = PROMPTS_PER_ROUND,
    *,
    rounds_done: int = 0,
    tokens_done: int = 0,
) -> Iterator[Rollouts]:
    """Let the model answer the prompts, `per_round` at a time, until `max_tokens` response tokens are there (0: each prompt once).

    Args:
        sampling: how; its seed is that of the first round, and every round has the next one.
        rounds_done, tokens_done: what an earlier call has yielded; this one goes on after it.
    """
    number, tokens = rounds_done, tokens_done
    first_seed = sampling.seed or 0
    while (tokens < max_tokens) if max_tokens else (number * per_round < len(prompts)):
        start = number * per_round
        picked = take_prompts(prompts, start, per_round) if max_tokens else prompts[start : start + per_round]
        rollouts = engine.generate(picked, replace(sampling, seed=first_seed + number))
        tokens, number = tokens + rollouts.generated_tokens, number + 1
        advance(rollouts.generated_tokens if max_tokens else len(picked), f"{rollouts.tokens_per_s:.0f} tokens/s")
        yield rollouts


def write_responses(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    advance: Advance,
    per_round: int = PROMPTS_PER_ROUND,
) -> list[Rollouts]:
    """All of `response_rounds` at once."""
    return list(response_rounds(engine, prompts, replace(sampling, seed=seed), max_tokens, advance, per_round))


def samples_of(rounds: Iterable[Rollouts]) -> list[Sample]:
    """Flatten rollouts; empty responses teach nothing and are left out."""
    samples = []
    for rollouts in rounds:
        for response in rollouts.responses:
            if response.token_ids:
                prompt = tuple(rollouts.prompts[response.prompt_index])
                ids = prompt + tuple(response.token_ids)
                samples.append(Sample(ids, ((len(prompt), len(ids)),), 0, tuple(response.logprobs)))
    return number_prompts(samples)


def number_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Responses with the same number for the same prompt, whatever round they come from."""
    numbers: dict[tuple[int, ...], int] = {}
    return [replace(sample, prompt=numbers.setdefault(sample.ids[: sample.spans[0][0]], len(numbers))) for sample in samples]


def samples_from_texts(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_length: int, max_tokens: int) -> list[Sample]:
    """Full texts: the first token is given, everything after it counts as written. Long texts become windows of `max_length` tokens.

    Args:
        max_tokens: stop when so many written tokens are there; later texts are not even read. 0: all.

    Raises:
        DataError: when no text has at least two tokens.
    """
    samples: list[Sample] = []
    tokens = seen = 0
    for number, text in enumerate(texts):
        seen += 1
        ids = tuple(tokenizer(text, truncation=False, verbose=False).input_ids)
        for start in range(0, len(ids) - 1, max_length - 1):
            window = ids[start : start + max_length]  # The first token of a window was the last one of the window before.
            samples.append(Sample(window, ((1, len(window)),), number))
            tokens += len(window) - 1
        if max_tokens and tokens >= max_tokens:
            break
    if not samples:
        raise DataError(
            "No text is long enough to train on.", given=f"{seen} texts", expected="at least two tokens each", do="Check --column."
        )
    return samples


def split_samples(samples: Sequence[Sample], fraction: float, most_tokens: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Training samples and held-out ones; no prompt is in both.

    Args:
        fraction: share of the prompts to hold out.
        most_tokens: no further prompt is held out when so many written tokens are.

    Raises:
        DataError: all samples answer one prompt.
    """
    prompts = sorted({sample.prompt for sample in samples})
    if len(prompts) < 2:
        raise DataError(
            "Too few prompts to keep some out of training.",
            given=f"{len(samples)} responses, 1 prompt",
            expected="2 prompts",
            do="Give more.",
        )
    written: dict[int, int] = dict.fromkeys(prompts, 0)
    for sample in samples:
        written[sample.prompt] += sample.written
    held: set[int] = set()
    tokens = 0
    for index in torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist():
        if held and (len(held) >= math.floor(fraction * len(prompts)) or tokens >= most_tokens):
            break
        held.add(prompts[index])
        tokens += written[prompts[index]]
    return [s for s in samples if s.prompt not in held], [s for s in samples if s.prompt in held]


def total_counters(rounds: Iterable[Rollouts]) -> Counters:
    """Sum of vLLM's counters over all rounds."""
    total = Counters()
    for rollouts in rounds:
        total = total + rollouts.counters
    return total
