"""The section `model`: the actor to train, and what its critic starts from."""

from __future__ import annotations

from typing import Literal

from medusa_ppo.config.section import Section, Text

EMBEDDED_ACTORS = ("demo", "demo-grown", "demo-grown-10m")
"""Names of embedded actors, which are trained on first use."""
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Vision-language models (`model_type` in config.json) that can be an actor and see images."""
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata")
"""The tracker and the index of a distributed checkpoint of Megatron; its folder has one of them."""


class ModelConfig(Section):
    """The actor and what the critic starts from."""

    path: Text = "demo"
    """The actor: a folder or hub name of a transformers causal LM. `demo` is a small embedded
    actor, `demo-grown` the same one made as slow as one of 20M parameters, `demo-grown-10m` as one
    of 10M. Set it to the model that you want to train; these are for trying things out.
    """
    critic_path: Text | None = None
    """The model that the critic starts from: a folder or hub name, or `demo`; null: the actor's own
    weights. Set it to save memory and time with a smaller critic; it reads the actor's token ids,
    so it must have the same tokenizer.
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the matrix products in the PPO update; null: bfloat16 on a GPU that has it,
    else float32. Weights, sums and optimizer stay float32 (a Megatron actor multiplies with
    bfloat16 copies of its weights). Set it to bfloat16 on a CPU with bfloat16 units, or to float32
    to find out whether rounding is the problem.
    """
