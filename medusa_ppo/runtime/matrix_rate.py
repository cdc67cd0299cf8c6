"""How fast this machine multiplies matrices, for estimates that are made at a start."""

from __future__ import annotations

import time

import torch

SIZE, SECONDS = 1024, 0.3


def matrix_rate(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Floating-point operations a second of square matrix products, measured now; on the CPU if
    no device is given, with the threads that torch has. No random number of the caller is drawn.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(SIZE, SIZE, generator=generator).to(device, dtype)
    # The first product also loads what later ones need.
    float((matrix @ matrix).float().sum())
    count = 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < SECONDS:
        # Reading a number waits for the product; otherwise a GPU would only queue it.
        float((matrix @ matrix)[0, 0])
        count += 1
    return count * 2.0 * SIZE**3 / spent
