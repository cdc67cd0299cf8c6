"""What a run was worth, in three plain sentences, which the terminal shows at its end."""

from __future__ import annotations

from typing import Any

from medusa_ppo.runtime import wording as w


def in_plain_words(summary: dict[str, Any]) -> list[str]:
    """At most three sentences: how fast, what the heads gained, what the policy learned. Anything
    that was not measured is left out.
    """
    said = (_speed(summary), _heads(summary), _policy(summary))
    return [sentence for sentence in said if sentence]


def _speed(summary: dict[str, Any]) -> str:
    ratio = summary["rollout_speedup"]
    if ratio is None:
        return ""
    pairs = summary["rollout_speedup_pairs"]
    spread = f"{pairs['min']:.2f} to {pairs['max']:.2f} in {pairs['count']} pairs"
    against = w.AGAINST[pairs["against"]]
    step = summary["step_ratio"]
    whole = "" if step is None else f", and a whole PPO step took {w.more_time(step)}"
    return f"Rollouts were {ratio:.2f} times as fast as {against} ({spread}){whole}."


def _heads(summary: dict[str, Any]) -> str:
    mal = summary["mean_acceptance_length"]
    if mal["serving"] is None:
        return ""
    most = 1 + len(summary["acceptance_per_position"] or [])
    share = some_drafted(summary)
    with_drafts = " with drafts" if share else ""
    sentence = (
        f"In the last steps an engine step{with_drafts} wrote {mal['serving']:.2f} of at most"
        f" {most} tokens"
    )
    if share:
        sentence += f" ({share} of the steps had drafts)"
    if only_first_version(summary):
        return f"{sentence}; one version was published, so there is nothing to compare it with."
    if mal["frozen"] is None or mal["serving_replay"] is None:
        return f"{sentence}."
    return (
        f"{sentence}; by replay, the heads trained beside the loop reach"
        f" {mal['serving_replay']:.2f}, and those of the first version {mal['frozen']:.2f}."
    )


def _policy(summary: dict[str, Any]) -> str:
    reward = summary["reward"]
    if reward["first"] is None or reward["last"] is None:
        return ""
    right = summary["correct_frac"]
    answers = ""
    if right["first"] is not None and right["last"] is not None:
        answers = f", right answers from {w.percent(right['first'])} to {w.percent(right['last'])}"
    return (
        f"Meanwhile the policy went from a reward of {reward['first']:.2f} to"
        f" {reward['last']:.2f}{answers}."
    )


def some_drafted(summary: dict[str, Any]) -> str:
    """The share of the engine's steps with drafts, if not all had some: the acceptance lengths are
    of these alone.
    """
    share = summary.get("drafted_frac")  # Earlier releases' summaries have none.
    return w.percent(share) if share is not None and w.percent(share) != w.percent(1.0) else ""


def only_first_version(summary: dict[str, Any]) -> bool:
    """Whether the serving heads are the frozen ones: no second version was published."""
    return bool(summary["companion"]["versions_published"] == 1)
