"""The class that drafts in vLLM's model runners: our proposer's base class, and where to find it.

vLLM imports `CustomClass` by its name (`speculation.CUSTOM_CLASS`) from 0.33 on.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin.vllm_versions import has_medusa, vllm_version


class CustomClass:
    """The class that vLLM constructs if it has no Medusa of its own (from 0.33 on); our proposer
    extends it there, and replaces it.
    """

    def __init__(self, vllm_config: Any, device: torch.device | None = None) -> None:
        self.vllm_config = vllm_config
        self.spec_config = vllm_config.speculative_config
        self.device = device
        self.hidden_size = vllm_config.model_config.get_hidden_size()
        self.num_speculative_tokens = self.spec_config.num_speculative_tokens

    def propose(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedVersionError(
            "This class has not been replaced in vLLM's model runner.",
            given="a worker without the medusa-ppo plugin, or no heads that it wrote",
            expected="additional_config with medusa_ppo_heads, a folder of heads",
            do="Leave VLLM_PLUGINS unset, or add medusa_ppo to it; name the heads' folder.",
        )


Drafter: Any = (
    importlib.import_module("vllm.v1.spec_decode.medusa").MedusaProposer
    if has_medusa(vllm_version())
    else CustomClass
)
"""Base class of our proposer; vLLM checks with isinstance for its Medusa."""


def drafter_of(runner: Any) -> Any:
    """The drafter in either of vLLM's model runners; None if there is none."""
    return getattr(getattr(runner, "speculator", runner), "drafter", None)
