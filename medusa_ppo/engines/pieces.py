"""The pieces of a generate call: how a pool splits it and assigns pieces to engines, their seeds,
reporting responses, and calls that end early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from heads.errors import EngineError
from medusa_ppo.contract.rollouts import Response, Rollouts, Sampling
from medusa_ppo.drafting.memory import ResponseMemory, Row, prompt_key

Piece = tuple[int, ...]
"""Indices of some prompts of one generate call, assigned to an engine as a whole."""
Finished = Callable[[int, Response], None]
"""Called when a response has ended, with its place among the call's responses and the response."""
Ended = dict[int, Response]
"""Finished responses, by their places."""
ALIKE = 0.2
"""Engines whose speeds differ from their mean by less than this share count as equally fast."""
UNFINISHED = "unfinished"
"""`Response.finish_reason` of a response that has not ended."""


@dataclass(frozen=True)
class Partly:
    """A call that continues responses of earlier ones, and may end before all have ended.

    Attributes:
        begun: for each response of the call, its tokens so far; finished ones are not requested
            again.
        enough: number of fully answered prompts after which the call ends.
        due: indices of prompts that it always waits for.
    """

    begun: tuple[Response, ...]
    enough: int
    due: frozenset[int] = frozenset()

    def over(self, unfinished: Mapping[int, int]) -> bool:
        """Whether the call may end. `unfinished`: number of unfinished responses of each prompt, by
        its index.
        """
        open_prompts = {prompt for prompt, count in unfinished.items() if count}
        return len(unfinished) - len(open_prompts) >= self.enough and not open_prompts & self.due


def tell(parts: Iterable[Ended | Rollouts], finished: Finished) -> Rollouts:
    """Call `finished` for each response, and return the last item, the whole result."""
    found: Ended = {}
    for part in parts:
        if isinstance(part, Rollouts):
            return (
                part
                if part.responses
                else replace(part, responses=tuple(found[place] for place in range(len(found))))
            )
        found |= part
        for place, response in part.items():
            finished(place, response)
    raise EngineError(
        "An engine stopped before its result was complete.",
        given=f"{len(found)} responses",
        expected="all of them",
        do="Read the engine's log.",
    )


def expected_tokens(prompt: Sequence[int], sampling: Sampling) -> int:
    """Upper bound on a prompt's tokens: it is read once, and each response may reach its limit."""
    return len(prompt) + sampling.responses_per_prompt * sampling.max_new_tokens


def cut(prompts: Sequence[Sequence[int]], sampling: Sampling, engines: int) -> list[Piece]:
    """The call's pieces in order of assignment, which depends on the prompts alone, not on engine
    speed.

    Each piece takes a 1 / (2 x engines) share of the remaining tokens, and at least one prompt. So
    there are at least twice as many pieces as engines, given enough prompts, and the last ones are
    small, which lets `deal` balance them. One engine gets everything in one piece, in its own
    order.
    """
    if engines <= 1:
        return [tuple(range(len(prompts)))]
    # Long prompts first, so that the last pieces are short ones.
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    weights = [expected_tokens(prompts[index], sampling) for index in order]
    left = sum(weights)
    at = 0
    pieces = []
    while at < len(order):
        wanted = left / (2 * engines)
        taken = 0
        end = at
        while end < len(order) and (end == at or taken < wanted):
            taken += weights[end]
            end += 1
        pieces.append(tuple(order[at:end]))
        left = left - taken
        at = end
    return pieces


def deal(
    pieces: Sequence[Piece],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    speeds: Sequence[float],
) -> list[tuple[Piece, ...]]:
    """The pieces that each engine answers in one call, all assigned at the start.

    Each piece goes to the engine that would finish it first, so the small ones at the end balance
    the large ones. Holding pieces back for an engine's next call would be fairer to slow engines,
    but a call ends with its longest response while most slots are empty, and every further call has
    such an end: `benchmarks/pieces_on_paper.py` has both.

    Args:
        speeds: engine speeds in any unit; nearly equal speeds count as equal, because random long
            responses shift them as much.
    """
    middle = sum(speeds) / len(speeds)
    if all(abs(speed - middle) <= ALIKE * middle for speed in speeds):
        speeds = [1.0] * len(speeds)
    loads = [0.0] * len(speeds)
    dealt: list[list[Piece]] = [[] for _ in speeds]
    for piece in pieces:
        tokens = sum(expected_tokens(prompts[index], sampling) for index in piece)
        ends = [(load + tokens) / speed for load, speed in zip(loads, speeds, strict=True)]
        engine = ends.index(min(ends))
        loads[engine] += tokens
        dealt[engine].append(piece)
    return [tuple(given) for given in dealt]


def in_call(finished: Finished, piece: Piece, repeat: int) -> Finished:
    """Reports a piece's responses by their places in the whole call, with `repeat` responses per
    prompt.
    """

    def told(place: int, response: Response) -> None:
        # An engine numbers prompts and responses within its piece.
        index = piece[response.prompt_index]
        finished(index * repeat + place % repeat, replace(response, prompt_index=index))

    return told


def piece_seed(sampling: Sampling, index: int) -> int | None:
    """The seed of an engine's part of a call. Each part has its own: two parts may hold the same
    prompt, which must not get the same answer.
    """
    return (
        None
        if sampling.seed is None
        else (sampling.seed * 1_000_003 + index * 7_919 + 1) % (1 << 31)
    )


def request_seed(sampling: Sampling, index: int) -> int | None:
    """Seed of request `index` (prompt-major) of a generate call, or None."""
    return None if sampling.seed is None else (sampling.seed * 1_000_003 + index) % (1 << 31)


class SharedMemory(ResponseMemory):
    """The responses of all engines of a pool, kept on the pool's side. With `most_bytes` 0 nothing
    is kept. Thread-safe.

    Attributes:
        news: for the running call: who wrote what.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self.news: list[tuple[object, list[Row]]] = []
        # Restarting engines request rows in their own threads.
        self._lock = threading.RLock()

    def hear(self, author: object, rollouts: Rollouts, version: int) -> None:
        """Add an engine's answers to one call; `version` is that of its policy."""
        if not self.most_bytes:
            return
        keys = [prompt_key(prompt).hex() for prompt in rollouts.prompts]
        numbered = [
            (index, one)
            for index, one in enumerate(rollouts.responses)
            # It continues in a later call, and is added as a whole then.
            if one.finish_reason != UNFINISHED
        ]
        rows = [
            (keys[one.prompt_index], 0, request_seed(rollouts.sampling, index), list(one.token_ids))
            for index, one in numbered
        ]
        self.news.append((author, rows))
        with self._lock:
            self.version = version
            self.take(rows)

    def news_for(self, engine: object) -> list[Row]:
        """Rows written by other engines."""
        return [row for author, rows in self.news if author is not engine for row in rows]

    def rows(self, version: int | None = None) -> list[Row]:
        """The rows of all responses, as `ResponseMemory.rows`. `version`: version of the current
        policy, if it has changed since the last response.
        """
        with self._lock:
            self.version = self.version if version is None else version
            return super().rows()

    def state_dict(self, of: Mapping[str, bytes], version: int | None = None) -> dict[str, Tensor]:
        """The whole memory, as `ResponseMemory.state_dict`; `version` as for `rows`."""
        with self._lock:
            self.version = self.version if version is None else version
            return super().state_dict(of)
