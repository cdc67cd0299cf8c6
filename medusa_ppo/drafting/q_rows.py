"""q of the drafts that a step verifies, as the logits that vLLM's V2 kernels read: for each row of
the step's logits a row over all tokens, computed for some requests at a time.

V2 has a table `[S, K, V]` for this, by slot and draft: 2.5 GB at 1,024 sequences, four drafts and
152k tokens. Its kernels find a row by `slot * stride + draft * stride`. Here the rows of a request
lie one after the other, as its logits do, so with its first row in place of the slot both strides
are one row.

Shape letters as in `slots`; T rows of logits of the requests that are verified at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from medusa_ppo.drafting.slots import DraftSlots, stamps

TABLE_BYTES = 256 * 1024**2
"""Maximum bytes of the rows that exist at a time, unless a single request needs more."""


def table_rows_at_once(vocab_size: int) -> int:
    return max(1, TABLE_BYTES // (4 * vocab_size))


class VerifiedRows(NamedTuple):
    """The rows of logits that are verified at a time.

    Attributes:
        slots_T: int64, slot of the row's request.
        places_T: int64, place of the row among its request's: row j verifies draft j, the last one
            none.
        positions_T: position of the token that the row was computed from.
        ids_T: the token there; in all rows but a request's first it is a draft, -1 if that must be
            refused.
    """

    slots_T: torch.Tensor
    places_T: torch.Tensor
    positions_T: torch.Tensor
    ids_T: torch.Tensor

    @property
    def widened(self) -> VerifiedRows:
        """With slots and places in int64, where an engine has them in fewer bits."""
        return self._replace(slots_T=self.slots_T.long(), places_T=self.places_T.long())

    @property
    def firsts_T(self) -> torch.Tensor:
        """The first row of each row's request."""
        return torch.arange(len(self.places_T), device=self.places_T.device) - self.places_T


def table_of(
    slots: DraftSlots,
    rows: VerifiedRows,
    requests_S: torch.Tensor,
    temperature_S: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """float32 `[T, K, V]`, in which draft k of the request whose first row is t is at `[t, k]`: the
    logits, before the temperature, of what it was drawn from; one-hot if it was not drawn from a q
    that is still kept.

    Args:
        requests_S: serial number of the request in each slot.
    """
    count, drafts = len(rows.slots_T), slots.drafts
    # The last rows of the view reach beyond the last request's own.
    rows_NV = torch.empty(count + drafts - 1, vocab_size, device=requests_S.device)
    firsts_T = rows.firsts_T
    # The stamp says who drafted and at which position, which is that of the first row.
    stamps_T = stamps(requests_S[rows.slots_T], rows.positions_T[firsts_T].long())
    following_T = (firsts_T + rows.places_T + 1).clamp_max(count - 1)
    slots.write_logits(
        rows.slots_T,
        stamps_T,
        rows.places_T.clamp_max(drafts - 1),
        rows.ids_T[following_T],
        temperature_S[rows.slots_T],
        rows_NV[:count],
    )
    return rows_NV.as_strided((count, drafts, vocab_size), (vocab_size, vocab_size, 1))
