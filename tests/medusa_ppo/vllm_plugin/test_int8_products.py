"""Products of vLLM's CPU build with packed weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from medusa_ppo.vllm_plugin import int8_products
from medusa_ppo.vllm_plugin.int8_products import onednn_product, packed_linear, packs_8_bit
from medusa_ppo.vllm_plugin.second_set import begin_beside


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_is_right_for_any_number_of_rows_after_any_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    product = packed_linear(weight)
    for rows in (7, 40, 3, 41, 40):
        rows_ND = torch.randn(rows, 64).to(dtype)
        expected_NW = rows_ND.float() @ weight.float().T
        off = (product(rows_ND).float() - expected_NW).square().mean().sqrt()
        assert off < 0.02 * expected_NW.std()


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


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    # Not torch's own name: an engine within this process may have replaced it.
    torch._C.set_num_threads(4)
    yield
    torch._C.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(160, 64), (192, 64), (288, 288), (384, 384)])
def test_weights_packed_beside_the_engine_leave_products_of_the_actors_right(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    """With one thread oneDNN chooses another layout for some of these sizes, for which the actor's
    product would be compiled, too.
    """
    torch.manual_seed(0)
    actors, ours = (torch.randn(size).to(dtype) for _ in range(2))
    # As vLLM's own linear layers do when they are loaded.
    actors_product = onednn_product(actors)
    our_product = begin_beside(lambda: packed_linear(ours)).result()
    # A number of rows that the actor had in no step before.
    rows_ND = torch.randn(29, size[1]).to(dtype)
    for weight, product in ((ours, our_product), (actors, actors_product)):
        expected_NW = rows_ND.float() @ weight.float().T
        off = (product(rows_ND).float() - expected_NW).square().mean().sqrt()
        assert off < 0.02 * expected_NW.std()


def test_no_product_of_ours_is_compiled_in_another_dtype_than_the_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU with AVX-512 in which oneDNN multiplies in 16 bits, but not in 8."""

    def refuse(*_: object) -> None:
        raise AssertionError("the actor's product of this size reads bfloat16")

    monkeypatch.setattr(int8_products, "packs_8_bit", lambda *_: False)
    monkeypatch.setattr(int8_products, "_has_products_of", lambda dtype: True)
    monkeypatch.setattr(int8_products.custom_ops, "create_onednn_mm", refuse)
    torch.manual_seed(0)
    weight = torch.randn(96, 64).bfloat16()
    rows_ND = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(packed_linear(weight)(rows_ND), rows_ND.float() @ weight.float().T)
