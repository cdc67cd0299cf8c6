"""Matrix products with weights that oneDNN has packed, on CPUs; in 8 bits where they have
instructions for that.

vLLM's operations keep one compiled product for all weights of equal sizes in the process, ours and
the actor's, although it reads only one layout and one dtype. So ours must be packed as vLLM packs
the actor's: with as many threads, on which the layout depends, and not in another dtype. Otherwise
whichever product is used second has wrong results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import vllm._custom_ops as custom_ops

from medusa_ppo.drafting.products import LINEAR, plain_linear

PRIMITIVES = 32
"""Number of batch sizes for which oneDNN keeps a compiled product, as in vLLM's own layers."""


def packed_linear(weight: torch.Tensor) -> LINEAR:
    """The product with a weight `[out, in]`. On the CPU it uses a copy packed by oneDNN, as vLLM's
    own linear layers do.

    If the CPU has the instructions, a 16-bit weight is packed in 8 bits with one scale per output:
    half as much to read, and a quarter of the arithmetic's time. That adds 1 % of rounding to
    products that round at 0.4 % anyway; drafts may come from any q.
    """
    if weight.device.type != "cpu" or not custom_ops._supports_onednn:
        return plain_linear(weight)
    if packs_8_bit(weight.dtype, weight.device):
        return _onednn_8_bit(weight)
    wide = weight.float()
    # vLLM's own layers are compiled in 16 bits then.
    if weight.dtype != torch.float32 and _has_products_of(weight.dtype):
        return lambda rows: torch.nn.functional.linear(rows.float(), wide)
    return onednn_product(wide)


def packs_8_bit(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `packed_linear` packs such weights in 8 bits."""
    return (
        dtype != torch.float32
        and device.type == "cpu"
        and custom_ops._supports_onednn
        and torch.cpu._is_vnni_supported()
    )


def onednn_product(weight: torch.Tensor) -> LINEAR:
    """The product in the weight's own dtype on the CPU, as vLLM's own linear layers make it: by
    torch where oneDNN has none (16 bits on a CPU with AVX2 only).
    """
    try:
        handler = _packed(custom_ops.create_onednn_mm, weight.contiguous().t(), PRIMITIVES)
    except RuntimeError:
        return plain_linear(weight)
    return lambda rows: custom_ops.onednn_mm(handler, rows.to(weight.dtype), None)


@functools.cache
def _has_products_of(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype here."""
    try:
        custom_ops.create_onednn_mm(torch.zeros(16, 16, dtype=dtype), 1)
    except RuntimeError:
        return False
    return True


def _packed(create: Callable[..., Any], *arguments: Any) -> Any:
    """What `create` makes with the process's number of threads, whatever this thread has."""

    def packed() -> Any:
        # At its first use of torch a thread takes over the number of the process.
        torch.get_num_threads()
        return create(*arguments)

    with ThreadPoolExecutor(1, "medusa-ppo-pack") as packer:
        return packer.submit(packed).result()


def _onednn_8_bit(weight: torch.Tensor) -> LINEAR:
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    eighths = (wide / scales.unsqueeze(1)).round_().to(torch.int8)
    handler = _packed(
        custom_ops.create_onednn_scaled_mm,
        *(eighths.t(), scales, torch.float32, True, False, PRIMITIVES),
    )
    held = handler.handler_tensor
    width = len(weight)
    narrow = torch.ops._C.dynamic_scaled_int8_quant.default
    multiply = torch.ops._C.onednn_scaled_mm.default

    scratch = torch.empty((0, weight.shape[1]), dtype=torch.int8), torch.empty((0, 1))

    def product(rows: torch.Tensor) -> torch.Tensor:
        nonlocal scratch
        count = rows.shape[0]
        # One piece of memory for all numbers of rows, as large as the largest needed.
        if count > len(scratch[0]):
            scratch = torch.empty(rows.shape, dtype=torch.int8), torch.empty((count, 1))
        eighths, sizes = scratch[0][:count], scratch[1][:count]
        narrow(eighths, rows.contiguous(), sizes, None)
        out = torch.empty((count, width))
        multiply(out, eighths, sizes, None, None, None, held)
        return out

    # Keep the scales alive: oneDNN reads them in place.
    product.held = handler, scales  # type: ignore[attr-defined]
    return product
