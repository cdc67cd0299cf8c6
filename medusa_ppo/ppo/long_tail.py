"""The long tail of a batch: unfinished prompts continue in the next step, with its actor
(`ppo.carry_after`).

    step t       asks for its own prompts and those that step t - 1 carried over, and stops the
                 engine when enough of them are answered
                 learns from those that are answered
    step t + 1   asks for the others again: prompt and tokens so far, whose log-probs and versions
                 stay those of the actor that wrote them

Every prompt is learned from once, whole, with all its responses: groups are compared with each
other (GRPO, RLOO), so finished siblings wait for the last one. The engine finishes a prompt whose
oldest token would be more than `ppo.staleness` updates old in the next step, and the last step
waits for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heads.errors import CheckpointError, ConfigError
from medusa_ppo.contract.rollouts import Response, Rollouts, Sampling
from medusa_ppo.engines.pieces import UNFINISHED, Partly
from medusa_ppo.engines.rollout_engine import RolloutEngine
from medusa_ppo.ppo.generation import Prompt

FILE = "carried.jsonl"


@dataclass(frozen=True)
class Carried:
    """An unfinished prompt.

    Attributes:
        step, place: the step that first asked for it, and its place among that step's prompts.
        prompt_ids: its tokens.
        responses: their tokens so far; each token has its version.
    """

    step: int
    place: int
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]

    @property
    def answered(self) -> bool:
        return all(response.finish_reason != UNFINISHED for response in self.responses)

    def oldest(self, newest: int) -> int:
        """Version of its oldest token; `newest` if it has none."""
        return min(
            (version for response in self.responses for version in response.versions),
            default=newest,
        )


class LongTail:
    """Asks an engine for the rollouts of one step after another, and carries over unfinished
    prompts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts_of: Callable[[int], list[Prompt]],
        share: float,
        staleness: int,
        last_step: int,
        *,
        first_version: int = 0,
        carried: tuple[int, Sequence[Carried]] = (0, ()),
    ) -> None:
        """
        Args:
            prompts_of: a step's own prompts.
            share: share of finished prompts at which the engine stops.
            staleness: maximum updates between a token's version and the one that learns from it.
            last_step: nothing is carried beyond it.
            first_version: version of the actor that learns from step 0.
            carried: prompts carried into this step.
        """
        self._engine = engine
        self._prompts_of = prompts_of
        self._share = share
        self._staleness = staleness
        self._last_step = last_step
        self._first_version = first_version
        self._into = {carried[0]: tuple(carried[1])}

    def into(self, step: int) -> tuple[Carried, ...]:
        """The prompts carried into a step. They are known once the previous step has been written,
        and are kept for the last `staleness` steps.
        """
        return self._into.get(step, ())

    def write(
        self, step: int, prompts: list[Prompt], sampling: Sampling
    ) -> tuple[list[Prompt], Rollouts]:
        """Write a step: returns the prompts that are now answered, and their rollouts. The engine
        must already have the right actor.

        Raises:
            CheckpointError: what was carried over does not match this run's prompts and sampling.
        """
        count = sampling.responses_per_prompt
        version = self._engine.policy_version
        learned_at = self._first_version + step
        nothing = tuple(Response(0, (), (), UNFINISHED) for _ in range(count))
        fresh = (
            Carried(step, place, tuple(prompt.token_ids), nothing)
            for place, prompt in enumerate(prompts)
        )
        groups = [*self.into(step), *fresh]
        every = [*self._prompts_of_carried(step, sampling), *prompts]
        begun = tuple(
            replace(response, prompt_index=index)
            for index, group in enumerate(groups)
            for response in group.responses
        )
        due = {
            i
            for i, group in enumerate(groups)
            if learned_at + 1 - group.oldest(version) > self._staleness
        }
        everything = range(len(groups)) if step >= self._last_step else ()
        asked = Partly(
            begun, math.ceil(self._share * len(groups)), frozenset(due.union(everything))
        )
        found = self._engine.generate_partly(
            [group.prompt_ids for group in groups], sampling, asked
        )
        written = [
            _stamped(was, now, found.policy_version)
            for was, now in zip(begun, found.responses, strict=True)
        ]
        groups = [
            replace(group, responses=tuple(written[i * count : (i + 1) * count]))
            for i, group in enumerate(groups)
        ]
        # Steps are written up to `staleness` ahead of learning, and what is carried into the step
        # after the last learned one is saved with the run.
        kept = {at: left for at, left in self._into.items() if at >= step - self._staleness}
        self._into = {**kept, step + 1: tuple(group for group in groups if not group.answered)}
        answered = [i for i, group in enumerate(groups) if group.answered]
        responses = tuple(
            replace(r, prompt_index=place)
            for place, i in enumerate(answered)
            for r in groups[i].responses
        )
        rollouts = replace(
            found, prompts=tuple(groups[i].prompt_ids for i in answered), responses=responses
        )
        return [every[i] for i in answered], replace(
            rollouts, written_tokens=found.generated_tokens
        )

    def _prompts_of_carried(self, step: int, sampling: Sampling) -> list[Prompt]:
        """The prompts carried into a step, with their texts and rows."""
        batches: dict[int, list[Prompt]] = {}
        for group in self.into(step):
            if group.step not in batches:
                batches[group.step] = self._prompts_of(group.step)
            batch = batches[group.step]
            fits = (
                group.place < len(batch) and tuple(batch[group.place].token_ids) == group.prompt_ids
            )
            longest = max(
                (len(r.token_ids) for r in group.responses if r.finish_reason == UNFINISHED),
                default=0,
            )
            if (
                not fits
                or len(group.responses) != sampling.responses_per_prompt
                or longest >= sampling.max_new_tokens
            ):
                raise CheckpointError(
                    "The carried-over prompts are not from this run.",
                    given=(
                        f"place {group.place} of step {group.step}: {len(group.responses)}"
                        f" responses, {longest} tokens"
                    )
                    + ("" if fits else ", to another prompt"),
                    expected=(
                        f"the data's prompt, {sampling.responses_per_prompt} responses below"
                        f" {sampling.max_new_tokens} tokens"
                    ),
                    do="Resume with the data and the sampling that the run had.",
                )
        return [batches[group.step][group.place] for group in self.into(step)]


def _stamped(was: Response, now: Response, version: int) -> Response:
    """A response with the version of each token; earlier tokens keep theirs."""
    return replace(
        now, versions=was.versions + (version,) * (len(now.token_ids) - len(was.token_ids))
    )


def save_carried(folder: Path, carried: Sequence[Carried]) -> None:
    """Write what is carried into the next step to a checkpoint, one line each; no file if there is
    nothing.
    """
    if carried:
        (folder / FILE).write_text(
            "".join(json.dumps(asdict(group)) + "\n" for group in carried), encoding="utf-8"
        )


def read_carried(folder: Path, *, wanted: bool) -> tuple[Carried, ...]:
    """Read what `save_carried` wrote.

    Raises:
        ConfigError: prompts were carried over, but not `wanted`.
        CheckpointError: the file is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return ()
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        carried = tuple(
            Carried(
                int(row["step"]),
                int(row["place"]),
                tuple(row["prompt_ids"]),
                tuple(_read(r) for r in row["responses"]),
            )
            for row in rows
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        do = "Start without --resume."
        raise CheckpointError(
            "The saved run is damaged.",
            given=f"{file}: {error!r}",
            expected="a prompt in each line",
            do=do,
        ) from None
    if carried and not wanted:
        do = "Resume with ppo.carry_after, or start without --resume."
        given = f"{len(carried)} prompts, ppo.carry_after=null"
        raise ConfigError(
            "The saved run carries prompts over.", given=given, expected="ppo.carry_after", do=do
        )
    return carried


def _read(row: dict[str, Any]) -> Response:
    ids, versions = (tuple(map(int, row[name])) for name in ("token_ids", "versions"))
    logprobs = tuple(map(float, row["logprobs"]))
    if not len(ids) == len(logprobs) == len(versions):
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    return Response(0, ids, logprobs, str(row["finish_reason"]), versions)
