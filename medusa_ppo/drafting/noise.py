"""The random numbers of drafting and verification, and how to draw a token with one of them.

They are counter-based: they depend only on seed, position and purpose.

A request's numbers are those of SplitMix64 (Steele, Lea and Flood, 2014) started at its key: number
n is mix(key + n * GOLDEN). A key is the seed, mixed once, so the streams of neighbouring seeds
begin far apart. The counter n is position * STREAMS + stream, so a step never shifts the numbers of
another, whatever shared its batch. Requests without a seed get theirs from torch's generator, one
draw for all.

Shape letters: B requests, L streams (numbers of one position), V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heads.heads_config import MOST_HEADS

STREAMS = 64
"""Random numbers that a request may use at one position: for drafts, their acceptances, and the
token that ends the run.
"""
# Separate streams for each purpose: using one number for a draft and its acceptance would correlate
# the two, and the tokens would no longer have the policy's distribution.
DRAFT_STREAM, ACCEPT_STREAM, LAST_STREAM = 0, MOST_HEADS, 2 * MOST_HEADS

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
SCAN_BYTES = 64 * 1024**2
# A power of two, so multiplying by it is exact.
GRAINS = 2.0**40
# The distance between two neighbouring uniforms.
UNIT = 2.0**-53


def _signed(word: int) -> int:
    """The same 64 bits as an int64 of torch."""
    # torch has no arithmetic on uint64; int64 wraps around to the same bits.
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def keys_of(seeds: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """The keys `[B]` of seeds (any integers; on a device int64)."""
    if isinstance(seeds, torch.Tensor):
        return _mix(seeds + _signed(_GOLDEN))
    return _mix(torch.tensor([_signed(seed + _GOLDEN) for seed in seeds]))


def counted(
    keys_B: torch.Tensor, positions_B: torch.Tensor, stream: int, count: int
) -> torch.Tensor:
    """Float64 uniforms in [0, 1) `[B, count]` of the streams from `stream` on."""
    streams_L = torch.arange(stream, stream + count, device=keys_B.device)
    word_BL = _mix(
        (positions_B.unsqueeze(1) * STREAMS + streams_L) * _signed(_GOLDEN) + keys_B.unsqueeze(1)
    )
    # A float64 in [0, 1) can represent 53 evenly spaced bits.
    return _shifted(word_BL, 11).double() * UNIT


def _mix(word: torch.Tensor) -> torch.Tensor:
    # Not strict: the third shift has no factor, and comes below.
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word = (word ^ _shifted(word, shift)) * _signed(factor)
    return word ^ _shifted(word, _SHIFTS[-1])


def _shifted(word: torch.Tensor, by: int) -> torch.Tensor:
    """Shift in zeros from the left; torch's own shift extends the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)


def uniforms(
    positions_B: torch.Tensor,
    keys_B: torch.Tensor | None,
    seeded_B: torch.Tensor | None,
    stream: int,
    count: int,
) -> torch.Tensor:
    """Float64 uniforms `[B, count]`: counter-based for the requests in `seeded_B`, from torch's own
    generator for the others.

    Args:
        keys_B: int64; None if no request of the batch has a seed. The values of requests without a
            seed are not read.
        seeded_B: bool; None if every request has a seed.
    """
    shape = (positions_B.shape[0], count)
    if keys_B is None:
        return torch.rand(shape, dtype=torch.float64, device=positions_B.device)
    counted_BL = counted(keys_B, positions_B, stream, count)
    if seeded_B is None:
        return counted_BL
    # Numbers for all requests, because only the device knows which are seeded.
    drawn_BL = torch.rand(shape, dtype=torch.float64, device=positions_B.device)
    return torch.where(seeded_B.unsqueeze(1), counted_BL, drawn_BL)


def float32_below(uniform: torch.Tensor) -> torch.Tensor:
    """The largest float32 that is not above a float64 uniform: it is below exactly those float32
    numbers that the uniform is below.
    """
    # A float64 has 29 more fraction bits than a float32; with these cleared, `float()` does not
    # round. Rounding up would draw a token that the uniform does not reach.
    return (uniform.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64).float()


def cumulate(mass_BW: torch.Tensor, out_BX: torch.Tensor) -> None:
    """Cumulative sums of all columns but the last, X = W - 1, never decreasing: with these, one
    uniform draws a column.

    Column w is drawn if it is the first whose sum exceeds the uniform. Its probability is C_w -
    C_{w-1} to the last bit, where C_{-1} = 0, the last is 1, and sums above 1 count as 1. So q is
    this difference, not the mass before rounding.
    """
    if mass_BW.device.type == "cpu":
        # torch adds one after the other here, in double precision, so the sums never decrease.
        torch.cumsum(mass_BW[:, :-1], -1, out=out_BX)
    else:
        cumulate_in_parallel(mass_BW, out_BX)


def cumulate_in_parallel(mass_BW: torch.Tensor, out_BX: torch.Tensor) -> None:
    """`cumulate` where additions come in any order. With floats a sum might then be less than the
    one before it, by rounding, and a column would have a negative q; so it adds whole multiples of
    2^-40, exactly.
    """
    # In blocks of rows, because both tensors have 8 bytes per number.
    rows = max(1, SCAN_BYTES // (8 * mass_BW.shape[1]))
    for part_BW, part_BX in zip(mass_BW.split(rows), out_BX.split(rows), strict=True):
        torch.mul((part_BW[:, :-1] * GRAINS).long().cumsum(-1), 1 / GRAINS, out=part_BX)


def drawn_from(sums_BX: torch.Tensor) -> torch.Tensor:
    """q `[B, W]` from the sums of `cumulate`."""
    sums_BX = sums_BX.clamp_max(1)
    ends_B1 = sums_BX.new_zeros(sums_BX.shape[0], 1)
    return torch.diff(sums_BX, prepend=ends_B1, append=ends_B1 + 1)


def write_drawn_from(sums_BX: torch.Tensor, out_BW: torch.Tensor) -> None:
    """`drawn_from` without temporary memory: the sums are overwritten, too."""
    sums_BX.clamp_max_(1)
    out_BW[:, 0] = sums_BX[:, 0]
    torch.sub(sums_BX[:, 1:], sums_BX[:, :-1], out=out_BW[:, 1:-1])
    out_BW[:, -1] = 1 - sums_BX[:, -1]


def draw(mass_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """Ids `[B, 1]` drawn in proportion to mass: the first token whose cumulative sum exceeds the
    uniform's share of the total.

    A uniform is at most 1 - 2^-53, so its product with the total rounds to less than the total:
    some entry exceeds it, and that entry has mass. (Rows of NaN give the last id.)
    """
    cumulative_BV = mass_BV.cumsum(-1, dtype=torch.float64)
    point_B1 = uniform_B1 * cumulative_BV[..., -1:]
    return torch.searchsorted(cumulative_BV, point_B1, right=True).clamp_max(mass_BV.shape[-1] - 1)
