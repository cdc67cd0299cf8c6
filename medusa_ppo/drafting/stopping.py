"""Where a draft run ends, request by request: before a draft that will hardly be accepted.

What a draft's chance is, is estimated from q, from which it is about to be drawn, and from the
drafts before it: how often drafts were accepted whose q had about so large a top, and whose own
share of it was about so large. Neither the draft itself nor anything that verifies it has a part in
that, so the end of a run is a stopping time and nothing is lost (docs/theory.md).

Shape letters: B requests, S slots, K drafts, W width of the draft vocabulary, T bins of q's top, P
bins of a draft's share of it, X = T P.
"""

from __future__ import annotations

import torch

TOPS, PARTS = 16, 4
"""Bins; of a draft's probability as a share of the largest: the largest itself, more than a third,
more than a tenth, less.
"""
PRIOR, MOST_SEEN = 10.0, 2000.0
"""Drafts that the first estimate counts for, and after which older ones are forgotten."""
EXPLORE = 32
"""Of so many steps one ends no run, so that every chance goes on being measured."""


class Stopping:
    """Chances by bin, learned from verified drafts, and what the drafts of each slot wait to teach.

    Attributes:
        least: a draft below this chance is not made, nor any after it.
    """

    def __init__(self, least: float, slots: int, drafts: int, device: torch.device) -> None:
        self.least = least
        self._offered_TP = torch.zeros(TOPS, PARTS, device=device)
        self._accepted_TP = torch.zeros_like(self._offered_TP)
        self._first_T1 = 0.2 + 0.8 * (torch.arange(TOPS, device=device).unsqueeze(1) + 0.5) / TOPS
        # One slot more than requests, for rows that pad a batch.
        self._cells_KS = torch.full((drafts, slots + 1), -1, device=device)
        self._steps_K1 = torch.arange(drafts, device=device).unsqueeze(1)
        self._step = 0
        # What the drafting call reads stays where it is: a graph may have captured it.
        self._bound_1 = torch.full((1,), least, device=device)
        self._of_drawn_X = torch.empty(TOPS * PARTS, device=device)
        self._of_next_T = torch.empty(TOPS, device=device)
        self._estimate()

    def _estimate(self) -> None:
        # Two tables: of a draft that was drawn its own share of the top is known; of the one to
        # come only the top is.
        accepted_TP = self._accepted_TP + PRIOR * self._first_T1
        self._of_drawn_X.copy_((accepted_TP / (self._offered_TP + PRIOR)).flatten())
        offered_T = self._offered_TP.sum(1)
        accepted_T = self._accepted_TP.sum(1)
        first_T = PRIOR * self._first_T1.squeeze(1)
        self._of_next_T.copy_((accepted_T + first_T) / (offered_T + PRIOR))

    def begin(self, slots_B: torch.Tensor) -> Ending:
        """The runs of a step's requests."""
        self.begin_step()
        return self.runs(slots_B)

    def begin_step(self) -> None:
        """Before a step's drafts are drawn: whether its runs may end early."""
        # With a bound of 0 no run ends early; most steps have the bound of the step before.
        explored = self._step and self._step % EXPLORE == 0
        self._step += 1
        explores = self._step % EXPLORE == 0
        if explored or explores:
            self._bound_1.fill_(0.0 if explores else self.least)

    def runs(self, slots_B: torch.Tensor) -> Ending:
        """The same, where `begin_step` was called before: it does nothing on the host."""
        return Ending(self, slots_B)

    def settle(
        self, slots_B: torch.Tensor, drafted_B: torch.Tensor, accepted_B: torch.Tensor
    ) -> None:
        """Learn from the drafts that the last step verified."""
        cells_KB = self._cells_KS[:, slots_B]
        # The refused draft was asked too; what stands behind it was never verified.
        asked_KB = (self._steps_K1 <= accepted_B) & (self._steps_K1 < drafted_B) & (cells_KB >= 0)
        took_KB = asked_KB & (self._steps_K1 < accepted_B)
        places_N = cells_KB.clamp_min(0).flatten()
        for sums_TP, values_KB in ((self._offered_TP, asked_KB), (self._accepted_TP, took_KB)):
            sums_TP.view(-1).index_add_(0, places_N, values_KB.flatten().float())
        # Heads and policy move: a full cell shrinks, so that newer drafts count as much as they
        # should.
        fade_TP = (MOST_SEEN / self._offered_TP.clamp_min(MOST_SEEN)).clamp_max(1)
        self._offered_TP *= fade_TP
        self._accepted_TP *= fade_TP
        # Each draft teaches once, also where the next step drafts nothing.
        self._cells_KS[:, slots_B] = -1
        self._estimate()


class Ending:
    """The runs of a batch while their drafts are drawn, one after the other.

    Attributes:
        lengths_B: int64, drafts of each request so far.
    """

    def __init__(self, owner: Stopping, slots_B: torch.Tensor) -> None:
        self._owner = owner
        self._slots_B = slots_B
        self.lengths_B = torch.zeros_like(slots_B)
        self._reached_B = torch.ones(len(slots_B), device=slots_B.device)
        self._goes_on_B = torch.ones_like(slots_B, dtype=torch.bool)

    def ask(self, q_BW: torch.Tensor, sampled_B1: torch.Tensor) -> None:
        """Before a draft is drawn from `q_BW`: is it made? Always where drafts are not sampled."""
        self._top_B = q_BW.amax(1)
        self._sampled_B = sampled_B1.squeeze(1)
        self._bin_B = (self._top_B * TOPS).long().clamp(0, TOPS - 1)
        chance_B = self._reached_B * self._owner._of_next_T[self._bin_B]
        self._goes_on_B = self._goes_on_B & (
            (chance_B >= self._owner._bound_1) | self._sampled_B.logical_not()
        )
        # Drafts behind the end are drawn all the same, in static shapes; they are only not
        # verified.
        self.lengths_B += self._goes_on_B

    def follow(self, k: int, drawn_q_B: torch.Tensor) -> None:
        """Draft k was drawn, with this probability."""
        part_B = drawn_q_B / self._top_B
        cell_B = self._bin_B * PARTS + (part_B < 1).long() + (part_B < 1 / 3) + (part_B < 0.1)
        # The chance of a run is the product of its drafts' chances.
        self._reached_B = self._reached_B * self._owner._of_drawn_X[cell_B]
        kept_B = torch.where(self._goes_on_B & self._sampled_B, cell_B, -1)
        self._owner._cells_KS[k].index_copy_(0, self._slots_B, kept_B)
