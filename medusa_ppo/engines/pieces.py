"""The pieces of a generate call: how a pool cuts it and deals it to its engines, their seeds, who
hears of responses, and calls that end early.
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
"""Indices of some prompts of one generate call: what is dealt to an engine as a whole."""
Finished = Callable[[int, Response], None]
"""Hears of a response that has ended: its place among the responses of the call, and what it is."""
Ended = dict[int, Response]
"""Responses that have ended, by their places."""
ALIKE = 0.2
"""Engines whose speeds are within this share of their mean are called equally fast."""
UNFINISHED = "unfinished"
"""Reason of a response that has not ended (`Response.finish_reason`)."""


@dataclass(frozen=True)
class Partly:
    """A call that goes on with responses of earlier ones, and may end before all have ended.

    Attributes:
        begun: of each response of the call what there is of it already; those that have ended are
            not asked for again.
        enough: prompts to which all responses have ended; with so many the call ends.
        due: indices of prompts that it waits for in any case.
    """

    begun: tuple[Response, ...]
    enough: int
    due: frozenset[int] = frozenset()

    def over(self, unfinished: Mapping[int, int]) -> bool:
        """The call may end. `unfinished`: responses that have not ended, of each prompt by its
        index.
        """
        open_prompts = {prompt for prompt, count in unfinished.items() if count}
        return len(unfinished) - len(open_prompts) >= self.enough and not open_prompts & self.due


def tell(parts: Iterable[Ended | Rollouts], finished: Finished) -> Rollouts:
    """What comes last; `finished` hears of what comes before it."""
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
        "An engine broke off.",
        given=f"{len(found)} responses",
        expected="all of them",
        do="Read the engine's log.",
    )


def expected_tokens(prompt: Sequence[int], sampling: Sampling) -> int:
    """Tokens that a prompt may come to: it is read once, and each response may be as long as it is
    allowed to be.
    """
    return len(prompt) + sampling.responses_per_prompt * sampling.max_new_tokens


def cut(prompts: Sequence[Sequence[int]], sampling: Sampling, engines: int) -> list[Piece]:
    """The call's pieces in the order in which they are dealt; a function of the prompts alone, not
    of who is quick.

    Each piece takes a 1 / (2 x engines) share of the tokens that are left, and at least one prompt:
    there are twice as many pieces as engines or more, where there are so many prompts, and the last
    ones are small, so that what `deal` makes of them comes out even. One engine gets everything in
    one piece, in its own order.
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
    """The pieces that each engine answers in one call, all of them from the start.

    One piece after the other goes to the engine that would be through with it first, so the small
    ones at the end even out what the large ones left. Pieces that wait for an engine's next call
    would be fairer to slow engines, but a call ends with its longest response while most slots are
    empty, and each further one has such an end: `benchmarks/pieces_on_paper.py` has both.

    Args:
        speeds: of the engines, in any unit; speeds that are nearly the same count as the same,
            because a call's own luck with long responses moves them as much.
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
    """Tells of a piece's responses by their places in the whole call, in which a prompt has
    `repeat` of them.
    """

    def told(place: int, response: Response) -> None:
        # An engine numbers prompts and responses within its piece.
        index = piece[response.prompt_index]
        finished(index * repeat + place % repeat, replace(response, prompt_index=index))

    return told


def piece_seed(sampling: Sampling, index: int) -> int | None:
    """Seed of an engine's part of a call: two may hold the same prompt, which must not be answered
    alike.
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
    """What all engines of a pool have said, kept by whoever speaks for them. With `most_bytes` 0
    nothing is. Any thread may ask.

    Attributes:
        news: of the call that runs: who wrote something, and what.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self.news: list[tuple[object, list[Row]]] = []
        # Engines that start again ask for rows in threads of their own.
        self._lock = threading.RLock()

    def hear(self, author: object, rollouts: Rollouts, version: int) -> None:
        """What an engine has answered to one call; `version` of its policy."""
        if not self.most_bytes:
            return
        keys = [prompt_key(prompt).hex() for prompt in rollouts.prompts]
        numbered = [
            (index, one)
            for index, one in enumerate(rollouts.responses)
            # It goes on in a later call, and comes as a whole then.
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
        """What this one has not written itself."""
        return [row for author, rows in self.news if author is not engine for row in rows]

    def rows(self, version: int | None = None) -> list[Row]:
        """As of a memory; `version`: of the policy now, where it has moved since something was
        heard.
        """
        with self._lock:
            self.version = self.version if version is None else version
            return super().rows()

    def state_dict(self, of: Mapping[str, bytes], version: int | None = None) -> dict[str, Tensor]:
        """As of a memory; `version` as for `rows`."""
        with self._lock:
            self.version = self.version if version is None else version
            return super().state_dict(of)
