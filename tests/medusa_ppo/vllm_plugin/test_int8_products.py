"""Products of vLLM's CPU build with packed weights."""

from __future__ import annotations

import gc

import pytest
import torch

from medusa_ppo.vllm_plugin.int8_products import packed_linear, packs_8_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_products_are_close_to_plain_ones(dtype: torch.dtype, rows: int) -> None:
    """Whatever becomes of the weight: a packed product holds what it reads."""
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    rows_ND = torch.randn(rows, 64).to(dtype)
    weight[7] = 0
    expected_NW = rows_ND.float() @ weight.float().T
    product = packed_linear(weight)
    del weight
    gc.collect()
    junk = [torch.full((96,), torch.nan) for _ in range(100)]
    limit = 0.02 if packs_8_bit(dtype, torch.device("cpu")) else 1e-5
    assert (
        product(rows_ND).float() - expected_NW
    ).square().mean().sqrt() < limit * expected_NW.std()
    assert len(junk) == 100
