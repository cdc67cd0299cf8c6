"""The least that training heads costs, for estimates before it starts: the operations of its matrix
products, and how many operations this machine does per second.
"""

from __future__ import annotations

import math
import time

import torch

from heads.heads_config import HeadsConfig

# Long enough for a rate, short enough for a start or a --dry-run.
PROBE_SIZE, PROBE_S = 1024, 0.3
PRODUCTS = 2
"""Products with each matrix in training: forward, and backward to the matrix or to its input. Many
matrices need both backward products; an input that is frozen needs none.
"""
FOR_EACH_HEAD = ("cell.token", "cell.step", "cell.out", "copy.out")
"""Matrices that all heads share, multiplied once for each of them."""
FOR_A_TEXT = ("copy.query", "copy.key", "copy.value")
"""Matrices that are multiplied once for each different token of a text, however long it is."""


def training_operations(heads: HeadsConfig, drafted: int) -> float:
    """Floating-point operations of one pass over one position, at least: matrix products without
    attention, and without what copying computes once for each different token of a text.

    Args:
        drafted: number of tokens that drafts come from.
    """
    numbers = heads.num_heads * heads.hidden_size * drafted
    for name, shape in heads.tensor_shapes().items():
        if len(shape) == 2 and not name.startswith((*FOR_A_TEXT, "lm_heads")):
            uses = heads.num_heads if name.startswith(FOR_EACH_HEAD) else 1
            numbers += uses * math.prod(shape)
    return 2.0 * PRODUCTS * numbers


def matrix_rate(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Floating-point operations per second of square matrix products, measured now on a device
    (None: the CPU, with torch's current number of threads). Leaves the caller's random numbers as
    they are.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(PROBE_SIZE, PROBE_SIZE, generator=generator).to(device, dtype)
    # The first product also loads what later ones need.
    float((matrix @ matrix).float().sum())
    count = 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < PROBE_S:
        # Reading a number waits for the product; otherwise a GPU would only queue it.
        float((matrix @ matrix)[0, 0])
        count += 1
    return count * 2.0 * PROBE_SIZE**3 / spent
