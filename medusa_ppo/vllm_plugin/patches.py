"""The patches of vLLM: faults of its CPU build, one function for each replaced name. All were
checked by running 0.31 and 0.32.

Each function takes vLLM's original and returns the replacement. `medusa-ppo doctor` runs a probe
which shows that the samples are right.

Shape letters: B requests, K drafts of a step, T drafts of all requests one after the other, N rows
of logits (T + B), V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
import vllm.v1.sample.rejection_sampler as rejection_sampler
import vllm.v1.worker.gpu_model_runner as model_runner
from torch import nn
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

from medusa_ppo.drafting import verify
from medusa_ppo.vllm_plugin.speculation import refuse_lossy_rule

Replaced = Callable[..., Any]
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
OUR_MODEL_TYPE = "medusa_ppo"
"""model_type in config.json for heads that stock vLLM has no module for."""
PROPOSED = verify.Proposed | torch.Tensor | None
"""The type of vLLM's draft_probs; our own proposer adds to it."""


@dataclass(frozen=True)
class Patch:
    """One replaced name of vLLM. `name` is for reports; empty if part of the previous patch."""

    name: str
    holder: Any
    attribute: str
    replace: Callable[[Replaced], Replaced]


# ---- drafts and their verification


def values_of_rows(_: Replaced) -> Replaced:
    """Failure: the C++ version writes to a discarded copy, so temperature, top-k and top-p of each
    draft are uninitialised memory.

    Trigger: any drafting at temperature above 0. Versions 0.23 to 0.33.
    github.com/vllm-project/vllm/issues/55005
    """
    return verify.expand_to_rows


def no_constraints_without_rows(original: Replaced) -> Replaced:
    """Failure: top-k takes the maximum of an empty tensor, and the engine dies.

    Trigger: top-k without top-p in a step without drafts. Versions 0.31 and 0.32; not reported
    upstream.
    """

    @functools.wraps(original)
    def apply_sampling_constraints(
        logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> torch.Tensor:
        return (
            logits
            if logits.shape[0] == 0
            else original(logits, cu_num_draft_tokens, sampling_metadata)
        )

    return apply_sampling_constraints


def verified_in_torch(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    draft_probs: PROPOSED,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """vLLM's `rejection_sample`, on any device."""
    if synthetic_mode:
        refuse_lossy_rule("synthetic")
    bonus_B = bonus_token_ids.view(-1).to(torch.int64)
    if max_spec_len == 0:
        return bonus_B.unsqueeze(1).to(torch.int32)
    drafts = verify.DraftRows.build(draft_token_ids, num_draft_tokens, bonus_rows=False)
    # A request without drafts has no row of its own here. Any row will do, because its run ends at
    # the bonus token.
    rows_BK = drafts.rows_BK.clamp(0, target_logits.shape[0] - 1)
    drafts = verify.DraftRows(drafts.draft_ids_BK, drafts.counts_B, drafts.starts_B, rows_BK)
    run_B, last_B = verify.verify_rows(
        target_logits, None, drafts, num_draft_tokens, draft_probs, _rule(sampling_metadata)
    )
    return verify.assemble(drafts, run_B, torch.where(run_B >= drafts.counts_B, bonus_B, last_B))


def verification_in_one_pass(original: Replaced) -> Replaced:
    """Fixes no failure, but is faster: the same distribution with one softmax for verification and
    log-probs, and random numbers for B rows only.
    """

    @functools.wraps(original)
    def forward(
        self: Any,
        metadata: Any,
        draft_probs: PROPOSED,
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> Any:
        if self.synthetic_mode or not _is_plain(self, sampling_metadata):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        return _verify_in_one_pass(self, metadata, draft_probs, logits, sampling_metadata)

    return forward


def _is_plain(sampler: Any, sampling_metadata: Any) -> bool:
    """Whether only temperature, top-k and top-p shape the distribution, and log-probs (if any) are
    those of the distribution that is sampled from.
    """
    holder = sampling_metadata.thinking_budget_state_holder
    processors = sampling_metadata.logitsprocs
    return (
        (
            sampling_metadata.max_num_logprobs is None
            or sampler.sampler.logprobs_mode == "processed_logprobs"
        )
        and sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and not sampling_metadata.logprob_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and not processors.argmax_invariant
        and all(
            isinstance(p, MinTokensLogitsProcessor) and not p.min_toks
            for p in processors.non_argmax_invariant
        )
    )


def _verify_in_one_pass(
    sampler: Any, metadata: Any, proposed: PROPOSED, logits: torch.Tensor, sampling_metadata: Any
) -> SamplerOutput:
    """RejectionSampler.forward for plain sampling: constraints and softmax are applied once, to the
    rows of drafts and bonus tokens alike.
    """
    counts = metadata.num_draft_tokens
    drafts = verify.DraftRows.build(metadata.draft_token_ids, counts)
    logits_NV = logits.float()
    if not sampling_metadata.all_greedy:
        logits_NV = _constrain(logits_NV, drafts.counts_B + 1, sampling_metadata)
    num_logprobs = sampling_metadata.max_num_logprobs
    # One softmax for verification and log-probs: the reported distribution is the sampled one.
    logprobs_NV = None if num_logprobs is None else logits_NV.log_softmax(-1, dtype=torch.float32)
    run_B, last_B = verify.verify_rows(
        logits_NV, logprobs_NV, drafts, counts, proposed, _rule(sampling_metadata)
    )
    ids_BW = verify.assemble(drafts, run_B, last_B)
    logprobs = (
        None
        if logprobs_NV is None
        else _gather_logprobs(sampler, logprobs_NV, ids_BW, drafts, num_logprobs)
    )
    return SamplerOutput(sampled_token_ids=ids_BW, logprobs_tensors=logprobs)


def _rule(sampling_metadata: Any) -> verify.Rule:
    sm = sampling_metadata
    greedy_B = None if sm.all_random or sm.all_greedy else sm.temperature == 0
    return verify.Rule(all_greedy=sm.all_greedy, greedy_B=greedy_B, generators=sm.generators)


def _constrain(
    logits_NV: torch.Tensor, rows_B: torch.Tensor, sampling_metadata: Any
) -> torch.Tensor:
    """Apply each request's temperature, top-k and top-p to its rows. The input is not changed."""

    def spread(values_B: torch.Tensor | None) -> Any:
        return (
            None
            if values_B is None
            else torch.repeat_interleave(values_B, rows_B, output_size=logits_NV.shape[0])
        )

    temperature_B = sampling_metadata.temperature
    if not sampling_metadata.all_random:
        temperature_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    scaled_NV = logits_NV / spread(temperature_B).unsqueeze(1)
    return rejection_sampler.apply_top_k_top_p(
        scaled_NV, spread(sampling_metadata.top_k), spread(sampling_metadata.top_p)
    )


def _gather_logprobs(
    sampler: Any,
    logprobs_NV: torch.Tensor,
    ids_BW: torch.Tensor,
    drafts: verify.DraftRows,
    num_logprobs: int,
) -> LogprobsTensors:
    """vLLM's log-prob tensors, one row per place in `ids_BW`. Rows of places without a token are
    meaningless and dropped later.
    """
    steps_W = torch.arange(ids_BW.shape[1], device=ids_BW.device)
    rows_BW = drafts.starts_B.unsqueeze(1) + torch.minimum(steps_W, drafts.counts_B.unsqueeze(1))
    rows = rows_BW.flatten()
    own_NV = logprobs_NV if rows.shape[0] == logprobs_NV.shape[0] else logprobs_NV[rows]
    ids_N = ids_BW.flatten().clamp_min(0)
    if (
        num_logprobs == 0
    ):  # Like vLLM's own; its compiled rank count takes longer to look up than to compute.
        sampled_N1 = own_NV.gather(1, ids_N.unsqueeze(1).to(torch.int64))
        return LogprobsTensors(ids_N.unsqueeze(1), sampled_N1, (own_NV >= sampled_N1).sum(-1))
    return sampler.sampler.gather_logprobs(own_NV, num_logprobs, ids_N.to(torch.int64))


# ---- seeds in chunked prefill


def _discarded(runner: Any) -> list[int]:
    """Requests of this step whose sampled token is discarded: their prompt isn't finished."""
    return runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()


def generators_without_offsets(original: Replaced) -> Replaced:
    """Failure: vLLM undoes the draw of an unfinished prompt by its generator's offset. A CPU
    generator has none, and the engine dies.

    Trigger: a request with a seed whose prompt is computed in pieces. Versions 0.31 and 0.32; not
    reported upstream.
    """

    @functools.wraps(original)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = (
            {i: generators.pop(i) for i in _discarded(self) if i in generators}
            if generators
            else {}
        )
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    return _bookkeeping_sync


def generators_kept(original: Replaced) -> Replaced:
    """The other half of `generators_without_offsets`: the draws of unfinished prompts are undone
    here.
    """

    @functools.wraps(original)
    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        generators = self.input_batch.generators
        kept = (
            {i: generators[i].get_state() for i in _discarded(self) if i in generators}
            if generators
            else {}
        )
        output = original(self, logits, spec_decode_metadata)
        for index, state in kept.items():
            generators[index].set_state(state)
        return output

    return _sample


# ---- packed weights


def no_small_amx_products(_: Replaced) -> Replaced:
    """Failure: the AMX kernel for weights under 1 MiB kills the worker (SIGILL) at random, even
    without drafts.

    Trigger: a bfloat16 model with such weights, on a CPU with AMX. Versions 0.23 to 0.33; not
    reported upstream.
    """
    return lambda n, k, dtype: False


def pack_tied_lm_head(model: nn.Module) -> bool:
    """Failure: lm_head multiplies with the previous weights. Only weights that are loaded are
    packed again, and a tied lm_head is not loaded.

    Trigger: new weights of a tied actor whose lm_head is a separate module, in the CPU build,
    however they arrive. Versions 0.24 to 0.33; not reported upstream. Nothing is replaced: the
    worker extension calls this after new weights.

    Returns:
        Whether there is a tied lm_head.
    """
    tables: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
    ]
    places = [(table, table.weight.data_ptr()) for table in tables]
    embeddings = {place for table, place in places if not isinstance(table, ParallelLMHead)}
    tied = [
        table
        for table, place in places
        if isinstance(table, ParallelLMHead) and place in embeddings
    ]
    for module in tied if current_platform.is_cpu() else []:
        module.quant_method.process_weights_after_loading(module)
    return bool(tied)


# ---- older releases


def drafts_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.propose_draft_token_ids` of the CPU build.

    Failure: `The size of tensor a (4) must match the size of tensor b (0)` in
    `CPUModelRunner._copy_draft_token_ids_to_cpu`, which copies as many columns as there are heads.
    Lists are not copied. Trigger: fewer drafts than heads. Versions: 0.24 (run). The CPU runner of
    0.26 has no such method any more. Upstream: fixed by removing the CPU's own copies of these
    methods.
    """

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, *args, **kwargs)
        return drafts.tolist() if torch.is_tensor(drafts) else drafts

    return propose_draft_token_ids


def kind_of_heads_known(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`SpeculativeConfig.hf_config_override`.

    Failure: transformers refuses `model_type: medusa_ppo`, and vLLM any draft folder whose
    model_type is not medusa. Trigger: heads of kind hydra with method=medusa. Versions: 0.24 (run).
    From 0.26 on, method=medusa sets the type itself (`draft_hf_overrides`). Upstream: the comment
    "Old-format Medusa checkpoints" in vllm/config/speculative.py of 0.26.
    """

    @functools.wraps(original)
    def hf_config_override(hf_config: Any) -> Any:
        # vLLM first calls this with a dummy, to learn which class will read the folder.
        prefix = "dummy_" if str(hf_config.model_type).startswith("dummy_") else ""
        if hf_config.model_type == prefix + OUR_MODEL_TYPE:
            hf_config.model_type = f"{prefix}medusa"
        return original(hf_config)

    return hf_config_override


def patches_of_older(release: tuple[int, int]) -> tuple[Patch, ...]:
    """The patches that an older release needs besides `CPU_PATCHES`."""
    runner = model_runner.GPUModelRunner
    found = []
    if current_platform.is_cpu() and "_copy_draft_token_ids_to_cpu" in vars(
        import_module(CPU_RUNNER).CPUModelRunner
    ):
        found.append(
            Patch("fewer drafts than heads", runner, "propose_draft_token_ids", drafts_as_lists)
        )
    if release < (0, 26):
        found.append(
            Patch(
                "kinds of heads that vLLM lacks",
                SpeculativeConfig,
                "hf_config_override",
                kind_of_heads_known,
            )
        )
    return tuple(found)


CPU_PATCHES = (
    Patch("temperatures of drafts", rejection_sampler, "expand_batch_to_tokens", values_of_rows),
    Patch(
        "top-k without drafts",
        rejection_sampler,
        "apply_sampling_constraints",
        no_constraints_without_rows,
    ),
    Patch(
        "verification in one pass",
        rejection_sampler.RejectionSampler,
        "forward",
        verification_in_one_pass,
    ),
    Patch(
        "seeds in chunked prefill",
        model_runner.GPUModelRunner,
        "_bookkeeping_sync",
        generators_without_offsets,
    ),
    Patch("", model_runner.GPUModelRunner, "_sample", generators_kept),
    Patch("small AMX products", layer_utils, "check_cpu_sgl_kernel", no_small_amx_products),
)
