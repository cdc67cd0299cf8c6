"""Every private name of vLLM that we rely on, as data: its purpose, place and releases, and how it
was checked. Importing this does not import vLLM.

`python -m medusa_ppo.vllm_plugin.hook_table` prints as JSON how the installed vLLM compares;
`medusa-ppo doctor` shows it.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from medusa_ppo.vllm_plugin.vllm_versions import (
    FIRST,
    FIRST_AHEAD,
    FIRST_GRAPHS,
    FIRST_TRANSFER,
    FIRST_V2,
    LAST,
    LAST_MEDUSA,
    is_cpu_build,
    release,
    text_of,
    vllm_version,
)

RUN = "run on CPU"
CALLED = "called on CPU, where it frees nothing"
INTERPRETED = "run on Triton's interpreter"
PROFILED = "its name found in 0.32; the CPU build profiles no memory"
FED = "run on CPU with 0.32 alone"
READ = "its name found in 0.32; no engine test copies drafts yet"
CPU = "V1 on CPU"
V2 = "V2"
CORE = "core loop"


@dataclass(frozen=True)
class Hook:
    """One name.

    Attributes:
        need: what we use it for.
        name: qualified name in `module`.
        parameters: parameters that it must have.
        attributes: attributes that its code must set or read. They exist on an object and not on
            its class, so they can't be looked up without an engine.
        first: oldest release that has it in the form we use.
        last: newest release that has it.
        runner: the model runner of vLLM that it belongs to; hooks of `CPU` concern no other build,
            those of `V2` need Triton, those of `CORE` concern engines that feed themselves.
        checked: how it was checked in the releases that count as tested.
    """

    need: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()
    first: tuple[int, int] = FIRST
    last: tuple[int, int] = LAST
    runner: str = "V1"
    checked: str = RUN
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HookCheck:
    """A hook in the installed vLLM; `fault` is empty if it matches the code that
    was checked.
    """

    need: str
    where: str
    runner: str
    releases: str
    checked: str
    fault: str


_RUNNER, _SAMPLER, _MEDUSA = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.spec_decode.medusa",
)
_V2_RUNNER, _V2_SPECULATOR = (
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.spec_decode.speculator",
)
_V2_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_CORE = "vllm.v1.engine.core"
_CUSTOM = "vllm.v1.spec_decode.custom_class_proposer"
_TRANSFER, _RELOAD = (
    "vllm.distributed.weight_transfer.base",
    "vllm.model_executor.model_loader.reload",
)
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"

_REJECTION = (
    *("draft_token_ids", "num_draft_tokens", "max_spec_len", "draft_probs"),
    *("target_logits", "bonus_token_ids", "sampling_metadata", "synthetic_mode"),
)
_V2_PROPOSE = (
    "input_batch",
    "last_hidden_states",
    "num_rejected",
    "last_sampled",
    "temperature",
    "seeds",
    "dummy_run",
)


def _v2(need: str, module: str, name: str, *parameters: str) -> Hook:
    return Hook(need, module, name, parameters, first=FIRST_V2, runner=V2, checked=INTERPRETED)


HOOKS: tuple[Hook, ...] = (
    # Drafting.
    Hook(
        "base class of our proposer",
        _MEDUSA,
        "MedusaProposer.__init__",
        ("vllm_config", "device"),
        last=LAST_MEDUSA,
    ),
    Hook(
        "loading our heads",
        _MEDUSA,
        "MedusaProposer.load_model",
        ("target_model",),
        last=LAST_MEDUSA,
    ),
    Hook(
        "loading our heads without vLLM's Medusa",
        _CUSTOM,
        "create_custom_proposer",
        ("vllm_config",),
        first=(0, 33),
    ),
    Hook(
        "replacing vLLM's proposer",
        _RUNNER,
        "GPUModelRunner.__init__",
        ("vllm_config", "device"),
    ),
    Hook(
        "q of the drafts to verify",
        _RUNNER,
        "GPUModelRunner._get_spec_decode_draft_probs",
        ("spec_decode_metadata",),
    ),
    Hook(
        "drafts up to the end of the context",
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        ("common_attn_metadata",),
    ),
    Hook(
        "requesting drafts",
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids", "sampling_metadata", "sample_hidden_states"),
    ),
    Hook(
        "a step without drafts runs as without speculation",
        _RUNNER,
        "GPUModelRunner.execute_model",
        ("scheduler_output",),
    ),
    Hook(
        "drafts after such a step",
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        ("grammar_output",),
    ),
    Hook(
        "drafts after such a step",
        _RUNNER,
        "GPUModelRunner._copy_draft_token_ids_to_cpu",
        ("scheduler_output",),
    ),
    Hook(
        "a step without drafts is plain",
        _RUNNER,
        "GPUModelRunner._sample",
        ("logits", "spec_decode_metadata"),
    ),
    Hook(
        "a step without drafts counts none",
        _RUNNER,
        "GPUModelRunner._calc_spec_decode_metadata",
        ("num_draft_tokens", "cu_num_scheduled_tokens"),
    ),
    Hook(
        "seeded requests without drafts, and drafts in the memory profile",
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata.make_dummy",
        ("draft_token_ids", "device"),
    ),
    Hook(
        "drafts in the memory profile",
        _RUNNER,
        "GPUModelRunner._dummy_sampler_run",
        ("hidden_states",),
        checked=PROFILED,
    ),
    Hook("verifying drafts where their q is stored", _SAMPLER, "rejection_sample", _REJECTION),
    Hook("top-k and top-p of drafts", _SAMPLER, "apply_top_k_top_p", ("logits", "k", "p")),
    Hook(
        "tokens that drafts are copied from",
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch.__init__",
        checked=READ,
        attributes=("token_ids_cpu", "num_tokens_no_spec"),
    ),
    Hook("ranks agree on a number", "vllm.distributed.parallel_state", "get_tp_group"),
    # Weights.
    Hook(
        "the actor from a file",
        _RUNNER,
        "GPUModelRunner.reload_weights",
        ("weights_iterator", "is_checkpoint_format"),
    ),
    Hook(
        "noticing weights that others load",
        "vllm.v1.worker.gpu_worker",
        "Worker.reload_weights",
        first=(0, 29),
    ),
    Hook(
        "noticing weights that others send",
        "vllm.v1.worker.gpu_worker",
        "Worker.finish_weight_update",
        first=(0, 29),
    ),
    Hook(
        "noticing heads lost in a sleep",
        "vllm.v1.worker.gpu_worker",
        "Worker.wake_up",
        ("tags",),
        checked=CALLED,
    ),
    Hook(
        "the actor from a broadcast",
        _TRANSFER,
        "WeightTransferEngine.__init__",
        ("model", "device"),
        first=FIRST_TRANSFER,
    ),
    Hook(
        "one session of a broadcast",
        _TRANSFER,
        "WeightTransferEngine.finish_weight_update",
        first=FIRST_TRANSFER,
    ),
    Hook("reloading layers one by one", _RELOAD, "initialize_layerwise_reload", ("model",)),
    Hook("reloading the rest of the model", _RELOAD, "finalize_layerwise_reload"),
    # Patches of the CPU build.
    Hook(
        "verification in one pass",
        _SAMPLER,
        "RejectionSampler.forward",
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
        runner=CPU,
    ),
    Hook(
        "the packed copy of a tied lm_head",
        _EMBEDDING,
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        ("layer",),
        runner=CPU,
    ),
    Hook(
        "temperatures of drafts",
        _SAMPLER,
        "expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        runner=CPU,
    ),
    Hook(
        "top-k without drafts",
        _SAMPLER,
        "apply_sampling_constraints",
        ("logits", "cu_num_draft_tokens", "sampling_metadata"),
        runner=CPU,
    ),
    Hook(
        "seeds in chunked prefill",
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        ("scheduler_output", "sampler_output"),
        runner=CPU,
    ),
    Hook(
        "log-probs of what was sampled",
        "vllm.v1.sample.sampler",
        "Sampler.compute_logprobs",
        ("logits",),
        runner=CPU,
    ),
    Hook(
        "log-probs by token",
        "vllm.v1.sample.sampler",
        "Sampler.gather_logprobs",
        ("logprobs", "num_logprobs", "token_ids"),
        runner=CPU,
    ),
    Hook(
        "log-probs as vLLM passes them",
        "vllm.v1.outputs",
        "LogprobsTensors",
        ("logprob_token_ids", "logprobs", "selected_token_ranks"),
        runner=CPU,
    ),
    Hook(
        "no small AMX products",
        "vllm.model_executor.layers.utils",
        "check_cpu_sgl_kernel",
        ("n", "k", "dtype"),
        runner=CPU,
    ),
    Hook(
        "products of heads, packed",
        "vllm._custom_ops",
        "create_onednn_mm",
        ("weight", "primitive_cache_size"),
        runner=CPU,
    ),
    Hook(
        "and computed", "vllm._custom_ops", "onednn_mm", ("dnnl_handler", "x", "bias"), runner=CPU
    ),
    Hook(
        "products of heads, packed in 8 bits",
        "vllm._custom_ops",
        "create_onednn_scaled_mm",
        ("weight", "weight_scales", "output_type"),
        runner=CPU,
    ),
    Hook(
        "their rows",
        "vllm._custom_ops",
        "onednn_scaled_int8_quant",
        ("input", "scale", "azp"),
        runner=CPU,
    ),
    Hook(
        "products of heads, computed in 8 bits",
        "vllm._custom_ops",
        "onednn_scaled_mm",
        ("dnnl_handler", "x", "output", "input_scale"),
        runner=CPU,
    ),
    # Patches of older releases.
    Hook(
        "fewer drafts than heads",
        "vllm.v1.worker.cpu_model_runner",
        "CPUModelRunner._copy_draft_token_ids_to_cpu",
        ("scheduler_output",),
        last=(0, 24),
        runner=CPU,
    ),
    # The V2 model runner.
    _v2(
        "replacing vLLM's speculator",
        _V2_RUNNER,
        "init_speculator",
        "vllm_config",
        "device",
    ),
    _v2(
        "base class of our speculator",
        _V2_SPECULATOR,
        "DraftModelSpeculator.__init__",
        "vllm_config",
        "device",
    ),
    _v2(
        "loading the speculator's heads",
        _V2_SPECULATOR,
        "DraftModelSpeculator.load_draft_model",
        "target_model",
        "target_attn_layer_names",
    ),
    _v2("requesting drafts, V2", _V2_SPECULATOR, "DraftModelSpeculator.propose", *_V2_PROPOSE),
    _v2("V2 with Medusa", "vllm.config", "VllmConfig._get_v2_model_runner_unsupported_features"),
    _v2(
        "new and returning requests",
        _V2_RUNNER,
        "GPUModelRunner.add_requests",
        "scheduler_output",
    ),
    Hook(
        "tokens of these requests",
        "vllm.v1.core.sched.output",
        "NewRequestData.__init__",
        ("prefill_token_ids",),
        first=FIRST_V2,
        runner=V2,
        checked=READ,
    ),
    _v2(
        "how many drafts were verified",
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch.__init__",
        *("cu_num_logits_np", "num_tokens"),
    ),
    _v2("reporting as many drafts as were made", _V2_RUNNER, "GPUModelRunner.take_draft_token_ids"),
    _v2(
        "learning nothing from V2's warm-up",
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
    ),
    _v2(
        "top-k and top-p of drafts, V2",
        "vllm.v1.worker.gpu.sample.states",
        "SamplingStates.get_top_k_top_p",
        "idx_mapping_np",
    ),
    _v2(
        "temperatures and seeds of requests, V2",
        "vllm.v1.worker.gpu.sample.states",
        "SamplingStates.add_request",
        "req_idx",
        "sampling_params",
    ),
    _v2(
        "q that V2 verifies against",
        _V2_SAMPLER,
        "rejection_sample",
        *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos"),
        *("idx_mapping", "expanded_idx_mapping", "expanded_local_pos", "temperature", "seed"),
    ),
    _v2(
        "requests that V2 verifies at a time",
        _V2_SAMPLER,
        "RejectionSampler._verify_in_chunks",
        *("draft_logits", "max_chunk_logits"),
    ),
    Hook(
        "a captured step for each number of drafts",
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager._init_candidates",
        first=FIRST_GRAPHS,
        last=FIRST_GRAPHS,
        runner=V2,
        checked="its candidates asked for on CPU",
    ),
    *(
        Hook(need, module, name, parameters, FIRST_AHEAD, FIRST_AHEAD, V2, INTERPRETED)
        for need, module, name, parameters in (
            ("scheduling ahead", "vllm.config", "VllmConfig.__post_init__", ()),
            (
                "scheduling as many drafts as are wanted",
                "vllm.v1.core.sched.async_scheduler",
                "AsyncScheduler._update_after_schedule",
                ("scheduler_output",),
            ),
            (
                "how many drafts are wanted",
                "vllm.v1.core.sched.scheduler",
                "Scheduler.update_from_output",
                ("scheduler_output", "model_runner_output"),
            ),
            ("telling it", _V2_RUNNER, "GPUModelRunner.sample_tokens", ("grammar_output",)),
        )
    ),
    # Engines that feed themselves, on either runner.
    Hook(
        "loading newer heads",
        _CORE,
        "EngineCore.post_step",
        ("model_executed",),
        runner=CORE,
        checked=FED,
    ),
    Hook(
        "loading heads into all ranks at once",
        _CORE,
        "EngineCore.collective_rpc",
        ("method", "args"),
        runner=CORE,
        checked=FED,
    ),
    Hook(
        "feeding lost heads again", _CORE, "EngineCore.wake_up", ("tags",), runner=CORE, checked=FED
    ),
    Hook(
        "loading nothing while asleep",
        _CORE,
        "EngineCore.is_sleeping",
        runner=CORE,
        checked=FED,
    ),
    Hook(
        "ending the feed's thread with the engine",
        _CORE,
        "EngineCore.shutdown",
        runner=CORE,
        checked=FED,
    ),
    Hook(
        "loading heads in workers without our extension",
        "vllm.v1.worker.gpu_worker",
        "Worker.__init__",
        ("vllm_config",),
        runner=CORE,
        checked=FED,
    ),
    # Kinds of heads.
    Hook(
        "kinds of heads that vLLM lacks",
        "vllm.config.speculative",
        "SpeculativeConfig.hf_config_override",
        ("hf_config",),
        last=(0, 24),
    ),
)


def compare(
    originals: Mapping[str, Callable[..., Any]] | None = None, hooks: tuple[Hook, ...] = HOOKS
) -> Iterator[HookCheck]:
    """Compare each hook with the installed release.

    Args:
        originals: holder and attribute (`GPUModelRunner._sample`) -> the original that ours
            replaced.
    """
    installed = release(vllm_version())
    for hook in hooks:
        # An unknown release is compared with what the newest known one has.
        if hook.first <= min(installed, LAST) <= hook.last and _concerns(hook):
            span = f"{text_of(hook.first)} to {text_of(hook.last)}"
            yield HookCheck(
                hook.need,
                f"{hook.module}:{hook.name}",
                hook.runner,
                span,
                hook.checked,
                _fault(hook, originals or {}),
            )


def _concerns(hook: Hook) -> bool:
    """Whether the hook concerns this machine's build of vLLM."""
    return {CPU: is_cpu_build(), V2: importlib.util.find_spec("triton") is not None}.get(
        hook.runner, True
    )


def _fault(hook: Hook, originals: Mapping[str, Callable[..., Any]]) -> str:
    try:
        target: Any = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            holder = target
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        return f"missing ({error}); vLLM {text_of(hook.last)} had it"
    target = originals.get(f"{holder.__name__}.{part}", target)
    target = inspect.unwrap(target)
    known = inspect.signature(target).parameters if hook.parameters else {}
    written = target.__code__.co_names if hook.attributes else ()
    faults = [f"no parameter {name}" for name in hook.parameters if name not in known]
    faults += [f"no attribute {name}" for name in hook.attributes if name not in written]
    return f"has {', '.join(faults)}; vLLM {text_of(hook.last)} had" if faults else ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps([asdict(finding) for finding in compare()]) + "\n")
