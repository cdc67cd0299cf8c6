"""The section `sampling`: how responses are sampled."""

from __future__ import annotations

from pydantic import Field

from medusa_ppo.config.section import Count, Section


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; 1: off."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens; null: from all."""
    max_new_tokens: Count = 96
    """Longest response, in tokens."""
    responses_per_prompt: Count = 4
    """Responses sampled for each prompt."""
