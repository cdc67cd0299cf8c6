"""Seconds of generation that trained heads saved: a figure for reports, which decides nothing."""

from __future__ import annotations

import math


class SavedSeconds:
    """Compares each step with the fastest of those in which the run's first heads drafted."""

    def __init__(self) -> None:
        self._first_s = math.inf  # Seconds per token.

    def of(self, generate_s: float, tokens: int, serving: int) -> float:
        """Seconds saved in one more step; below 0 if drafts cost more than they gained.

        Args:
            tokens: response tokens.
            serving: version of the heads that drafted; 0: those that the run began with.
        """
        if not serving or self._first_s == math.inf:
            self._first_s = min(self._first_s, generate_s / max(1, tokens))
        return tokens * self._first_s - generate_s if serving else 0.0
