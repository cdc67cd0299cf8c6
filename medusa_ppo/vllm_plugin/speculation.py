"""How an engine is told where our heads are, and how a process of vLLM reads it. Importing this
imports no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from heads.errors import ConfigError, LossyError
from medusa_ppo.vllm_plugin.vllm_versions import has_medusa, vllm_version
from medusa_ppo.vllm_plugin.worker_calls import COUNTS, HEADS, SAMPLED

CUSTOM_CLASS = "medusa_ppo.vllm_plugin.drafter.CustomClass"
"""What vLLM is told to import where it has no Medusa."""
FEED = "MEDUSA_PPO_FEED"
"""Environment variable of the feed that an engine's own loop takes newer heads from."""
LOSSLESS = ("standard", "block")
"""Rules by which vLLM may accept drafts without another distribution of what is sampled."""


def speculation(
    folder: str,
    drafts: int,
    *,
    sampled: bool,
    block: bool = False,
    counts: Sequence[int] = (),
) -> dict[str, Any]:
    """Arguments of vLLM's engine with which the installed version drafts with the heads of a
    folder.

    Args:
        drafts: most drafts of a step.
        sampled: drafts will be sampled, and the memory of their q is to be profiled.
        block: vLLM's own kernels verify drafts as a block (`drafting.verify`). V2 has it; on V1
            ours do, and nothing is said.
        counts: the numbers of drafts that steps will have, for graphs of each; none: `drafts`.
    """
    own: dict[str, Any] = {SAMPLED: sampled}
    if counts:
        own[COUNTS] = list(counts)
    speculative: dict[str, Any] = {"num_speculative_tokens": drafts}
    if block:
        speculative["rejection_sample_method"] = "block"
    if has_medusa(vllm_version()):
        speculative |= {"method": "medusa", "model": folder}
    else:
        speculative |= {"method": "custom_class", "model": CUSTOM_CLASS}
        own[HEADS] = folder
    return {"speculative_config": speculative, "additional_config": own}


def heads_folder(vllm_config: Any) -> str:
    """Where the heads are that an engine was started with; empty where it drafts otherwise."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "medusa":
        return str(speculative.draft_model_config.model)
    ours = (
        speculative is not None
        and speculative.method == "custom_class"
        and speculative.model == CUSTOM_CLASS
    )
    return str((vllm_config.additional_config or {}).get(HEADS, "")) if ours else ""


def drafts_of_steps(vllm_config: Any) -> list[int]:
    """The numbers of drafts that steps of an engine will have, the most first."""
    most = int(vllm_config.speculative_config.num_speculative_tokens)
    told = (vllm_config.additional_config or {}).get(COUNTS) or [most]
    return sorted({min(int(count), most) for count in told}, reverse=True)


def feeds_itself() -> bool:
    """An engine of this process is to look for newer heads by itself."""
    return bool(os.environ.get(FEED))


def refuse_lossy_rule(rule: str) -> None:
    """LossyError for a rule by which drafts would change what is sampled, whoever started the
    engine: PPO would learn from log-probs of another distribution. vLLM 0.33 has "fly", and all
    releases have "synthetic".
    """
    if rule not in LOSSLESS:
        raise LossyError(
            "This acceptance rule changes the distribution of the sampled tokens.",
            given=f"rejection_sample_method={rule}",
            expected=" or ".join(LOSSLESS),
            do="Leave rejection_sample_method out of vLLM's speculative configuration.",
        )


def refuse_what_heads_lack(vllm_config: Any) -> None:
    """ConfigError for ways to serve a model in which our heads were never run, whoever started the
    engine: `medusa_ppo.engines.launch` refuses them too, but other loops start vLLM themselves.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1:
        raise _not_with_heads(
            "pipeline_parallel_size", stages, 1, "Use tensor parallelism, or leave the heads out."
        )
    if getattr(parallel, "enable_expert_parallel", False):
        raise _not_with_heads(
            "enable_expert_parallel", True, False, "Leave it out, or leave the heads out."
        )
    lora = getattr(vllm_config, "lora_config", None)
    if lora is not None:
        raise _not_with_heads(
            "enable_lora", True, False, "Merge the adapter into the actor, or leave the heads out."
        )


def _not_with_heads(name: str, given: object, expected: object, do: str) -> ConfigError:
    return ConfigError(
        f"vLLM's {name} can't be combined with draft heads.", given=given, expected=expected, do=do
    )


def rule_of(speculative_config: Any) -> str:
    """The acceptance rule of vLLM's speculative configuration. Releases before it could be chosen
    have the first of `LOSSLESS` alone.
    """
    return str(getattr(speculative_config, "rejection_sample_method", LOSSLESS[0]))
