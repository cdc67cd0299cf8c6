"""Matrix products in 8 bits, on CPUs with instructions for them."""

from __future__ import annotations

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
    return (
        _onednn_8_bit(weight)
        if packs_8_bit(weight.dtype, weight.device)
        else onednn_product(weight.float())
    )


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
        handler = custom_ops.create_onednn_mm(weight.contiguous().t(), PRIMITIVES)
    except RuntimeError:
        return plain_linear(weight)
    return lambda rows: custom_ops.onednn_mm(handler, rows.to(weight.dtype), None)


def _onednn_8_bit(weight: torch.Tensor) -> LINEAR:
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    eighths = (wide / scales.unsqueeze(1)).round_().to(torch.int8)
    handler = custom_ops.create_onednn_scaled_mm(
        eighths.t(), scales, torch.float32, True, False, PRIMITIVES
    )
    held = handler.handler_tensor
    width = len(weight)
    narrow = torch.ops._C.dynamic_scaled_int8_quant.default
    multiply = torch.ops._C.onednn_scaled_mm.default

    scratch: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def product(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        if count not in scratch:
            scratch[count] = torch.empty(rows.shape, dtype=torch.int8), torch.empty((count, 1))
        eighths, sizes = scratch[count]
        narrow(eighths, rows.contiguous(), sizes, None)
        out = torch.empty((count, width))
        multiply(out, eighths, sizes, None, None, None, held)
        return out

    # Keep the scales alive: oneDNN reads them in place.
    product.held = handler, scales  # type: ignore[attr-defined]
    return product
