"""How long the engines of each preset are idle in a rollout with a long tail, on paper.

    python benchmarks/pieces_on_paper.py [--mean 200] [--spread 0.8]
        [--lengths FILE] [--full-step 2]

Responses have log-normal lengths, cut at the preset's `sampling.max_new_tokens` (or the lengths in
a file, one number per line), four draws. A step of an engine takes 1 when nearly empty and
`--full-step` with all slots in use, linearly in between; responses take free slots in order. The
output is the share of engine time without a response, and steps until the last response ends, for

    0.3.0       pieces of at least `engine.max_num_seqs` / 2 prompts, one after the other
    one by one  `cut`'s pieces, each to the first free engine
    dealt       `cut`'s pieces, dealt to the engines before the call (`deal`), as the pool does
    no calls    any free slot takes the next response: no way of cutting can be much better

A file for --lengths has one number of tokens a line. Lengths of a chat service: column
GeneratedTokens of the first 260 requests in data/AzureLLMInferenceTrace_conv.csv of
github.com/Azure/AzurePublicDataset, in their order. A rollout with more responses goes through them
again.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from medusa_ppo.config.config_file import preset
from medusa_ppo.config.run_config import RunConfig, load_config
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.pieces import Piece, cut, deal, expected_tokens
from medusa_ppo.predict.rollout_model import ResponseLengths

DRAWS = 4
PROMPT_TOKENS = 64
WAYS = ("0.3.0", "one by one", "dealt", "no calls")


class Engines:
    """Engines with this many slots each; a step's time is linear in the slots in use."""

    def __init__(self, count: int, slots: int, full_step: float) -> None:
        self.count = count
        self.slots = slots
        self._slope = (full_step - 1) / slots

    def call(self, lengths: Sequence[int]) -> float:
        """Time of one engine for these responses, in steps of a nearly empty batch."""
        waiting = iter(lengths)
        running: list[int] = []
        steps, seconds = 0, 0.0
        for length in waiting:
            if len(running) == self.slots:
                end = heapq.heappop(running)
                seconds += (end - steps) * (1 + self._slope * self.slots)
                steps = end
            heapq.heappush(running, steps + length)
        while running:
            seconds += (running[0] - steps) * (1 + self._slope * len(running))
            steps = heapq.heappop(running)
        return seconds

    def one_by_one(self, calls: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Total time and idle share, if the next call goes to the first free engine."""
        free = [0.0] * self.count
        busy = 0.0
        for lengths in calls:
            seconds = self.call(lengths)
            heapq.heapreplace(free, free[0] + seconds)
            busy += seconds
        return max(free), 1 - busy / (max(free) * self.count)

    def by_slots(self, lengths: Sequence[int]) -> tuple[float, float]:
        """The same, if each free slot takes the next response."""
        steps, clock, ends = ([0.0] * self.count for _ in range(3))
        running: list[list[float]] = [[] for _ in range(self.count)]
        first = min(len(lengths), self.count * self.slots)
        for place in range(first):
            heapq.heappush(running[place % self.count], float(lengths[place]))
        waiting = list(lengths[first:])[::-1]
        while any(running):
            times = [
                clock[e] + (queue[0] - steps[e]) * (1 + self._slope * len(queue))
                if queue
                else float("inf")
                for e, queue in enumerate(running)
            ]
            e = times.index(min(times))
            clock[e] = ends[e] = times[e]
            steps[e] = heapq.heappop(running[e])
            if waiting:
                heapq.heappush(running[e], steps[e] + waiting.pop())
        return max(ends), 1 - sum(ends) / (max(ends) * self.count)


def old_cut(prompts: Sequence[Sequence[int]], sampling: Sampling, engines: int, smallest: int):
    """The earlier version of `cut`: pieces of at least `smallest` prompts."""
    weights = [expected_tokens(prompt, sampling) for prompt in prompts]
    left, at = sum(weights), 0
    pieces: list[Piece] = []
    while at < len(prompts):
        end, taken = at, 0
        while end < len(prompts) and (end - at < smallest or taken < left / (2 * engines)):
            taken += weights[end]
            end += 1
        pieces.append(tuple(range(at, end)))
        left, at = left - taken, end
    return pieces


def simulated(config: RunConfig, lengths: Sequence[int], full_step: float):
    """Number of pieces, time and idle share of each way."""
    repeat = config.sampling.responses_per_prompt
    count, slots = config.engine.replicas, config.engine.max_num_seqs
    engines = Engines(count, slots, full_step)
    prompts = [[1] * PROMPT_TOKENS] * config.ppo.prompts_per_step
    sampling = Sampling(max_new_tokens=config.sampling.max_new_tokens, responses_per_prompt=repeat)

    def of(piece: Piece) -> list[int]:
        return [length for index in piece for length in lengths[index * repeat :][:repeat]]

    before = old_cut(prompts, sampling, count, max(1, slots // 2))
    pieces = cut(prompts, sampling, count)
    dealt = deal(pieces, prompts, sampling, [1.0] * count)
    loads = [[length for piece in given for length in of(piece)] for given in dealt]
    return {
        "0.3.0": (len(before), *engines.one_by_one([of(piece) for piece in before])),
        "one by one": (len(pieces), *engines.one_by_one([of(piece) for piece in pieces])),
        "dealt": (len(pieces), *engines.one_by_one(loads)),
        "no calls": (0, *engines.by_slots(lengths)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean", type=float, default=200)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--lengths", type=Path, help="one number of tokens a line")
    parser.add_argument("--full-step", type=float, default=2.0)
    options = parser.parse_args()
    lines = [f"| preset | engines | sequences | slots | {' | '.join(WAYS)} |"]
    lines.append("|---" * (4 + len(WAYS)) + "|")
    for path in sorted(preset("demo").parent.glob("*.yaml")):
        if path.stem == "kuberay":
            continue
        config = load_config(path)
        count = config.ppo.prompts_per_step * config.sampling.responses_per_prompt
        longest = config.sampling.max_new_tokens
        found = []
        for seed in range(DRAWS):
            if options.lengths:
                given = ResponseLengths.read(options.lengths).tokens
                lengths = [
                    min(longest, given[(seed * count + n) % len(given)]) for n in range(count)
                ]
            else:
                mean = min(options.mean, 0.6 * longest)
                drawn = ResponseLengths.log_normal(count, mean, options.spread, longest, seed)
                lengths = list(drawn.tokens)
            found.append(simulated(config, lengths, options.full_step))
        cells = []
        for way in WAYS:
            pieces = f"{found[0][way][0]} pieces, " if found[0][way][0] else ""
            steps = fmean(draw[way][1] for draw in found)
            idle = fmean(draw[way][2] for draw in found)
            cells.append(f"{pieces}{100 * idle:.0f} %, {steps:,.0f}")
        lines.append(
            f"| {path.stem} | {config.engine.replicas} | {count} | {config.engine.max_num_seqs}"
            f" | {' | '.join(cells)} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
