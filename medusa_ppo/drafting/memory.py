"""A memory of earlier responses to the same prompt, as a second source of drafts.

The heads know the state, the memory knows the wording. Drafts are drawn from one mixture q = (1 - w) q_heads + w q_memory: q_memory are
counts of what followed the longest suffix of the text so far (drafts included) wherever that occurred before, in responses to the same
prompt that have ended or that run beside this one. w stands in a table by length of suffix and count, and is learned from what was
accepted. All of it is fixed before a draft is drawn, so q is exact and nothing is lost (docs/theory.md).

What stands in the texts is chosen on the host, between steps; what is looked up and mixed are tensors of fixed shapes.

Shape letters: B requests, S slots, K drafts, n tokens of a suffix, P places of a text (tokens that may come next), X = n + P, V vocabulary,
W width of the draft vocabulary, C cells of the table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

SUFFIX = 8
"""Tokens of the longest suffix that is told from a longer one."""
COUNTS = 4
"""Buckets of counts: below 2, below 4, below 8, and more."""
FADE = 0.9
"""What a count weighs after each new version of the policy."""
PLACES = 16_384
"""Most tokens of a text that are searched; newer responses come first."""
EMPTY, MISSING = -1, -2
"""Between responses of a text, and before the first token of a short one: equal to no token, nor to each other."""
OVERHEAD = 256
"""Bytes that a response takes beside its tokens, about."""
REFRESH = 8
"""Steps after which a request sees again what those beside it have said by then."""
FIRST_SHARES = (0.35, 0.45, 0.5, 0.55, 0.65, 0.75, 0.8, 0.85)
"""w by length of suffix, before anything was learned."""
PRIOR, MOST_SEEN = 20.0, 5000.0
"""Accepted drafts that the first w counts for, and after which older ones are forgotten."""


# ---- what was said, on the host --------------------------------------------------------------------------------------------------


def prompt_key(prompt: Sequence[int]) -> bytes:
    """The same for the same tokens."""
    return blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=16).digest()


class _Said(NamedTuple):
    """A response, the version of the policy that it began with, and its seed."""

    tokens: np.ndarray
    version: int
    seed: int | None


class ResponseMemory:
    """Responses by prompt, in `most_bytes` at most; the prompt that was not asked for longest forgets first, its oldest response first.

    Attributes:
        version: of the policy now.
        nbytes: what it holds.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes, self.version = most_bytes, 0, 0
        self._said: OrderedDict[bytes, list[_Said]] = OrderedDict()

    def remember(self, key: bytes, response: Sequence[int], version: int | None = None, seed: int | None = None) -> None:
        """One response that has ended, to the prompt with this key; `version` of the policy that began it (None: of now)."""
        tokens = np.asarray(response, dtype=np.int32)
        size = tokens.nbytes + OVERHEAD
        if not len(tokens) or size > self.most_bytes:
            return
        self._said.setdefault(key, []).append(_Said(tokens, self.version if version is None else version, seed))
        self._said.move_to_end(key)
        self.nbytes += size
        while self.nbytes > self.most_bytes:
            oldest, said = next(iter(self._said.items()))
            self.nbytes -= said.pop(0).tokens.nbytes + OVERHEAD
            if not said:
                del self._said[oldest]

    def text(
        self, key: bytes, tail: Sequence[int], beside: Iterable[Sequence[int]], places: int, seed: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """What was said to a prompt, the newest first, in `places` tokens at most: tokens `X` (int32) and weights `P` (float32).

        A token that may not come next (of the prompt, or none) weighs 0.

        Args:
            tail: the prompt's last tokens; they stand before each response.
            beside: what responses that have not ended have said so far.
            seed: of who will read it: what was drawn with the same random numbers is left out, because q may not depend on them.
        """
        said = self._said.get(key, [])
        if said:
            self._said.move_to_end(key)
        before, gap = np.asarray(tail, dtype=np.int32), np.array([EMPTY], dtype=np.int32)
        tokens, weights, room = [np.full(SUFFIX, EMPTY, dtype=np.int32)], [np.zeros(0, dtype=np.float32)], places
        newest_first = ((self.version - one.version, one.tokens) for one in reversed(said) if seed is None or one.seed != seed)
        for age, response in chain(((0, np.asarray(some, dtype=np.int32)) for some in beside), newest_first):
            if not len(response):
                continue
            room -= len(before) + len(response) + 1
            if room < 0:
                break
            weight = np.zeros(len(before) + len(response) + 1, dtype=np.float32)
            weight[len(before) : -1] = FADE**age * (response >= 0)  # vLLM has placeholders below 0.
            tokens += [before, response, gap]
            weights.append(weight)
        return np.concatenate(tokens), np.concatenate(weights)


def tail_of(prompt: Sequence[int], said: Sequence[int] = ()) -> list[int]:
    """The last `SUFFIX` tokens of a prompt and what was said to it; `MISSING` where there are fewer."""
    tail = [*prompt[-SUFFIX:], *said[-SUFFIX:]][-SUFFIX:]
    return [MISSING] * (SUFFIX - len(tail)) + tail


# ---- what followed a suffix ------------------------------------------------------------------------------------------------------


class Votes(NamedTuple):
    """What followed the longest suffix.

    Attributes:
        share_BP: float32, how much of q_memory each place of the text has; all 0 where nothing fits.
        length_B: int64, tokens of the suffix, 0: none fits.
        cells_B: int64, of the table of w; -1: none.
    """

    share_BP: torch.Tensor
    length_B: torch.Tensor
    cells_B: torch.Tensor


def match(texts_BX: torch.Tensor, tails_Bn: torch.Tensor) -> torch.Tensor:
    """How many tokens before each place are those of the tail, from its last one backwards: int32 `[B, P]`."""
    places = texts_BX.shape[1] - SUFFIX
    alike_BP = torch.ones(texts_BX.shape[0], places, dtype=torch.bool, device=texts_BX.device)
    run_BP = torch.zeros(alike_BP.shape, dtype=torch.int32, device=texts_BX.device)
    for back in range(1, SUFFIX + 1):
        alike_BP &= texts_BX[:, SUFFIX - back : SUFFIX - back + places] == tails_Bn[:, -back].unsqueeze(1)
        run_BP += alike_BP
    return run_BP


def advance(texts_BX: torch.Tensor, run_BP: torch.Tensor, ids_B: torch.Tensor) -> torch.Tensor:
    """`match` after one more token."""
    longer_BP = torch.nn.functional.pad(run_BP[:, :-1], (1, 0)) + 1
    return longer_BP.clamp_max_(SUFFIX) * (texts_BX[:, SUFFIX - 1 : -1] == ids_B.unsqueeze(1))


def vote(run_BP: torch.Tensor, weight_BP: torch.Tensor) -> Votes:
    """Counts behind the longest suffix that anything followed."""
    run_BP = run_BP * (weight_BP > 0)
    length_B = run_BP.amax(1).long()
    voting_BP = weight_BP * ((run_BP == length_B.unsqueeze(1)) & (run_BP > 0))
    total_B = voting_BP.sum(1)
    count_B = total_B.clamp_min(1).log2().long().clamp_max(COUNTS - 1)
    cells_B = torch.where(length_B > 0, (length_B - 1) * COUNTS + count_B, -1)
    return Votes(voting_BP / total_B.clamp_min(1e-30).unsqueeze(1), length_B, cells_B)


class Trust:
    """How much of a draft's q is the memory's, by cell: the share of the drafts accepted there that the memory is owed.

    A draft x owes the memory w q_memory(x) / q(x) of itself. Where neither source could gain by more weight, that share is w.

    Attributes:
        owed_C, accepted_C: float32, of drafts that were accepted; those of long ago are forgotten.
    """

    def __init__(self, device: torch.device) -> None:
        self._first_C = torch.tensor(FIRST_SHARES, device=device).repeat_interleave(COUNTS)
        self.owed_C, self.accepted_C, self._taken_C, self._offered_C = (torch.zeros_like(self._first_C) for _ in range(4))
        self._share_C = self._first_C

    def share(self, cells_B: torch.Tensor) -> torch.Tensor:
        """w of each cell; 0 without one."""
        return torch.where(cells_B >= 0, self._share_C[cells_B.clamp_min(0)], 0.0)

    def learn(self, cells_N: torch.Tensor, owed_N: torch.Tensor, accepted_N: torch.Tensor, offered_N: torch.Tensor) -> None:
        """
        Args:
            cells_N: of drafts; -1: none of the memory's.
            owed_N: what each owes the memory.
            accepted_N, offered_N: float32, 0 to 1: whether it was accepted, and whether it was verified with all before it accepted.
        """
        there_N = (cells_N >= 0).float()
        cells_N = cells_N.clamp_min(0)
        sums = (self.owed_C, owed_N * accepted_N), (self.accepted_C, accepted_N), (self._taken_C, accepted_N), (self._offered_C, offered_N)
        for sums_C, values_N in sums:
            sums_C.index_add_(0, cells_N, values_N * there_N)
        fade_C = (MOST_SEEN / self.accepted_C.clamp_min(MOST_SEEN)).clamp_max(1)
        self.owed_C *= fade_C
        self.accepted_C *= fade_C
        self._share_C = (self.owed_C + PRIOR * self._first_C) / (self.accepted_C + PRIOR)

    def by_length(self) -> list[tuple[float, float]]:
        """Drafts verified and drafts accepted behind suffixes of 1, 2, ... tokens, since the beginning."""
        both_C2 = torch.stack([self._offered_C, self._taken_C], dim=1)
        return [(offered, taken) for offered, taken in both_C2.view(SUFFIX, COUNTS, 2).sum(1).tolist()]


# ---- one step --------------------------------------------------------------------------------------------------------------------


class Debts:
    """What the drafts of each slot owe the memory until they are verified."""

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        self.owed_KS = torch.zeros(drafts, slots, device=device)
        self.cells_KS = torch.full((drafts, slots), -1, device=device)


class Recall:
    """What a batch recalls while a step's drafts are drawn, one after the other."""

    def __init__(
        self, texts_BX: torch.Tensor, weight_BP: torch.Tensor, tails_Bn: torch.Tensor, trust: Trust, slots_B: torch.Tensor, debts: Debts
    ) -> None:
        self._texts_BX, self._trust, self._slots_B, self._debts = texts_BX, trust, slots_B, debts
        self._next_BP = self._columns_BP = texts_BX[:, SUFFIX:].clamp_min(0).long()
        self._weight_BP = weight_BP
        self._run_BP = match(texts_BX, tails_Bn)

    def among(self, ids_W: torch.Tensor, vocab_size: int) -> None:
        """Only these tokens may be drafted."""
        place_V = torch.full((vocab_size,), -1, device=ids_W.device)
        place_V[ids_W] = torch.arange(len(ids_W), device=ids_W.device)
        columns_BP = place_V[self._next_BP]
        self._weight_BP = self._weight_BP * (columns_BP >= 0)
        self._columns_BP = columns_BP.clamp_min(0)

    def mix(self, mass_BW: torch.Tensor, on_B1: torch.Tensor) -> None:
        """Make the heads' q the mixture, where `on_B1`."""
        self._votes = vote(self._run_BP, self._weight_BP)
        self._cells_B = torch.where(on_B1.squeeze(1), self._votes.cells_B, -1)
        share_B1 = self._trust.share(self._cells_B).unsqueeze(1)
        self._mass_BP = self._votes.share_BP * share_B1
        mass_BW.mul_(1 - share_B1).scatter_add_(1, self._columns_BP, self._mass_BP)

    def follow(self, k: int, ids_B: torch.Tensor, q_B: torch.Tensor) -> None:
        """Draft k was drawn, with probability `q_B`: what it owes, and what the next one stands behind."""
        mine_B = (self._mass_BP * (self._next_BP == ids_B.unsqueeze(1))).sum(1)
        self._debts.owed_KS[k].index_copy_(0, self._slots_B, (mine_B / q_B.clamp_min(1e-30)).clamp_max(1))
        self._debts.cells_KS[k].index_copy_(0, self._slots_B, self._cells_B)
        self._run_BP = advance(self._texts_BX, self._run_BP, ids_B)


# ---- inside an engine ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Met:
    """A request that has not ended: vLLM's state of it, the key and the last tokens of its prompt, the version of the policy that it began
    with, and its seed."""

    request: Any
    key: bytes
    tail: list[int]
    version: int
    seed: int | None

    @property
    def said(self) -> Sequence[int]:
        return self.request.output_token_ids


class RunningMemory:
    """The memory of an engine: it remembers each request when that has ended, and lays out texts for those that run.

    Attributes:
        store: what was said.
        trust: the table of w.
    """

    def __init__(self, most_bytes: int, requests: int, drafts: int, places: int, device: torch.device) -> None:
        """
        Args:
            requests: that run at a time, at most.
            places: most tokens of a text.
        """
        self.store, self.trust = ResponseMemory(most_bytes), Trust(device)
        self._places, self._device = min(places, PLACES), device
        self._tokens_SX = torch.full((requests, SUFFIX + self._places), EMPTY, dtype=torch.int32, device=device)
        self._weight_SP = torch.zeros(requests, self._places, device=device)
        self._debts = Debts(requests, drafts, device)
        self._steps_K1 = torch.arange(drafts, device=device).unsqueeze(1)
        self._lengths = [0] * requests
        self._slots: dict[str, int] = {}
        self._free = list(range(requests))
        self._met: dict[str, _Met] = {}
        self._step = 0

    def new_policy(self) -> None:
        """What was said until now is one version older."""
        self.store.version += 1

    def settle(self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from the drafts that the last step verified."""
        known = [(self._slots[key], d, a) for key, d, a in zip(request_ids, drafted, accepted, strict=True) if key in self._slots]
        if not known:
            return
        slots_B, drafted_B, accepted_B = torch.tensor(known).to(self._device, non_blocking=True).unbind(1)
        cells_KB, owed_KB = self._debts.cells_KS[:, slots_B], self._debts.owed_KS[:, slots_B]
        took_KB, asked_KB = self._steps_K1 < accepted_B, (self._steps_K1 <= accepted_B) & (self._steps_K1 < drafted_B)
        self.trust.learn(cells_KB.flatten(), owed_KB.flatten(), took_KB.flatten().float(), asked_KB.flatten().float())
        self._debts.cells_KS[:, slots_B] = -1

    def attend(self, request_ids: Sequence[str], live: Mapping[str, Any]) -> None:
        """Know who runs now, and remember who has ended; once a step, drafts or none.

        Args:
            live: vLLM's states of all requests that have not ended.
        """
        for key in [key for key in self._met if key not in live]:
            self._take_leave(key)
        for key in request_ids:
            if key not in self._met:
                prompt, asked = live[key].prompt_token_ids or (), live[key].sampling_params
                seed = None if asked is None else asked.seed
                self._met[key] = _Met(live[key], prompt_key(prompt), list(prompt[-SUFFIX:]), self.store.version, seed)

    def recall(self, request_ids: Sequence[str]) -> Recall:
        """For the drafts of this step, of requests that are attended to."""
        new = [key for key in request_ids if key not in self._slots]
        self._make_room(len(new), set(request_ids))
        self._slots |= {key: self._free.pop() for key in new}
        self._step += 1
        self._lay_out(request_ids if self._step % REFRESH == 0 else new)
        slots = [self._slots[key] for key in request_ids]
        width = max(1, *(self._lengths[slot] for slot in slots))
        slots_B = torch.tensor(slots).to(self._device, non_blocking=True)
        tails = [tail_of(met.tail, met.said) for met in map(self._met.__getitem__, request_ids)]
        tails_Bn = torch.tensor(tails, dtype=torch.int32).to(self._device, non_blocking=True)
        texts_BX, weight_BP = self._tokens_SX[slots_B, : SUFFIX + width], self._weight_SP[slots_B, :width]
        return Recall(texts_BX, weight_BP, tails_Bn, self.trust, slots_B, self._debts)

    def _take_leave(self, key: str) -> None:
        """A request has ended; tokens that were accepted behind its end are not its own."""
        met = self._met.pop(key)
        asked, said = met.request.sampling_params, met.said
        ends = set() if asked is None or asked.ignore_eos else asked.all_stop_token_ids
        end = next((place + 1 for place, token in enumerate(said) if token in ends), len(said))
        self.store.remember(met.key, said[:end], met.version, met.seed)
        if key in self._slots:
            self._free.append(self._slots.pop(key))

    def _make_room(self, count: int, running: set[str]) -> None:
        for waiting in [key for key in self._slots if key not in running][: max(count - len(self._free), 0)]:
            self._free.append(self._slots.pop(waiting))

    def _lay_out(self, request_ids: Sequence[str]) -> None:
        """Write the texts of some requests: what was said to their prompts, of those beside them what they have said by now."""
        beside: dict[bytes, list[_Met]] = {}
        for met in self._met.values() if request_ids else ():
            beside.setdefault(met.key, []).append(met)
        for key in request_ids:
            met, slot = self._met[key], self._slots[key]
            others = (other for other in beside[met.key] if other is not met and (met.seed is None or met.seed != other.seed))
            tokens, weights = self.store.text(met.key, met.tail, (other.said for other in others), self._places, met.seed)
            length = self._lengths[slot] = len(weights)
            self._tokens_SX[slot, : SUFFIX + length] = torch.from_numpy(tokens).to(self._device, non_blocking=True)
            self._tokens_SX[slot, SUFFIX + length :] = EMPTY
            self._weight_SP[slot, :length] = torch.from_numpy(weights).to(self._device, non_blocking=True)
            self._weight_SP[slot, length:] = 0
            self._debts.cells_KS[:, slot] = -1
