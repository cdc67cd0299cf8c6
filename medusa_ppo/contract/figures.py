"""A step's figures from engine and companion, named as in `contract/metrics.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_ppo.contract.metrics import (
    ACCEPTANCE_PER_POSITION,
    ACCEPTED,
    ACCEPTED_PER_ENGINE,
    COMPANION_DROPPED,
    COMPANION_GPU,
    COMPANION_LEARNING_RATE,
    COMPANION_LEFT_OUT,
    COMPANION_LOSS,
    COMPANION_PASSES,
    COMPANION_POSITIONS,
    COMPANION_RATE,
    COMPANION_REASON,
    COMPANION_RESTARTS,
    COMPANION_STEPS,
    COMPANION_TRAINED_TOKENS,
    COMPANION_WORKERS,
    DRAFT_CHOICES,
    DRAFT_SPEEDUP,
    DRAFTS,
    DRAFTS_PER_ENGINE,
    GENERATE_S,
    HEADS_VERSION,
    LOGGED,
    MAL_PER_ENGINE,
    MAL_SERVING,
    NUM_DRAFTS,
    POLICY_LAG,
    POLICY_LAG_MAX,
    POLICY_VERSION,
    REPLAY_CANDIDATE,
    REPLAY_FROZEN,
    REPLAY_HEADS_VERSION,
    REPLAY_POLICY_VERSION,
    REPLAY_SERVING,
    RESPONSE_LENGTH,
    STALENESS,
    TOKENS_PER_ENGINE,
    TOKENS_PER_S,
    TRUNCATED_FRAC,
    VERSIONS_FOLLOWED,
    VERSIONS_PUBLISHED,
    VERSIONS_WORSE,
)

if TYPE_CHECKING:
    from medusa_ppo.contract.rollouts import Rollouts
    from medusa_ppo.contract.status import CompanionStatus, PublishedHeads

REPLAYED = (
    REPLAY_SERVING,
    REPLAY_CANDIDATE,
    REPLAY_FROZEN,
    REPLAY_HEADS_VERSION,
    REPLAY_POLICY_VERSION,
)
"""What the companion's last judgement gave."""


def rollout_figures(rollouts: Rollouts) -> dict[str, Any]:
    """Figures of the rollouts themselves: version, speed and length."""
    count = max(1, len(rollouts.responses))
    return {
        POLICY_VERSION: rollouts.policy_version,
        GENERATE_S: rollouts.seconds,
        TOKENS_PER_S: rollouts.tokens_per_s,
        RESPONSE_LENGTH: sum(len(r.token_ids) for r in rollouts.responses) / count,
        TRUNCATED_FRAC: sum(r.finish_reason == "length" for r in rollouts.responses) / count,
    }


def lag_figures(rollouts: Rollouts, learner: int) -> dict[str, float]:
    """How many updates the learning version is ahead of the versions that wrote the tokens."""
    versions = [version for response in rollouts.responses for version in response.versions]
    # If no call continued an earlier version's responses, all tokens have the rollouts' version.
    if not versions:
        return {POLICY_LAG: learner - rollouts.policy_version}
    return {
        POLICY_LAG: learner - sum(versions) / len(versions),
        POLICY_LAG_MAX: learner - min(versions),
    }


def counter_figures(rollouts: Rollouts) -> dict[str, Any]:
    """vLLM's acceptance counters."""
    counters = rollouts.counters
    return {
        NUM_DRAFTS: rollouts.num_drafts,
        DRAFTS: counters.drafts,
        ACCEPTED: counters.accepted,
        MAL_SERVING: counters.mean_acceptance_length,
        ACCEPTANCE_PER_POSITION: list(counters.acceptance_per_position),
    }


def logged(values: dict[str, Any]) -> dict[str, float]:
    """Figures in the form that other loggers accept: numbers only, all under `medusa/`; a list
    becomes one number for each of its places.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        places = (
            {f"{name}_{place}": part for place, part in enumerate(value, 1)}
            if isinstance(value, list)
            else {name: value}
        )
        found |= {
            LOGGED + key: float(part)
            for key, part in places.items()
            # Loggers of other loops accept only numbers; a single text would make the whole line
            # fail.
            if isinstance(part, int | float)
        }
    return found


def serving_figures(
    rollouts: Rollouts, serving: PublishedHeads | None, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """The serving heads' figures: version, staleness, acceptance, each engine's share, and the
    choices of an engine that chooses K.
    """
    more: dict[str, Any] = {DRAFT_CHOICES: choices} if choices else {}
    if (speedup := mean_speedup(choices)) is not None:
        more[DRAFT_SPEEDUP] = speedup
    if rollouts.engines:
        more[MAL_PER_ENGINE] = [share.counters.mean_acceptance_length for share in rollouts.engines]
        more[DRAFTS_PER_ENGINE] = [share.counters.drafts for share in rollouts.engines]
        more[ACCEPTED_PER_ENGINE] = [share.counters.accepted for share in rollouts.engines]
        more[TOKENS_PER_ENGINE] = [share.generated_tokens for share in rollouts.engines]
    staleness = rollouts.policy_version - (serving.policy_version if serving else 0)
    return (
        more
        | {HEADS_VERSION: rollouts.heads_version, STALENESS: staleness}
        | counter_figures(rollouts)
    )


def mean_speedup(choices: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean of the rows' speed-ups, each weighted by its number of steps. Rows without one, where
    steps without drafts were not measured, are left out; None: all are.
    """
    known = [(row["speedup"], sum(row["steps"])) for row in choices if row["speedup"] is not None]
    if not known:
        return None
    return sum(speedup * steps for speedup, steps in known) / max(1, sum(n for _, n in known))


def companion_figures(status: CompanionStatus) -> dict[str, Any]:
    """What the companion has done, and its replay estimates; unknown values are left out."""
    values: dict[str, Any] = {
        COMPANION_TRAINED_TOKENS: status.trained_tokens,
        COMPANION_DROPPED: status.batches_dropped,
        COMPANION_LEFT_OUT: status.positions_left_out,
        COMPANION_RESTARTS: status.restarts,
        COMPANION_STEPS: status.optimizer_steps,
        COMPANION_WORKERS: status.workers,
        VERSIONS_PUBLISHED: status.versions_published,
        VERSIONS_FOLLOWED: status.versions_followed,
        VERSIONS_WORSE: status.versions_worse,
    }
    # If a companion has a budget, the plugin overwrites these with its own number and reason.
    if status.passes:
        values |= {COMPANION_PASSES: status.passes, COMPANION_REASON: "fixed"}
        values |= {COMPANION_POSITIONS: status.positions_frac, COMPANION_RATE: status.rate}
        if status.learning_rate:
            values[COMPANION_LEARNING_RATE] = status.learning_rate
    if status.gpu_gib is not None:
        values[COMPANION_GPU] = status.gpu_gib
    # Before the first batch there is no loss: it is NaN, which equals nothing, not even itself.
    if status.last_loss == status.last_loss:
        values[COMPANION_LOSS] = status.last_loss
    if status.serving is not None:
        values[REPLAY_HEADS_VERSION] = status.replayed_version
        values[REPLAY_POLICY_VERSION] = status.replayed_policy_version
    rows = [
        (REPLAY_SERVING, status.serving),
        (REPLAY_CANDIDATE, status.candidate),
        (REPLAY_FROZEN, status.frozen),
    ]
    return values | {name: row.mean_acceptance_length for name, row in rows if row is not None}


def lengths_over_frozen(status: CompanionStatus) -> dict[int, float]:
    """For the versions that were judged last, how many times the tokens of the first published
    heads they give in each engine step, by replay of the same responses. Empty where nothing was
    judged: what earlier judgements said of a version still holds then.
    """
    if status.frozen is None:
        return {}
    rows = {status.replayed_version: status.serving}
    if status.fresh:
        rows[status.versions_published] = status.candidate
    found = {
        version: row.mean_acceptance_length / status.frozen.mean_acceptance_length
        for version, row in rows.items()
        if row is not None
    }
    if status.fresh and status.versions_published == 1:
        found[1] = 1.0  # These are the first: what they were judged against serves no longer.
    return found


def seconds_saved(rollouts: Rollouts, lengths: Mapping[int, float]) -> float:
    """Seconds of generation that the first published heads would have needed beyond those of the
    serving ones: more of the steps with drafts, each as long as a step is on average. 0 without
    drafts, and before both are judged.

    Args:
        lengths: what `lengths_over_frozen` said so far.
    """
    counters = rollouts.counters
    if not counters.drafts:
        return 0.0
    # Each step of a request writes one token, and those drafts that were accepted.
    request_steps = max(counters.drafts, rollouts.generated_tokens - counters.accepted)
    drafted_s = rollouts.seconds * counters.drafts / request_steps
    return drafted_s * (lengths.get(rollouts.heads_version, 1.0) - 1.0)
