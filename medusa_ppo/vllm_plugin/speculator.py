"""Our heads in vLLM's V2 model runner: a speculator over the same drafting core.

V2 keeps requests by slot on the device and verifies with its own kernels, against the logits that
drafts were drawn from, before temperature. Ours are log q times the temperature, so verification
sees whatever shaped q (draft temperatures, top-k, top-p). They are made when they are read, for
some requests at a time, from what the drafts were drawn with (`drafting.q_rows`). A row that is
-inf except at the draft itself is a one-hot draft, which is valid for any draft. Requests with a
grammar get such rows (vLLM truncates them by their own values), and so do requests that did not
draft in the step before.

Imported only if V2 is used. Shape letters: B requests, T rows of a step, S slots, K drafts,
D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils
import vllm.v1.worker.gpu.model_runner as v2_runner
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as v2_sampler
import vllm.v1.worker.gpu_worker as gpu_worker
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from heads.errors import ConfigError
from medusa_ppo.drafting import sending
from medusa_ppo.drafting.context import Arrived, ContextHeads, Seen, Standing
from medusa_ppo.drafting.core import Drafted, DraftSampling
from medusa_ppo.drafting.memory import Recall
from medusa_ppo.drafting.noise import DRAFT_STREAM, keys_of, uniforms
from medusa_ppo.drafting.products import DraftVocabulary
from medusa_ppo.drafting.q_rows import VerifiedRows, table_rows_at_once
from medusa_ppo.drafting.slots import NOTHING, DraftSlots, stamps
from medusa_ppo.drafting.stopping import Ending
from medusa_ppo.drafting.texts import Copier, TextRing
from medusa_ppo.vllm_plugin import asynchronous, q_kernel
from medusa_ppo.vllm_plugin.calibrating import random_states
from medusa_ppo.vllm_plugin.draft_graphs import CudaRecorder, DraftGraphs, DraftStep
from medusa_ppo.vllm_plugin.proposer import TEXT_TOKENS_AT_ONCE, MedusaProposer
from medusa_ppo.vllm_plugin.running_requests import Admitted, RunningRequests
from medusa_ppo.vllm_plugin.speculation import (
    heads_folder,
    is_asynchronous,
    refuse_lossy_rule,
    refuse_what_heads_lack,
    rule_of,
)
from medusa_ppo.vllm_plugin.vllm_versions import has_graphs, schedules_ahead, vllm_version
from medusa_ppo.vllm_plugin.worker_calls import Drafting

logger = logging.getLogger(__name__)
CUTS_ASK_FOR_V = "vocab_size" in inspect.signature(SamplingStates.get_top_k_top_p).parameters
"""True from 0.33 on. Looked up once, because `_cuts` runs between two steps."""


@dataclass(frozen=True)
class _LastStep:
    """A step whose number of sampled tokens isn't known yet.

    Attributes:
        keys: its requests.
        sampled: on its way to the host.
        seconds: None: unknown, or known only when the next step's work was queued.
    """

    keys: Sequence[str]
    sampled: sending.OnItsWay
    drafted: Sequence[int]
    scheduled_tokens: int
    seconds: float | None


class HeldHeads(MedusaProposer):
    """The serving heads, how they change while they serve, and what they may read.

    Attributes:
        running: the requests, for the memory.
        notes_at_once: whether new pairs are written in a step without drafts, too. Otherwise they
            are held: there is nothing to compute until somebody drafts again.
    """

    runner = "v2"
    running: RunningRequests
    _serves: torch.Tensor
    notes_at_once: bool = False
    _last_step: _LastStep | None = None
    _last_tokens: tuple[Sequence[str], torch.Tensor] | None = None

    def _make_ring(self) -> None:
        super()._make_ring()
        requests = self.vllm_config.scheduler_config.max_num_seqs
        self.running = RunningRequests(requests, self.num_speculative_tokens, self.device)
        self._serves = torch.ones((), dtype=torch.bool, device=self.device)

    def draft(
        self,
        hidden_BD: torch.Tensor,
        last_ids_B: torch.Tensor,
        count: int,
        sampling: DraftSampling | None = None,
        seen: Seen | None = None,
        recall: Recall | None = None,
        ending: Ending | None = None,
    ) -> Drafted:
        slots = self._slots if sampling is not None else None
        return self._core.draft(hidden_BD, last_ids_B, count, sampling, seen, slots, recall, ending)

    @property
    def slots(self) -> DraftSlots | None:
        """q of the last drafts; None if drafts are not sampled."""
        return self._slots

    def _new_vocabulary(self, size: int) -> DraftVocabulary:
        vocabulary = super()._new_vocabulary(size)
        vocabulary.count_on(self.device)
        return vocabulary

    def observe(
        self,
        keys: Sequence[str],
        slots_B: torch.Tensor,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
        drafted: Sequence[int],
    ) -> None:
        """Give the tokens that a step sampled to the memory (`Arrived.of_step` has the same
        arguments).
        """
        self._last_tokens = None
        if self.memory is None:
            return
        ids_Bn, _ = self._sampled(ids_T, rows_B, last_ids_B, sampled_B)
        running = self.running
        running.take()
        self.memory.attend(keys, running.live)
        self.memory.settle(keys, drafted, running.scores(slots_B))
        self._last_tokens = keys, running.sampled(keys, slots_B, ids_Bn, sampled_B)

    def _sampled(
        self,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that a step sampled, int64 `[B, n]`, the newest first, and which of these
        entries are any.
        """
        back_n = torch.arange(self.num_speculative_tokens + 1, device=rows_B.device)
        rows_Bn = (rows_B.unsqueeze(1) - back_n + 1).clamp(0, len(ids_T) - 1)
        ids_Bn = ids_T[rows_Bn].long().clamp_min(0)
        ids_Bn[:, 0] = last_ids_B
        return ids_Bn, back_n < sampled_B.unsqueeze(1)

    def count(
        self,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
    ) -> None:
        """Count the tokens that a step sampled for the draft vocabulary. `will_count` comes
        before.
        """
        if self.draft_vocabulary.size:
            ids_Bn, there_Bn = self._sampled(ids_T, rows_B, last_ids_B, sampled_B)
            there_Bn = there_Bn & self._serves
            self.draft_vocabulary.count(ids_Bn.flatten(), there_Bn.flatten())

    def will_count(self, requests: int) -> None:
        """What the host does for a step whose tokens are counted on the device."""
        vocabulary = self.draft_vocabulary
        if not vocabulary.size or self._calibrating is not None:
            return
        # A request whose prompt isn't finished samples nothing, so the host's count is slightly too
        # high.
        vocabulary.expect(requests)
        if vocabulary.due:
            self._refresh_vocabulary()

    @property
    def observes(self) -> bool:
        """Whether the host takes part in what is learned from a step's tokens."""
        return self.memory is not None or self.stopping is not None

    @property
    def is_still(self) -> bool:
        """Whether a step's drafts depend on nothing that the host decides for that step alone."""
        held = self._unread is not None and len(self._unread) > 0
        return self.memory is None and self.stopping is None and not held

    @property
    def read_by_drafts(self) -> tuple[object, ...]:
        """What drafting reads and writes besides a step, and how often it was replaced."""
        kept = self._slots, self._ring, self._texts, self.draft_vocabulary
        return self._core, self._core.changes, *kept

    def recall(self) -> Recall | None:
        """What the memory suggests for the drafts that follow the step observed last."""
        if self.memory is None or self._last_tokens is None:
            return None
        return self.memory.recall(*self._last_tokens)

    def verifying(self, logits_TV: torch.Tensor, rows: VerifiedRows) -> None:
        """Called when drafts are about to be verified against these logits."""
        if self.memory is not None:
            self.running.score(logits_TV, rows.widened)

    def look_back(
        self,
        hidden_TD: torch.Tensor,
        ids_T: torch.Tensor,
        rows_B: torch.Tensor,
        last_ids_B: torch.Tensor,
        sampled_B: torch.Tensor,
        at: Standing,
        drafted: Sequence[int],
        count: int,
    ) -> Seen | None:
        """What requests attend to after a step (`Arrived.of_step`) that verified `drafted` drafts
        of each, if `count` drafts follow. None for heads without a context, and without further
        drafts: then the new pairs are held, or written at once where that is a part of a recording.
        Without trained heads only the text is kept.
        """
        ring, unread = self._ring, self._unread
        fused = self._core.fused
        if ring is None or unread is None or not isinstance(fused, ContextHeads):
            return None
        # Steps that are held must be small: without drafts each request brings one pair at most.
        most = max(drafted) + 1
        step = hidden_TD, ids_T, rows_B, last_ids_B, sampled_B, at, ring.spare
        arrived = Arrived.of_step(*step, min(most, ring.pairs))
        texts = self._texts
        copier = self._core.copier
        if texts is not None and copier is not None:
            told = arrived if most <= ring.pairs else Arrived.of_step(*step, most)
            # The token x_{j+1} of a pair is one position after its state.
            self._write(texts, copier, told.slots_N, told.positions_N + 1, told.ids_N)
        if not self.drafting:
            return None
        if not count:
            if self.notes_at_once:
                fused.note(ring, arrived)
            else:
                unread.hold_pairs(arrived)
            return None
        seen = fused.look_back(ring, arrived.after(unread.take(), at, ring), at)
        if texts is None or copier is None:
            return seen
        told_BKH = copier.find(texts, at.slots_B, at.positions_B + 1)
        return replace(seen, told_BKH=told_BKH)

    def _write(
        self,
        texts: TextRing,
        copier: Copier,
        slots_N: torch.Tensor,
        positions_N: torch.Tensor,
        ids_N: torch.Tensor,
    ) -> None:
        """Write tokens, and their keys. Heads that come later search the tokens, too, and make the
        keys then (`_forget_pairs`); a deep sleep may have thrown away what keys are made of.
        """
        if self.drafting:
            copier.write(texts, slots_N, positions_N, ids_N)
        else:
            texts.write_ids(slots_N, positions_N, ids_N)

    @torch.inference_mode()
    def admit(self, admitted: Sequence[Admitted]) -> None:
        """Requests take their slots. All of them at once: a batch of rollouts arrives together, and
        each request by itself would cost the host as much as a step.
        """
        if self._calibrating is None:
            # What a request said before it was preempted has been counted step by step.
            unseen = [new.prompt for new in admitted if new.key not in self.running.live]
            self.draft_vocabulary.observe(unseen)
        self.running.begin(admitted)
        texts = self._texts
        copier = self._core.copier
        if texts is None or copier is None:
            return
        texts.begin(sending.sent([new.slot for new in admitted], self.device))
        firsts = [max(0, len(new.tokens) - texts.places) for new in admitted]
        numbers_3N = np.concatenate(
            [
                np.stack(
                    [
                        np.full(len(new.tokens) - first, new.slot),
                        np.arange(first, len(new.tokens)),
                        np.asarray(new.tokens[first:], dtype=np.int64),
                    ]
                )
                for new, first in zip(admitted, firsts, strict=True)
            ],
            axis=1,
        )
        for part_3N in torch.from_numpy(numbers_3N).split(TEXT_TOKENS_AT_ONCE, dim=1):
            self._write(texts, copier, *sending.sent(part_3N, self.device).unbind(0))

    def _forget_pairs(self) -> None:
        super()._forget_pairs()
        texts = self._texts
        copier = self._core.copier
        slots = self.running.slots
        # Without heads, as in `_write`, no key can be made; those that come make all of them.
        if self.drafting and texts is not None and copier is not None and slots:
            copier.write_again(texts, sending.sent(slots, self.device))

    @torch.inference_mode()
    def _renew(self) -> None:
        super()._renew()
        self.running.renew()
        self._last_tokens = None
        # V2's tokens are counted on the device.
        self.draft_vocabulary.forget_counts()
        self._serves.fill_(self._calibrating is None)

    def step_ended(
        self,
        keys: Sequence[str],
        sampled_B: torch.Tensor,
        drafted: Sequence[int],
        scheduled_tokens: int,
    ) -> None:
        """Take a step that verified `drafted` drafts and sampled `sampled_B` tokens of each
        request. The latter are read one step later, when their copy has reached the host without
        waiting.
        """
        last = self._last_step
        if last is not None:
            # Before the clock is read: what has passed then ends with what the device has done.
            last.sampled.arrived()
        timed = self._learns_from_steps
        seconds = self._seconds_of_step() if timed else None
        if self.device.type != "cpu":
            # This step's work is only queued: what has passed since the last call was the last
            # step. Without a request in common the engine may have been idle in between.
            between = last is not None and not set(last.keys).isdisjoint(keys)
            self._learn_of_last_step(seconds if between else None)
            seconds = None
        else:
            self._learn_of_last_step()
        if timed:
            sampled = sending.OnItsWay(sampled_B)
            self._last_step = _LastStep(keys, sampled, drafted, scheduled_tokens, seconds)

    def skip_step(self) -> None:
        """The step that begins now does not count for the times of steps."""
        self._step_began = None

    def _learn_of_last_step(self, seconds: float | None = None) -> None:
        """Learn from the last step.

        Args:
            seconds: how long it took, if that was not known when its work was queued.
        """
        last = self._last_step
        self._last_step = None
        if last is None:
            return
        sampled = last.sampled.arrived().tolist()
        self._learn(sampled, last.drafted, last.scheduled_tokens, last.seconds or seconds)

    def calibrate(self, drafts: int | None) -> list[list[float]]:
        self._learn_of_last_step()
        # On the device, because what reads it is recorded.
        self._serves.fill_(drafts is None)
        return super().calibrate(drafts)

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Requests of vLLM's own warm-up are artificial, as those of a calibration, and their steps
        take seconds, because kernels are compiled in them.
        """
        self.calibrate(self.num_drafts)
        try:
            yield
        finally:
            if self._calibrating is not None:
                # vLLM has seeded its generators for what it will serve.
                self._calibrating.random_states = random_states(self.device)
            self.calibrate(None)

    def configure(self, settings: Drafting) -> Drafting:
        if settings.get("stop_below") and is_asynchronous(self.vllm_config):
            raise ConfigError(
                "This engine schedules each step before it knows where runs of drafts end.",
                given=f"stop_below={settings['stop_below']}",
                expected="0 (engine.stop_below=null)",
                do="Start the engine with engine.stop_below, or with"
                " engine.extra.async_scheduling=false.",
            )
        return super().configure(settings)


class MedusaSpeculator(DraftModelSpeculator):
    """V2's model runner calls this for drafts after each step.

    Attributes:
        drafter: the heads; the worker extension swaps and configures them.
        states: V2's sampling settings by slot; set when the first request arrives.
        ahead: whether steps are scheduled before the drafts of the last one are made
            (`asynchronous`).
        asked: number of drafts that later steps should make, if they are scheduled ahead; None:
            no step has been made yet.
        count: number of drafts that the last step made for each request.
        draft_logits: what V2 verifies against; it hands this on and never looks into it.
        lengths_B: int64, number of drafts to verify for each request, if some have fewer than
            `count`; None: all have `count`.
    """

    _graphs: DraftGraphs | None = None
    ahead: bool = False
    asked: int | None = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any = None) -> None:
        super().__init__(vllm_config, device)
        self.drafter = HeldHeads(vllm_config, device)
        self.ahead = is_asynchronous(vllm_config)
        self.states: Any = None
        self.count = 0
        self.lengths_B: torch.Tensor | None = None
        # One more for requests that only pad a batch.
        slots = self.max_num_reqs + 1
        self._grammar_S = torch.zeros(slots, dtype=torch.bool, device=device)
        # What these draft has no q that anybody could look up.
        self._grammar_S[-1] = True
        self._requests_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._keys_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._temperature_S = torch.zeros(slots, device=device)
        self._admitted = 0
        self.draft_logits: Any = DraftsToVerify(self.drafter, self._requests_S, self.vocab_size)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        self.drafter.load_model(target_model)
        return self.drafter.heads

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Drafting is recorded where the model is (`draft_graphs`). With tensor parallelism its
        products are collectives of all ranks, which are not recorded.
        """
        alone = self.vllm_config.parallel_config.world_size == 1
        if self.device.type == "cuda" and cudagraph_mode != CUDAGraphMode.NONE and alone:
            record = CudaRecorder(self.device)
            self._graphs = DraftGraphs(self.max_num_reqs, self.num_speculative_steps, record)

    def capture(self, *_: Any) -> None:
        """Sizes are recorded when they come up: after each swap anew."""

    def admit(self, admitted: Sequence[Admitted], states: Any) -> None:
        """Requests have arrived, or returned after a preemption: their slots hold other requests'
        values.
        """
        if not admitted:
            return
        self.drafter.admit(admitted)
        self.states = states
        # Mixed here once: every step would need a dozen kernels for it.
        keys = keys_of([int(states.seeds.np[new.slot]) for new in admitted]).tolist()
        serials = range(self._admitted + 1, self._admitted + 1 + len(admitted))
        # As integers, to be sent with the others.
        temperatures = states.temperature.np[[new.slot for new in admitted]].view(np.int32).tolist()
        rows = [
            (new.slot, *values, new.has_grammar)
            for new, *values in zip(admitted, serials, keys, temperatures, strict=True)
        ]
        self._admitted += len(admitted)
        numbers = sending.sent(rows, self.device).unbind(1)
        slots_N, serials_N, keys_N, temperatures_N, grammar_N = numbers
        self._temperature_S[slots_N] = temperatures_N.int().view(torch.float32)
        self._requests_S[slots_N] = serials_N
        self._keys_S[slots_N] = keys_N
        self._grammar_S[slots_N] = grammar_N.bool()

    # The last parameters differ by release; only those named here are read.
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
        """Draft ids int64 `[B, K]`; columns from `count` on are meaningless and not scheduled."""
        drafter = self.drafter
        batch = input_batch.num_reqs
        most = self.num_speculative_steps
        if num_speculative_tokens is not None:
            most = min(most, num_speculative_tokens)
        drafted: list[int] = []
        told: list[int] = []
        if dummy_run:
            # Whatever is trained now: vLLM measures by it how much memory is left, and later heads
            # and settings may draft as many.
            count = min(most, drafter.num_speculative_tokens) if drafter.fed else 0
        else:
            drafted = (np.diff(input_batch.cu_num_logits_np)[:batch] - 1).tolist()
            # vLLM gives a request whose prompt is cached as many drafts as there are heads, so that
            # all requests of a step have the same shape. Nobody drafted these.
            prefilling = getattr(input_batch, "is_prefilling_np", None)
            told = (
                drafted
                if prefilling is None or not prefilling[:batch].any()
                else np.where(prefilling[:batch], 0, drafted).tolist()
            )
            keys = input_batch.req_ids[:batch]
            drafter.step_ended(keys, num_sampled[:batch], told, input_batch.num_tokens)
            self.count = count = self._number(most, batch)
        cuts: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if count and drafter.slots is not None:
            cuts = self._cuts(input_batch.idx_mapping[:batch], input_batch.idx_mapping_np[:batch])
        step = DraftStep(
            last_hidden_states,
            input_batch.input_ids,
            input_batch.positions,
            input_batch.query_start_loc[1 : batch + 1],
            num_rejected[:batch],
            num_sampled[:batch],
            input_batch.idx_mapping[:batch],
            last_sampled,
            *cuts,
        )
        if dummy_run:
            return self._padded(self._draft(step, count, None).ids_BK)
        self.lengths_B = None
        drafter.will_count(batch)
        if drafter.observes:
            at, rows_B, last_ids_B = self._newest(step)
            drafter.observe(
                input_batch.req_ids[:batch],
                at.slots_B,
                input_batch.input_ids,
                rows_B,
                last_ids_B,
                num_sampled[:batch],
                told,
            )
            if drafter.stopping is not None:
                drafted_B = sending.sent(told, self.device)
                accepted_B = (num_sampled[:batch] - 1).clamp_min(0)
                drafter.stopping.settle(at.slots_B, drafted_B, accepted_B)
        if not drafter.drafting:
            return self._padded(self._draft(step, 0, drafted).ids_BK)
        drafter.notes_at_once = self._graphs is not None and not self._graphs.broken
        if self._graphs is not None and drafter.is_still:
            self._graphs.reads(*drafter.read_by_drafts, step.last_S1.data_ptr())
            found_Bk = self._graphs.drafts(
                step,
                input_batch.num_tokens,
                count,
                lambda still: self._draft(still, count, [self.num_speculative_steps]).ids_BK,
            )
            if found_Bk is not None:
                if self._graphs.recorded_now:
                    drafter.skip_step()
                return self._padded(found_Bk)
        found = self._draft(step, count, drafted)
        self.lengths_B = found.lengths_B
        return self._padded(found.ids_BK)

    def _padded(self, ids_Bk: torch.Tensor) -> torch.Tensor:
        """With zeros for the drafts that were not made. V2 copies what it gets at once, so it may
        belong to a recording.
        """
        missing = self.num_speculative_steps - ids_Bk.shape[1]
        return torch.nn.functional.pad(ids_Bk, (0, missing)) if missing else ids_Bk

    def _number(self, most: int, batch: int) -> int:
        """Number of drafts to make now, at most `most`."""
        drafter = self.drafter
        if not self.ahead:
            return drafter.wanted(most, batch)
        # Only one rank's outputs reach the scheduler, so the ranks need not agree here.
        self.asked = drafter.wanted(self.num_speculative_steps, batch, agree=int)
        # The next step will verify `most` of them, whatever is in their places. Without a q of this
        # step any token is a valid draft.
        return most if drafter.drafting else 0

    def _newest(self, step: DraftStep) -> tuple[Standing, torch.Tensor, torch.Tensor]:
        """Where requests stand, the rows of their last accepted tokens, and these tokens."""
        slots_B = step.slots_B.long()
        rows_B = (step.ends_B - 1 - step.rejected_B).long()
        at = Standing(slots_B, self._requests_S[slots_B], step.positions_T[rows_B].long())
        # V2's own table has no slot for requests that pad a batch.
        own_B = slots_B.clamp_max(self.max_num_reqs - 1)
        return at, rows_B, step.last_S1[own_B].view(-1)

    def _draft(self, step: DraftStep, count: int, drafted: Sequence[int] | None) -> Drafted:
        """`count` drafts for each request; with 0 only what arrived is noted.

        Args:
            drafted: number of drafts that the step verified, by request (or the largest alone);
                None: a dummy run, of which nothing may be kept.
        """
        drafter = self.drafter
        at, rows_B, last_ids_B = self._newest(step)
        seen = None
        if drafted is not None:
            drafter.count(step.ids_T, rows_B, last_ids_B, step.sampled_B)
            seen = drafter.look_back(
                step.hidden_TD,
                step.ids_T,
                rows_B,
                last_ids_B,
                step.sampled_B,
                at,
                drafted,
                count,
            )
        if not count:
            return Drafted(last_ids_B.new_zeros(len(rows_B), 0))
        hidden_BD = step.hidden_TD[rows_B]
        if drafted is None:
            seen = drafter.seen_alone(hidden_BD, at.slots_B)
        if drafter.slots is None:
            return drafter.draft(hidden_BD, last_ids_B, count, seen=seen)
        temperature_B = self._temperature_S[at.slots_B]
        temperature_B = temperature_B.masked_fill(self._grammar_S[at.slots_B], 0.0)
        keys_B = self._keys_S[at.slots_B]
        noise_BK = uniforms(at.positions_B, keys_B, None, DRAFT_STREAM, count)
        sampling = DraftSampling(temperature_B, noise_BK, step.top_k_B, step.top_p_B)
        recall = ending = None
        if drafted is not None:
            recall = drafter.recall()
            if drafter.stopping is not None:
                ending = drafter.stopping.begin(at.slots_B)
        drafts = drafter.draft(hidden_BD, last_ids_B, count, sampling, seen, recall, ending)
        if drafted is None:
            # What was drawn with is overwritten. The table, too, is part of the profile.
            drafter.slots.forget()
            self.draft_logits.rehearse(len(rows_B) * (count + 1))
        else:
            # Verification starts at the tokens sampled last, one position after these.
            stamps_B = stamps(at.requests_B, at.positions_B + 1)
            stamps_B = torch.where(temperature_B > 0, stamps_B, NOTHING)
            drafter.slots.stamp(at.slots_B, stamps_B, count)
        return drafts

    def _cuts(
        self, slots_B: torch.Tensor, slots: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """top-k and top-p of each request; None if no request has any. (vLLM 0.33 returns more.)"""
        if self.states is None:
            return None, None
        more = (self.vocab_size,) if CUTS_ASK_FOR_V else ()
        top_k_B, top_p_B, *_ = self.states.get_top_k_top_p(slots_B, slots, *more)
        return top_k_B, top_p_B


class DraftsToVerify:
    """Stands where V2 has a table of draft logits `[S, K, V]`, from which it reads in verification.

    Attributes:
        drafter: has the drafts.
        rows_at_once: rows of logits for which a table is made at a time.
    """

    def __init__(self, drafter: HeldHeads, requests_S: torch.Tensor, vocab_size: int) -> None:
        self.drafter = drafter
        self._requests_S = requests_S
        self._vocab_size = vocab_size
        self.rows_at_once = table_rows_at_once(vocab_size)

    def by_row(
        self, rows: VerifiedRows, temperature_S: torch.Tensor, seed_S: torch.Tensor
    ) -> q_kernel.ByRow | None:
        """What is looked up by row; None: all drafts are one-hot."""
        slots = self.drafter.slots
        if slots is None:
            return None
        tables_S = self._requests_S, temperature_S, seed_S
        return q_kernel.by_row(slots, rows, *tables_S, self._vocab_size)

    def rehearse(self, rows: int) -> None:
        """Make a table as large as that of a step with this many rows."""
        nothing_T = self._requests_S.new_zeros(min(rows, self.rows_at_once))
        temperature_S = torch.ones_like(self._requests_S, dtype=torch.float32)
        # In vLLM's own types, for which the kernel is compiled now.
        few_T = nothing_T.int()
        dummy = VerifiedRows(nothing_T, few_T, nothing_T, few_T)
        self.by_row(dummy, temperature_S, self._requests_S)


# ---- what is replaced in vLLM


def with_our_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """`init_speculator` of the V2 runner, which has no Medusa."""

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: torch.device, *args: Any) -> Any:
        if heads_folder(vllm_config):
            refuse_lossy_rule(rule_of(vllm_config.speculative_config))
            refuse_what_heads_lack(vllm_config)
            return MedusaSpeculator(vllm_config, device, *args)
        return original(vllm_config, device, *args)

    return init_speculator


def medusa_allowed(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`VllmConfig._get_v2_model_runner_unsupported_features`: heads are supported now."""

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
            drafter = self.speculator.drafter
            drafter.running.end(scheduler_output.finished_req_ids)
            slots = self.req_states.req_id_to_index
            admitted = []
            for new in scheduler_output.scheduled_new_reqs:
                prompt = new.prompt_token_ids or ()
                tokens = new.prefill_token_ids or prompt
                slot = slots[new.req_id]
                admitted.append(Admitted(new.req_id, slot, prompt, tokens, new.sampling_params))
            self.speculator.admit(admitted, self.sampler.sampling_states)

    return add_requests


def without_learning(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Worker.compile_or_warm_up_model`, which serves requests of its own with V2."""

    @functools.wraps(original)
    def compile_or_warm_up_model(self: Any) -> Any:
        speculator = getattr(self.model_runner, "speculator", None)
        if not isinstance(speculator, MedusaSpeculator):
            return original(self)
        with speculator.drafter.warming_up():
            return original(self)

    return compile_or_warm_up_model


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


def with_q_as_it_is_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """`rejection_sample`: verifies against a table of only these rows of logits. What the kernels
    look up by a request's slot is passed by row instead; they look it up by the request's first
    row.
    """

    @functools.wraps(original)
    def rejection_sample(
        target_logits: torch.Tensor,
        draft_logits: Any,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(draft_logits, DraftsToVerify):
            rows = VerifiedRows(expanded_idx_mapping, expanded_local_pos, pos, draft_sampled)
            draft_logits.drafter.verifying(target_logits, rows)
            found = draft_logits.by_row(rows, temperature, seed)
            draft_logits = None
            if found is not None:
                if kwargs.get("watermarking") is not None:
                    kwargs["watermarking"] = kwargs["watermarking"][expanded_idx_mapping.long()]
                draft_logits, expanded_idx_mapping, temperature, seed = found
                idx_mapping = cu_num_logits[:-1]
        return original(
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            temperature,
            seed,
            *args,
            **kwargs,
        )

    return rejection_sample


def in_parts_of_our_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RejectionSampler._verify_in_chunks`: V2 verifies so many requests at a time that their
    logits take a gigabyte; our table of them would take another.
    """

    @functools.wraps(original)
    def _verify_in_chunks(
        self: Any,
        logits: Any,
        input_batch: Any,
        draft_logits: Any,
        draft_sampled: Any,
        pos: Any,
        max_chunk_logits: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(draft_logits, DraftsToVerify):
            max_chunk_logits = min(max_chunk_logits, draft_logits.rows_at_once)
        return original(
            self,
            logits,
            input_batch,
            draft_logits,
            draft_sampled,
            pos,
            max_chunk_logits,
            *args,
            **kwargs,
        )

    return _verify_in_chunks


def with_graphs_for_each_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """`CudaGraphManager._init_candidates`: the model's step is captured whole for one number of
    drafts, the largest. With any other its attention is launched layer by layer; on an H100 an 8B's
    step with one draft then took twice as long as one with four. V2 captures all numbers that its
    own option names for some batch size; here each may be chosen at any. With fewer sequences than
    numbers the smallest ones are left out.
    """

    @functools.wraps(original)
    def _init_candidates(self: Any) -> Any:
        config = self.vllm_config.speculative_config
        if not heads_folder(self.vllm_config) or config.uses_dynamic_speculative_decoding():
            return original(self)
        most = self.vllm_config.num_speculative_tokens
        config.num_speculative_tokens_per_batch_size = [
            (place + 1, place + 1, most - place) for place in range(most + 1)
        ]
        try:
            original(self)
        finally:
            config.num_speculative_tokens_per_batch_size = None
        _offer_each_number(self)

    return _init_candidates


def _offer_each_number(manager: Any) -> None:
    """Offer each step the smallest captured one of every number of drafts. V2 offers only those of
    the next number of tokens, which may all be of other numbers of drafts.
    """
    whole = sorted(
        manager._capture_descs.get(CUDAGraphMode.FULL, ()), key=lambda step: step.num_tokens
    )
    for (tokens, loras), offered in manager._candidates.items():
        smallest: dict[Any, Any] = {}
        for step in whole:
            if step.num_tokens >= tokens and step.num_active_loras == loras:
                smallest.setdefault((step.uniform_token_count, step.num_ubatches), step)
        rest = [step for step in offered if step.cg_mode != CUDAGraphMode.FULL]
        offered[:] = [*smallest.values(), *rest]


PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (v2_runner, "init_speculator", with_our_speculator),
    (VllmConfig, "_get_v2_model_runner_unsupported_features", medusa_allowed),
    (v2_runner.GPUModelRunner, "add_requests", with_requests_admitted),
    (v2_runner.GPUModelRunner, "take_draft_token_ids", with_as_many_drafts),
    (gpu_worker.Worker, "compile_or_warm_up_model", without_learning),
    (v2_sampler, "rejection_sample", with_q_as_it_is_read),
    (v2_sampler.RejectionSampler, "_verify_in_chunks", in_parts_of_our_size),
    *(asynchronous.PLACES if schedules_ahead(vllm_version()) else ()),
    *(
        [(cudagraph_utils.CudaGraphManager, "_init_candidates", with_graphs_for_each_number)]
        if has_graphs(vllm_version())
        else []
    ),
)
