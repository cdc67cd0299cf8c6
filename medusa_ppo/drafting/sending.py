"""What the host tells the device between two steps, in one place: it must not wait for it.

A copy out of ordinary memory waits until the device is done with all that was asked of it before,
the forward pass first of all; then verification is launched late. A copy out of pinned memory goes
on its way, and so does the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64}


def sent(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of numbers (lists, numpy arrays or a tensor on the host) on its way to the device.
    A copy in any case: what it was made of may change afterwards.
    """
    if isinstance(values, torch.Tensor):
        host = values.to(dtype, copy=True)
    elif isinstance(values, np.ndarray) and dtype in NUMPY_TYPES:
        # A tenth of what torch.tensor takes, and it is asked for at every step.
        host = torch.from_numpy(values.astype(NUMPY_TYPES[dtype]))
    else:
        host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    # torch keeps pinned memory, and gives none away that is still being read.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
