"""Our heads in vLLM's V2 model runner: a speculator over the same drafting core.

V2 keeps requests by slot on the device and verifies by its own kernels, against the logits of what
drafts were drawn from, before temperature: ours are log q times the temperature, so whatever shaped
q (draft temperatures, top-k, top-p) verification sees it. A row that is -inf but for the draft
itself is a one-hot draft, which is right for any draft: so are those of requests with a grammar
(vLLM cuts them by their own values), and what stands in a slot before its request has drafted.

Imported only where V2 is asked for. Shape letters: B requests, T rows of a step, S slots, K drafts,
D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import vllm.v1.worker.gpu.model_runner as v2_runner
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from heads.errors import ConfigError
from medusa_ppo.drafting.context import Arrived, ContextHeads, Seen, Standing
from medusa_ppo.drafting.core import Drafted, DraftSampling
from medusa_ppo.drafting.noise import DRAFT_LANE, keys_of, uniforms
from medusa_ppo.vllm_plugin.proposer import TEXT_TOKENS_AT_ONCE, MedusaProposer
from medusa_ppo.vllm_plugin.speculation import heads_folder, refuse_lossy_rule, rule_of
from medusa_ppo.vllm_plugin.worker_calls import Drafting

logger = logging.getLogger(__name__)
CUTS_ASK_FOR_V = "vocab_size" in inspect.signature(SamplingStates.get_top_k_top_p).parameters
"""From 0.33 on. Looked up once: `_cuts` runs between two steps."""


class HeldHeads(MedusaProposer):
    """The serving heads, how they are changed while they serve, and what they may be told. q is
    V2's to keep.
    """

    def _use_vocabulary(self) -> None:
        self._core.use_vocabulary(None, None)

    def draft(
        self,
        hidden_BD: torch.Tensor,
        last_ids_B: torch.Tensor,
        count: int,
        sampling: DraftSampling | None = None,
        seen: Seen | None = None,
    ) -> Drafted:
        return self._core.draft(hidden_BD, last_ids_B, count, sampling, seen)

    def look_back(
        self,
        hidden_TD: torch.Tensor,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
        at: Standing,
    ) -> Seen | None:
        """What requests attend to after a step (`Arrived.of_step`); None for heads without a
        context.
        """
        ring = self._ring
        fused = self._core.fused
        if ring is None or not isinstance(fused, ContextHeads):
            return None
        most = min(self.num_speculative_tokens + 1, ring.pairs)
        arrived = Arrived.of_step(
            hidden_TD, ids_T, rows_B, last_ids_B, sampled_B, at, ring.spare, most
        )
        seen = fused.look_back(ring, arrived, at)
        texts = self._texts
        copier = self._core.copier
        if texts is None or copier is None:
            return seen
        # The token x_{j+1} of a pair stands one position behind its state.
        copier.write(texts, arrived.slots_N, arrived.positions_N + 1, arrived.ids_N)
        told_BKH = copier.find(texts, at.slots_B, at.positions_B + 1)
        return replace(seen, told_BKH=told_BKH)

    @torch.inference_mode()
    def admit(self, slot: int, token_ids: Sequence[int]) -> None:
        """A request takes a slot with these tokens, its prompt and what it has said before."""
        texts = self._texts
        copier = self._core.copier
        if texts is None or copier is None:
            return
        texts.begin(slot)
        first = max(0, len(token_ids) - texts.places)
        positions_N = torch.arange(first, len(token_ids))
        numbers_3N = torch.stack(
            [torch.full_like(positions_N, slot), positions_N, torch.tensor(token_ids[first:])]
        )
        for part_3N in numbers_3N.split(TEXT_TOKENS_AT_ONCE, dim=1):
            copier.write(texts, *part_3N.to(self.device, non_blocking=True).unbind(0))

    def _forget_pairs(self) -> None:
        super()._forget_pairs()
        if self._texts is not None and self._core.copier is not None:
            self._core.copier.write_again(self._texts)

    def configure(self, settings: Drafting) -> Drafting:
        if settings.get("choose"):
            logger.info("V2 can't choose the number of drafts: each step has the same.")
            settings = settings | {"choose": False}
        for name in ("draft_vocab", "memory_bytes", "stop_below"):
            if settings.get(name):
                raise ConfigError(
                    "vLLM's V2 model runner tells a drafter no tokens on the host, and this setting"
                    " needs them.",
                    given=f"{name}={settings[name]}",
                    expected="a fixed number of drafts from the whole vocabulary",
                    do="Set engine.runner=v1, or leave the setting out.",
                )
        return super().configure(settings)


class MedusaSpeculator(DraftModelSpeculator):
    """What V2's model runner asks for drafts after each step.

    Attributes:
        drafter: what the worker extension swaps and configures.
        states: V2's sampling settings by slot; there once a request has come.
        count: drafts that the last step made of each request.
        draft_logits: float32 `[S, K, V]`, what V2 verifies against. Made at once, so that vLLM's
            memory profile counts it.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any = None) -> None:
        super().__init__(vllm_config, device)
        self.drafter = HeldHeads(vllm_config, device)
        waiting_N = torch.zeros(
            self.max_num_reqs * self.num_speculative_steps, dtype=torch.int64, device=device
        )
        self._kept_SKV = _one_hot(waiting_N, self.vocab_size).view(
            self.max_num_reqs, self.num_speculative_steps, self.vocab_size
        )
        self.draft_logits = self._kept_SKV
        self.states: Any = None
        self.count = 0
        self._grammar_S = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        self._requests_S = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self._admitted = 0

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        self.drafter.load_model(target_model)
        return self.drafter.heads

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Drafting is not captured."""

    def capture(self, *_: Any) -> None:
        """Drafting is not captured."""

    def admit(self, slot: int, grammar: bool, states: Any, token_ids: Sequence[int]) -> None:
        """A request has come, or come back: whatever stands in its slot is another's. V2 has token
        0 where nothing was drafted.
        """
        self.drafter.admit(slot, token_ids)
        self.states = states
        self._admitted += 1
        self._requests_S[slot], self._grammar_S[slot] = self._admitted, grammar
        self._kept_SKV[slot] = -torch.inf
        self._kept_SKV[slot, :, 0] = 0.0

    # Its last parameters differ by release, and only those that are named here are read.
    @torch.inference_mode()
    def propose(  # type: ignore[override]
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Draft ids int64 `[B, K]`; columns from `count` on mean nothing and are not scheduled."""
        drafter = self.drafter
        batch = input_batch.num_reqs
        count = min(
            (
                self.num_speculative_steps
                if num_speculative_tokens is None
                else num_speculative_tokens
            ),
            drafter.num_drafts,
        )
        self.count = count = count if drafter.drafting else 0
        ids_BK = torch.zeros(
            batch, self.num_speculative_steps, dtype=torch.int64, device=self.device
        )
        if not count:
            return ids_BK
        slots_B = input_batch.idx_mapping[:batch].long()
        rows_B = (
            input_batch.query_start_loc[1 : batch + 1] - 1 - num_rejected[:batch]
        ).long()  # Of each request's last accepted token.
        hidden_BD = last_hidden_states[rows_B]
        last_ids_B = last_sampled[slots_B].view(-1)
        seen = None
        positions_B = input_batch.positions[rows_B].long()
        if not dummy_run:
            at = Standing(slots_B, self._requests_S[slots_B], positions_B)
            seen = drafter.look_back(
                last_hidden_states,
                input_batch.input_ids,
                rows_B,
                last_ids_B,
                num_sampled[:batch],
                at,
            )
        if not drafter.sampled or dummy_run:
            drafted = drafter.draft(hidden_BD, last_ids_B, count, seen=seen)
            temperature_B = None
        else:
            temperature_B = torch.where(self._grammar_S[slots_B], 0.0, temperature[slots_B])
            noise_BK = uniforms(positions_B, keys_of(seeds[slots_B]), None, DRAFT_LANE, count)
            cuts = self._cuts(slots_B, input_batch.idx_mapping_np[:batch])
            drafted = drafter.draft(
                hidden_BD, last_ids_B, count, DraftSampling(temperature_B, noise_BK, *cuts), seen
            )
        ids_BK[:, :count] = drafted.ids_BK
        if not dummy_run:
            self._keep(slots_B, drafted, temperature_B)
        return ids_BK

    def _cuts(
        self, slots_B: torch.Tensor, slots: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """top-k and top-p of each request, None where none has any. (vLLM 0.33 says more.)"""
        if self.states is None:
            return None, None
        more = (self.vocab_size,) if CUTS_ASK_FOR_V else ()
        top_k_B, top_p_B, *_ = self.states.get_top_k_top_p(slots_B, slots, *more)
        return top_k_B, top_p_B

    def _keep(
        self, slots_B: torch.Tensor, drafted: Drafted, temperature_B: torch.Tensor | None
    ) -> None:
        """For verification: log q times the temperature; one-hot rows where the temperature is 0,
        and everywhere without q.
        """
        for k, ids_B in enumerate(drafted.ids_BK.unbind(1)):
            logits_BV = _one_hot(ids_B, self.vocab_size)
            if temperature_B is not None:
                temperature_B1 = temperature_B.unsqueeze(1)
                logits_BV = torch.where(
                    temperature_B1 > 0, drafted.q[k].log() * temperature_B1, logits_BV
                )
            self._kept_SKV[slots_B, k] = logits_BV


def _one_hot(ids_N: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits `[N, V]` that leave one token each."""
    logits_NV = torch.full((len(ids_N), vocab_size), -torch.inf, device=ids_N.device)
    return logits_NV.scatter_(1, ids_N.unsqueeze(1), 0.0)


# ---- our place in vLLM


def with_our_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_speculator` of the V2 runner, which knows no Medusa."""

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: torch.device, *args: Any) -> Any:
        if heads_folder(vllm_config):
            refuse_lossy_rule(rule_of(vllm_config.speculative_config))
            return MedusaSpeculator(vllm_config, device, *args)
        return original(vllm_config, device, *args)

    return init_speculator


def medusa_allowed(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`VllmConfig._get_v2_model_runner_unsupported_features`: heads are supported by now."""

    @functools.wraps(original)
    def unsupported(self: Any) -> list[str]:
        method = f"'{self.speculative_config.method}'" if heads_folder(self) else ""
        return [feature for feature in original(self) if not method or method not in feature]

    return unsupported


def with_requests_admitted(original: Callable[..., None]) -> Callable[..., None]:
    """`GPUModelRunner.add_requests`: requests that are new, or come back after a preemption."""

    @functools.wraps(original)
    def add_requests(self: Any, scheduler_output: Any) -> None:
        original(self, scheduler_output)
        if isinstance(self.speculator, MedusaSpeculator):
            for new in scheduler_output.scheduled_new_reqs:
                grammar = (
                    new.sampling_params is not None
                    and new.sampling_params.structured_outputs is not None
                )
                self.speculator.admit(
                    self.req_states.req_id_to_index[new.req_id],
                    grammar,
                    self.sampler.sampling_states,
                    new.prefill_token_ids or new.prompt_token_ids or (),
                )

    return add_requests


def with_as_many_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.take_draft_token_ids`: the scheduler makes room for as many as were drafted,
    not as the heads could.
    """

    @functools.wraps(original)
    def take_draft_token_ids(self: Any) -> Any:
        drafts = original(self)
        if drafts is not None and isinstance(self.speculator, MedusaSpeculator):
            drafts.draft_token_ids = [
                ids[: self.speculator.count] for ids in drafts.draft_token_ids
            ]
        return drafts

    return take_draft_token_ids


PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (v2_runner, "init_speculator", with_our_speculator),
    (VllmConfig, "_get_v2_model_runner_unsupported_features", medusa_allowed),
    (v2_runner.GPUModelRunner, "add_requests", with_requests_admitted),
    (v2_runner.GPUModelRunner, "take_draft_token_ids", with_as_many_drafts),
)
