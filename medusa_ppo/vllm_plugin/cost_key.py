"""Everything that decides how long an engine's steps take: measured times are valid for as long as
all of it is the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from medusa_ppo.runtime.hardware import processor_name
from medusa_ppo.vllm_plugin.speculation import is_asynchronous
from medusa_ppo.vllm_plugin.vllm_versions import vllm_version

SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)
"""Keys of a model's config.json: new weights do not change the time of a step."""


def cost_key(proposer: Any) -> dict[str, Any]:
    """The key of an engine in its present setting, as JSON."""
    config = proposer.vllm_config
    model = config.model_config
    text = model.hf_text_config
    return {
        "machine": _machine(proposer.device),
        "vllm": vllm_version(),
        "torch": str(torch.__version__),
        "runner": proposer.runner,
        "asynchronous": is_asynchronous(config),
        "model": {
            name: value for name in SIZES if (value := getattr(text, name, None)) is not None
        },
        "quantization": str(getattr(model, "quantization", None)),
        "dtype": str(proposer.dtype),
        "heads": proposer.heads.config.to_dict(),
        "max_drafts": proposer.num_speculative_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "eager": bool(model.enforce_eager),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "sampled": proposer.sampled,
        "draft_vocab": proposer.draft_vocabulary.size,
        # Steps with either are not recorded on a GPU, and a search takes time on a CPU, too.
        "memory": proposer.memory is not None,
        "stops_early": proposer.stopping is not None,
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0))
    return f"{processor_name()}, {cores} cores, {torch.get_num_threads()} threads"
