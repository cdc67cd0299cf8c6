"""Everything that touches a private name of vLLM; checked with vLLM 0.31.x and 0.32.x (V1 model runner).

`CONTRACT` lists each name with the parameters that we rely on, and `check_contract` compares it with what is installed. The
mends for the CPU (vllm-project/vllm#55005 and what comes with it) and the wiring of our proposer stand here and nowhere else; for that
the file may be long.

Shape letters: B requests, K drafts of a step, T drafts of all requests one after the other, N rows of logits (T + B), V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layer_utils
import vllm.v1.sample.rejection_sampler as rejection_sampler
import vllm.v1.worker.gpu_model_runner as model_runner
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm import ModelRegistry
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
from vllm.v1.spec_decode.medusa import MedusaProposer as StockMedusaProposer

from heads.errors import LossyError, UnsupportedVersionError
from medusa_ppo.drafting import verify
from medusa_ppo.drafting.draws import RequestSampling
from medusa_ppo.drafting.packed import LINEAR, plain_linear
from medusa_ppo.vllm_plugin.rpc import TRANSFER
from medusa_ppo.vllm_plugin.vllm_versions import can_transfer, require_vllm

logger = logging.getLogger(__name__)

PRIMITIVES = 32
"""Sizes of batches for which oneDNN keeps a compiled product, as vLLM's own layers do."""

__all__ = [
    "CONTRACT",
    "INSTALLED",
    "StockMedusaProposer",
    "agreed",
    "agreed_by_all",
    "check_contract",
    "embedding_module",
    "install",
    "lm_head_logits",
    "packed_linear",
    "request_sampling",
    "uninstall",
]

# Module, qualified name, parameters that must be among its parameters.
CONTRACT: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.v1.spec_decode.medusa", "MedusaProposer.__init__", ("vllm_config", "device")),
    (
        "vllm.v1.spec_decode.medusa",
        "MedusaProposer.propose",
        ("num_speculative_tokens", "target_hidden_states", "sampling_metadata", "slot_mappings"),
    ),
    ("vllm.v1.spec_decode.medusa", "MedusaProposer.load_model", ("target_model",)),
    ("vllm.v1.spec_decode.medusa", "MedusaProposer.dummy_run", ("num_tokens",)),
    ("vllm.v1.worker.gpu_model_runner", "MedusaProposer", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_spec_decode_draft_probs", ("spec_decode_metadata",)),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids", "sampling_metadata"),
    ),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", ("logits", "spec_decode_metadata")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync", ("scheduler_output", "sampler_output")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights", ("weights_iterator", "is_checkpoint_format")),
    ("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",)),
    ("vllm.v1.sample.rejection_sampler", "RejectionSampler.forward", ("metadata", "draft_probs", "logits", "sampling_metadata")),
    (
        "vllm.v1.sample.rejection_sampler",
        "rejection_sample",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
            "synthetic_mode",
        ),
    ),
    ("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")),
    ("vllm.v1.sample.rejection_sampler", "apply_sampling_constraints", ("logits", "cu_num_draft_tokens", "sampling_metadata")),
    ("vllm.v1.sample.rejection_sampler", "apply_top_k_top_p", ("logits", "k", "p")),
    ("vllm.v1.sample.sampler", "Sampler.compute_logprobs", ("logits",)),
    ("vllm.v1.sample.sampler", "Sampler.gather_logprobs", ("logprobs", "num_logprobs", "token_ids")),
    ("vllm.v1.outputs", "LogprobsTensors", ("logprob_token_ids", "logprobs", "selected_token_ranks")),
    ("vllm.model_executor.layers.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    ("vllm.distributed.parallel_state", "get_tp_group", ()),
    ("vllm._custom_ops", "create_onednn_mm", ("weight", "primitive_cache_size")),
    ("vllm._custom_ops", "onednn_mm", ("dnnl_handler", "x", "bias")),
)


@dataclass
class Installed:
    """What `install` did in this process; `mends` are names for reports, `proposer` our proposer class."""

    mends: list[str] = field(default_factory=list)
    originals: dict[str, Callable[..., Any]] = field(default_factory=dict)
    proposer: type | None = None


INSTALLED = Installed()


def check_contract(contract: tuple[tuple[str, str, tuple[str, ...]], ...] = CONTRACT) -> list[str]:
    """What is missing or has another signature in the installed vLLM; empty when all is as it was checked."""
    faults = []
    for module_name, qualified, parameters in contract:
        try:
            target: Any = importlib.import_module(module_name)
            for part in qualified.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            faults.append(f"{module_name}:{qualified} is missing ({error})")
            continue
        target = INSTALLED.originals.get(f"{module_name}.{qualified}", target)  # Ours may stand there by now.
        if parameters:
            known = inspect.signature(inspect.unwrap(target)).parameters
            missing = [name for name in parameters if name not in known]
            if missing:
                faults.append(f"{module_name}:{qualified} has no parameter {', '.join(missing)}")
    return faults


def install(proposer: type) -> Installed:
    """Mend vLLM on the CPU and put `proposer` in the place of its Medusa proposer; does nothing the second time.

    Raises:
        UnsupportedVersionError: another version of vLLM, or a name that is not as it was checked.
    """
    if INSTALLED.proposer is not None:
        return INSTALLED
    version = require_vllm()
    faults = check_contract()
    if faults:
        raise UnsupportedVersionError(
            "vLLM's inner names are not those that medusa-ppo was checked with.",
            given=f"vLLM {version}: {'; '.join(faults)}",
            expected="the names in medusa_ppo/vllm_plugin/hooks.py",
            do="Install a released vLLM 0.31 or 0.32.",
        )
    if current_platform.is_cpu():
        _mend_cpu()
    _replace(model_runner, "MedusaProposer", proposer)
    runner = model_runner.GPUModelRunner
    _replace(runner, "propose_draft_token_ids", _with_draft_context(runner.propose_draft_token_ids))
    _replace(runner, "_get_spec_decode_draft_probs", _with_kept_draft_probs(runner._get_spec_decode_draft_probs))
    _replace(runner, "_sample", _plain_without_drafts(runner._sample))
    _replace(gpu_worker.Worker, "wake_up", _with_heads_looked_at(gpu_worker.Worker.wake_up))
    if "MedusaPPOModel" not in ModelRegistry.get_supported_archs():
        # The name of conditioned kinds in config.json. vLLM only looks it up; our proposer builds the heads itself.
        ModelRegistry.register_model("MedusaPPOModel", "vllm.model_executor.models.medusa:Medusa")
    if can_transfer(version):
        with contextlib.suppress(ValueError):  # It is there already.
            importlib.import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory.register_engine(
                TRANSFER, "medusa_ppo.vllm_plugin.transfer_engine", "BroadcastEngine"
            )
    INSTALLED.proposer = proposer
    return INSTALLED


def uninstall() -> None:
    """Put everything back; for tests that show what happens without the mends."""
    for place, original in INSTALLED.originals.items():
        holder, name = _PLACES[place]
        setattr(holder, name, original)
    INSTALLED.mends.clear()
    INSTALLED.originals.clear()
    INSTALLED.proposer = None


_PLACES: dict[str, tuple[Any, str]] = {}


def _replace(holder: Any, name: str, new: Any, mend: str = "") -> None:
    _PLACES[place := f"{holder.__name__}.{name}"] = (holder, name)
    INSTALLED.originals.setdefault(place, getattr(holder, name))  # A name may be wrapped twice.
    setattr(holder, name, new)
    if mend:
        INSTALLED.mends.append(mend)


# ---- mends for the CPU ------------------------------------------------------------------------------------------------------


def _mend_cpu() -> None:
    rs, runner = rejection_sampler, model_runner.GPUModelRunner
    # Its C++ form writes into a discarded copy: temperature, top-k and top-p of each draft are uninitialised memory.
    _replace(rs, "expand_batch_to_tokens", verify.expand_to_rows, "temperatures of drafts")
    # A step without drafts has no rows, and top-k takes a maximum over nothing.
    _replace(rs, "apply_sampling_constraints", _skip_without_rows(rs.apply_sampling_constraints), "top-k without drafts")
    # Its C++ form reads outside its input for the padding id -1.
    _replace(rs, "rejection_sample", _torch_rejection_sample(rs.rejection_sample), "rejection sampling")
    # The same distribution with one softmax for verification and log-probs, and noise for B rows only.
    _replace(rs.RejectionSampler, "forward", _fast_forward(rs.RejectionSampler.forward), "verification in one pass")
    # The CPU's generator has no offset, so seeded requests die in chunked prefill.
    _replace(runner, "_bookkeeping_sync", _without_offsets(runner._bookkeeping_sync), "seeds in chunked prefill")
    _replace(runner, "_sample", _with_generators_kept(runner._sample))
    # The AMX kernel for weights under 1 MiB kills the worker (SIGILL) at random.
    _replace(layer_utils, "check_cpu_sgl_kernel", lambda n, k, dtype: False, "small AMX products")


def _skip_without_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def apply_sampling_constraints(logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        return logits if logits.shape[0] == 0 else original(logits, cu_num_draft_tokens, sampling_metadata)

    return apply_sampling_constraints


def _torch_rejection_sample(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's rejection_sample in torch; used when a request needs logits processors, which `_fast_forward` leaves to vLLM."""

    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        if synthetic_mode:
            raise LossyError(
                "Synthetic acceptance changes the distribution of the sampled tokens.", given="on", expected="off", do="Unset it."
            )
        bonus_B = bonus_token_ids.view(-1).to(torch.int64)
        if max_spec_len == 0:
            return bonus_B.unsqueeze(1).to(torch.int32)
        drafts = verify.DraftRows.build(draft_token_ids, num_draft_tokens, bonus_rows=False)
        # A request without drafts has no row of its own here; any row will do, its run ends at the bonus token.
        drafts = verify.DraftRows(
            drafts.draft_ids_BK, drafts.counts_B, drafts.starts_B, drafts.rows_BK.clamp(0, target_logits.shape[0] - 1)
        )
        run_B, last_B = verify.verify_rows(target_logits, None, drafts, num_draft_tokens, draft_probs, _rule(sampling_metadata))
        return verify.assemble(drafts, run_B, torch.where(run_B >= drafts.counts_B, bonus_B, last_B))

    return rejection_sample


def _fast_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        if self.synthetic_mode or not _is_plain(self, sampling_metadata):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        return _verify_in_one_pass(self, metadata, draft_probs, logits, sampling_metadata)

    return forward


def _is_plain(sampler: Any, sampling_metadata: Any) -> bool:
    """Nothing but temperature, top-k and top-p shapes the distribution, and log-probs (if any) are of what is sampled from."""
    holder = sampling_metadata.thinking_budget_state_holder
    processors = sampling_metadata.logitsprocs
    return (
        (sampling_metadata.max_num_logprobs is None or sampler.sampler.logprobs_mode == "processed_logprobs")
        and sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and not sampling_metadata.logprob_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and not processors.argmax_invariant
        and all(isinstance(p, MinTokensLogitsProcessor) and not p.min_toks for p in processors.non_argmax_invariant)
    )


def _verify_in_one_pass(
    sampler: Any, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
) -> SamplerOutput:
    """RejectionSampler.forward for plain sampling: constraints and softmax once for all rows, drafts and bonus alike."""
    counts = metadata.num_draft_tokens
    drafts = verify.DraftRows.build(metadata.draft_token_ids, counts)
    logits_NV = logits.float()
    if not sampling_metadata.all_greedy:
        logits_NV = _constrain(logits_NV, drafts.counts_B + 1, sampling_metadata)
    num_logprobs = sampling_metadata.max_num_logprobs
    # One softmax for verification and report: what is reported is what was sampled from.
    logprobs_NV = None if num_logprobs is None else logits_NV.log_softmax(-1, dtype=torch.float32)
    run_B, last_B = verify.verify_rows(logits_NV, logprobs_NV, drafts, counts, draft_probs, _rule(sampling_metadata))
    ids_BW = verify.assemble(drafts, run_B, last_B)
    logprobs = None if logprobs_NV is None else _gather_logprobs(sampler, logprobs_NV, ids_BW, drafts, num_logprobs)
    return SamplerOutput(sampled_token_ids=ids_BW, logprobs_tensors=logprobs)


def _rule(sampling_metadata: Any) -> verify.Rule:
    sm = sampling_metadata
    greedy_B = None if sm.all_random or sm.all_greedy else sm.temperature == 0
    return verify.Rule(all_greedy=sm.all_greedy, greedy_B=greedy_B, generators=sm.generators)


def _constrain(logits_NV: torch.Tensor, rows_B: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
    """Temperature, top-k and top-p of each request on all its rows. Leaves its input as it is."""

    def spread(values_B: torch.Tensor | None) -> Any:
        return None if values_B is None else torch.repeat_interleave(values_B, rows_B, output_size=logits_NV.shape[0])

    temperature_B = sampling_metadata.temperature
    if not sampling_metadata.all_random:
        temperature_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    scaled_NV = logits_NV / spread(temperature_B).unsqueeze(1)
    return rejection_sampler.apply_top_k_top_p(scaled_NV, spread(sampling_metadata.top_k), spread(sampling_metadata.top_p))


def _gather_logprobs(
    sampler: Any, logprobs_NV: torch.Tensor, ids_BW: torch.Tensor, drafts: verify.DraftRows, num_logprobs: int
) -> LogprobsTensors:
    """vLLM's log-prob tensors, one row per place in `ids_BW`; rows of places without a token mean nothing and are dropped later."""
    steps_W = torch.arange(ids_BW.shape[1], device=ids_BW.device)
    rows_BW = drafts.starts_B.unsqueeze(1) + torch.minimum(steps_W, drafts.counts_B.unsqueeze(1))
    rows = rows_BW.flatten()
    own_NV = logprobs_NV if rows.shape[0] == logprobs_NV.shape[0] else logprobs_NV[rows]
    return sampler.sampler.gather_logprobs(own_NV, num_logprobs, ids_BW.flatten().clamp_min(0).to(torch.int64))


def _discarded(runner: Any) -> list[int]:
    """Requests of this step whose sampled token is thrown away, because their prompt isn't finished."""
    return runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()


def _with_generators_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        generators = self.input_batch.generators
        kept = {i: generators[i].get_state() for i in _discarded(self) if i in generators} if generators else {}
        output = original(self, logits, spec_decode_metadata)
        for index, state in kept.items():
            generators[index].set_state(state)
        return output

    return _sample


def _without_offsets(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {i: generators.pop(i) for i in _discarded(self) if i in generators} if generators else {}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    return _bookkeeping_sync


# ---- our proposer inside vLLM's runner -----------------------------------------------------------------------------------------


def _is_ours(runner: Any) -> bool:
    return INSTALLED.proposer is not None and isinstance(getattr(runner, "drafter", None), INSTALLED.proposer)


def _with_draft_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell our proposer which tokens were just sampled, and keep the draft probabilities of this step by request."""

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        drafted = [len(scheduler_output.scheduled_spec_decode_tokens.get(key, ())) for key in self.input_batch.req_ids]
        self.drafter.before_step(sampled_token_ids, drafted, scheduler_output.total_num_scheduled_tokens)
        drafts = original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        self.drafter.after_step(self.input_batch.req_ids, self.requests)
        return drafts

    return propose_draft_token_ids


def _with_kept_draft_probs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> torch.Tensor | None:
        if not _is_ours(self):
            return original(self, spec_decode_metadata)
        meta = spec_decode_metadata
        return self.drafter.draft_probs.take(
            self.input_batch.req_ids, meta.num_draft_tokens, meta.draft_token_ids, self.input_batch.vocab_size
        )

    return _get_spec_decode_draft_probs


def _plain_without_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step in which nothing was drafted samples as an engine without speculation does, and costs as much.

    Seeded requests are left out while others may draft: how their tokens are drawn must not depend on who shares their step.
    """

    @functools.wraps(original)
    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        ours = spec_decode_metadata is not None and _is_ours(self)
        if ours and not any(spec_decode_metadata.num_draft_tokens) and not (self.input_batch.generators and self.drafter.num_drafts):
            self._get_spec_decode_draft_probs(spec_decode_metadata)  # What these requests drafted before is forgotten.
            spec_decode_metadata = None
        return original(self, logits, spec_decode_metadata)

    return _sample


def _with_heads_looked_at(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whoever wakes the engine: heads that a deep sleep threw away are noticed before it drafts. (The CPU's worker never really sleeps.)"""

    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        result = original(self, tags)
        if (tags is None or "weights" in tags) and _is_ours(self.model_runner):
            self.model_runner.drafter.held_version()
        return result

    return wake_up


def request_sampling(sampling_metadata: Any) -> RequestSampling:
    """vLLM's sampling metadata in our own words."""
    sm = sampling_metadata
    temperature_B = None if sm.all_greedy else sm.temperature
    return RequestSampling(temperature_B, sm.top_k, sm.top_p, sm.generators, rejection_sampler.apply_top_k_top_p)


def lm_head_logits(target_model: Any, features_ND: torch.Tensor) -> torch.Tensor:
    """Logits `[N, V]` by the engine's own lm_head: prepacked and sharded as it is, and always that of the last actor sync."""
    return target_model.compute_logits(features_ND)


def agreed(number: int) -> int:
    """The number of the first tensor-parallel rank, on all of them."""
    group = get_tp_group()
    if group.world_size == 1:
        return number
    shared = torch.tensor([number], dtype=torch.int64)
    torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
    return int(shared.item())


def agreed_by_all(good: bool) -> bool:
    """Whether it is so on all tensor-parallel ranks; each of them asks."""
    group = get_tp_group()
    if group.world_size == 1:
        return good
    shared = torch.tensor([int(good)], dtype=torch.int64)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(shared.item())


def packed_linear(weight: torch.Tensor) -> LINEAR:
    """The product with a weight `[out, in]`; on the CPU with a copy that oneDNN has packed, as vLLM's own linear layers have."""
    if weight.device.type != "cpu" or not custom_ops._supports_onednn:
        return plain_linear(weight)
    handler = custom_ops.create_onednn_mm(weight.contiguous().t(), PRIMITIVES)
    return lambda rows: custom_ops.onednn_mm(handler, rows, None)


def embedding_module(target_model: Any) -> Any:
    """The engine's own embedding layer, to be called with ids: it follows every sync, and tensor parallelism may shard its table."""
    for name, module in target_model.named_modules():
        if name.split(".")[-1] in ("embed_tokens", "wte", "word_embeddings") and hasattr(module, "weight"):
            return module
    raise UnsupportedVersionError(
        "The actor's embedding table was not found in vLLM's model.",
        given=type(target_model).__name__,
        expected="a module named embed_tokens",
        do="Use heads of kind medusa or markov with this actor.",
    )
