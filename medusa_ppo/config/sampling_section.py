"""The section `sampling`: how responses are sampled."""

from __future__ import annotations

from pydantic import Field

from medusa_ppo.config.section import Count, Section


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts; the update's log-probs use this temperature too. Set it
    below 1 when responses are too random to be rewarded, above 1 when they are all alike.
    """
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: from all. Set it
    below 1 when rare tokens ruin responses.
    """
    top_k: Count | None = None
    """Sample from this many of the likeliest tokens; null: from all. Set it when rare tokens ruin
    responses, like `top_p`.
    """
    max_new_tokens: Count = 96
    """Longest response, in tokens; longer ones are cut. Set it to what your task's answers need:
    `truncated_frac` is the share that was cut.
    """
    responses_per_prompt: Count = 4
    """Responses sampled for each prompt. Set it higher with ppo.advantages=grpo or rloo, which
    compare a prompt's responses with each other.
    """
    seeded: bool | None = None
    """Give each request its own seed, derived from `seed`, the step and its place, so that a run
    reproduces its responses; null: only if the run is otherwise reproducible (engine.num_drafts is
    a number, and the companion waits or is off); those of evaluations always have one. vLLM samples
    seeded requests one by one, which takes time in each step. Set it to false for speed, to true to
    compare runs whose drafts or heads follow the clock.
    """
