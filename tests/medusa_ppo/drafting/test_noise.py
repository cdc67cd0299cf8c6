"""Counted noise: uniform, independent of its neighbours in every argument, and the same whatever
shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats

from heads.heads_config import MOST_HEADS
from medusa_ppo.drafting.noise import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    LAST_STREAM,
    STREAMS,
    counted,
    cumulate,
    cumulate_in_parallel,
    draw,
    float32_below,
    keys_of,
    uniforms,
)


def numbers(seeds: int, positions: int, streams: int) -> torch.Tensor:
    """`[seeds, positions, streams]` of neighbouring seeds, positions and streams."""
    keys = keys_of(range(seeds)).repeat_interleave(positions)
    places = torch.arange(positions).repeat(seeds)
    return counted(keys, places, 0, streams).view(seeds, positions, streams)


def test_the_first_numbers_are_those_of_splitmix64() -> None:
    """Published outputs of the generator that starts at 1234567; its n-th output counts from 1."""
    words = counted(torch.tensor([1234567]), torch.tensor([0]), 1, 3)[0] * 2.0**53
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert words.long().tolist() == [word >> 11 for word in published]


@pytest.mark.parametrize("along", ["seeds", "positions", "streams"])
def test_numbers_are_uniform_and_neighbours_are_independent(along: str) -> None:
    values = numbers(200, 100, 10).movedim(("seeds", "positions", "streams").index(along), -1)
    flat = values.reshape(-1).numpy()
    assert stats.kstest(flat, "uniform").pvalue > 1e-3
    pairs = torch.stack([values[..., :-1].reshape(-1), values[..., 1:].reshape(-1)], dim=1)
    cells = (pairs * 10).long()
    counts = torch.bincount(cells[:, 0] * 10 + cells[:, 1], minlength=100)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_low_bits_are_as_random_as_high_ones() -> None:
    words = (numbers(100, 100, 4).reshape(-1) * 2.0**53).long()
    for shift in (0, 8, 24, 45):
        counts = torch.bincount((words >> shift) & 255, minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3, shift


def test_a_number_depends_on_seed_position_and_stream_alone() -> None:
    keys = keys_of([7, 8, -1])
    places = torch.tensor([5, 900, 5])
    together = counted(keys, places, 0, 4)
    for row in range(3):
        alone = counted(keys[row : row + 1], places[row : row + 1], 0, 4)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(counted(keys, places, 2, 2), together[:, 2:])
    assert len(together.unique()) == together.numel()
    assert keys_of([2**64 + 3]) == keys_of([3])


def test_purposes_never_share_a_number() -> None:
    used = [
        *range(DRAFT_STREAM, DRAFT_STREAM + MOST_HEADS),
        *range(ACCEPT_STREAM, ACCEPT_STREAM + MOST_HEADS),
        LAST_STREAM,
    ]
    assert len(set(used)) == len(used) and max(used) < STREAMS


def test_unseeded_requests_draw_once_for_all() -> None:
    places = torch.zeros(3, dtype=torch.int64)
    keys = keys_of([1, 0, 1])
    seeded = torch.tensor([True, False, True])
    torch.manual_seed(3)
    drawn = torch.rand((3, 4), dtype=torch.float64)
    torch.manual_seed(3)
    mixed = uniforms(places, keys, seeded, 0, 4)
    assert torch.equal(mixed[1], drawn[1])
    assert torch.equal(mixed[0], mixed[2]) and torch.equal(mixed[0], counted(keys, places, 0, 4)[0])
    torch.manual_seed(3)
    assert torch.equal(uniforms(places, None, None, 0, 4), drawn)


def test_tokens_are_drawn_in_proportion_to_their_mass() -> None:
    mass_V = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    uniform_B1 = numbers(200, 100, 1).reshape(-1, 1)
    counts = torch.bincount(draw(mass_V.expand(20_000, 6), uniform_B1).squeeze(1), minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert stats.chisquare(counts[[1, 3, 4]].numpy(), [7500, 2500, 10_000]).pvalue > 1e-3


@pytest.mark.parametrize("add_up", [cumulate, cumulate_in_parallel])
def test_columns_are_drawn_with_exactly_the_probability_that_q_says(
    add_up: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """The steps of the sums are q to the last bit: uniforms just below and at each of them fall on
    its two sides.
    """
    mass_BW = (6 * torch.randn(50, 200, generator=torch.Generator().manual_seed(0))).softmax(-1)
    sums_BX = torch.empty(50, 199)
    add_up(mass_BW, sums_BX)
    assert (sums_BX.diff() >= 0).all()
    # Two sums near 1 are each rounded by up to 2^-24.
    torch.testing.assert_close(sums_BX.diff(), mass_BW[:, 1:-1], atol=2**-22, rtol=1e-4)
    inside = (sums_BX > 0) & (sums_BX < 1)
    for uniform_BX, right in (
        (sums_BX.double(), True),
        (torch.nextafter(sums_BX.double(), torch.tensor(0.0).double()), False),
    ):
        column_BX = torch.searchsorted(sums_BX, float32_below(uniform_BX), right=True)
        index_BX = torch.arange(199).expand_as(column_BX)
        assert ((column_BX > index_BX) == right)[inside].all()
    ends_B1 = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    one_hot_BX = torch.empty(2, 3)
    add_up(torch.tensor([[0.0, 0.0, 1.0, 0.0]]).repeat(2, 1), one_hot_BX)
    assert torch.searchsorted(one_hot_BX, float32_below(ends_B1), right=True).squeeze(
        1
    ).tolist() == [2, 2]


def test_sums_in_any_order_never_decrease_and_are_close_with_many_tokens() -> None:
    """Of 152,000 tokens most have less than a millionth."""
    generator = torch.Generator().manual_seed(0)
    mass_BW = (4 * torch.randn(3, 152_000, generator=generator)).softmax(-1)
    sums_BX, exact_BX = torch.empty(2, 3, 151_999)
    cumulate_in_parallel(mass_BW, sums_BX)
    cumulate(mass_BW, exact_BX)
    assert (sums_BX.diff() >= 0).all()
    torch.testing.assert_close(sums_BX, exact_BX, atol=2e-7, rtol=0)
    cumulate_in_parallel(mass_BW.flip(0), exact_BX)
    assert torch.equal(exact_BX.flip(0), sums_BX), "whatever its neighbours are"


def test_the_ends_of_the_unit_interval_fall_on_tokens_with_mass() -> None:
    mass_BV = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).repeat(2, 1)
    ends_B1 = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    assert draw(mass_BV, ends_B1).squeeze(1).tolist() == [1, 2]
    assert draw(torch.full((1, 4), torch.nan), ends_B1[:1]).item() <= 3
