"""The section `sampling`: how responses are sampled."""

from __future__ import annotations

from pydantic import Field

from medusa_ppo.config.section import Count, Section


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts; the log-probs of the update are at this temperature
    too. Set it below 1 when responses are too random to be rewarded, above 1 when they are all
    alike.
    """
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that have this probability together; 1: from all. Set it
    below 1 when rare tokens ruin responses.
    """
    top_k: Count | None = None
    """Sample from this many of the likeliest tokens; null: from all. Set it when rare tokens ruin
    responses, as `top_p`.
    """
    max_new_tokens: Count = 96
    """Longest response, in tokens; what is longer is cut. Set it to what your task's answers take:
    `truncated_frac` is the share that was cut.
    """
    responses_per_prompt: Count = 4
    """Responses sampled for each prompt. Set it higher with ppo.advantages=grpo or rloo, which
    compare a prompt's responses with each other.
    """
    seeded: bool | None = None
    """Give each request a seed of its own, which follows from `seed`, the step and its place, so
    that a run writes the same responses again; null: where nothing else keeps a run from repeating
    itself (engine.num_drafts is a number, the companion waits or is off). vLLM draws for seeded
    requests one by one, which takes time in each step. Set it to false for speed, to true to
    compare runs whose drafts or heads follow the clock.
    """
