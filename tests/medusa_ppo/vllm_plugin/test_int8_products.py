"""Products of vLLM's CPU build with packed weights."""

from __future__ import annotations

import gc

import pytest
import torch

from medusa_ppo.vllm_plugin import int8_products
from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear, packs_8_bit


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


@pytest.mark.parametrize("known", [True, False])
def test_a_product_is_made_where_onednn_has_none(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it has none in bfloat16 on a CPU with AVX2 only, where vLLM's layers go to torch, too."""
    if not known:

        def refuse(*_: object) -> None:
            raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

        monkeypatch.setattr(int8_products.custom_ops, "create_onednn_mm", refuse)
    torch.manual_seed(0)
    weight = torch.randn(96, 64).bfloat16()
    rows_ND = torch.randn(3, 64).bfloat16()
    expected_NW = rows_ND.float() @ weight.float().T
    product_NW = onednn_product(weight)(rows_ND).float()
    torch.testing.assert_close(product_NW, expected_NW, rtol=0.02, atol=0.1)
