"""The section `model`: the actor that is trained, and what its critic starts from."""

from __future__ import annotations

from typing import Literal

from medusa_ppo.config.section import Section, Text

EMBEDDED_ACTORS = ("demo", "demo-grown")
"""Names of actors that are trained on first use."""
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Vision-language models (`model_type` in config.json) that can be an actor and see images."""


class ModelConfig(Section):
    """The actor and what the critic starts from."""

    path: Text = "demo"
    """Folder or hub name of a transformers causal LM; `demo`: the embedded actor, `demo-grown`: the
    same, as slow as 20M parameters.
    """
    critic_path: Text | None = None
    """Folder or hub name that the critic starts from, or `demo`; null: the actor's own weights."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of products in the PPO update; null: bfloat16 on a GPU that has it, else float32.
    Weights, sums and optimizer stay float32 (a Megatron actor multiplies with bfloat16 copies of
    its weights).
    """
