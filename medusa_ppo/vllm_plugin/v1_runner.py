"""Our proposer in vLLM's V1 model runner: the replacements of the runner's methods (`PLACES`).

Faults of vLLM's CPU build and of its older releases are patched in patches.py. The V2 model
runner's part is in speculator.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.v1.sample.rejection_sampler as rejection_sampler
import vllm.v1.worker.gpu_model_runner as model_runner
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm.platforms import current_platform
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from heads.checkpoint import holds_heads
from medusa_ppo.drafting import sending, verify
from medusa_ppo.vllm_plugin.drafter import Drafter, drafter_of
from medusa_ppo.vllm_plugin.patches import verified_in_torch
from medusa_ppo.vllm_plugin.proposer import MedusaProposer
from medusa_ppo.vllm_plugin.speculation import (
    heads_folder,
    refuse_lossy_rule,
    refuse_what_heads_lack,
    rule_of,
)


def with_our_proposer(original: Callable[..., None]) -> Callable[..., None]:
    """Use our proposer for heads that we wrote; any other Medusa folder keeps vLLM's own."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stock: Any = getattr(self, "drafter", None)
        folder = heads_folder(stock.vllm_config) if type(stock) is Drafter else ""
        if folder and holds_heads(Path(folder)):
            refuse_lossy_rule(rule_of(stock.spec_config))
            refuse_what_heads_lack(stock.vllm_config)
            self.drafter = MedusaProposer(stock.vllm_config, self.device)

    return __init__


def _is_ours(runner: Any) -> bool:
    return isinstance(drafter_of(runner), MedusaProposer)


def with_draft_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask our proposer for drafts, after telling it which tokens were just sampled, and from which
    states.
    """
    states = list(inspect.signature(original).parameters).index("sample_hidden_states") - 3

    @functools.wraps(original)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _is_ours(self):
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        verified = scheduler_output.scheduled_spec_decode_tokens
        drafts = [verified.get(key, ()) for key in self.input_batch.req_ids]
        placeholders: Sequence[int] = ()
        # They stand at the end; this looks at one token of each request in every step.
        if any(ids and ids[-1] < 0 for ids in drafts):
            placeholders = [sum(token < 0 for token in ids) for ids in drafts]
        hidden_TD = args[states] if len(args) > states else kwargs["sample_hidden_states"]
        return _drafts_after(
            self,
            scheduler_output,
            sampled_token_ids,
            [len(ids) for ids in drafts],
            hidden_TD,
            placeholders,
        )

    return propose_draft_token_ids


def _drafts_after(
    runner: Any,
    scheduled: Any,
    tokens: Sequence[Sequence[int]],
    drafted: Sequence[int],
    hidden_TD: torch.Tensor,
    placeholders: Sequence[int] = (),
) -> Any:
    """Drafts after a step that sampled `tokens` of each request and verified `drafted` drafts, some
    of them placeholders.
    """
    _seat(runner)
    drafter = runner.drafter
    drafter.before_step(
        tokens, drafted, scheduled.total_num_scheduled_tokens, hidden_TD, placeholders
    )
    return drafter.propose(
        scheduled.num_spec_tokens_to_schedule,
        _last_states(hidden_TD, tokens, drafted),
        runner.input_batch.sampling_metadata,
    )


def _last_states(
    hidden_TD: torch.Tensor, sampled_token_ids: Sequence[Sequence[int]], drafted: Sequence[int]
) -> torch.Tensor:
    """h_t `[B, D]` of each request: the state from which its last token was sampled. Each request
    has one row for each of its drafts, and one more.
    """
    if hidden_TD.shape[0] == len(sampled_token_ids):
        return hidden_TD
    rows = []
    begin = 0
    for tokens, count in zip(sampled_token_ids, drafted, strict=True):
        rows.append(begin + max(len(tokens) - 1, 0))
        begin += count + 1
    return hidden_TD[sending.sent(rows, hidden_TD.device)]


def with_kept_draft_probs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> Any:
        if not _is_ours(self):
            return original(self, spec_decode_metadata)
        _seat(self)
        return self.drafter.proposed(
            spec_decode_metadata.num_draft_tokens,
            self.input_batch.sampling_metadata.all_greedy,
        )

    return _get_spec_decode_draft_probs


def with_our_verification(original: Callable[..., Any]) -> Callable[..., Any]:
    """`rejection_sample`: our sampled drafts are verified as a block, where their q is stored. V1's
    kernels verify each draft on its own, and need q of all tokens and all drafts, three times the
    memory of the logits.

    The CPU build verifies all drafts in torch, whoever drafted them. Failure: its C++ version reads
    outside its input for the padding id -1, and in 0.23 to 0.25 it doesn't take `USE_FP64_GUMBEL`.
    Trigger: a request that is scheduled with padded drafts. Versions 0.31 and 0.32; not reported
    upstream. Used if a request needs logits processors, because `verification_in_one_pass` leaves
    these to vLLM.
    """

    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: Any,
        num_draft_tokens: Any,
        max_spec_len: int,
        cu_num_draft_tokens: Any,
        draft_probs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(draft_probs, verify.Proposed) and not current_platform.is_cpu():
            return original(
                draft_token_ids,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                draft_probs,
                *args,
                **kwargs,
            )
        return verified_in_torch(
            draft_token_ids, num_draft_tokens, max_spec_len, draft_probs, *args, **kwargs
        )

    return rejection_sample


def with_drafts_profiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_dummy_sampler_run`: vLLM profiles memory with one draft per request and without any q. This
    makes and verifies as many drafts as a full batch has. (The CPU build profiles no memory.)
    """

    @functools.wraps(original)
    def _dummy_sampler_run(self: Any, hidden_states: torch.Tensor) -> Any:
        if not _is_ours(self) or self.device.type == "cpu":
            return original(self, hidden_states)
        sampler = self.rejection_sampler
        asked: list[Any] = []

        def listening(*args: Any) -> Any:
            asked.append(args[-1])
            return sampler(*args)

        # vLLM's own sampling settings for this many requests, in the form of this release.
        self.rejection_sampler = listening
        try:
            result = original(self, hidden_states)
        finally:
            self.rejection_sampler = sampler
        if asked:
            rehearse(self, hidden_states, asked[0])
        return result

    return _dummy_sampler_run


@torch.inference_mode()
def rehearse(runner: Any, hidden_ND: torch.Tensor, sampling: Any) -> None:
    """Draft for all requests of `sampling`, and verify the drafts."""
    drafter = runner.drafter
    batch = len(sampling.temperature)
    count = drafter.num_speculative_tokens
    rows_ND = torch.rand(
        batch * (count + 1), hidden_ND.shape[1], dtype=hidden_ND.dtype, device=hidden_ND.device
    )
    proposed = drafter.rehearse(rows_ND[:batch])
    meta = SpecDecodeMetadata.make_dummy([[0] * count] * batch, rows_ND.device)
    runner.rejection_sampler(meta, proposed, runner.model.compute_logits(rows_ND), sampling)


def _seat(runner: Any) -> None:
    batch = runner.input_batch
    runner.drafter.seat(
        batch.req_ids,
        runner.requests,
        batch.num_tokens_no_spec[: batch.num_reqs],
        batch.token_ids_cpu,
    )


def drafting_to_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Failure: near max_model_len vLLM gives every request as many drafts of token 0 as it
    reserves, whatever num_drafts and the chooser decide, and counts them. Heads have no positions,
    so they can draft anywhere; the scheduler cuts what is too long.

    Trigger: any request within K tokens of max_model_len.
    """

    @functools.wraps(original)
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        return (
            common_attn_metadata is not None
            if _is_ours(self)
            else original(self, common_attn_metadata)
        )

    return _input_fits_in_drafter


def _is_plain(runner: Any, scheduled: Any) -> bool:
    """Whether an engine without speculation would run this step in the same way: each request has
    one token, none has drafts. Code that reads `speculative_config` for other reasons still sees
    it.
    """
    return (
        _is_ours(runner)
        and not scheduled.scheduled_spec_decode_tokens
        and not scheduled.scheduled_new_reqs
        and scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens)
        and not runner.input_batch.generators
        and not runner.use_async_scheduling
        and not runner.model_config.is_hybrid
        and runner.vllm_config.kv_transfer_config is None
        and runner.drafter.memory is None  # It scores the logits of every step.
    )


@contextlib.contextmanager
def _without_speculation(runner: Any) -> Iterator[None]:
    config = runner.speculative_config
    runner.speculative_config = None
    try:
        yield
    finally:
        runner.speculative_config = config


def with_plain_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """`execute_model`: an engine that speculates makes indices, masks and copies of metadata for
    drafts even if no request has any; this takes a twentieth of a small actor's step.
    """

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(self) and scheduler_output.scheduled_new_reqs:
            self.drafter.arrive(new.req_id for new in scheduler_output.scheduled_new_reqs)
        self.medusa_plain = _is_plain(self, scheduler_output)
        if not self.medusa_plain:
            return original(self, scheduler_output, *args, **kwargs)
        with _without_speculation(self):
            return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def with_drafts_after_plain_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """`sample_tokens` after such a step; it doesn't ask for drafts, so this does."""

    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is None or not self.medusa_plain:
            return original(self, grammar_output)
        with _without_speculation(self):
            output = original(self, grammar_output)
        tokens = output.sampled_token_ids
        scheduled = state.scheduler_output
        drafts = _drafts_after(
            self, scheduled, tokens, [0] * len(tokens), state.sample_hidden_states
        )
        # If there are no drafts again, the scheduler need not be told.
        if torch.is_tensor(drafts) or any(drafts):
            self._draft_token_ids = drafts
            self._copy_draft_token_ids_to_cpu(scheduled)
        return output

    return sample_tokens


def plain_without_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step without drafts samples like an engine without speculation, at the same cost.

    Seeded requests are left out while others may draft: how their tokens are drawn must not depend
    on which requests share their step. (vLLM 0.31 and older have no metadata for a step without
    drafts; on the CPU, where we draw the tokens, it is made here.)
    """

    @functools.wraps(original)
    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if _is_ours(self) and logits is not None:
            seeded = self.input_batch.generators and self.drafter.num_drafts
            if (
                spec_decode_metadata is not None
                and not any(spec_decode_metadata.num_draft_tokens)
                and not seeded
            ):
                spec_decode_metadata = None
            elif spec_decode_metadata is None and seeded and current_platform.is_cpu():
                spec_decode_metadata = SpecDecodeMetadata.make_dummy(
                    [[]] * len(logits), logits.device
                )
                spec_decode_metadata.bonus_logits_indices = torch.arange(
                    len(logits), device=logits.device
                )
            if spec_decode_metadata is not None and self.drafter.memory is not None:
                meta = spec_decode_metadata
                temperature_B = self.input_batch.sampling_metadata.temperature
                self.drafter.memory.judge(
                    logits,
                    meta.target_logits_indices,
                    meta.draft_token_ids,
                    meta.num_draft_tokens,
                    temperature_B,
                )
        return original(self, logits, spec_decode_metadata)

    return _sample


@dataclass(frozen=True)
class WithoutDrafts:
    """Indices of the rows of up to R requests when none of them has a draft, int32."""

    none: torch.Tensor
    zeros_R: torch.Tensor
    numbers_R: torch.Tensor


@functools.lru_cache
def without_drafts(requests: int, device: torch.device) -> WithoutDrafts:
    """Cached, because they are the same in every step."""
    return WithoutDrafts(
        torch.empty(0, dtype=torch.int32, device=device),
        torch.zeros(requests + 1, dtype=torch.int32, device=device),
        torch.arange(requests + 1, dtype=torch.int32, device=device),
    )


def few_indices_without_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Find each request's row of logits in a step without drafts: vLLM counts and copies seven
    arrays for that, of which all but one concern drafts.
    """

    @functools.wraps(original)
    def _calc_spec_decode_metadata(
        self: Any, num_draft_tokens: Any, cu_num_scheduled_tokens: Any
    ) -> Any:
        if not _is_ours(self) or num_draft_tokens.any():
            return original(self, num_draft_tokens, cu_num_scheduled_tokens)
        count = len(num_draft_tokens)
        fixed = without_drafts(self.max_num_reqs, self.device)
        return SpecDecodeMetadata(
            draft_token_ids=fixed.none,
            num_draft_tokens=[0] * count,
            cu_num_draft_tokens=fixed.zeros_R[:count],
            cu_num_sampled_tokens=fixed.numbers_R[1 : count + 1],
            target_logits_indices=fixed.none,
            bonus_logits_indices=fixed.numbers_R[:count],
            logits_indices=sending.sent(cu_num_scheduled_tokens - 1, self.device, torch.int32),
        )

    return _calc_spec_decode_metadata


def with_heads_looked_at(original: Callable[..., Any]) -> Callable[..., Any]:
    """Heads lost in a deep sleep are noticed before the engine drafts, whatever woke it. (The CPU's
    worker never really sleeps.)
    """

    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        result = original(self, tags)
        if (tags is None or "weights" in tags) and _is_ours(self.model_runner):
            drafter_of(self.model_runner).held_version()
        return result

    return wake_up


def with_new_weights_noticed(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the methods by which vLLM's runners get new weights. Some write into parameters directly;
    the drafter notices only calls of `load_weights`, so it has to be told.
    """

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _is_ours(self.model_runner):
            drafter_of(self.model_runner).target_loaded()
        return result

    return load


NEW_WEIGHTS = ("reload_weights", "finish_weight_update")
"""Methods of vLLM's worker; older releases lack the second."""
PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (model_runner.GPUModelRunner, "__init__", with_our_proposer),
    (model_runner.GPUModelRunner, "propose_draft_token_ids", with_draft_context),
    (model_runner.GPUModelRunner, "_get_spec_decode_draft_probs", with_kept_draft_probs),
    (model_runner.GPUModelRunner, "execute_model", with_plain_steps),
    (model_runner.GPUModelRunner, "sample_tokens", with_drafts_after_plain_steps),
    (model_runner.GPUModelRunner, "_input_fits_in_drafter", drafting_to_the_end),
    (model_runner.GPUModelRunner, "_calc_spec_decode_metadata", few_indices_without_drafts),
    (model_runner.GPUModelRunner, "_sample", plain_without_drafts),
    (model_runner.GPUModelRunner, "_dummy_sampler_run", with_drafts_profiled),
    (rejection_sampler, "rejection_sample", with_our_verification),
    (gpu_worker.Worker, "wake_up", with_heads_looked_at),
    *(
        (gpu_worker.Worker, name, with_new_weights_noticed)
        for name in NEW_WEIGHTS
        if hasattr(gpu_worker.Worker, name)
    ),
)
