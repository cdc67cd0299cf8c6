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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.model_runner as v2_runner
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from heads.errors import ConfigError
from medusa_ppo.drafting import sending
from medusa_ppo.drafting.batch_inputs import BatchInputs, BatchRows, Found
from medusa_ppo.drafting.context import Arrived, ContextHeads, Seen, Standing
from medusa_ppo.drafting.core import Drafted, DraftSampling
from medusa_ppo.drafting.noise import DRAFT_STREAM, drawn_from, keys_of, uniforms
from medusa_ppo.drafting.products import DraftVocabulary
from medusa_ppo.drafting.stopping import Ending
from medusa_ppo.vllm_plugin import draft_graphs
from medusa_ppo.vllm_plugin.draft_graphs import DraftGraphs, can_capture
from medusa_ppo.vllm_plugin.proposer import TEXT_TOKENS_AT_ONCE, MedusaProposer
from medusa_ppo.vllm_plugin.speculation import (
    drafts_of_steps,
    heads_folder,
    refuse_lossy_rule,
    refuse_what_heads_lack,
    rule_of,
)
from medusa_ppo.vllm_plugin.worker_calls import Drafting

logger = logging.getLogger(__name__)
CUTS_ASK_FOR_V = "vocab_size" in inspect.signature(SamplingStates.get_top_k_top_p).parameters
"""From 0.33 on. Looked up once: `_cuts` runs between two steps."""


@dataclass(frozen=True)
class _LastStep:
    """A step of which it isn't known yet how many tokens it sampled.

    Attributes:
        there: that `sampled_B` is on the host; None where it always was.
    """

    sampled_B: torch.Tensor
    there: torch.cuda.Event | None
    drafted: Sequence[int]
    scheduled_tokens: int
    seconds: float | None


class HeldHeads(MedusaProposer):
    """The serving heads, how they are changed while they serve, and what they may be told. q is
    V2's to keep.
    """

    _last_step: _LastStep | None = None

    def draft(
        self,
        hidden_BD: torch.Tensor,
        last_ids_B: torch.Tensor,
        count: int,
        sampling: DraftSampling | None = None,
        seen: Seen | None = None,
        ending: Ending | None = None,
    ) -> Drafted:
        slots = self._slots if sampling is not None else None
        return self._core.draft(hidden_BD, last_ids_B, count, sampling, seen, slots, ending=ending)

    def drawn(self, k: int, batch: int) -> torch.Tensor:
        """What draft k of the last sampled call was drawn from, float32 `[B, W]`."""
        assert self._slots is not None, "who samples drafts has room for them"
        return drawn_from(self._slots.cumulative_KRX[k, :batch])

    @property
    def ids_W(self) -> torch.Tensor | None:
        """The tokens that drafts come from; None: all."""
        return self._core.ids_W

    def _new_vocabulary(self, size: int) -> DraftVocabulary:
        vocabulary = super()._new_vocabulary(size)
        vocabulary.count_on(self.device)
        return vocabulary

    def observe(
        self,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
    ) -> None:
        """Count the tokens that a step sampled (`Arrived.of_step` has the same arguments)."""
        vocabulary = self.draft_vocabulary
        if not vocabulary.size or self._calibrating is not None:
            return
        back_n = torch.arange(self.num_speculative_tokens + 1, device=rows_B.device)
        rows_Bn = (rows_B.unsqueeze(1) - back_n + 1).clamp(0, len(ids_T) - 1)
        ids_Bn = ids_T[rows_Bn].long().clamp_min(0)
        ids_Bn[:, 0] = last_ids_B
        there_Bn = back_n < sampled_B.unsqueeze(1)
        # A request whose prompt isn't finished samples none: the host's count is a little high.
        vocabulary.observe_there(ids_Bn.flatten(), there_Bn.flatten(), len(rows_B))
        if vocabulary.due:
            self._refresh_vocabulary()

    @property
    def layout(self) -> Hashable:
        """Which tensors the drafting call reads, and by which path: another one after any change
        that a captured graph would not see.
        """
        core, vocabulary = self._core, self.draft_vocabulary
        copier = core.copier
        return (
            self._changes,
            self.sampled,
            core.fused.fixed.moves,
            None if copier is None else copier.fixed.moves,
            vocabulary.fixed.moves,
            vocabulary.product is None,
            vocabulary.ids_W is None,
        )

    @property
    def newest(self) -> int:
        """How many rows of a request the drafting call reads: after a step with all drafts so many
        may be new.
        """
        most = self.num_speculative_tokens + 1
        return 1 if self._ring is None else min(most, self._ring.pairs)

    def hold(
        self,
        hidden_TD: torch.Tensor,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
        at: Standing,
        drafted: Sequence[int],
    ) -> None:
        """After a step (`Arrived.of_step`) that verified so many drafts of each request, where none
        are wanted: what came is held, so that later drafts may attend to it.
        """
        ring, unread = self._ring, self._unread
        if ring is None or unread is None:
            return
        # Steps that are held must be small: without drafts each request brought one pair at most.
        most = min(max(drafted) + 1, ring.pairs)
        arrived = Arrived.of_step(
            hidden_TD, ids_T, rows_B, last_ids_B, sampled_B, at, ring.spare, most
        )
        self._write_texts(arrived)
        unread.hold_pairs(arrived)

    def held(self) -> list[Arrived]:
        """What steps without drafts brought; nothing is held afterwards."""
        return [] if self._unread is None else self._unread.take()

    def look_back(
        self, rows: BatchRows, at: Standing, before: Sequence[Arrived] = ()
    ) -> Seen | None:
        """What requests attend to after a step, and after those `before` it; None for heads without
        a context.
        """
        ring = self._ring
        fused = self._core.fused
        if ring is None or not isinstance(fused, ContextHeads):
            return None
        arrived = Arrived.of_rows(rows.hidden_BnD, rows.ids_Bn, rows.sampled_B, at, ring.spare)
        self._write_texts(arrived)
        seen = fused.look_back(ring, arrived.after(before, at, ring), at)
        texts, copier = self._texts, self._core.copier
        if texts is None or copier is None:
            return seen
        told_BKH = copier.find(texts, at.slots_B, at.positions_B + 1)
        return replace(seen, told_BKH=told_BKH)

    def _write_texts(self, arrived: Arrived) -> None:
        if self._texts is not None and self._core.copier is not None:
            # The token x_{j+1} of a pair stands one position behind its state.
            positions_N = arrived.positions_N + 1
            self._core.copier.write(self._texts, arrived.slots_N, positions_N, arrived.ids_N)

    def forget_time(self) -> None:
        """The step that runs takes longer than others: nobody is to learn from it."""
        self._step_began = None

    @torch.inference_mode()
    def admit(self, slot: int, token_ids: Sequence[int]) -> None:
        """A request takes a slot with these tokens, its prompt and what it has said before."""
        if self._calibrating is None:
            self.draft_vocabulary.observe([token_ids])
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

    def step_ended(
        self, sampled_B: torch.Tensor, drafted: Sequence[int], scheduled_tokens: int
    ) -> None:
        """A step has verified `drafted` drafts of each request, and sampled so many tokens. The
        latter is read one step later, when its copy is on the host without waiting.
        """
        self._learn_of_last_step()
        if not self.choose and self._calibrating is None:
            return
        on_device = sampled_B.device.type == "cuda"
        host_B = torch.empty(sampled_B.shape, dtype=sampled_B.dtype, pin_memory=on_device)
        host_B.copy_(sampled_B, non_blocking=True)
        there = torch.cuda.Event() if on_device else None
        if there is not None:
            there.record()
        self._last_step = _LastStep(
            host_B, there, drafted, scheduled_tokens, self._seconds_of_step()
        )

    def _learn_of_last_step(self) -> None:
        last = self._last_step
        self._last_step = None
        if last is None:
            return
        if last.there is not None:
            last.there.synchronize()
        self._learn(last.sampled_B.tolist(), last.drafted, last.scheduled_tokens, last.seconds)

    def calibrate(self, drafts: int | None) -> list[list[float]]:
        self._learn_of_last_step()
        return super().calibrate(drafts)

    def configure(self, settings: Drafting) -> Drafting:
        if settings.get("memory_bytes"):
            raise ConfigError(
                "vLLM's V2 model runner tells a drafter no tokens on the host, and a memory needs"
                " them.",
                given=f"memory_bytes={settings['memory_bytes']}",
                expected="0",
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
        graphs: of the drafting call; None where nothing is captured.
        lengths_B: int64, drafts of each request that are to be verified, where some have fewer
            than `count`; None: all have as many.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any = None) -> None:
        super().__init__(vllm_config, device)
        self.drafter = HeldHeads(vllm_config, device)
        # One slot more than requests, for rows that pad a batch.
        slots = self.max_num_reqs + 1
        waiting_N = torch.zeros(
            slots * self.num_speculative_steps, dtype=torch.int64, device=device
        )
        self._kept_SKV = _one_hot(waiting_N, self.vocab_size).view(
            slots, self.num_speculative_steps, self.vocab_size
        )
        self.draft_logits = self._kept_SKV[: self.max_num_reqs]
        self.graphs: DraftGraphs | None = None
        self.states: Any = None
        self.count = 0
        self.lengths_B: torch.Tensor | None = None
        self._grammar_S = torch.zeros(slots, dtype=torch.bool, device=device)
        self._requests_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._admitted = 0

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        self.drafter.load_model(target_model)
        return self.drafter.heads

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Graphs that were captured before (vLLM's memory profile captures some to measure them)
        are gone.
        """
        self.graphs = None
        if cudagraph_mode != CUDAGraphMode.NONE and can_capture():
            self.graphs = DraftGraphs(self.vllm_config, self.device, self._call, self._clear)

    def capture(self, *_: Any) -> None:
        """When vLLM captures its own."""
        if self.graphs is not None:
            counts = [count for count in drafts_of_steps(self.vllm_config) if count]
            self.graphs.capture_all(counts, self.drafter.layout)

    def _clear(self, batch: int) -> None:
        self._inputs.clear(0, batch)

    @functools.cached_property
    def _inputs(self) -> BatchInputs:
        # Not while the heads are loaded: a deep sleep throws away what was made then.
        drafter = self.drafter
        return BatchInputs(
            self.max_num_reqs,
            drafter.newest,
            self.num_speculative_steps,
            drafter.hidden_size,
            self.vocab_size,
            drafter.dtype,
            self.device,
        )

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
        most = self.num_speculative_steps
        if num_speculative_tokens is not None:
            most = min(most, num_speculative_tokens)
        if dummy_run:
            # It computes what a step does, so that the profile sees it, for rows that are nobody's.
            count = min(most, drafter.num_drafts) if drafter.drafting else 0
            if count:
                self._clear(batch)
                self._drafted(batch, count, False)
            return self._none(batch)
        drafted = (np.diff(input_batch.cu_num_logits_np)[:batch] - 1).tolist()
        sampled_B = num_sampled[:batch]
        drafter.step_ended(sampled_B, drafted, input_batch.num_tokens)
        self.count = count = drafter.wanted(most, batch)
        slots_B = input_batch.idx_mapping[:batch].long()
        rows_B = (
            input_batch.query_start_loc[1 : batch + 1] - 1 - num_rejected[:batch]
        ).long()  # Of each request's last accepted token.
        last_ids_B = last_sampled[slots_B].view(-1)
        self.lengths_B = None
        drafter.observe(input_batch.input_ids, rows_B, last_ids_B, sampled_B)
        if drafter.stopping is not None:
            drafted_B = sending.sent(drafted, self.device)
            accepted_B = (sampled_B - 1).clamp_min(0)
            drafter.stopping.settle(slots_B, drafted_B, accepted_B)
        ids_T, positions_T = input_batch.input_ids, input_batch.positions
        if not count:
            if drafter.drafting:
                positions_B = positions_T[rows_B].long()
                at = Standing(slots_B, self._requests_S[slots_B], positions_B)
                step = last_hidden_states, ids_T, rows_B, last_ids_B, sampled_B
                drafter.hold(*step, at, drafted)
            return self._none(batch)
        cuts = self._cuts(slots_B, input_batch.idx_mapping_np[:batch])
        found = Found(
            last_hidden_states,
            ids_T,
            positions_T,
            rows_B,
            last_ids_B,
            sampled_B,
            slots_B,
            temperature,
            seeds,
            cuts if drafter.sampled else (None, None),
        )
        return self._draft(found, count)

    def _none(self, batch: int) -> torch.Tensor:
        return torch.zeros(batch, self.num_speculative_steps, dtype=torch.int64, device=self.device)

    def _draft(self, found: Found, count: int) -> torch.Tensor:
        """`count` drafts for each request, by a captured graph where there is one."""
        drafter = self.drafter
        batch = len(found.slots_B)
        cut = found.cut
        before = drafter.held()
        graph = None
        # How much was held differs from time to time, so that step is in no graph.
        if self.graphs is not None and not before:
            graph, captured = self.graphs.of(batch, count, cut, drafter.layout)
            if captured:
                drafter.forget_time()
        if drafter.stopping is not None:
            drafter.stopping.begin_step()
        rows = self._inputs.write(found)
        if self.graphs is None or graph is None:
            self._call(batch, count, cut, before)
        else:
            self._inputs.clear(batch, graph.num_reqs or batch)
            self.graphs.run_fullgraph(graph)
        if drafter.sampled and drafter.stopping is not None:
            self.lengths_B = rows.lengths_B
        return rows.drafts_BK

    def _call(self, batch: int, count: int, cut: bool, before: Sequence[Arrived] = ()) -> None:
        """The drafting call, from `_inputs` to `_inputs`, as it is captured: everything that is
        there afterwards stands where it stood before.
        """
        drafts = self._drafted(batch, count, cut, before)
        rows = self._inputs.rows(batch)
        rows.drafts_BK[:, :count].copy_(drafts.ids_BK)
        if count < self.num_speculative_steps:
            rows.drafts_BK[:, count:].zero_()
        if drafts.lengths_B is not None:
            rows.lengths_B.copy_(drafts.lengths_B)

    def _drafted(
        self, batch: int, count: int, cut: bool, before: Sequence[Arrived] = ()
    ) -> Drafted:
        """Drafts of what stands in `_inputs`; their q is kept for verification."""
        drafter = self.drafter
        rows = self._inputs.rows(batch)
        slots_B = rows.slots_B
        at = Standing(slots_B, self._requests_S.index_select(0, slots_B), rows.positions_B)
        seen = drafter.look_back(rows, at, before)
        hidden_BD, last_ids_B = rows.hidden_BnD[:, 0], rows.ids_Bn[:, 0]
        temperature_B = None
        if not drafter.sampled:
            drafts = drafter.draft(hidden_BD, last_ids_B, count, seen=seen)
        else:
            grammar_B = self._grammar_S.index_select(0, slots_B)
            temperature_B = rows.temperature_B.masked_fill(grammar_B, 0.0)
            keys_B = keys_of(rows.seeds_B)
            noise_BK = uniforms(rows.positions_B, keys_B, None, DRAFT_STREAM, count)
            cuts = (rows.top_k_B, rows.top_p_B) if cut else (None, None)
            sampling = DraftSampling(temperature_B, noise_BK, *cuts)
            ending = None if drafter.stopping is None else drafter.stopping.runs(slots_B)
            drafts = drafter.draft(hidden_BD, last_ids_B, count, sampling, seen, ending)
        for k, ids_B in enumerate(drafts.ids_BK.unbind(1)):
            kept_BV = self._kept(k, ids_B, temperature_B)
            self._kept_SKV[:, k].index_copy_(0, slots_B, kept_BV)
        return drafts

    def _cuts(
        self, slots_B: torch.Tensor, slots: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """top-k and top-p of each request, None where none has any. (vLLM 0.33 says more.)"""
        if self.states is None:
            return None, None
        more = (self.vocab_size,) if CUTS_ASK_FOR_V else ()
        top_k_B, top_p_B, *_ = self.states.get_top_k_top_p(slots_B, slots, *more)
        return top_k_B, top_p_B

    def _kept(
        self, k: int, ids_B: torch.Tensor, temperature_B: torch.Tensor | None
    ) -> torch.Tensor:
        """For verification: the log of what draft k was drawn from, times the temperature; one-hot
        rows where the temperature is 0, and everywhere without q.
        """
        one_hot_BV = _one_hot(ids_B, self.vocab_size)
        if temperature_B is None:
            return one_hot_BV
        temperature_B1 = temperature_B.unsqueeze(1)
        logits_BV = logits_BW = self.drafter.drawn(k, len(ids_B)).log() * temperature_B1
        if self.drafter.ids_W is not None:
            nowhere_BV = torch.full_like(one_hot_BV, -torch.inf)
            logits_BV = nowhere_BV.index_copy_(1, self.drafter.ids_W, logits_BW)
        return torch.where(temperature_B1 > 0, logits_BV, one_hot_BV)


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
            refuse_what_heads_lack(vllm_config)
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
            ours = self.speculator
            # How long runs are is known when they are drawn, and the scheduler has to know it.
            lengths = (
                [ours.count] * len(drafts.draft_token_ids)
                if ours.lengths_B is None
                else ours.lengths_B.tolist()
            )
            drafts.draft_token_ids = [
                ids[:length] for ids, length in zip(drafts.draft_token_ids, lengths, strict=True)
            ]
        return drafts

    return take_draft_token_ids


PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (v2_runner, "init_speculator", with_our_speculator),
    (VllmConfig, "_get_v2_model_runner_unsupported_features", medusa_allowed),
    (v2_runner.GPUModelRunner, "add_requests", with_requests_admitted),
    (v2_runner.GPUModelRunner, "take_draft_token_ids", with_as_many_drafts),
    *draft_graphs.PLACES,
)
