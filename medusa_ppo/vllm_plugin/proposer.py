"""Our draft proposer, which replaces vLLM's Medusa proposer: our heads, the engine's own lm_head,
any number of drafts.

A draft folder written by heads/checkpoint.py is served by `heads.modules.MedusaHeads` as plain
torch parameters. The engine's lm_head and embedding are used in place, so they follow every actor
sync. Any other Medusa folder is left to vLLM's own proposer.

Shape letters: B requests, K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from heads.checkpoint import checksum, load_heads
from heads.errors import ConfigError, MedusaError, SwapError
from heads.heads_config import COPY_WINDOW, TEMPERATURES
from heads.modules import MedusaHeads
from medusa_ppo.contract.status import Checked
from medusa_ppo.drafting import sending
from medusa_ppo.drafting.choice import DraftChooser
from medusa_ppo.drafting.context import (
    Arrived,
    ContextHeads,
    PairRing,
    Seen,
    Standing,
    UnreadSteps,
)
from medusa_ppo.drafting.core import Drafted, DraftingCore, DraftSampling
from medusa_ppo.drafting.noise import ACCEPT_STREAM, DRAFT_STREAM, LAST_STREAM, uniforms
from medusa_ppo.drafting.products import DraftVocabulary
from medusa_ppo.drafting.running_memory import RunningMemory
from medusa_ppo.drafting.slots import (
    NOTHING,
    DraftSlots,
    Seating,
    Seats,
    Traits,
    stamps,
)
from medusa_ppo.drafting.stopping import Stopping
from medusa_ppo.drafting.texts import TextRing, WrittenTexts
from medusa_ppo.drafting.verify import Proposed
from medusa_ppo.vllm_plugin.calibrating import Calibrating
from medusa_ppo.vllm_plugin.confirm import (
    Plain,
    ReadHeads,
    check_finite,
    check_fit,
    find_damage,
    find_difference,
    fingerprint,
    fixed_inputs,
    fixed_sampling,
    read_state,
    sums_of_bits,
    what_is_seen,
)
from medusa_ppo.vllm_plugin.drafter import Drafter
from medusa_ppo.vllm_plugin.int8_products import packed_linear, packs_8_bit
from medusa_ppo.vllm_plugin.rank_agreement import (
    agreed,
    agreed_by_all,
    only_rank,
    shared_product,
    together,
)
from medusa_ppo.vllm_plugin.second_set import SecondSet, SetOrder, let_go
from medusa_ppo.vllm_plugin.speculation import heads_folder, why_sequences_wait
from medusa_ppo.vllm_plugin.target_tables import (
    embedding_module,
    lm_head_weight,
    refuse_quantised_lm_head,
)
from medusa_ppo.vllm_plugin.worker_calls import DRAFTING, Drafting

logger = logging.getLogger(__name__)

TEXT_TOKENS_AT_ONCE = 2048
"""Tokens whose keys are computed at once. With a large vocabulary each takes a few embeddings, in
all 50 MB at a width of 4,096, which no profile sees.
"""
MARK = (0x5EED, -1)
"""Stands beside the heads: untrained ones may be all zeros, and so may memory be that was thrown
away.
"""
MEMORY_LENGTHS = 16
"""The memory's texts have room for this many responses of full length."""


def image_tokens(hf_config: Any) -> tuple[int, ...]:
    """The tokens that stand for images in prompts, from a vision-language model's configuration."""
    names = ("image_token_id", "image_token_index", "video_token_id")
    found = (getattr(hf_config, name, None) for name in names)
    return tuple(token for token in found if token is not None)


class MedusaProposer(Drafter):
    """vLLM's model runner calls this for drafts after each step.

    Attributes:
        runner: `v1` or `v2`.
    """

    runner = "v1"

    heads: MedusaHeads
    _core: DraftingCore
    _mark: torch.Tensor | None = None
    _slots: DraftSlots | None = None
    _seats: Seats
    _sent_B: torch.Tensor | None = None
    _target: nn.Module
    _target_loaded: bool = False
    _actors: int = 0
    _ring: PairRing | None = None
    _unread: UnreadSteps | None = None
    _texts: TextRing | None = None
    _written: WrittenTexts | None = None
    _came: tuple[torch.Tensor, Sequence[Sequence[int]], Sequence[int]] | None = None
    memory: RunningMemory | None = None
    stopping: Stopping | None = None
    _calibrating: Calibrating | None = None
    _running: tuple[Sequence[str], Mapping[str, Any]] = ((), {})

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.version = 0
        self.heads_checksum = ""
        self.fed = True  # Without heads nothing is drafted, whatever num_drafts says.
        self.num_drafts: int = self.num_speculative_tokens
        # What is set at the start is part of the memory that vLLM profiles, and reaches engines
        # that nobody calls. Where nothing is set, the engine drafts as one of a run does.
        self._first: Drafting = (vllm_config.additional_config or {}).get(
            DRAFTING, Drafting(choose=True)
        )
        self.sampled = bool(self._first.get("sampled", True))
        self.draft_temperature = 1.0
        self.choose = False
        self.chooser = DraftChooser(self.num_drafts)
        self.draft_vocabulary = DraftVocabulary(0, 0)
        self._step_began: float | None = None
        self._fingerprint: list[int] = []
        self._seating = Seating(vllm_config.scheduler_config.max_num_seqs, device)
        self._last_ids: list[int] = []

    # ---- what vLLM calls

    def load_model(self, target_model: nn.Module) -> None:
        refuse_quantised_lm_head(target_model)
        folder = heads_folder(self.vllm_config)
        config = self.vllm_config.model_config
        sizes = {"hidden_size": config.get_hidden_size(), "vocab_size": config.get_vocab_size()}
        heads, metadata = together("loading the heads", lambda: load_heads(folder, **sizes))
        # The digest is of the file's own numbers, before they are rounded, as it is after a swap.
        self.heads_checksum = checksum(heads.trainable_state())
        if self.num_speculative_tokens > heads.config.num_heads:
            raise ConfigError(
                "There are more drafts than trained heads.",
                given=f"num_speculative_tokens={self.num_speculative_tokens}",
                expected=f"<= {heads.config.num_heads}, the heads in {folder}",
                do="Draft fewer tokens or train more heads.",
            )
        scheduler = self.vllm_config.scheduler_config
        if waiting := why_sequences_wait(scheduler, self.num_speculative_tokens):
            logger.warning("%s", waiting)
        self.model = self.heads = (
            heads.to(device=self.device, dtype=self.dtype).requires_grad_(False).eval()
        )
        self.version = metadata.version
        self._target = target_model
        self._watch(target_model)
        self._fingerprint = fingerprint(self.heads)
        self._mark = torch.tensor(MARK, device=self.device)
        self._untrained = self.heads.untrained
        if self._untrained:
            logger.info(
                "The heads of %s were never trained; nothing is drafted until trained ones are"
                " fed.",
                folder,
            )
        self._core = DraftingCore(
            self.heads,
            self._lm_head,
            self._embedding(),
            packed_linear,
            image_tokens(config.hf_config),
            pack_own=shared_product(packed_linear),
        )
        # By the companion's rule: heads were trained for these tokens only.
        first_vocab = int(self._first.get("draft_vocab", self.heads.config.draft_vocabulary))
        shared = self.heads.config.lm_head == "shared"
        self.draft_vocabulary = self._new_vocabulary(first_vocab if shared else 0)
        self._refresh_vocabulary()
        self._make_ring()
        self.configure(self._first)

    def _watch(self, target_model: nn.Module) -> None:
        """Notice weights that are loaded into the actor without our calls, as TRL and verl load
        them: by this method of vLLM's model, on all ranks between two steps.
        """
        load_weights: Any = getattr(target_model, "load_weights", None)
        if load_weights is None:
            return

        @functools.wraps(load_weights)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.target_loaded()
            return load_weights(*args, **kwargs)

        target_model.load_weights = watched  # type: ignore[assignment]

    def target_loaded(self) -> None:
        """The actor is being given new weights; what was read from the old ones is renewed before
        the next drafts, when all of them are there.
        """
        self._target_loaded = True

    @property
    def drafting(self) -> bool:
        """Whether there are trained heads. An untrained head repeats lm_head's prediction and costs
        as much as a trained one; so calibration times untrained heads too.
        """
        return self.fed and (self._calibrating is not None or not self._untrained)

    def _make_ring(self) -> None:
        config = self.heads.config
        fused = self._core.fused
        if isinstance(fused, ContextHeads):
            self._ring = PairRing(
                self.vllm_config.scheduler_config.max_num_seqs,
                config.context,
                fused.kept_width,
                fused.dtype,
                self.device,
            )
            self._unread = UnreadSteps(config.context)
        if config.copies:
            self._texts = TextRing(
                self.vllm_config.scheduler_config.max_num_seqs,
                min(COPY_WINDOW, self.vllm_config.model_config.max_model_len),
                config.copy_parts,
                config.copy_width // config.copy_parts,
                self.dtype,
                self.device,
            )
            self._written = WrittenTexts(self._texts)

    @torch.inference_mode()
    def _use_vocabulary(self) -> None:
        """Draft from the draft vocabulary's tokens, or from all. The q kept so far is forgotten;
        its drafts then count as one-hot.

        The table of q is kept while its size is right: it takes gigabytes, and a new one would not
        lie in the memory that a sleeping engine gives away.
        """
        ids_W = self.draft_vocabulary.ids_W
        width = self.heads.config.vocab_size if ids_W is None else len(ids_W)
        slots = self._slots
        if not self.sampled:
            slots = None
        elif slots is None or slots.width != width:
            # On all ranks before anything is replaced: one of them may have no room.
            slots = together("making room for q", lambda: self._new_slots(width))
        self._core.use_vocabulary(ids_W, self.draft_vocabulary.product)
        if slots is not None:
            slots.use(ids_W)
        self._slots = slots

    def _new_slots(self, width: int) -> DraftSlots:
        size = self.vllm_config.scheduler_config.max_num_seqs
        return DraftSlots(size, self.num_speculative_tokens, width, self.device)

    def _embedding(self) -> Any:
        return embedding_module(self._target) if self.heads.config.kind == "hydra" else None

    def _lm_head(self, features_ND: torch.Tensor) -> torch.Tensor:
        """Logits `[N, V]` by the engine's own lm_head, prepacked and sharded as it is. It is always
        that of the last actor sync.
        """
        return self._target.compute_logits(features_ND.to(self.dtype))  # type: ignore[operator]

    def _new_vocabulary(self, size: int) -> DraftVocabulary:
        cpu = self.device.type == "cpu"
        own = self.heads.config.lm_head == "own"
        pack = shared_product(packed_linear)
        vocab_size = self.heads.config.vocab_size
        return DraftVocabulary(size, vocab_size, pack, cpu and not own, stand_in=True)

    def propose(
        self,
        num_speculative_tokens: int,
        target_hidden_states: torch.Tensor,
        sampling_metadata: Any,
        slot_mappings: Any = None,
    ) -> torch.Tensor | list[list[int]]:
        """Draft ids int64 `[B, k]` with k = min(num_speculative_tokens, num_drafts), which may be
        0; lists if requests have fewer.

        Args:
            target_hidden_states: h_t `[B, D]` of each request, after the last norm.
        """
        # vLLM's name for it: vLLM itself calls this where a test takes the patches out.
        hidden_BD = target_hidden_states
        count = self.wanted(num_speculative_tokens, hidden_BD.shape[0])
        if count == 0:
            self._hold()
            # Lists, because vLLM uses them as they are; it would first copy a tensor to the host.
            return [[] for _ in range(hidden_BD.shape[0])]
        seen = self._look_back()
        last_ids_B = sending.sent(self._last_ids, self.device)
        if not self.sampled or sampling_metadata.all_greedy:
            return self._core.draft(hidden_BD, last_ids_B, count, seen=seen).ids_BK
        drafted = self._draft_and_keep(hidden_BD, last_ids_B, count, sampling_metadata, seen)
        if drafted.lengths_B is None:
            return drafted.ids_BK
        return [
            ids[:length]
            for ids, length in zip(drafted.ids_BK.tolist(), drafted.lengths_B.tolist(), strict=True)
        ]

    def wanted(self, most: int, batch: int, agree: Callable[[int], int] = agreed) -> int:
        """Number of drafts in the next step for `batch` requests, at most `most`.

        Args:
            agree: makes one number of all ranks' numbers.
        """
        if self._target_loaded:
            self.target_changed()
        count = min(most, self.num_drafts) if self.drafting else 0
        if self._calibrating is not None:
            return min(count, self._calibrating.drafts)
        if self.choose and count:
            # Each rank learns from its own clock, and all must draft the same number: the first one
            # decides.
            return min(count, agree(self.chooser.choose(batch)))
        return count

    def _draft_and_keep(
        self,
        hidden_BD: torch.Tensor,
        last_ids_B: torch.Tensor,
        count: int,
        sampling_metadata: Any,
        seen: Seen | None,
    ) -> Drafted:
        """Sampled drafts; their q is kept until verification."""
        assert self._slots is not None, "sampled drafts need slots"
        seats = self._seats
        sm = sampling_metadata
        temperature_B = sm.temperature if seats.drawn_B is None else sm.temperature * seats.drawn_B
        noise_BK = uniforms(self._positions_B, seats.keys_B, seats.seeded_B, DRAFT_STREAM, count)
        how = DraftSampling(temperature_B, noise_BK, sm.top_k, sm.top_p)
        recall = None if self.memory is None else self.memory.recall(self._running[0])
        ending = None if self.stopping is None else self.stopping.begin(seats.slots_B)
        drafted = self._core.draft(
            hidden_BD, last_ids_B, count, how, seen, self._slots, recall, ending
        )
        stamps_B = torch.where(
            temperature_B > 0, stamps(seats.requests_B, self._positions_B), NOTHING
        )
        self._slots.stamp(seats.slots_B, stamps_B, count)
        return drafted

    # ---- called by v1_runner.py

    def seat(
        self,
        request_ids: Sequence[str],
        live_requests: Mapping[str, Any],
        tokens: Any,
        token_ids: Any = None,
    ) -> None:
        """Set which requests are in the batch now, before anything is verified or drafted.

        Args:
            live_requests: vLLM's states of all running requests.
            tokens: numpy, number of tokens of each request in the batch; it drafts after these.
            token_ids: numpy, these tokens, one row for each request in the batch.
        """
        self._tokens_B, self._sent_B = tokens, None
        self._token_ids = token_ids
        self._seats = self._seating.seat(
            request_ids, lambda key: self._meet(live_requests[key]), live_requests
        )
        self._running = request_ids, live_requests

    def arrive(self, request_ids: Iterable[str]) -> None:
        """These requests are new, though earlier ones may have had the same ids."""
        self._seating.arrive(request_ids)

    @property
    def _positions_B(self) -> torch.Tensor:
        """Number of tokens of each request in the batch, int64; sent to the device on first use."""
        if self._sent_B is None:
            self._sent_B = sending.sent(self._tokens_B, self.device)
        return self._sent_B

    def _meet(self, request: Any) -> Traits:
        """The traits of a new request, from vLLM's state."""
        asked = request.sampling_params
        if self._calibrating is None:
            self.draft_vocabulary.observe([request.prompt_token_ids or ()])
        return (
            Traits() if asked is None else Traits(asked.seed, asked.structured_outputs is not None)
        )

    def proposed(self, counts: Sequence[int], all_greedy: bool) -> Proposed | None:
        """What verification needs for `counts` drafts of each request (`v1_runner`). None: all are
        one-hot, and vLLM's own verification handles them.
        """
        width = max(counts)
        seats = self._seats
        stamps_B = stamps(seats.requests_B, self._positions_B)
        kept = (
            self._slots.look_up(seats.slots_B, stamps_B, width)
            if self._slots is not None and width and not all_greedy
            else None
        )
        if kept is None and (seats.keys_B is None or self.device.type != "cpu"):
            return None
        streams = ((ACCEPT_STREAM, width), (LAST_STREAM, 1))
        noise = [
            uniforms(self._positions_B, seats.keys_B, seats.seeded_B, *stream) for stream in streams
        ]
        return Proposed(kept, torch.cat(noise, dim=1))

    def before_step(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        drafted: Sequence[int],
        scheduled_tokens: int,
        hidden_TD: torch.Tensor,
        placeholders: Sequence[int] = (),
    ) -> None:
        """Take what the last step sampled, before the next drafts are made.

        Args:
            sampled_token_ids: new tokens by request; none for a request whose prompt isn't
                finished.
            drafted: number of verified drafts, by request.
            scheduled_tokens: number of tokens that the model computed, prompts included.
            hidden_TD: the states that verification read: one more than drafts for each request, so
                one for a request without drafts.
            placeholders: how many of `drafted` nobody drafted, by request; empty: none. vLLM gives
                a request whose prompt is cached as many as there are heads, so that all requests of
                a step have the same shape.
        """
        self._came = hidden_TD, sampled_token_ids, drafted
        if placeholders:
            drafted = [count - empty for count, empty in zip(drafted, placeholders, strict=True)]
        self._last_ids = [tokens[-1] if tokens else 0 for tokens in sampled_token_ids]
        if self._calibrating is None:
            self.draft_vocabulary.observe(sampled_token_ids)
            if self.draft_vocabulary.due:
                self._refresh_vocabulary()
        if self._learns_from_steps:
            sampled = [len(tokens) for tokens in sampled_token_ids]
            self._learn(sampled, drafted, scheduled_tokens, self._seconds_of_step())
        accepted = [max(len(tokens) - 1, 0) for tokens in sampled_token_ids]
        if self.memory is not None:
            self.memory.attend(*self._running)
            self.memory.settle(self._running[0], drafted)
        if self.stopping is not None:
            counts_2B = sending.sent([list(drafted), accepted], self.device)
            self.stopping.settle(self._seats.slots_B, *counts_2B.unbind(0))

    def _hold(self) -> None:
        """Only keep what arrived in a step without drafts, since that must cost almost nothing."""
        if self._unread is not None and self._came is not None and self.drafting:
            # Copied, because vLLM overwrites the numbers of tokens.
            at = partial(self._standing, self._seats, self._tokens_B.copy())
            self._unread.hold(*self._came, at)
        self._came = None

    def _standing(self, seats: Seats, tokens_B: np.ndarray) -> Standing:
        return Standing(seats.slots_B, seats.requests_B, sending.sent(tokens_B, self.device))

    @torch.inference_mode()
    def _look_back(self) -> Seen | None:
        """What the requests that will get drafts attend to."""
        ring, unread = self._ring, self._unread
        if ring is None or unread is None or self._came is None or not self.drafting:
            return None
        came = self._came
        self._came = None
        at = Standing(self._seats.slots_B, self._seats.requests_B, self._positions_B)
        if not any(came[1]):
            return None
        now = Arrived.of_lists(*came, at, ring.pairs)
        arrived = now.after(unread.take(), at, ring)
        fused = self._core.fused
        assert isinstance(fused, ContextHeads), "a ring is made for heads with a context"
        seen = fused.look_back(ring, arrived, at)
        if self._texts is not None:
            seen = replace(seen, told_BKH=self._look_up_texts(self._texts))
        return seen

    def _look_up_texts(self, ring: TextRing) -> torch.Tensor | None:
        """Write the tokens that arrived since, and find what the next drafts may copy."""
        copier = self._core.copier
        if copier is None or self._written is None or self._token_ids is None:
            return None
        slots_B, serials_B = self._seats.host_2B
        request_N, position_N = self._written.missing(slots_B, serials_B, self._tokens_B)
        ids_N = self._token_ids[request_N, position_N]
        numbers_3N = np.stack([slots_B[request_N], position_N, ids_N.astype(np.int64)])
        for part_3N in torch.from_numpy(numbers_3N).split(TEXT_TOKENS_AT_ONCE, dim=1):
            copier.write(ring, *sending.sent(part_3N, self.device).unbind(0))
        longest = int(self._tokens_B.max())
        return copier.find(ring, self._seats.slots_B, self._positions_B - 1, longest)

    @property
    def _learns_from_steps(self) -> bool:
        """Whether steps are timed and counted. Not where drafting is switched off, as for the plain
        half of a timed pair: those steps are no choice.
        """
        return (self.choose and self.num_drafts > 0) or self._calibrating is not None

    def _seconds_of_step(self) -> float | None:
        """Seconds since the last call; None in the first."""
        now = time.perf_counter()
        began = self._step_began
        self._step_began = now
        return None if began is None else now - began

    def _learn(
        self,
        sampled: Sequence[int],
        drafted: Sequence[int],
        scheduled_tokens: int,
        seconds: float | None,
    ) -> None:
        """Learn from a step: how many drafts each request had, how many tokens it sampled, and how
        long the step took.
        """
        calibrating = self._calibrating
        if calibrating is None and any(drafted):
            self.chooser.observe_acceptance(drafted, [max(count - 1, 0) for count in sampled])
        only_decodes = scheduled_tokens == len(drafted) + sum(drafted) and all(sampled)
        if seconds is None or not only_decodes or min(drafted) != max(drafted):
            return
        if calibrating is None:
            self.chooser.observe_step(len(drafted), drafted[0], seconds)
        else:
            calibrating.steps.append([len(drafted), drafted[0], seconds])

    @torch.inference_mode()
    def rehearse(self, hidden_BD: torch.Tensor) -> Proposed | None:
        """Run what a step needs with all drafts of this many requests, before there are any:
        meanwhile vLLM measures how much memory is left for keys and values. Returns what
        verification of these drafts gets (as `proposed`).
        """
        count = self.num_speculative_tokens
        numbers_B = torch.arange(hidden_BD.shape[0], device=self.device)
        ids_B = torch.zeros_like(numbers_B)
        seen = self.seen_alone(hidden_BD, numbers_B)
        slots = self._slots
        if slots is None:
            self._core.draft(hidden_BD, ids_B, count, seen=seen)
            return None
        noise_BW = uniforms(numbers_B, None, None, DRAFT_STREAM, count + 1)
        how = DraftSampling(torch.ones_like(numbers_B, dtype=torch.float32), noise_BW[:, :count])
        self._core.draft(hidden_BD, ids_B, count, how, seen, slots)
        stamps_B = stamps(numbers_B, numbers_B)
        slots.stamp(numbers_B, stamps_B, count)
        kept = slots.look_up(numbers_B, stamps_B, count)
        slots.forget()
        return Proposed(kept, noise_BW)

    def seen_alone(self, hidden_BD: torch.Tensor, slots_B: torch.Tensor) -> Seen | None:
        """What requests attend to whose only state is this one, found with as much memory as what
        others attend to.
        """
        fused = self._core.fused
        if not isinstance(fused, ContextHeads):
            return None
        firsts_B = torch.zeros_like(slots_B)
        seen = fused.alone(hidden_BD, firsts_B)
        if self._texts is None or self._core.copier is None:
            return seen
        return replace(seen, told_BKH=self._core.copier.find(self._texts, slots_B, firsts_B))

    @torch.inference_mode()
    def probe(self, hidden: Sequence[Sequence[float]], last_ids: Sequence[int]) -> list[list[int]]:
        """One-hot drafts for given hidden states: what the serving heads draft now."""
        hidden_BD = torch.tensor(hidden, dtype=self.dtype, device=self.device)
        last_ids_B = torch.tensor(last_ids, dtype=torch.int64, device=self.device)
        return self._core.draft(hidden_BD, last_ids_B, self.num_speculative_tokens).ids_BK.tolist()

    # ---- changes while serving

    def calibrate(self, drafts: int | None) -> list[list[float]]:
        """Time steps of this many drafts each, with trained or untrained heads; None: serve as
        before. The requests during calibration are artificial, so nothing is learned from them, and
        later random numbers are drawn as if there had been none.

        Returns:
            The timings since the last call: sequences, drafts and seconds of each pure decode
            step.
        """
        before = self._calibrating
        if drafts is None:
            self._calibrating = None
            if before is not None:
                self.memory = before.end(self.device)
        elif before is None:
            self._calibrating = Calibrating.begin(drafts, self.memory, self.device)
            if self.memory is not None:
                self.memory = self._new_memory(self._memory_bytes)
        else:
            before.drafts = drafts
        # The time of an RPC is not part of a step.
        self._step_began = None
        return before.take() if before is not None else []

    def configure(self, settings: Drafting) -> Drafting:
        """Change how drafts are made from the next step on; returns the settings now in effect.
        After a ConfigError nothing has changed.
        """
        temperature = float(settings.get("draft_temperature", self.draft_temperature))
        count = int(settings.get("num_drafts", self.num_drafts))
        size = int(settings.get("draft_vocab", self.draft_vocabulary.size))
        memory_bytes = int(settings.get("memory_bytes", self._memory_bytes))
        stop_below = float(settings.get("stop_below", self._stop_below))
        known = Drafting.__annotations__
        own = self.heads.config.lm_head == "own"
        possible = 0 < temperature < float("inf") and memory_bytes >= 0 and 0 <= stop_below < 1
        if any(name not in known for name in settings) or not possible:
            raise ConfigError(
                "These draft settings are not possible.",
                given=dict(settings),
                expected=", ".join(known),
                do="Correct them.",
            )
        if not 0 <= count <= self.num_speculative_tokens:
            raise ConfigError(
                "This number of drafts is not possible.",
                given=count,
                expected=f"0..{self.num_speculative_tokens}, as the engine was started",
                do="Restart the engine with more drafts.",
            )
        if size and (size < 0 or own):
            raise ConfigError(
                "These heads can't draft from a truncated vocabulary.",
                given=f"{size} tokens, heads with lm_head={self.heads.config.lm_head}",
                expected="a number of tokens, and heads that share the actor's lm_head",
                do="Set engine.draft_vocab=0.",
            )
        # On all ranks before anything is replaced, as room for q.
        memory, stopping = self.memory, self.stopping
        if memory_bytes != self._memory_bytes:
            memory = together("making room for a memory", lambda: self._new_memory(memory_bytes))
        if stop_below != self._stop_below:
            stopping = together("preparing ends", lambda: self._new_stopping(stop_below))
        if size != self.draft_vocabulary.size:
            self.draft_vocabulary = self._new_vocabulary(size)
            self._refresh_vocabulary()
        # The learned costs stay if the choice is switched off and on again.
        self.num_drafts, self.choose = count, bool(settings.get("choose", self.choose))
        self._step_began = None
        sampled = bool(settings.get("sampled", self.sampled))
        self.draft_temperature = temperature
        if sampled != self.sampled:
            self.sampled = sampled
            self._use_vocabulary()
        self._core.use_temperature(temperature)
        self.memory, self.stopping = memory, stopping
        size = self.draft_vocabulary.size
        held = Drafting(
            num_drafts=count,
            sampled=self.sampled,
            draft_temperature=temperature,
            choose=self.choose,
            draft_vocab=size,
        )
        return held | {"memory_bytes": memory_bytes, "stop_below": stop_below}

    @property
    def _memory_bytes(self) -> int:
        return self.memory.store.most_bytes if self.memory is not None else 0

    @property
    def _stop_below(self) -> float:
        return self.stopping.least if self.stopping is not None else 0.0

    def _new_memory(self, most_bytes: int) -> RunningMemory | None:
        if not most_bytes:
            return None
        requests = self.vllm_config.scheduler_config.max_num_seqs
        places = MEMORY_LENGTHS * self.vllm_config.model_config.max_model_len
        return RunningMemory(most_bytes, requests, self.num_speculative_tokens, places, self.device)

    def _new_stopping(self, least: float) -> Stopping | None:
        requests = self.vllm_config.scheduler_config.max_num_seqs
        return (
            Stopping(least, requests, self.num_speculative_tokens, self.device) if least else None
        )

    def target_changed(self) -> None:
        """The actor has new weights: renew everything that was read from the old ones."""
        self._target_loaded = False
        self._actors += 1
        self.chooser.heads_changed()
        self._core.actor_changed()
        if self.memory is not None:
            self.memory.new_policy()
        self._forget_pairs()
        self._refresh_vocabulary()

    def _forget_pairs(self) -> None:
        """Forget keys and values computed with other heads, or another actor."""
        if self._ring is not None and self._unread is not None:
            self._ring.forget()
            self._unread.forget()
        if self._written is not None:
            self._written.forget()

    @torch.inference_mode()
    def _renew(self) -> None:
        """Memory that was allocated with the heads is lost with them, and vLLM restores only what
        belongs to modules. Everything else is written again here, or by the next swap from the new
        heads.
        """
        self.heads.temperatures_K.fill_(1.0)
        if self._mark is not None:
            self._mark.copy_(torch.tensor(MARK, device=self.device))
        self.draft_vocabulary.renew(self.device)
        if self._slots is not None:
            self._slots.renew()
            # Not only by the next swap: requests may be running, and their drafts are verified
            # against a table of q that is as wide as before.
            self._slots.use(self.draft_vocabulary.ids_W)
        if self.stopping is not None:
            self.stopping.renew()
        saved = None if self._calibrating is None else self._calibrating.memory
        for memory in (self.memory, saved):
            if memory is not None:
                memory.renew()
        if self._ring is not None:
            self._ring.renew()
        if self._unread is not None:
            self._unread.forget()
        if self._texts is not None:
            self._texts.renew()
        if self._written is not None:
            self._written.forget()

    @torch.inference_mode()
    def _refresh_vocabulary(self) -> None:
        self.draft_vocabulary.refresh(
            self._lm_head, self.hidden_size, self.dtype, self.device, self._lm_head_weight()
        )
        self._use_vocabulary()

    def _lm_head_weight(self) -> torch.Tensor | None:
        return lm_head_weight(self._target, self.heads.config.vocab_size)

    def read(self, path: str, checked: Checked | None = None) -> ReadHeads:
        """A state file's tensors as they will serve.

        Changes nothing and involves no other rank, so it may run beside the engine.

        Raises:
            SwapError: the file does not fit the serving heads.
        """
        state, digest = read_state(path, "new heads", checked)
        check_fit(self.heads.config.shapes_among(state), state, path)
        cast = {name: state[name].to(self.dtype) for name in state}
        check_finite(
            {name: tensor for name, tensor in cast.items() if tensor.dtype != state[name].dtype}
        )
        sums = sums_of_bits(cast[name] for name in self.heads.trainable_views())
        return ReadHeads(cast, digest, sums)

    def ahead(
        self, path: str, checked: Checked | None = None
    ) -> Callable[[], ReadHeads | SecondSet]:
        """The part of a later swap that needs no other rank, for a thread; asked for between two
        steps. `swap` takes what it returns.

        On the CPU that is everything but the exchange. On other devices heads stay at their
        addresses, which a sleeping engine gives away and restores: they are written there, and
        tried, between two steps.
        """
        if self.device.type != "cpu":
            return partial(self.read, path, checked)
        order = SetOrder(
            self._core,
            self._core.packed,
            self.num_drafts or self.heads.config.num_heads,
            self._actors,
            self._embedding(),
            # Of an actor that is just being loaded, nothing can be read yet.
            only_rank() and not self._target_loaded,
            self.dtype,
            packs_8_bit(self.dtype, self.device),
            self.draft_vocabulary,
            None
            if self._target_loaded
            else self.draft_vocabulary.choosing(self._lm_head_weight(), self.dtype),
        )
        return lambda: SecondSet(self.read(path, checked), order)

    def made_beside(
        self, begun: Future[ReadHeads | SecondSet], path: str, checked: Checked | None = None
    ) -> ReadHeads | SecondSet:
        """What a thread made of a file, for `swap`. If it failed in any way but by refusing the
        file, it is made again now, between two steps: the loop may have loaded the actor meanwhile,
        and vLLM takes the model's tables apart for that.
        """
        try:
            return begun.result()
        except MedusaError:
            raise
        except Exception as error:
            logger.info("New heads are prepared again, between two steps: %s", error)
            return self.ahead(path, checked)()

    def swap(
        self,
        path: str,
        version: int,
        checked: Checked | None = None,
        ready: Callable[[], ReadHeads | SecondSet] | None = None,
    ) -> str:
        """Replace the serving heads with those of a state file; nothing is changed unless the file
        is right.

        Args:
            checked: result of an earlier check of the file. Its bytes are confirmed before anything
                is changed, and the heads afterwards.
            ready: returns what `self.ahead` made of the file; None: read it now.

        Returns:
            The checksum of the file's tensors.

        Raises:
            SwapError: the file does not fit the serving heads, which stay; or the drafts now are
                not those of the file's heads: then nothing is drafted until heads are fed again.
        """
        # Whatever may fail on a single rank is finished on all of them before the first product,
        # because products are collectives.
        new = together("reading new heads", ready or (lambda: self.read(path, checked)))
        if isinstance(new, SecondSet):
            self._exchange(new)
            self._untrained = new.untrained
        else:
            self._replace(new)
            self._untrained = self.heads.untrained
        self.fed = True
        # Only now, because it may compute with the new heads.
        self._forget_pairs()
        self.version = version
        self.heads_checksum = new.checksum
        self._fingerprint = new.sums
        return new.checksum

    def _exchange(self, new: SecondSet) -> None:
        """Draft with a second set from now on, if all ranks find it right."""
        fault = new.fault(None if self._target_loaded else self._actors)
        if not agreed_by_all(not fault):
            raise SwapError(
                "The new heads do not draft as they should; the serving ones stay.",
                given=fault or "a fault on another rank",
                expected="the drafts that the file's values make",
                do="Report this.",
            )
        let_go(self._core.take(new.core))
        self.chooser.heads_changed()
        self._renew_vocabulary(new)

    def _renew_vocabulary(self, new: SecondSet) -> None:
        """Choose the draft vocabulary again after an exchange. Products that depend on the actor
        alone stay, and with them q of the drafts that are to be verified.
        """
        vocabulary = self.draft_vocabulary
        current = new.actor == self._actors and not self._target_loaded
        if not vocabulary.size or not current or new.vocabulary is not vocabulary:
            # There are no ids, or they were chosen since.
            return
        if new.chosen is not None and vocabulary.take(new.chosen):
            self._use_vocabulary()
        elif new.chosen is not None or not new.could_choose:
            self._refresh_vocabulary()

    def _replace(self, new: ReadHeads) -> None:
        """Write new heads over the serving ones, and check what they draft."""
        heads = self.heads
        self.fed = False
        together("taking new heads", lambda: heads.load_trainable_state(new.state))
        self._core.load()
        self.chooser.heads_changed()
        self._refresh_vocabulary()
        damage = find_damage(heads, new.sums)
        # Without damage the parameters are the file's values. The file's own tensors are on the
        # host: to send them again for each product would take longer than the swap itself.
        held = heads.trainable_views()
        if TEMPERATURES in new.state:
            held[TEMPERATURES] = new.state[TEMPERATURES]
        # With damage, too: with tensor parallelism the probe is a collective.
        difference = self._probe_swap(held)
        fault = damage or difference
        if not agreed_by_all(not fault):
            raise SwapError(
                "The engine does not draft with the heads that were swapped in; it drafts nothing"
                " now.",
                given=fault or "a fault on another rank",
                expected="the file's values, and the drafts that they make",
                do="Swap again; should that fail too, restart the engine.",
            )

    @torch.inference_mode()
    def _probe_swap(self, state: Mapping[str, torch.Tensor]) -> str:
        """How the drafts now differ from those of the heads in `state`; empty if they agree."""
        config = self.heads.config
        fixed = fixed_inputs(self.heads.config, self.dtype, self.device)
        seen = what_is_seen(self._core, fixed)
        how = fixed_sampling(config.num_heads, self.device)
        eighths = packs_8_bit(self.dtype, self.device)
        draft = self._core.draft(
            fixed.hidden_BnD[:, -1], fixed.ids_Bn[:, -1], config.num_heads, how, seen
        )
        plain = Plain(
            self._lm_head,
            self._embedding(),
            self.dtype,
            self.draft_temperature,
            self.draft_vocabulary.ids_W,
            eighths,
        )
        return find_difference(draft, state, config, fixed, plain)

    def held_version(self) -> int:
        """Version of the heads that are really in memory; -1 if they are gone (a deep sleep, a
        failed swap): then nothing is drafted.

        All ranks call this together and get the same answer.
        """
        # If memory is lost on one rank, all of them renew theirs: what they learned must agree.
        marked = self._mark is None or tuple(self._mark.tolist()) == MARK
        whole = agreed_by_all(marked and fingerprint(self.heads) == self._fingerprint)
        if not whole:
            self._renew()
        there = agreed_by_all(self.fed and whole)
        if self.fed and not there:
            logger.warning(
                "Heads version %d are gone from the engine's memory; nothing is drafted until heads"
                " are fed.",
                self.version,
            )
        self.fed = there
        return self.version if there else -1
