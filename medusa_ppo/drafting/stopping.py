"""Where a draft run ends, request by request: before a draft that will hardly be accepted.

A draft's chance of acceptance is estimated from the q that it is about to be drawn from, and from
the earlier drafts: how often drafts with a similar largest probability of q, and a similar share of
it, were accepted. Neither the draft itself nor anything used to verify it is involved, so the end
of a run is a stopping time and verification stays lossless (docs/theory.md).

Shape letters: B requests, S slots, K drafts, W width of the draft vocabulary, T bins of q's top, P
bins of a draft's share of it, X = T P.
"""

from __future__ import annotations

import torch

TOPS, PARTS = 16, 4
"""Bins of a draft's probability relative to the largest: the largest itself, more than a third,
more than a tenth, less.
"""
PRIOR, MOST_SEEN = 10.0, 2000.0
"""Weight of the first estimate, in drafts, and the number of drafts after which older ones are
forgotten.
"""
EXPLORE = 32
"""One in this many steps ends no run early, so that all chances are still measured."""


class Stopping:
    """Chances by bin, learned from verified drafts, and the bins of drafts not verified yet.

    Attributes:
        least: a run ends before a draft with a smaller chance.
    """

    def __init__(self, least: float, slots: int, drafts: int, device: torch.device) -> None:
        self.least = least
        self._offered_TP = torch.zeros(TOPS, PARTS, device=device)
        self._accepted_TP = torch.zeros_like(self._offered_TP)
        self._first_T1 = 0.2 + 0.8 * (torch.arange(TOPS, device=device).unsqueeze(1) + 0.5) / TOPS
        self._cells_KS = torch.full((drafts, slots), -1, device=device)
        self._steps_K1 = torch.arange(drafts, device=device).unsqueeze(1)
        self._step = 0
        self._estimate()

    def renew(self) -> None:
        """Restore the initial state at the same addresses, after the memory was thrown away."""
        drafts, slots = self._cells_KS.shape
        new = Stopping(self.least, slots, drafts, self._cells_KS.device)
        for held in ("_offered_TP", "_accepted_TP", "_first_T1", "_cells_KS", "_steps_K1"):
            getattr(self, held).copy_(getattr(new, held))
        self._step = 0
        self._estimate()

    def _estimate(self) -> None:
        # Two tables: for a drawn draft its share of the largest probability is known; for the next
        # one only the largest probability is.
        self._of_drawn_X = (
            (self._accepted_TP + PRIOR * self._first_T1) / (self._offered_TP + PRIOR)
        ).flatten()
        offered_T = self._offered_TP.sum(1)
        accepted_T = self._accepted_TP.sum(1)
        self._of_next_T = (accepted_T + PRIOR * self._first_T1.squeeze(1)) / (offered_T + PRIOR)

    def begin(self, slots_B: torch.Tensor) -> Ending:
        """Start the runs of a step's requests."""
        self._step += 1
        # With a bound of 0 no run ends early.
        return Ending(self, slots_B, 0.0 if self._step % EXPLORE == 0 else self.least)

    def settle(
        self, slots_B: torch.Tensor, drafted_B: torch.Tensor, accepted_B: torch.Tensor
    ) -> None:
        """Learn from the drafts that the last step verified."""
        cells_KB = self._cells_KS[:, slots_B]
        # The refused draft was verified, too; later ones were not.
        asked_KB = (self._steps_K1 <= accepted_B) & (self._steps_K1 < drafted_B) & (cells_KB >= 0)
        took_KB = asked_KB & (self._steps_K1 < accepted_B)
        places_N = cells_KB.clamp_min(0).flatten()
        for sums_TP, values_KB in ((self._offered_TP, asked_KB), (self._accepted_TP, took_KB)):
            sums_TP.view(-1).index_add_(0, places_N, values_KB.flatten().float())
        # Heads and policy change: the sums of a full bin shrink, so that newer drafts keep their
        # weight.
        fade_TP = (MOST_SEEN / self._offered_TP.clamp_min(MOST_SEEN)).clamp_max(1)
        self._offered_TP *= fade_TP
        self._accepted_TP *= fade_TP
        # Each draft teaches once, even if the next step drafts nothing.
        self._cells_KS[:, slots_B] = -1
        self._estimate()


class Ending:
    """The runs of a batch while their drafts are drawn, one after the other.

    Attributes:
        lengths_B: int64, drafts of each request so far.
    """

    def __init__(self, owner: Stopping, slots_B: torch.Tensor, least: float) -> None:
        self._owner = owner
        self._slots_B = slots_B
        self._least = least
        self.lengths_B = torch.zeros_like(slots_B)
        self._reached_B = torch.ones(len(slots_B), device=slots_B.device)
        self._goes_on_B = torch.ones_like(slots_B, dtype=torch.bool)

    def ask(self, q_BW: torch.Tensor, sampled_B1: torch.Tensor) -> None:
        """Decide, before a draft is drawn from `q_BW`, whether the run goes on. Before a draft that
        is not sampled it always does.
        """
        self._top_B = q_BW.amax(1)
        self._sampled_B = sampled_B1.squeeze(1)
        self._bin_B = (self._top_B * TOPS).long().clamp(0, TOPS - 1)
        chance_B = self._reached_B * self._owner._of_next_T[self._bin_B]
        self._goes_on_B = self._goes_on_B & (
            (chance_B >= self._least) | self._sampled_B.logical_not()
        )
        # Shapes are static, so drafts after the end are still drawn, but not verified.
        self.lengths_B += self._goes_on_B

    def follow(self, k: int, drawn_q_B: torch.Tensor) -> None:
        """Draft k was drawn with this probability."""
        part_B = drawn_q_B / self._top_B
        cell_B = self._bin_B * PARTS + (part_B < 1).long() + (part_B < 1 / 3) + (part_B < 0.1)
        # The chance of a run is the product of its drafts' chances.
        self._reached_B = self._reached_B * self._owner._of_drawn_X[cell_B]
        kept_B = torch.where(self._goes_on_B & self._sampled_B, cell_B, -1)
        self._owner._cells_KS[k].index_copy_(0, self._slots_B, kept_B)
