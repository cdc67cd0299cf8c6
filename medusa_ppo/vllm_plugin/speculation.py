"""How to tell an engine where our heads are, and how a process of vLLM reads that. Importing this
does not import vLLM.
"""

from __future__ import annotations

import os
from typing import Any

from heads.errors import ConfigError, LossyError
from medusa_ppo.vllm_plugin.vllm_versions import has_medusa, vllm_version
from medusa_ppo.vllm_plugin.worker_calls import DRAFTING, HEADS, Drafting

CUSTOM_CLASS = "medusa_ppo.vllm_plugin.drafter.CustomClass"
"""The class that vLLM imports if it has no Medusa."""
FEED = "MEDUSA_PPO_FEED"
"""Environment variable with the feed from which an engine's own loop loads newer heads."""
QUANTISE_BEFORE = "Serve a checkpoint that is quantised already, or leave the heads out."
LOSSLESS = ("standard", "block")
"""Acceptance rules of vLLM that do not change the distribution of samples."""


def speculation(
    folder: str, drafts: int, drafting: Drafting, *, block: bool = False
) -> dict[str, Any]:
    """Engine arguments that make the installed version of vLLM draft with the heads of a folder.

    Args:
        drafts: maximum drafts in a step.
        drafting: how to draft at first. `sampled` and `draft_vocab` belong here even if a call sets
            everything later: vLLM then profiles the memory of the drafts' q, and no more.
        block: vLLM's own kernels verify drafts as a block (`drafting.verify`). Only V2 has this; on
            V1 our verification does it anyway, and no argument is set.
    """
    own: dict[str, Any] = {DRAFTING: dict(drafting)}
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
    """The folder of the heads that an engine was started with; empty if it has none of ours."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "medusa":
        return str(speculative.draft_model_config.model)
    ours = (
        speculative is not None
        and speculative.method == "custom_class"
        and speculative.model == CUSTOM_CLASS
    )
    return str((vllm_config.additional_config or {}).get(HEADS, "")) if ours else ""


def is_asynchronous(vllm_config: Any) -> bool:
    """Whether an engine schedules its next step before the last one has ended."""
    return bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))


def why_sequences_wait(scheduler_config: Any, drafts: int) -> str:
    """A warning if not all sequences with this many drafts each fit into a step; empty if they do.
    vLLM gives running sequences their tokens in turn, and those for which none are left stand still
    until others have ended.
    """
    sequences = int(scheduler_config.max_num_seqs)
    # By releases and settings it is None, which means the same as the other.
    asked = getattr(scheduler_config, "max_num_scheduled_tokens", None)
    most = int(asked or scheduler_config.max_num_batched_tokens)
    wanted = sequences * (1 + drafts)
    if wanted <= most:
        return ""
    return (
        f"{sequences} sequences with {drafts} drafts each need {wanted} tokens in a step, and vLLM"
        f" schedules {most} at most: while so many are drafted, {most // (1 + drafts)} sequences"
        f" run and the others wait. Start vLLM with max_num_batched_tokens={wanted}, or with fewer"
        " sequences."
    )


def feeds_itself() -> bool:
    """Whether an engine of this process looks for newer heads by itself."""
    return bool(os.environ.get(FEED))


def has_separate_ranks(vllm_config: Any) -> bool:
    """Whether each rank of a model is an engine with a scheduler of its own, all of which a loop
    calls alike (`torchrun`, TRL's colocated mode): a call of one engine reaches one rank only.
    """
    parallel = vllm_config.parallel_config
    launcher = getattr(parallel, "distributed_executor_backend", None)
    return launcher == "external_launcher" and parallel.world_size > 1


def refuse_lossy_rule(rule: str) -> None:
    """Raise LossyError for a rule by which drafts would change the samples, whoever started the
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
    """Raise ConfigError for ways of serving a model that our heads were never tested with, whoever
    started the engine: `medusa_ppo.engines.launch` refuses them too, but other loops start vLLM
    themselves.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1:
        raise not_with_heads(
            "pipeline_parallel_size", stages, 1, "Use tensor parallelism, or leave the heads out."
        )
    if getattr(parallel, "enable_expert_parallel", False):
        raise not_with_heads(
            "enable_expert_parallel", True, False, "Leave it out, or leave the heads out."
        )
    # Each rank would know p of its own requests only, and learn other trust in a memory.
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        raise not_with_heads(
            "enable_batch_sharded_sampling", True, False, "Leave it out, or leave the heads out."
        )
    # vLLM would cut runs of drafts by a confidence that our heads don't report.
    speculative = getattr(vllm_config, "speculative_config", None)
    if getattr(speculative, "enable_adaptive_verification", False):
        raise not_with_heads(
            "enable_adaptive_verification", True, False, "Leave it out, or leave the heads out."
        )
    model = getattr(vllm_config, "model_config", None)
    method = getattr(model, "quantization", None)
    # A checkpoint that is quantised never takes a sync; one that vLLM quantises as it loads would
    # be quantised again by each.
    if method and not _is_quantised(model):
        raise not_with_heads(
            "quantization", method, "none, or the checkpoint's own", QUANTISE_BEFORE
        )
    lora = getattr(vllm_config, "lora_config", None)
    if lora is not None:
        raise not_with_heads(
            "enable_lora", True, False, "Merge the adapter into the actor, or leave the heads out."
        )


def _is_quantised(model_config: Any) -> bool:
    """Whether the checkpoint itself is quantised, by the names that vLLM looks for."""
    return any(
        getattr(getattr(model_config, config, None), name, None)
        for config in ("model_arch_config", "hf_config", "hf_text_config")
        for name in ("quantization_config", "compression_config")
    )


def not_with_heads(name: str, given: object, expected: object, do: str) -> ConfigError:
    return ConfigError(
        f"vLLM's {name} can't be combined with draft heads.", given=given, expected=expected, do=do
    )


def rule_of(speculative_config: Any) -> str:
    """The acceptance rule of vLLM's speculative configuration. Releases without a choice have only
    the first of `LOSSLESS`.
    """
    return str(getattr(speculative_config, "rejection_sample_method", LOSSLESS[0]))
