"""The last n pairs (hidden state h_j, token x_{j+1}) of each request, by slot, for heads that read a context.

A pair stands at its position modulo n, beside that position: a pair that is missing (a prefix-cache hit, a resumed request, another
request's slot) is seen to be missing, because what stands in its place is of another position or another request.

Shape letters: B requests, N pairs written, S slots, n pairs kept, D hidden.
"""

from __future__ import annotations

import torch

from medusa_ppo.drafting.slots import NOTHING, stamps


class PairRing:
    """One slot more than requests takes what nobody reads."""

    def __init__(self, slots: int, pairs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pairs = pairs
        self.hidden_ND = torch.zeros((slots + 1) * pairs, hidden_size, dtype=dtype, device=device)
        self.tokens_N = torch.zeros((slots + 1) * pairs, dtype=torch.int64, device=device)
        self.stamps_N = torch.full(((slots + 1) * pairs,), NOTHING, device=device)
        self._back_n = torch.arange(1 - pairs, 1, device=device)

    def write(
        self, slots_N: torch.Tensor, requests_N: torch.Tensor, positions_N: torch.Tensor, hidden_ND: torch.Tensor, tokens_N: torch.Tensor
    ) -> None:
        """Pairs at their positions (>= 0); of one call, no two may fall on the same place: at most n positions of a request in a row."""
        place_N = slots_N * self.pairs + positions_N % self.pairs
        self.hidden_ND.index_copy_(0, place_N, hidden_ND.to(self.hidden_ND.dtype))
        self.tokens_N.index_copy_(0, place_N, tokens_N)
        self.stamps_N.index_copy_(0, place_N, stamps(requests_N, positions_N))

    def read(
        self, slots_B: torch.Tensor, requests_B: torch.Tensor, positions_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States `[B, n, D]`, tokens `[B, n]` and a mask `[B, n]` of the n positions that end at `positions_B`, oldest first.

        What the mask leaves out means nothing.
        """
        wanted_Bn = positions_B.unsqueeze(1) + self._back_n
        place_Bn = slots_B.unsqueeze(1) * self.pairs + wanted_Bn % self.pairs
        there_Bn = (self.stamps_N[place_Bn] == stamps(requests_B.unsqueeze(1), wanted_Bn)) & (wanted_Bn >= 0)
        return self.hidden_ND[place_Bn], self.tokens_N[place_Bn], there_Bn
