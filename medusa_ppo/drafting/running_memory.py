"""The memory of an engine: it remembers each finished request, and prepares texts for those that
run.

Shape letters as in `memory`; T drafts of all requests one after the other, N rows of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from medusa_ppo.drafting import sending
from medusa_ppo.drafting.memory import (
    EMPTY,
    PLACES,
    SUFFIX,
    Drawn,
    Recall,
    ResponseMemory,
    Shown,
    Trust,
    Waiting,
    prompt_key,
    shown,
    tail_of,
    whole_text,
)

REFRESH = 8
"""Steps after which a request sees the newest tokens of concurrent requests. An eighth of them does
in each step, because their texts are made while the device waits.
"""
SENT_AT_ONCE = 1 << 20
"""Tokens of texts that are sent to the device together."""


@dataclass
class _Met:
    """A running request: vLLM's state of it, its prompt's key and last tokens, its seed, and the
    version of the policy when it began.
    """

    request: Any
    key: bytes
    tail: list[int]
    version: int
    seed: int | None
    _said: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    _sure: int = 0

    @property
    def said(self) -> Sequence[int]:
        return self.request.output_token_ids

    def tokens(self) -> np.ndarray:
        """`said` as an array. Only new tokens are read, because reading a list of thousands takes
        longer than the rest of a step.
        """
        said = self.said
        self._sure = min(self._sure, len(said))
        new = np.asarray(said[self._sure :], dtype=np.int32)
        self._said = np.concatenate([self._said[: self._sure], new])
        # Negative values are placeholders for later tokens.
        waiting = np.flatnonzero(new < 0)
        self._sure += int(waiting[0]) if len(waiting) else len(new)
        return self._said


class RunningMemory:
    """The memory of an engine: it remembers each finished request, and prepares texts for those
    that run.

    Attributes:
        store: the responses.
        trust: the table of w.
    """

    def __init__(
        self, most_bytes: int, requests: int, drafts: int, places: int, device: torch.device
    ) -> None:
        """
        Args:
            requests: maximum number of requests that run at a time.
            places: maximum number of tokens in a text.
        """
        self.store = ResponseMemory(most_bytes)
        self.trust = Trust(device)
        self._places = min(places, PLACES)
        self._device = device
        self._tokens_SX = torch.full(
            (requests, SUFFIX + self._places), EMPTY, dtype=torch.int32, device=device
        )
        self._weight_SP = torch.zeros(requests, self._places, device=device)
        self._waiting = Waiting(requests, drafts, device)
        self._steps_K1 = torch.arange(drafts, device=device).unsqueeze(1)
        self._met: dict[str, _Met] = {}
        self._step = 0
        self._take_all_slots()

    def _take_all_slots(self) -> None:
        """No request has a text; each gets one when it drafts next."""
        requests = len(self._tokens_SX)
        self._lengths = [0] * requests
        self._slots: dict[str, int] = {}
        # The step in which each slot's text was made, the oldest first.
        self._made: dict[str, int] = {}
        self._free = list(range(requests))
        self._p_T: torch.Tensor | None = None

    def renew(self) -> None:
        """Restore what was on the device at the same addresses, after the memory was thrown away.
        The responses are on the host, and stay; what was learned of them is lost.
        """
        self.trust.renew()
        self._waiting.renew()
        self._tokens_SX.fill_(EMPTY)
        self._weight_SP.zero_()
        drafts = len(self._steps_K1)
        self._steps_K1.copy_(torch.arange(drafts, device=self._device).unsqueeze(1))
        self._take_all_slots()

    def new_policy(self) -> None:
        """Make all responses so far one version older."""
        self.store.version += 1

    def judge(
        self,
        logits_NV: torch.Tensor,
        rows_T: torch.Tensor,
        ids_T: torch.Tensor,
        counts: Sequence[int],
        temperature_B: torch.Tensor | None,
    ) -> None:
        """Score the drafts to be verified now with the policy, before top-k and top-p; `settle`
        learns from that afterwards.

        Args:
            rows_T: rows of the logits, one for each draft, request after request.
            counts: number of drafts of each request.
            temperature_B: None if all are greedy.
        """
        self._p_T = None
        if temperature_B is not None and len(ids_T):
            requests_T = sending.sent(torch.repeat_interleave(torch.tensor(counts)), self._device)
            # Greedy requests in a mixed batch have 0; their drafts are one-hot and teach nothing.
            temperature_T1 = temperature_B[requests_T].clamp_min(1e-5).unsqueeze(1)
            # Top-k and top-p are left out: p is then slightly too small, which affects w and no
            # sample.
            p_TV = (logits_NV[rows_T].float() / temperature_T1).softmax(-1)
            self._p_T = p_TV.gather(1, ids_T.to(torch.int64).clamp_min(0).unsqueeze(1)).squeeze(1)

    def settle(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[int],
        p_KB: torch.Tensor | None = None,
    ) -> None:
        """Learn from the scored drafts that the last step verified.

        It learns from all of them, weighted by the probability that they are reached: which of a
        block's drafts are accepted depends on the later ones, so the accepted ones alone would be a
        biased sample.

        Args:
            p_KB: the policy's probability of each draft; None: what `judge` found.
        """
        # Removed when read: a step without scores must not learn from the p of an earlier one.
        p_T = self._p_T
        self._p_T = None
        rows = []
        first = 0
        for row, (key, count) in enumerate(zip(request_ids, drafted, strict=True)):
            rows += [(self._slots[key], row, first, count)] if key in self._slots else []
            first += count
        if not rows or not first or (p_KB is None and (p_T is None or len(p_T) != first)):
            return
        slots_B, rows_B, first_B, drafted_B = sending.sent(rows, self._device).unbind(1)
        there_KB = (self._steps_K1 < drafted_B).float()
        heads_KB, memory_KB, q_KB = self._waiting.q_KS3[:, slots_B].unbind(2)
        q_KB = q_KB.clamp_min(1e-30)
        if p_KB is not None:
            p_KB = p_KB[:, rows_B]
        else:
            assert p_T is not None, "judged"
            p_KB = p_T[(first_B + self._steps_K1).clamp_max(first - 1)]
        weight_B = torch.ones_like(p_KB[0])
        weights = [weight_B]
        for ratio_B in (p_KB / q_KB).unbind(0):
            weight_B = (weight_B * ratio_B).clamp_max(1)
            weights.append(weight_B)
        offered_KB = torch.stack(weights[:-1])
        drawn = Drawn(
            self._waiting.cells_KS[:, slots_B],
            heads_KB,
            memory_KB,
            p_KB * offered_KB,
            there_KB / q_KB,
        )
        self.trust.learn(
            Drawn(*(part.flatten() for part in drawn)),
            (offered_KB * there_KB).flatten(),
            (torch.stack(weights[1:]) * there_KB).flatten(),
        )
        # Each draft is learned from only once.
        self._waiting.cells_KS[:, slots_B] = -1

    def attend(self, request_ids: Sequence[str], live: Mapping[str, Any]) -> None:
        """Track who runs now, and remember who has ended; call it once per step, with or without
        drafts.

        Args:
            live: vLLM's states of all running requests.
        """
        # An id may be given again as soon as its request has ended.
        for key in [key for key, met in self._met.items() if live.get(key) is not met.request]:
            self._take_leave(key)
        for key in request_ids:
            if key not in self._met:
                # vLLM has no ids for a prompt that was given as embeddings.
                prompt = live[key].prompt_token_ids or ()
                asked = live[key].sampling_params
                seed = None if asked is None else asked.seed
                self._met[key] = _Met(
                    live[key], prompt_key(prompt), list(prompt[-SUFFIX:]), self.store.version, seed
                )

    def recall(self, request_ids: Sequence[str], tails_Bn: torch.Tensor | None = None) -> Recall:
        """The memory's part in this step's drafts, for tracked requests.

        Args:
            tails_Bn: int32, the last tokens of their texts, if the device alone has them.
        """
        new = [key for key in request_ids if key not in self._slots]
        self._make_room(len(new), set(request_ids))
        self._slots |= {key: self._free.pop() for key in new}
        self._step += 1
        # New requests get their text at once, others a newer one only now and then: it has to be
        # copied to the device.
        self._lay_out([*new, *self._due(request_ids)])
        slots = [self._slots[key] for key in request_ids]
        # The cost of the search is proportional to its width, which is that of the batch's longest
        # text.
        width = max(1, *(self._lengths[slot] for slot in slots))
        slots_B = sending.sent(slots, self._device)
        if tails_Bn is None:
            tails = [tail_of(met.tail, met.said) for met in map(self._met.__getitem__, request_ids)]
            tails_Bn = sending.sent(tails, self._device, torch.int32)
        texts_BX = self._tokens_SX[slots_B, : SUFFIX + width]
        weight_BP = self._weight_SP[slots_B, :width]
        return Recall(texts_BX, weight_BP, tails_Bn, self.trust, slots_B, self._waiting)

    def _take_leave(self, key: str) -> None:
        """Forget a request that has ended; tokens accepted after its end are not part of it."""
        met = self._met.pop(key)
        asked = met.request.sampling_params
        said = met.said
        ends = set() if asked is None or asked.ignore_eos else asked.all_stop_token_ids
        end = next((place + 1 for place, token in enumerate(said) if token in ends), len(said))
        self.store.remember(met.key, said[:end], met.version, met.seed)
        if key in self._slots:
            self._give_back(key)

    def _give_back(self, key: str) -> None:
        self._free.append(self._slots.pop(key))
        self._made.pop(key, None)

    def _make_room(self, count: int, running: set[str]) -> None:
        # A preempted request gets a new slot and a new text if it returns.
        waiting = [key for key in self._slots if key not in running]
        for key in waiting[: max(count - len(self._free), 0)]:
            self._give_back(key)

    def _due(self, request_ids: Sequence[str]) -> list[str]:
        """Which of these get a newer text in this step."""
        most = -(-len(request_ids) // REFRESH)
        running = set(request_ids)
        due: list[str] = []
        for key, step in self._made.items():
            if len(due) == most or self._step - step < REFRESH:
                break
            due += [key] if key in running else []
        return due

    def _lay_out(self, request_ids: Sequence[str]) -> None:
        """Write the texts of some requests: the responses to their prompts, and what concurrent
        requests have written so far.
        """
        beside: dict[bytes, list[tuple[_Met, np.ndarray]]] = {}
        asked = {self._met[key].key for key in request_ids}
        for met in self._met.values():
            if met.key in asked:
                beside.setdefault(met.key, []).append((met, met.tokens()))
        finished: dict[tuple[bytes, int | None, int], Shown] = {}
        at_once = max(1, SENT_AT_ONCE // self._places)
        for first in range(0, len(request_ids), at_once):
            part = request_ids[first : first + at_once]
            mets = [self._met[key] for key in part]
            texts = [self._text(met, beside[met.key], finished) for met in mets]
            self._send([self._slots[key] for key in part], texts)
        for key in request_ids:
            # The newest stands last.
            self._made.pop(key, None)
            self._made[key] = self._step

    def _text(
        self,
        met: _Met,
        beside: Sequence[tuple[_Met, np.ndarray]],
        finished: dict[tuple[bytes, int | None, int], Shown],
    ) -> tuple[np.ndarray, np.ndarray]:
        """The text of one request (as `ResponseMemory.text`).

        Args:
            beside: all requests with its prompt, and what they have said.
            finished: what texts that were made before show of finished responses.
        """
        others = [
            (said, 1.0)
            for other, said in beside
            # Requests with the same seed draw with the same numbers, so q may not depend on each
            # other's tokens.
            if other is not met and (met.seed is None or met.seed != other.seed)
        ]
        room = self.store.room_beside(met.key, self._places)
        now = shown(others, met.tail, room)
        used = len(now.weights)
        if met.seed is None:
            # As if all were shown to each of them: then all show the same of finished responses,
            # which is most of the work.
            used = max(used, min(room, sum(len(met.tail) + len(said) + 1 for _, said in beside)))
        seed = met.seed if self.store.has_of_seed(met.key, met.seed) else None
        shared = met.key, seed, self._places - used
        if shared not in finished:
            finished[shared] = self.store.finished(met.key, met.tail, shared[2], seed)
        return whole_text(now, finished[shared])

    def _send(self, slots: Sequence[int], texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write texts to these slots, all of them in a few copies: each copy costs the host as much
        as making a text.
        """
        longest = max(
            *(self._lengths[slot] for slot in slots), *(len(weights) for _, weights in texts)
        )
        # What a slot's last text had more is emptied.
        tokens_NX = np.full((len(texts), SUFFIX + longest), EMPTY, dtype=np.int32)
        weight_NP = np.zeros((len(texts), longest), dtype=np.float32)
        for row, (slot, (tokens, weights)) in enumerate(zip(slots, texts, strict=True)):
            tokens_NX[row, : len(tokens)] = tokens
            weight_NP[row, : len(weights)] = weights
            self._lengths[slot] = len(weights)
        slots_N = sending.sent(slots, self._device)
        self._tokens_SX[:, : SUFFIX + longest].index_copy_(
            0, slots_N, sending.sent(tokens_NX, self._device, torch.int32)
        )
        self._weight_SP[:, :longest].index_copy_(
            0, slots_N, sending.sent(torch.from_numpy(weight_NP), self._device, torch.float32)
        )
        # Drafts of this slot's previous owner must not teach this request.
        self._waiting.cells_KS.index_fill_(1, slots_N, -1)
