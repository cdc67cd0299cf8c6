"""Which prompts an engine of a pool gets next: long ones first, in pieces that shrink, so that all engines end together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_ppo.types import Sampling


@dataclass(frozen=True)
class Piece:
    """Some prompts of one generate call, which one engine answers in one go.

    Attributes:
        prompts: their indices in the call.
        tokens: prompt and response tokens that they may come to.
    """

    prompts: tuple[int, ...]
    tokens: int


def expected_tokens(prompt: Sequence[int], sampling: Sampling) -> int:
    """Tokens that a prompt may come to: it is read once, and each response may be as long as it is allowed to be."""
    return len(prompt) + sampling.responses_per_prompt * sampling.max_new_tokens


def cut(prompts: Sequence[Sequence[int]], sampling: Sampling, engines: int, smallest: int = 1) -> list[Piece]:
    """The call's pieces in the order in which they are given out; a function of the prompts alone, not of who is quick.

    Each piece takes a 1 / (2 x engines) share of the tokens that are left: the first ones are large, so that an engine batches well, the
    last ones small, so that none waits long for the others. One engine gets everything at once, in its own order.

    Args:
        prompts: token ids.
        sampling: how they are answered.
        engines: engines that share the work.
        smallest: fewest prompts of a piece, the last one excepted; as many as keep an engine's slots full.
    """
    if engines <= 1:
        return [Piece(tuple(range(len(prompts))), sum(expected_tokens(prompt, sampling) for prompt in prompts))]
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    weights = [expected_tokens(prompts[index], sampling) for index in order]
    left, at, pieces = sum(weights), 0, []
    while at < len(order):
        wanted, taken, end = left / (2 * engines), 0, at
        while end < len(order) and (end - at < smallest or taken < wanted):
            taken += weights[end]
            end += 1
        pieces.append(Piece(tuple(order[at:end]), taken))
        left, at = left - taken, end
    return pieces


def piece_seed(sampling: Sampling, index: int) -> int | None:
    """Seed of a piece: pieces may hold the same prompt, which must not be answered alike."""
    return None if sampling.seed is None else (sampling.seed * 1_000_003 + index * 7_919 + 1) % (1 << 31)
