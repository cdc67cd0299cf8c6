"""Everything that V2's verification reads of our drafts, written by one kernel: on a GPU the forty
small operations of its reference take the host longer to launch than the GPU to compute.

Imported only if V2 is used. Shape letters as in `drafting.q_rows`; S slots, R rows of kept drafts,
X = W - 1 kept sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

from medusa_ppo.drafting.q_rows import VerifiedRows, table_of
from medusa_ppo.drafting.slots import POSITIONS, DraftSlots

BLOCK, WARPS = 2048, 8
"""Tokens that one program of the kernel writes, and its warps."""


class ByRow(NamedTuple):
    """What V2's kernels look up by a request's slot, by its first row of logits instead.

    Attributes:
        table_TKV: as `table_of` returns it.
        firsts_T: the first row of each row's request, in the place of its slot.
        temperature_T, seed_T: of the row's request.
    """

    table_TKV: torch.Tensor
    firsts_T: torch.Tensor
    temperature_T: torch.Tensor
    seed_T: torch.Tensor


# Compiled once, not again in the middle of serving for other numbers of rows or other chunks of a
# batch.
@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["slots_ptr", "places_ptr", "positions_ptr", "ids_ptr"],
)
def _write_by_row(
    rows_ptr,
    firsts_ptr,
    temperature_T_ptr,
    seed_T_ptr,
    slots_ptr,
    places_ptr,
    positions_ptr,
    ids_ptr,
    requests_S_ptr,
    temperature_S_ptr,
    seed_S_ptr,
    rows_S_ptr,
    stamps_R_ptr,
    columns_KR_ptr,
    columns_stride,
    sums_KRX_ptr,
    sums_stride_K,
    sums_stride_R,
    columns_V_ptr,
    count,
    drafts,
    width,
    vocab_size,
    STAMP: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    place = tl.load(places_ptr + row)
    first = row - place
    temperature = tl.load(temperature_S_ptr + slot)
    if block == 0:
        tl.store(firsts_ptr + row, first)
        tl.store(temperature_T_ptr + row, temperature)
        tl.store(seed_T_ptr + row, tl.load(seed_S_ptr + slot))

    # Who drafted, and at which position: that of the request's first row.
    stamp = tl.load(requests_S_ptr + slot) * STAMP + tl.load(positions_ptr + first)
    kept = tl.load(rows_S_ptr + slot)
    draft = tl.minimum(place, drafts - 1).to(tl.int64)
    column = tl.load(columns_KR_ptr + draft * columns_stride + kept)
    drawn = (tl.load(stamps_R_ptr + kept) == stamp) & (stamp >= 0) & (column >= 0)
    drafted = tl.maximum(tl.load(ids_ptr + tl.minimum(row + 1, count - 1)), 0)

    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    columns = tokens
    if HAS_COLUMNS:
        columns = tl.load(columns_V_ptr + tokens, mask=inside, other=-1)
    there = inside & drawn & (columns >= 0)
    sums_ptr = sums_KRX_ptr + draft * sums_stride_K + kept * sums_stride_R
    up_to = tl.load(sums_ptr + columns, mask=there & (columns < width - 1), other=1.0)
    before = tl.load(sums_ptr + columns - 1, mask=there & (columns > 0), other=0.0)
    q = tl.minimum(up_to, 1.0) - tl.minimum(before, 1.0)
    log_q = tl.where(there & (q > 0), tl.log(q) * temperature, float("-inf"))
    one_hot = tl.where(tokens == drafted, 0.0, float("-inf"))
    places = rows_ptr + row.to(tl.int64) * vocab_size + tokens
    tl.store(places, tl.where(drawn, log_q, one_hot), mask=inside)


def by_row(
    slots: DraftSlots,
    rows: VerifiedRows,
    requests_S: torch.Tensor,
    temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    vocab_size: int,
) -> ByRow:
    """The arguments are those of `table_of`.

    Args:
        rows: in vLLM's own integer types.
        seed_S: seed of the request in each slot.
    """
    if not HAS_TRITON:
        return by_row_plainly(slots, rows, requests_S, temperature_S, seed_S, vocab_size)
    count, drafts = len(rows.slots_T), slots.drafts
    columns_V = slots.columns_V(vocab_size)
    # The last rows of the view reach beyond the last request's own.
    rows_NV = torch.empty(count + drafts - 1, vocab_size, device=rows.slots_T.device)
    found = ByRow(
        rows_NV.as_strided((count, drafts, vocab_size), (vocab_size, vocab_size, 1)),
        torch.empty_like(rows.slots_T),
        temperature_S.new_empty(count),
        seed_S.new_empty(count),
    )
    sums_KRX, columns_KR = slots.cumulative_KRX, slots.columns_KR
    _write_by_row[count, triton.cdiv(vocab_size, BLOCK)](
        rows_NV,
        *found[1:],
        *rows,
        requests_S,
        temperature_S,
        seed_S,
        slots.rows_S,
        slots.stamps_R,
        columns_KR,
        columns_KR.stride(0),
        sums_KRX,
        sums_KRX.stride(0),
        sums_KRX.stride(1),
        slots.rows_S if columns_V is None else columns_V,
        count,
        drafts,
        sums_KRX.shape[2] + 1,
        vocab_size,
        POSITIONS,
        columns_V is not None,
        BLOCK,
        num_warps=WARPS,
    )
    return found


def by_row_plainly(
    slots: DraftSlots,
    rows: VerifiedRows,
    requests_S: torch.Tensor,
    temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    vocab_size: int,
) -> ByRow:
    """The reference of `by_row`."""
    wide = rows.widened
    return ByRow(
        table_of(slots, wide, requests_S, temperature_S, vocab_size),
        wide.firsts_T.to(rows.slots_T.dtype),
        temperature_S[wide.slots_T],
        seed_S[wide.slots_T],
    )
