"""What an engine returns for prompts: responses, acceptance counters, and the sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from heads.heads_config import GAP


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. Seeds are per generate call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 96
    responses_per_prompt: int = 1
    seed: int | None = None
    ignore_eos: bool = False


class ImagePrompt(tuple[int, ...]):
    """Token ids of a prompt with images, in the actor's form: an image's token is repeated once for
    each of its features.

    Attributes:
        images: the images in order, in file form (PNG, JPEG, ...).
        short_ids: the prompt with each image's token once, in vLLM's form.
    """

    images: tuple[bytes, ...]
    short_ids: tuple[int, ...]

    def __new__(
        cls, ids: Iterable[int], images: tuple[bytes, ...] = (), short_ids: tuple[int, ...] = ()
    ) -> ImagePrompt:
        # A tuple is filled in `__new__`; `__init__` would be too late.
        prompt = super().__new__(cls, ids)
        prompt.images = images
        prompt.short_ids = short_ids
        return prompt


def copyable(prompt: Sequence[int]) -> tuple[int, ...]:
    """A prompt in the form that copying may search: image tokens are gaps."""
    if not isinstance(prompt, ImagePrompt):
        return tuple(prompt)
    counts = Counter(prompt)
    once = Counter(prompt.short_ids)
    # Only image tokens are more frequent than in the short form: once for each feature.
    return tuple(GAP if counts[token] > once[token] else token for token in prompt)


@dataclass(frozen=True)
class Counters:
    """vLLM's own acceptance counters over one interval (differences, never totals since start).

    Attributes:
        drafts: draft steps, one per request and engine step that had drafts.
        draft_tokens: tokens drafted.
        accepted: drafted tokens accepted (bonus token not counted).
        accepted_per_position: accepted at position 1..K.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1.0 when nothing was drafted (vLLM's definition)."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Unconditional: accepted at position k / draft steps."""
        return tuple(n / self.drafts if self.drafts else 0.0 for n in self.accepted_per_position)

    def __add__(self, other: Counters) -> Counters:
        return self._zip(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._zip(other, -1)

    def _zip(self, other: Counters, sign: int) -> Counters:
        # If K is chosen, intervals differ in their number of positions.
        pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Counters(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted + sign * other.accepted,
            tuple(a + sign * b for a, b in pairs),
        )


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        prompt_index: which of the prompts it answers.
        token_ids: sampled tokens, the end token included when it was sampled.
        logprobs: behaviour log-probs, one per token: of the distribution that was actually sampled
            from.
        finish_reason: `stop` (end token), `length`, or `unfinished` if the call ended first.
        versions: version of the actor for each token, if calls continued the response; empty: all
            tokens have the rollouts' version.
    """

    prompt_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineShare:
    """What one engine of a pool did in one generate call.

    Attributes:
        index: its place in the pool.
        pieces: calls that it answered.
        tokens: prompt and response tokens that it processed.
        generated_tokens: response tokens.
        seconds: time that it was busy.
        counters: its acceptance counters.
    """

    index: int = 0
    pieces: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    counters: Counters = field(default_factory=Counters)

    def plus(self, part: Rollouts) -> EngineShare:
        """Add one more call."""
        return replace(
            self,
            pieces=self.pieces + 1,
            # An engine also processes prompts, so a pool divides work by all tokens, not by
            # response tokens.
            tokens=self.tokens
            + part.generated_tokens
            + sum(len(prompt) for prompt in part.prompts),
            generated_tokens=self.generated_tokens + part.generated_tokens,
            seconds=self.seconds + part.seconds,
            counters=self.counters + part.counters,
        )


@dataclass(frozen=True)
class Rollouts:
    """The result of one generate call, with responses in prompt order. `engines`: each engine's
    part, if a pool answered; `written_tokens`: tokens that the call wrote, if these are not its
    responses' tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[Response, ...]
    counters: Counters
    seconds: float
    sampling: Sampling
    policy_version: int = 0
    heads_version: int = 0
    num_drafts: int = 0
    engines: tuple[EngineShare, ...] = ()
    written_tokens: int | None = None

    @property
    def generated_tokens(self) -> int:
        return (
            sum(len(r.token_ids) for r in self.responses)
            if self.written_tokens is None
            else self.written_tokens
        )

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0
