"""Names of everything a run logs, with one sentence each; a name ends in its unit.

One JSON line per PPO step goes to `metrics.jsonl` with these keys; `reports/` reads nothing else.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

LOGGED = "medusa/"
"""Prefix of all these names in another loop's logger: W&B, TensorBoard, its console."""

STEP = "step"
"""PPO step, from 0."""
WALL_S = "wall_s"
"""Seconds since the run started, at the end of the step."""
POLICY_VERSION = "policy_version"
"""Version of the actor that wrote the rollouts of this step."""
POLICY_LAG = "policy_lag"
"""Policy updates between the actor that wrote the rollouts and the one that learned from them, mean
over tokens.
"""
POLICY_LAG_MAX = "policy_lag_max"
"""The largest lag of any token, if responses are carried over to the next step."""
PROMPTS_CARRIED = "prompts_carried"
"""Prompts without finished answers, which continue in the next step."""
HEADS_VERSION = "heads_version"
"""Version of the heads the engine drafted with in this step."""
STALENESS = "staleness"
"""Policy updates between the serving heads' last training batch and this step's rollouts."""
WARM_UP_S = "warm_up_s"
"""Seconds of the warm-up before the first step; logged only with that step."""
WARM_UP_TOKENS = "warm_up_tokens"
"""Response tokens that the heads were trained and judged on in the warm-up."""
WARM_UP_BEFORE = "warm_up_mal_before"
"""Replay estimate of the heads before the warm-up, on its held-out prompts."""
WARM_UP_AFTER = "warm_up_mal_after"
"""The same for the heads that the warm-up gave to the engine."""
NUM_DRAFTS = "num_drafts"
"""Draft tokens per step that the engine was set to."""

MAL_SERVING = "mal_serving"
"""Mean acceptance length from vLLM's counters, this step's rollouts."""
ACCEPTANCE_PER_POSITION = "acceptance_per_position"
"""Accepted at position k / draft steps, from vLLM's counters."""
DRAFT_CHOICES = "draft_choices"
"""If K is chosen: decode steps by running sequences and drafts, and the speed-up of the choice (1:
to draft nothing; null: steps without drafts were not measured).
"""
DRAFT_SPEEDUP = "draft_speedup"
"""If K is chosen: the engine's own estimate of the choice's tokens/s over those without drafts,
which is never below 1.
"""
DRAFTS = "drafts"
"""Draft steps counted by vLLM."""
ACCEPTED = "accepted"
"""Draft tokens accepted, counted by vLLM."""
MAL_PER_ENGINE = "mal_per_engine"
"""Mean acceptance length of each engine of a pool, from its counters."""
DRAFTS_PER_ENGINE = "drafts_per_engine"
"""Draft steps of each engine of a pool, counted by vLLM."""
ACCEPTED_PER_ENGINE = "accepted_per_engine"
"""Draft tokens accepted in each engine of a pool, counted by vLLM."""
TOKENS_PER_ENGINE = "generated_tokens_per_engine"
"""Response tokens of each engine of a pool."""
REPLAY_SERVING = "replay_mal_serving"
"""Replay estimate of the serving heads on the holdout that was judged last, which is repeated until
the next one; replay_heads_version says which heads these were.
"""
REPLAY_CANDIDATE = "replay_mal_candidate"
"""Replay estimate of the newly trained heads on the same holdout."""
REPLAY_FROZEN = "replay_mal_frozen"
"""Replay estimate of the first published heads on the same holdout."""
REPLAY_HEADS_VERSION = "replay_heads_version"
"""Version of the serving heads when that holdout was judged; if they were replaced by it,
heads_version is a later one.
"""
REPLAY_POLICY_VERSION = "replay_policy_version"
"""Version of the actor whose rollouts the replay estimates were made on."""

TOKENS_PER_S = "rollout_tokens_per_s"
"""Response tokens per second of this step's generation."""
PAIR_DRAFTING_TOKENS_PER_S = "pair_drafting_tokens_per_s"
"""The same prompts with drafting, timed in turn with plain generation (paired steps only)."""
PAIR_PLAIN_TOKENS_PER_S = "pair_plain_tokens_per_s"
"""The same prompts without drafting (paired steps only)."""
PAIR_SPEEDUP = "pair_speedup"
"""Ratio of the two."""

REWARD_MEAN = "reward_mean"
"""Mean reward of the rollouts, without the KL penalty."""
CORRECT_FRAC = "correct_frac"
"""Share of responses with the right answer."""
REWARDS_LATE = "rewards_late"
"""Rewards so far that took longer than ppo.reward_timeout_s and were set to 0."""
REWARDS_CUT = "rewards_cut"
"""Texts so far that lost their first tokens because the reward model cannot read more
(ppo.reward_too_long=cut).
"""
KL_REFERENCE = "kl_reference"
"""Mean over tokens of log pi - log pi_ref on the rollouts, nats."""
KL_COEFFICIENT = "kl_coefficient"
"""Weight of the KL penalty in this step, reward units per nat."""
KL_UPDATE = "kl_update"
"""Mean of (ratio - 1) - log ratio over the update, nats."""
ENTROPY = "entropy"
"""Mean entropy of the policy on the rollouts, nats."""
POLICY_LOSS = "policy_loss"
"""Clipped surrogate, mean over the update."""
VALUE_LOSS = "value_loss"
"""Clipped value loss, mean over the update."""
VALUE_EXPLAINED = "value_explained_frac"
"""Share of the variance of the returns that the critic's values explain, before the update; below 0
a constant would do better.
"""
CLIP_FRAC = "clip_frac"
"""Share of tokens whose ratio was clipped."""
LOGPROB_GAP = "logprob_gap"
"""Mean |engine log-prob - actor log-prob| on the rollouts, nats."""
LOGPROB_GAP_MAX = "logprob_gap_max"
"""Largest |engine log-prob - actor log-prob| of any token of the rollouts, nats."""
ENGINE_KL = "engine_kl"
"""Mean of (ratio - 1) - log ratio of actor to engine on the rollouts: their KL, nats."""
IMPORTANCE_CUT = "importance_cut_frac"
"""Share of tokens whose ratio of actor to engine is above ppo.importance_bound (null: above 2)."""
RESPONSE_LENGTH = "response_length_tokens"
"""Mean response length."""
TRUNCATED_FRAC = "truncated_frac"
"""Share of responses cut at the length limit."""
ACTOR_GRAD_NORM = "actor_grad_norm"
"""Mean gradient norm of the actor before clipping."""
ACTOR_STEPS = "actor_optimizer_steps"
"""Optimizer steps of the actor in this update; fewer where ppo.kl_stop ended it."""
STEPS_SKIPPED = "optimizer_steps_skipped"
"""Optimizer steps of actor and critic skipped because a gradient was not finite."""
LEARNING_RATE = "actor_learning_rate"
"""Learning rate of the actor in this update."""
PTX_LOSS = "ptx_loss"
"""Mean loss on the texts of data.ptx_path, nats a token."""
EVAL_REWARD = "eval_reward_mean"
"""Mean reward of the updated actor on the evaluation's prompts (some steps only)."""
EVAL_CORRECT = "eval_correct_frac"
"""Share of the evaluation's responses with the right answer (some steps only)."""

IMAGES = "images"
"""Number of different images that actor, critic and reference saw in this step."""
TOWER_RUNS = "vision_tower_runs"
"""Images that the vision tower processed since the last step; once each while its features are
cached.
"""

GENERATE_S = "generate_s"
"""Seconds of the rollout generation."""
SCORE_S = "score_s"
"""Seconds of the log-prob, value and reward passes; with ppo.piece_prompts only of those after the
generation.
"""
GENERATE_SCORE_S = "generate_score_s"
"""Seconds from the start of generation to the end of scoring."""
GENERATE_SCORE_IDLE = "generate_score_idle_frac"
"""Share of these seconds in which the engine, or scoring, was idle: mean of the two."""
SPANS = "role_spans_s"
"""When each role worked: [from, to] in seconds of the step."""
TOWER_S = "vision_tower_s"
"""Seconds of the vision tower, mostly in parallel with generation."""
UPDATE_S = "update_s"
"""Seconds of the PPO update."""
SYNC_S = "sync_s"
"""Seconds to send the actor to the engine."""
GENERATE_PEAK = "generate_peak_gib"
"""Peak memory of the loop's process during generation: torch's on its GPU, or resident on a CPU."""
SCORE_PEAK = "score_peak_gib"
"""The same during scoring."""
UPDATE_PEAK = "update_peak_gib"
"""The same during the update."""
SYNC_PEAK = "sync_peak_gib"
"""The same during the sync."""
LEDGER_PEAK = "ledger_peak_gib"
"""Peak memory of all roles on devices together: weights, gradients, moments, keys and values.
"""
LEDGER_ROLES = "ledger_roles_gib"
"""Peak device memory of each role."""
OFFLOAD_S = "offload_s"
"""Seconds spent moving roles to host memory and back (ppo.placement other than separate)."""
OFFLOAD_BYTES = "offload_bytes"
"""Bytes copied for that."""
ENGINE_WAKE_S = "engine_wake_s"
"""Seconds that the engine took to go to sleep and to wake up."""
EVALUATE_S = "evaluate_s"
"""Seconds of the evaluation (some steps only)."""
SYNC_COLLECT_S = "sync_collect_s"
"""Of sync_s, seconds until the weights were collected and written; in a broadcast, seconds of
waiting for them.
"""
SYNC_BYTES = "sync_bytes"
"""Bytes of the actor's weights that each engine read."""
TABLE_BYTES = "table_bytes"
"""Bytes of lm_head and embedding that training processes with shards of them exchanged in this
step; in verl and OpenRLHF those that left the workers.
"""
SWAP_S = "swap_s"
"""Seconds to swap heads into the engine."""
SWAP_ALARMS = "swap_alarms"
"""Swaps so far after which acceptance was near zero, so that the previous heads were put back."""
ENGINE_RESTARTS = "engine_restarts"
"""Times so far that an engine was lost and restarted."""
COMPANION_RESTARTS = "companion_restarts"
"""Times so far that the companion's process was found to be a new one."""
PLUGIN_EXPOSED_S = "plugin_exposed_s"
"""Seconds the loop spent inside the plugin's hooks."""
COMPANION_TRAIN_S = "companion_train_s"
"""Seconds the companion trained during this step."""
COMPANION_HIDDEN_S = "companion_hidden_s"
"""Of these, seconds in which no hook waited for it."""
COMPANION_SAVED_S = "companion_saved_s"
"""Seconds of generation saved in steps with drafts, compared with the first published heads, by
replay.
"""
COMPANION_LOST_S = "companion_lost_s"
"""Seconds that the companion took from the loop: in hooks, and on shared cores or devices."""
COMPANION_TAKEN = "companion_taken_frac"
"""Share of the loop's seconds that training has taken so far; companion.share is the limit."""
COMPANION_BUDGET_S = "companion_budget_s"
"""Seconds of training left in the budget; below 0 the last pass took longer than expected.
"""
COMPANION_TRAINED_TOKENS = "companion_trained_tokens"
"""Positions trained on so far."""
COMPANION_STEPS = "companion_optimizer_steps"
"""Optimizer steps of the companion so far."""
COMPANION_PASSES = "companion_passes"
"""Passes over a step's batch; below 1: once over a random part of its positions; 0: none.
"""
COMPANION_REASON = "companion_reason"
"""The reason for that number of passes (docs/companion.md explains each)."""
COMPANION_POSITIONS = "companion_positions_frac"
"""Share of the last batch's training positions that were used."""
COMPANION_RATE = "companion_rate"
"""The gate's factor on companion.learning_rate."""
COMPANION_LEARNING_RATE = "companion_learning_rate"
"""Learning rate of the companion's last optimizer step: smaller than the configured one by the
gate's factor, in small steps, and while an optimizer is new.
"""
COMPANION_GPU = "companion_gpu_gib"
"""GPU memory that the companion's process holds at the end of the step; missing without a GPU."""
COMPANION_LOSS = "companion_loss"
"""Mean loss on the last training batch."""
COMPANION_DROPPED = "companion_batches_dropped"
"""Batches dropped so far, because there was no room or newer policies had arrived."""
COMPANION_LEFT_OUT = "companion_positions_left_out"
"""Positions so far whose states were not handed over, for lack of room or time."""
COMPANION_WORKERS = "companion_workers"
"""Processes that train the heads together now; fewer than configured while one is replaced."""
VERSIONS_PUBLISHED = "versions_published"
"""Head versions published so far."""
VERSIONS_FOLLOWED = "versions_followed"
"""Of these, the versions compared with their predecessor on batches after the swap."""
VERSIONS_WORSE = "versions_worse"
"""Of those, the versions that were significantly worse (95 % interval over prompts below 0)."""

REASONS = {
    "fixed": "the loop waits for the companion, or the engine writes ahead: no budget",
    "alone": "training takes nothing from the loop: no budget",
    "training": "new versions keep coming, and the budget has room",
    "waiting": "the budget has no room for a quarter of a pass, or a batch is already waiting",
    "resting": "many verdicts in a row brought no new version; one pass is tried now and then",
}
"""State of the training -> what it means."""


def describe() -> dict[str, str]:
    """Metric name -> its one-sentence explanation: the docstring under the constant, in this
    file.
    """
    explained: dict[str, str] = {}
    # Docstrings under assignments don't survive loading, so the source is read.
    statements = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    for statement, following in pairwise(statements):
        match statement, following:
            case (
                ast.Assign(targets=[ast.Name(id=constant)], value=ast.Constant(value=str(name))),
                ast.Expr(value=ast.Constant(value=str(text))),
                # LOGGED is a prefix; its docstring explains no metric.
            ) if constant != "LOGGED":
                explained[name] = " ".join(text.split())
    return explained
