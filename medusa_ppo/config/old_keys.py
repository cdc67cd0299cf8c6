"""Keys of earlier releases: each is refused with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from heads.errors import ConfigError

OLD_KEYS = {
    "actor.threads": "ppo.threads is that of each rank too.",
    "actor.bucket_bytes": "It is 256 MiB for everybody.",
    "data.column": "Write data.template='{COLUMN}'.",
    "data.limit": "Write data.split='train[:NUMBER]'.",
    "engine.choose_drafts": (
        "engine.num_drafts=auto chooses, and is the default; a number is the same for all steps."
    ),
    "engine.host": (
        "A server that is started listens on this machine only; start your own and set"
        " engine.backend=http://HOST:PORT."
    ),
    "engine.port": (
        "A server that is started takes a free port; start your own and set"
        " engine.backend=http://HOST:PORT."
    ),
    "engine.url": "Write engine.backend=URL.",
    "engine.placement": (
        "Several engines are placed at once, as near to each other as it goes; engine.resource says"
        " on which nodes."
    ),
    "heads.num_layers": "New heads have one residual block; heads.path may name others.",
    "heads.rank": "It was of heads of kind markov, which are gone. Leave the key out.",
    "companion.weight_decay": (
        "Heads are trained without: it would pull them back to where they start."
    ),
    "companion.clip_norm": "Each head's gradient is clipped at 1.",
    "companion.accumulate": (
        "companion.batch_positions are those of an optimizer step; micro-batches follow from the"
        " vocabulary."
    ),
    "companion.schedule": (
        "It trains within companion.share of the loop's seconds, and companion.epochs passes over"
        " each batch with companion.wait or ppo.staleness."
    ),
    "companion.min_epochs": (
        "It trains a quarter of a pass or more, or nothing: set companion.share, the most that"
        " training may take of the loop's seconds."
    ),
    "companion.upper_mark_every": (
        "No upper mark is taken any more; replay_mal_frozen, heads that stopped learning, is what"
        " training along the way is compared with. Leave the key out."
    ),
    "companion.drift_lag": "Training that rests wakes when the engine's acceptance falls.",
    "companion.average": (
        "Candidates are a running mean of which 0.97 stays with each optimizer step."
    ),
    "companion.positions": (
        "All positions are trained on; of a batch that is more than half of companion.queue_bytes a"
        " sample is."
    ),
    "companion.position_share": (
        "All positions are trained on; of a batch that is more than half of companion.queue_bytes a"
        " sample is. Leave the key out, or set a smaller companion.queue_bytes."
    ),
    "companion.holdout_fraction": "A fifth of the responses is kept out of each training.",
    "companion.queue_lag": "Waiting batches go when they are more than two policy versions behind.",
    "companion.replay_decay": "A batch is replayed by half as much with each policy version.",
    "companion.replay_bytes": "It is twice companion.queue_bytes.",
    "companion.save_replay": "A run with companion.wait=true saves them.",
    "companion.draft_temperature": "Heads are judged at engine.draft_temperature.",
    "companion.checkpoint_every": "The companion's state is saved after each batch.",
    "companion.max_restarts": "It is started again up to a hundred times.",
    "companion.hang_s": "It is ended and started again after 300 s without an answer.",
    "companion.niceness": "It is 5.",
    "companion.threads": (
        "companion.cores=[...] has a thread on each; without it they follow from the cores of the"
        " node."
    ),
    "companion.offload": (
        "A companion with a share of a GPU (companion.num_gpus below 1) leaves it between batches."
    ),
    "companion.placement": (
        "Several workers are placed as near to each other as it goes; companion.resource says on"
        " which nodes."
    ),
    "ppo.value_coefficient": (
        "It acted through the gradient clip alone: the critic has its own optimizer; set"
        " ppo.critic_learning_rate."
    ),
    "ppo.reward_kind": (
        "ppo.reward says it: `module:function` is a callable, everything else a reward model."
    ),
    "ppo.gamma": (
        "A reward counts in full however late it comes; ppo.length_penalty makes long responses"
        " cost something."
    ),
    "report.speed_prompts": (
        "Pairs have all prompts of their step; a larger report.speed_every costs less time."
    ),
    "ppo.correct_from": "Give the reward function an attribute `correct_from`.",
}
"""Key of an earlier release -> what says it now."""


def refuse_old_keys(values: Mapping[str, Any]) -> None:
    """ConfigError for a key of an earlier release, with what says it now."""
    for key, value in _leaves(values):
        if key in OLD_KEYS:
            raise ConfigError(
                "This configuration key is gone.",
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
