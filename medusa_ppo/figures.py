"""A step's figures from what engine and companion report, under the names of medusa_ppo/metrics.py."""

from __future__ import annotations

from typing import Any

from medusa_ppo import metrics as names
from medusa_ppo.types import CompanionStatus, PublishedHeads, Rollouts


def rollout_figures(rollouts: Rollouts, serving: PublishedHeads | None, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rollouts say: versions, staleness, vLLM's acceptance counters, and what an engine that chooses K chose."""
    counters = rollouts.counters
    more: dict[str, Any] = {names.DRAFT_CHOICES: choices} if choices else {}
    if rollouts.engines:
        more[names.MAL_PER_ENGINE] = [share.counters.mean_acceptance_length for share in rollouts.engines]
        more[names.TOKENS_PER_ENGINE] = [share.generated_tokens for share in rollouts.engines]
    return more | {
        names.HEADS_VERSION: rollouts.heads_version,
        names.STALENESS: rollouts.policy_version - (serving.policy_version if serving else 0),
        names.NUM_DRAFTS: rollouts.num_drafts,
        names.MAL_SERVING: counters.mean_acceptance_length,
        names.ACCEPTANCE_PER_POSITION: list(counters.acceptance_per_position),
        names.DRAFTS: counters.drafts,
        names.ACCEPTED: counters.accepted,
    }


def companion_figures(status: CompanionStatus, upper_seen: int = 0) -> dict[str, Any]:
    """What the companion has done, and its replay estimates; those that are not known are left out.

    `upper_seen`: the batch whose upper mark was told before; it is told once.
    """
    values: dict[str, Any] = {
        names.COMPANION_TRAINED_TOKENS: status.trained_tokens,
        names.COMPANION_DROPPED: status.batches_dropped,
        names.COMPANION_RESTARTS: status.restarts,
        names.COMPANION_STEPS: status.optimizer_steps,
        names.COMPANION_WORKERS: status.workers,
        names.VERSIONS_PUBLISHED: status.versions_published,
    }
    if status.reason:
        values |= {names.COMPANION_PASSES: status.passes, names.COMPANION_REASON: status.reason}
        values |= {names.COMPANION_POSITIONS: status.positions_frac, names.COMPANION_RATE: status.rate}
    if status.gpu_gib is not None:
        values[names.COMPANION_GPU] = status.gpu_gib
    if status.last_loss == status.last_loss:  # not NaN: something was trained
        values[names.COMPANION_LOSS] = status.last_loss
    if status.serving is not None:
        values[names.REPLAY_POLICY_VERSION] = status.last_policy_version
    rows = [
        (names.REPLAY_SERVING, status.serving),
        (names.REPLAY_CANDIDATE, status.candidate),
        (names.REPLAY_FROZEN, status.frozen),
    ]
    if status.upper_batch != upper_seen:
        rows += [(names.REPLAY_UPPER, status.upper), (names.REPLAY_UPPER_SERVING, status.upper_serving)]
    return values | {name: row.mean_acceptance_length for name, row in rows if row is not None}
