"""The running requests of vLLM's V2 runner, as a memory of earlier responses reads them. V2 keeps
sampled tokens on the device only. The host gets them one step later; what a step's own drafts need
stays on the device.

Shape letters: B requests, S slots, K drafts of a step, n last tokens or tokens of a step, T rows of
logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from medusa_ppo.drafting import sending
from medusa_ppo.drafting.memory import MISSING, SUFFIX, tail_of
from medusa_ppo.drafting.q_rows import VerifiedRows
from medusa_ppo.drafting.verify import rows_at_once


class Admitted(NamedTuple):
    """A request that has arrived, or is back after a preemption.

    Attributes:
        key: vLLM's id.
        slot: its place in V2's tables, where another request may have been.
        prompt: tokens.
        tokens: its prompt and its response so far.
        asked: sampling parameters.
    """

    key: str
    slot: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    asked: Any

    @property
    def has_grammar(self) -> bool:
        return self.asked is not None and self.asked.structured_outputs is not None


@dataclass
class Running:
    """A request, with the names of V1's state of it. `output_token_ids` ends with the last step
    but one.

    Attributes:
        slot: the last that it had: since a preemption it may be another's.
    """

    prompt_token_ids: Sequence[int]
    sampling_params: Any
    slot: int
    output_token_ids: list[int] = field(default_factory=list)


class RunningRequests:
    """
    Attributes:
        live: the requests that have not ended, preempted ones included, by vLLM's id.
    """

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        self.live: dict[str, Running] = {}
        self._device = device
        self._drafts = drafts
        self._tails_Sn = torch.full((slots, SUFFIX), MISSING, dtype=torch.int32, device=device)
        # The last row of a request verifies no draft; its number is never read.
        self._p_SK = torch.zeros(slots, drafts + 1, device=device)
        # Lists of `output_token_ids`, not ids: a request may end before its last tokens are here,
        # and another one may have its id.
        self._coming: tuple[Sequence[list[int]], sending.OnItsWay] | None = None

    def renew(self) -> None:
        """Restore what was on the device at the same addresses, after the memory was thrown away.
        The last tokens of running requests are missing until they have written others.
        """
        self._tails_Sn.fill_(MISSING)
        self._p_SK.zero_()

    def begin(self, admitted: Sequence[Admitted]) -> None:
        """Requests that enter or come back after a preemption, with what they have said so far."""
        for new in admitted:
            request = self.live.setdefault(new.key, Running(new.prompt, new.asked, new.slot))
            request.slot = new.slot
            request.output_token_ids = list(new.tokens[len(new.prompt) :])
        slots_N = sending.sent([new.slot for new in admitted], self._device)
        tails = [tail_of(new.tokens) for new in admitted]
        self._tails_Sn[slots_N] = sending.sent(tails, self._device, torch.int32)

    def end(self, keys: Collection[str]) -> None:
        """These have ended. Called before a step's work is queued, when their last tokens may still
        be on their way.
        """
        for key in keys:
            self.live.pop(key, None)

    @property
    def slots(self) -> list[int]:
        """The slots of requests that have not ended, each once."""
        return sorted({request.slot for request in self.live.values()})

    def sampled(
        self,
        keys: Sequence[str],
        slots_B: torch.Tensor,
        ids_Bn: torch.Tensor,
        sampled_B: torch.Tensor,
    ) -> torch.Tensor:
        """A step has sampled `sampled_B` tokens of each request. Returns the last tokens of their
        texts, int32.

        Args:
            ids_Bn: these tokens, the newest first; entries beyond their number are ignored.
        """
        self.take()
        most = ids_Bn.shape[1]
        count_B1 = sampled_B.long().unsqueeze(1)
        # Place i of the new tail is i + count of the old one with the new tokens behind it.
        place_Bn = torch.arange(SUFFIX, device=self._device) + count_B1
        older_Bn = self._tails_Sn[slots_B].gather(1, place_Bn.clamp_max(SUFFIX - 1))
        back_Bn = (count_B1 - 1 - (place_Bn - SUFFIX)).clamp(0, most - 1)
        newer_Bn = ids_Bn.gather(1, back_Bn).int()
        tails_Bn = torch.where(place_Bn < SUFFIX, older_Bn, newer_Bn)
        self._tails_Sn[slots_B] = tails_Bn
        there_Bn = torch.arange(most, device=self._device) < count_B1
        texts = [self.live[key].output_token_ids if key in self.live else [] for key in keys]
        self._coming = texts, sending.OnItsWay(torch.where(there_Bn, ids_Bn, MISSING))
        return tails_Bn

    def take(self) -> None:
        """Add what the last step sampled to its requests, when this step's work is queued: a step
        that was scheduled ahead begins before the last one has ended.
        """
        if self._coming is None:
            return
        texts, ids = self._coming
        self._coming = None
        for text, newest_first in zip(texts, ids.arrived().tolist(), strict=True):
            text += [token for token in reversed(newest_first) if token != MISSING]

    def score(self, logits_TV: torch.Tensor, rows: VerifiedRows) -> None:
        """Note the probabilities of the drafts that are verified now.

        Args:
            logits_TV: what they are verified against, temperature and cuts included.
        """
        count = len(logits_TV)
        following_T = torch.arange(1, count + 1, device=self._device).clamp_max(count - 1)
        ids_T1 = rows.ids_T[following_T].long().clamp_min(0).unsqueeze(1)
        parts = logits_TV.split(rows_at_once(logits_TV.shape[1]))
        sums_T = torch.cat([part_TV.float().logsumexp(-1) for part_TV in parts])
        p_T = (logits_TV.gather(1, ids_T1).squeeze(1).float() - sums_T).exp()
        self._p_SK.index_put_((rows.slots_T, rows.places_T.clamp_max(self._drafts)), p_T)

    def scores(self, slots_B: torch.Tensor) -> torch.Tensor:
        """What `score` noted, `[K, B]`; meaningless where a step verified no draft."""
        return self._p_SK[slots_B, : self._drafts].t()
