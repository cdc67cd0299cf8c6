"""What drafts in vLLM's model runners: the class that our proposer extends, and where it is found.

vLLM imports `CustomClass` by its name (`speculation.CUSTOM_CLASS`) from 0.33 on.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin.vllm_versions import has_medusa, vllm_version


class CustomClass:
    """What vLLM makes where it has no Medusa of its own (from 0.33 on); our proposer extends it
    there, and takes its place.
    """

    def __init__(self, vllm_config: Any, device: torch.device | None = None) -> None:
        self.vllm_config = vllm_config
        self.spec_config = vllm_config.speculative_config
        self.device = device
        self.hidden_size = vllm_config.model_config.get_hidden_size()
        self.num_speculative_tokens = self.spec_config.num_speculative_tokens

    def propose(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedVersionError(
            "Nothing has taken the place of this class in vLLM's model runner.",
            given="a worker without the medusa-ppo plugin, or no heads that it wrote",
            expected="additional_config with medusa_ppo_heads, a folder of heads",
            do="Leave VLLM_PLUGINS unset, or add medusa_ppo to it; name the heads' folder.",
        )


Drafter: Any = (
    importlib.import_module("vllm.v1.spec_decode.medusa").MedusaProposer
    if has_medusa(vllm_version())
    else CustomClass
)
"""What our proposer extends: vLLM's Medusa asks whether it is one."""


def drafter_of(runner: Any) -> Any:
    """What drafts in either of vLLM's model runners; None where nothing does."""
    return getattr(getattr(runner, "speculator", runner), "drafter", None)
