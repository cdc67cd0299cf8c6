"""Names of everything a run logs, one sentence each; the unit stands in the name.

One JSON line per PPO step goes to `metrics.jsonl` with these keys; `reports/` reads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_ppo.types import CompanionStatus, PublishedHeads, Rollouts

STEP = "step"  # PPO step, from 0.
WALL_S = "wall_s"  # Seconds since the run started, at the end of the step.
POLICY_VERSION = "policy_version"  # Version of the actor that wrote the rollouts of this step.
HEADS_VERSION = "heads_version"  # Version of the heads the engine drafted with in this step.
STALENESS = "staleness"  # Policy updates between the serving heads' last training batch and this step's rollouts.
NUM_DRAFTS = "num_drafts"  # Draft tokens per step that the engine was set to.

MAL_SERVING = "mal_serving"  # Mean acceptance length from vLLM's counters, this step's rollouts.
ACCEPTANCE_PER_POSITION = "acceptance_per_position"  # Accepted at position k / draft steps, from vLLM's counters.
DRAFT_CHOICES = "draft_choices"  # Where K is chosen: decode steps by running sequences and drafts, and the speed-up of the choice.
DRAFTS = "drafts"  # Draft steps counted by vLLM.
ACCEPTED = "accepted"  # Draft tokens accepted, counted by vLLM.
MAL_PER_ENGINE = "mal_per_engine"  # Mean acceptance length of each engine of a pool, from its counters.
TOKENS_PER_ENGINE = "generated_tokens_per_engine"  # Response tokens of each engine of a pool.
REPLAY_SERVING = "replay_mal_serving"  # Replay estimate of the serving heads on this step's holdout.
REPLAY_CANDIDATE = "replay_mal_candidate"  # Replay estimate of the newly trained heads on this step's holdout.
REPLAY_FROZEN = "replay_mal_frozen"  # Replay estimate of the first published heads on this step's holdout.
REPLAY_UPPER = "replay_mal_upper"  # Replay estimate of heads fitted on a very batch, on its holdout (some batches only).
REPLAY_UPPER_SERVING = "replay_mal_upper_serving"  # Replay estimate of the serving heads on the holdout of that upper mark.
REPLAY_POLICY_VERSION = "replay_policy_version"  # Version of the actor whose rollouts the replay estimates were made on.

TOKENS_PER_S = "rollout_tokens_per_s"  # Response tokens per second of this step's generation.
PAIR_DRAFTING_TOKENS_PER_S = "pair_drafting_tokens_per_s"  # The same prompts with drafting, timed in turn with plain (paired steps).
PAIR_PLAIN_TOKENS_PER_S = "pair_plain_tokens_per_s"  # The same prompts without drafting (paired steps only).
PAIR_SPEEDUP = "pair_speedup"  # Ratio of the two.

REWARD_MEAN = "reward_mean"  # Mean reward of the rollouts, KL penalty not included.
CORRECT_FRAC = "correct_frac"  # Share of responses with the right answer.
KL_REFERENCE = "kl_reference"  # Mean over tokens of log pi - log pi_ref on the rollouts, nats.
KL_UPDATE = "kl_update"  # Mean of (ratio - 1) - log ratio over the update, nats.
ENTROPY = "entropy"  # Mean entropy of the policy on the rollouts, nats.
POLICY_LOSS = "policy_loss"  # Clipped surrogate, mean over the update.
VALUE_LOSS = "value_loss"  # Clipped value loss, mean over the update.
CLIP_FRAC = "clip_frac"  # Share of tokens whose ratio was clipped.
LOGPROB_GAP = "logprob_gap"  # Mean |engine log-prob - actor log-prob| on the rollouts, nats.
RESPONSE_LENGTH = "response_length_tokens"  # Mean response length.
TRUNCATED_FRAC = "truncated_frac"  # Share of responses cut at the length limit.
ACTOR_GRAD_NORM = "actor_grad_norm"  # Mean gradient norm of the actor before clipping.

GENERATE_S = "generate_s"  # Seconds of the rollout generation.
SCORE_S = "score_s"  # Seconds of the log-prob, value and reward passes.
UPDATE_S = "update_s"  # Seconds of the PPO update.
SYNC_S = "sync_s"  # Seconds of carrying the actor into the engine.
SYNC_COLLECT_S = "sync_collect_s"  # Of these, seconds until its weights were collected and written; in a broadcast, of waiting for them.
SYNC_BYTES = "sync_bytes"  # Bytes of the actor's weights that each engine read.
SWAP_S = "swap_s"  # Seconds of swapping heads into the engine.
SWAP_ALARMS = "swap_alarms"  # Swaps so far after which acceptance was near zero, so that the heads before were put back.
ENGINE_RESTARTS = "engine_restarts"  # Times so far that an engine was lost and started again.
COMPANION_RESTARTS = "companion_restarts"  # Times so far that the companion's process was seen to be another one.
PLUGIN_EXPOSED_S = "plugin_exposed_s"  # Seconds the loop spent inside the plugin's hooks.
COMPANION_TRAIN_S = "companion_train_s"  # Seconds the companion trained during this step.
COMPANION_HIDDEN_S = "companion_hidden_s"  # Of these, seconds that no hook waited for.
COMPANION_TRAINED_TOKENS = "companion_trained_tokens"  # Positions trained on so far.
COMPANION_STEPS = "companion_optimizer_steps"  # Optimizer steps of the companion so far.
COMPANION_PASSES = "companion_passes"  # Passes over the batch trained on last; below 1 a random part of its positions once.
COMPANION_REASON = "companion_reason"  # Why so many, in a word of the schedule (docs/companion.md explains each).
COMPANION_POSITIONS = "companion_positions_frac"  # Share of that batch's training positions that were trained on.
COMPANION_RATE = "companion_rate"  # Share of the configured step size that the companion trains with; the gate sets it.
COMPANION_GPU = "companion_gpu_gib"  # GPU memory that the companion's process holds when the step ends; without a GPU left out.
COMPANION_LOSS = "companion_loss"  # Mean loss of the last trained batch.
COMPANION_DROPPED = "companion_batches_dropped"  # Batches dropped so far: no room was left, or newer policies had come.
COMPANION_WORKERS = "companion_workers"  # Processes that train the heads together now; fewer than configured while one is replaced.
VERSIONS_PUBLISHED = "versions_published"  # Head versions published so far.


def describe() -> dict[str, str]:
    """Metric name -> its one-sentence explanation, read from this file's own comments."""
    from pathlib import Path

    out = {}
    for line in Path(__file__).read_text(encoding="utf-8").splitlines():
        head, mark, note = line.partition("  # ")
        if mark and " = " in head and head.split(" = ")[0].isupper():
            out[head.split('"')[1]] = note.strip()
    return out


def rollout_figures(rollouts: Rollouts, serving: PublishedHeads | None, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rollouts say: versions, staleness, vLLM's acceptance counters, and what an engine that chooses K chose."""
    counters = rollouts.counters
    more: dict[str, Any] = {DRAFT_CHOICES: choices} if choices else {}
    if rollouts.engines:
        more[MAL_PER_ENGINE] = [share.counters.mean_acceptance_length for share in rollouts.engines]
        more[TOKENS_PER_ENGINE] = [share.generated_tokens for share in rollouts.engines]
    return more | {
        HEADS_VERSION: rollouts.heads_version,
        STALENESS: rollouts.policy_version - (serving.policy_version if serving else 0),
        NUM_DRAFTS: rollouts.num_drafts,
        MAL_SERVING: counters.mean_acceptance_length,
        ACCEPTANCE_PER_POSITION: list(counters.acceptance_per_position),
        DRAFTS: counters.drafts,
        ACCEPTED: counters.accepted,
    }


def companion_figures(status: CompanionStatus, upper_seen: int = 0) -> dict[str, Any]:
    """What the companion has done, and its replay estimates; those that are not known are left out.

    `upper_seen`: the batch whose upper mark was told before; it is told once.
    """
    values: dict[str, Any] = {
        COMPANION_TRAINED_TOKENS: status.trained_tokens,
        COMPANION_DROPPED: status.batches_dropped,
        COMPANION_RESTARTS: status.restarts,
        COMPANION_STEPS: status.optimizer_steps,
        COMPANION_WORKERS: status.workers,
        VERSIONS_PUBLISHED: status.versions_published,
    }
    if status.reason:
        values |= {COMPANION_PASSES: status.passes, COMPANION_REASON: status.reason}
        values |= {COMPANION_POSITIONS: status.positions_frac, COMPANION_RATE: status.rate}
    if status.gpu_gib is not None:
        values[COMPANION_GPU] = status.gpu_gib
    if status.last_loss == status.last_loss:  # not NaN: something was trained
        values[COMPANION_LOSS] = status.last_loss
    if status.serving is not None:
        values[REPLAY_POLICY_VERSION] = status.last_policy_version
    rows = [
        (REPLAY_SERVING, status.serving),
        (REPLAY_CANDIDATE, status.candidate),
        (REPLAY_FROZEN, status.frozen),
    ]
    if status.upper_batch != upper_seen:
        rows += [(REPLAY_UPPER, status.upper), (REPLAY_UPPER_SERVING, status.upper_serving)]
    return values | {name: row.mean_acceptance_length for name, row in rows if row is not None}
