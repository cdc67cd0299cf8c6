"""How the host sends data to the device between two steps, without waiting for it.

A copy from ordinary memory waits until the device has finished everything that was queued before,
above all the forward pass, so verification would be launched late. A copy from pinned memory is
queued, and the host continues.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64}


def sent(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Send numbers (lists, numpy arrays or a tensor on the host) to the device as a tensor. It is
    always a copy, because the source may change afterwards.
    """
    if isinstance(values, torch.Tensor):
        host = values.to(dtype, copy=True)
    elif isinstance(values, np.ndarray) and dtype in NUMPY_TYPES:
        # Runs in every step, and takes a tenth of torch.tensor's time.
        host = torch.from_numpy(values.astype(NUMPY_TYPES[dtype]))
    else:
        host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    # torch reuses pinned memory only after it has been read.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class OnItsWay:
    """A tensor that is being copied to the host, while the host goes on."""

    def __init__(self, values: torch.Tensor) -> None:
        on_device = values.device.type == "cuda"
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_device)
        self._host.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event() if on_device else None
        if self._there is not None:
            self._there.record()

    def arrived(self) -> torch.Tensor:
        """The copy, after waiting for it."""
        if self._there is not None:
            self._there.synchronize()
        return self._host
