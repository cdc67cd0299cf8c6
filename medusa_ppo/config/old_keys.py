"""Keys of earlier releases: each is refused with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from heads.errors import ConfigError

OLD_KEYS = {
    "actor.threads": "ppo.threads also sets the threads of each rank.",
    "actor.bucket_bytes": "It is always 64 MiB.",
    "data.column": "Write data.template='{COLUMN}'.",
    "data.limit": "Write data.split='train[:NUMBER]'.",
    "engine.choose_drafts": (
        "engine.num_drafts=auto, the default, chooses K for each step; a number fixes it."
    ),
    "engine.host": (
        "Servers that we start listen on this machine only; start your own and set"
        " engine.backend=http://HOST:PORT."
    ),
    "engine.port": (
        "Servers that we start take a free port; start your own and set"
        " engine.backend=http://HOST:PORT."
    ),
    "engine.url": "Write engine.backend=URL.",
    "engine.placement": (
        "Several engines are placed at once, as close together as possible; engine.resource picks "
        "the nodes."
    ),
    "heads.num_layers": "New heads have one residual block; heads.path may name others.",
    "heads.rank": "It belonged to heads of kind markov, which were removed. Leave the key out.",
    "companion.weight_decay": (
        "Heads are trained without weight decay, which would pull them back to where they start."
    ),
    "companion.clip_norm": "Each head's gradient is clipped at 1.",
    "companion.accumulate": (
        "companion.batch_positions sets the size of an optimizer step; micro-batches follow from "
        "the vocabulary."
    ),
    "companion.schedule": (
        "It trains within companion.share of the loop's seconds; with companion.wait or "
        "ppo.staleness it makes companion.epochs passes over each batch."
    ),
    "companion.min_epochs": (
        "The companion trains at least a quarter of a pass, or not at all; companion.share limits"
        " the share of the loop's seconds that training takes."
    ),
    "companion.upper_mark_every": (
        "The upper reference was removed; training is compared with replay_mal_frozen, the heads "
        "that stopped learning. Leave the key out."
    ),
    "companion.drift_lag": "Resting training resumes when the engine's acceptance falls.",
    "companion.average": (
        "Candidates are a running mean over optimizer steps with a decay of 0.95."
    ),
    "companion.positions": (
        "All positions are trained on; a batch larger than half of companion.queue_bytes is"
        " sampled."
    ),
    "companion.position_share": (
        "All positions are trained on; a batch larger than half of companion.queue_bytes is"
        " sampled. Leave the key out, or set a smaller companion.queue_bytes."
    ),
    "companion.holdout_fraction": (
        "The answers to a fifth of the prompts are held out; of a large batch a stretch of one"
        " answer to each, a sixteenth of its rows; of fewer than 28 prompts none."
    ),
    "companion.queue_lag": "Waiting batches are dropped when they are more than two policy "
    "versions old.",
    "companion.replay_decay": "A batch is replayed half as much with each policy version.",
    "companion.replay_bytes": "It is twice companion.queue_bytes.",
    "companion.save_replay": "A run with companion.wait=true saves them.",
    "companion.draft_temperature": "Heads are judged at engine.draft_temperature.",
    "companion.checkpoint_every": (
        "The companion's state is saved with each version, and otherwise every 8 batches."
    ),
    "companion.max_restarts": "It is restarted up to a hundred times.",
    "companion.hang_s": "It is ended and restarted after 300 s without an answer.",
    "companion.niceness": (
        "A companion that takes turns with the loop has its priority; any other runs at niceness 5."
    ),
    "companion.threads": (
        "companion.cores=[...] puts a thread on each core; without it threads follow from the "
        "node's cores."
    ),
    "companion.offload": (
        "A companion with a share of a GPU (companion.num_gpus below 1) frees it between batches."
    ),
    "companion.placement": (
        "Several workers are placed as close together as possible; companion.resource picks the "
        "nodes."
    ),
    "ppo.value_coefficient": (
        "It only acted through gradient clipping, and the critic has its own optimizer; set"
        " ppo.critic_learning_rate."
    ),
    "ppo.reward_kind": (
        "ppo.reward decides it: `module:function` is a function, everything else a reward model."
    ),
    "ppo.gamma": ("Rewards are not discounted; ppo.length_penalty penalises long responses."),
    "report.speed_prompts": (
        "Pairs use all prompts of their step; a larger report.speed_every costs less time."
    ),
    "ppo.correct_from": "Give the reward function an attribute `correct_from`.",
}
"""Key of an earlier release -> what replaces it."""


def refuse_old_keys(values: Mapping[str, Any]) -> None:
    """ConfigError for a key of an earlier release, naming its replacement."""
    for key, value in _leaves(values):
        if key in OLD_KEYS:
            raise ConfigError(
                "This configuration key was removed.",
                given=f"{key} = {value!r}",
                expected=f"no {key}",
                do=OLD_KEYS[key],
            )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
